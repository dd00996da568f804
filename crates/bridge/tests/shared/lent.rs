//! What is particular to streams that are lent.

use std::{os::fd::OwnedFd, os::unix::net::UnixStream, process::Stdio};

use serde_json::json;

use crate::rig::{Agent, Context, Server};

fn server() -> Server {
    let server = Server::start(true);
    *server.script.agent_tools.lock() = Some(json!({"tools":[{"name":"read"}],"base":[]}));
    server
}

#[tokio::test]
async fn a_call_that_the_server_takes_does_not_pass_the_client_and_another_does() {
    let mut server = server();
    *server.script.callers.lock() = vec![json!({"caller_id":"myapp","tools":[{"name":"plain"}]})];
    let mut agent = server.agent();
    agent.initialize().await;
    assert_eq!(agent.names().await, ["myapp_plain", "read"]);
    for (name, here) in [("read", true), ("myapp_plain", false), ("@files/read", true)] {
        let id = agent.start_call(name, json!({"n": 1})).await;
        let asked = server.asked().await;
        assert_eq!(matches!(asked.context, Context::Lent { .. }), here, "{name}");
        asked.answer(json!({"content":[{"type":"text","text":name}],"isError":false}));
        assert_eq!(agent.answer(id).await["result"]["content"][0]["text"], name);
    }
}

#[tokio::test]
async fn calls_open_when_the_server_is_killed_are_told_and_the_client_goes_on() {
    let mut server = server();
    let agent = server.agent();
    the_server_is_killed_and_comes_back(&mut server, agent).await;
}

/// As node gives a child its streams.
#[tokio::test]
async fn streams_that_are_sockets_come_back_as_well() {
    let mut server = server();
    let mut command = server.command();
    let (stdin, agent_in) = UnixStream::pair().unwrap();
    let (stdout, agent_out) = UnixStream::pair().unwrap();
    command.stdin(Stdio::from(OwnedFd::from(stdin)));
    command.stdout(Stdio::from(OwnedFd::from(stdout)));
    let agent = Agent::over(command, agent_in, agent_out);
    the_server_is_killed_and_comes_back(&mut server, agent).await;
}

async fn the_server_is_killed_and_comes_back(server: &mut Server, mut agent: Agent) {
    agent.initialize().await;
    agent.names().await;
    let mut open = Vec::new();
    for n in 0..3 {
        let id = agent.start_call("read", json!({ "n": n })).await;
        let asked = server.asked().await;
        assert!(matches!(asked.context, Context::Lent { .. }));
        open.push((id, asked));
    }
    let (answered, asked) = open.remove(1);
    asked.answer(json!({"content":[],"isError":false}));
    assert_eq!(agent.answer(answered).await["result"]["isError"], false);
    server.stop_listening();
    server.peer().await.close();
    for (id, _asked) in open {
        let lost = agent.answer(id).await["result"].clone();
        assert_eq!(lost["structuredContent"]["error"]["code"], "unavailable");
        assert!(
            lost["content"][0]["text"]
                .as_str()
                .unwrap()
                .contains("may or may not have run")
        );
    }
    server.listen();
    server.peer().await;
    // By the client itself now.
    let id = loop {
        let id = agent.start_call("read", json!({})).await;
        tokio::select! {
            asked = server.asked() => {
                assert!(matches!(asked.context, Context::Relay(_)));
                asked.answer(json!({"content":[{"type":"text","text":"works"}],"isError":false}));
                break id;
            }
            // The client has not heard of the new server yet.
            away = agent.answer(id) => assert_eq!(away["result"]["structuredContent"]["error"]["code"], "unavailable"),
        }
    };
    assert_eq!(agent.answer(id).await["result"]["content"][0]["text"], "works");
}

#[tokio::test]
async fn streams_are_given_back_and_calls_that_were_open_are_told() {
    let mut server = server();
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let id = agent.start_call("read", json!({})).await;
    let asked = server.asked().await;
    server.hang_up.cancel();
    asked.context.cancel().cancelled().await;
    let lost = agent.answer(id).await["result"].clone();
    assert_eq!(lost["structuredContent"]["error"]["code"], "unavailable");
    // The relay is there still.
    let id = agent.start_call("read", json!({})).await;
    let asked = server.asked().await;
    assert!(matches!(asked.context, Context::Relay(_)));
    asked.answer(json!({"content":[{"type":"text","text":"works"}],"isError":false}));
    assert_eq!(agent.answer(id).await["result"]["content"][0]["text"], "works");
}

#[tokio::test]
async fn a_cancelled_call_is_given_up_in_order_and_never_answered() {
    let mut server = server();
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let id = agent.start_call("read", json!({})).await;
    let asked = server.asked().await;
    agent
        .tell("notifications/cancelled", json!({"requestId": id}))
        .await;
    asked.context.cancel().cancelled().await;
    let next = agent.start_call("read", json!({})).await;
    server.asked().await.answer(json!({"content":[],"isError":false}));
    assert_eq!(agent.answer(next).await["result"]["isError"], false);
    assert!(agent.heard.iter().all(|message| message["id"] != id));
}

#[tokio::test]
async fn an_agent_that_ends_has_its_calls_given_up() {
    let mut server = server();
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    agent.start_call("read", json!({})).await;
    let asked = server.asked().await;
    agent.close_stdin();
    asked.context.cancel().cancelled().await;
    assert_eq!(agent.end().await, "", "an orderly end says nothing");
}

#[tokio::test]
async fn a_client_that_is_killed_has_its_calls_given_up() {
    let mut server = server();
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    agent.start_call("read", json!({})).await;
    let asked = server.asked().await;
    agent.child.start_kill().unwrap();
    asked.context.cancel().cancelled().await;
}
