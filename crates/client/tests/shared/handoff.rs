//! What only a client does that hands its streams off.

use std::{os::fd::OwnedFd, os::unix::net::UnixStream, process::Stdio};

use serde_json::json;

use crate::support::{RequestChannel, Streams, TestAgent, TestServer};

fn server() -> TestServer {
    let server = TestServer::start(Streams::HandedOff);
    *server.script.agent_tools.lock() = Some(json!({"tools":[{"name":"read"}],"base":[]}));
    server
}

#[tokio::test]
async fn catalog_calls_are_answered_by_the_server_and_caller_calls_pass_the_client() {
    let mut server = server();
    *server.script.callers.lock() = vec![json!({"caller_id":"myapp","tools":[{"name":"plain"}]})];
    let mut agent = server.agent();
    agent.initialize().await;
    assert_eq!(agent.names().await, ["myapp_plain", "read"]);
    for (name, intercepted) in [("read", true), ("myapp_plain", false), ("@files/read", true)] {
        let id = agent.start_call(name, json!({"n": 1})).await;
        let asked = server.asked().await;
        assert_eq!(
            matches!(asked.context, RequestChannel::HandedOff { .. }),
            intercepted,
            "{name}"
        );
        asked.answer(json!({"content":[{"type":"text","text":name}],"isError":false}));
        assert_eq!(agent.answer(id).await["result"]["content"][0]["text"], name);
    }
}

/// Node gives a child sockets as its stdin and stdout.
#[tokio::test]
async fn sockets_are_handed_off_as_pipes_are() {
    let mut server = server();
    let mut command = server.command();
    let (stdin, agent_in) = UnixStream::pair().unwrap();
    let (stdout, agent_out) = UnixStream::pair().unwrap();
    command.stdin(Stdio::from(OwnedFd::from(stdin)));
    command.stdout(Stdio::from(OwnedFd::from(stdout)));
    let mut agent = TestAgent::over(command, agent_in, agent_out);
    agent.initialize().await;
    assert_eq!(agent.names().await, ["read"]);
    for _ in 0..3 {
        let id = agent.start_call("read", json!({})).await;
        let asked = server.asked().await;
        assert!(matches!(asked.context, RequestChannel::HandedOff { .. }));
        asked.answer(json!({"content":[],"isError":false}));
        assert_eq!(agent.answer(id).await["result"]["isError"], false);
    }
}

/// A client that is told of no hand-off socket uses the relay socket, even if the server has one.
#[tokio::test]
async fn without_the_variable_nothing_is_handed_off() {
    let mut server = server();
    let mut command = server.command();
    command.env_remove("OUBLIETTE_HANDOFF_SOCKET");
    let mut agent = TestAgent::spawn(command);
    agent.initialize().await;
    agent.names().await;
    let id = agent.start_call("read", json!({})).await;
    let asked = server.asked().await;
    assert!(matches!(asked.context, RequestChannel::Relay(_)));
    asked.answer(json!({"content":[],"isError":false}));
    assert_eq!(agent.answer(id).await["result"]["isError"], false);
}

#[tokio::test]
async fn the_client_ends_with_an_error_when_the_server_is_killed() {
    let mut server = server();
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    agent.start_call("read", json!({})).await;
    let _asked = server.asked().await;
    server.stop_listening();
    server.peer().await.close();
    ends_with_an_error(agent).await;
}

#[tokio::test]
async fn the_client_ends_with_an_error_when_the_server_ends_the_hand_off() {
    let mut server = server();
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    agent.start_call("read", json!({})).await;
    let asked = server.asked().await;
    server.hang_up.cancel();
    asked.context.cancel().cancelled().await;
    ends_with_an_error(agent).await;
}

async fn ends_with_an_error(agent: TestAgent) {
    let (status, said) = agent.wait().await;
    assert_eq!(status.code(), Some(1), "{said}");
    assert!(
        said.contains("the server that stdin and stdout were handed off to has gone"),
        "{said}"
    );
}

#[tokio::test]
async fn a_cancelled_call_is_cancelled_at_the_server_and_never_answered() {
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
async fn calls_are_cancelled_when_the_agent_ends() {
    let mut server = server();
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    agent.start_call("read", json!({})).await;
    let asked = server.asked().await;
    agent.close_stdin();
    asked.context.cancel().cancelled().await;
    assert_eq!(agent.end().await, "", "an orderly end writes nothing to stderr");
}

#[tokio::test]
async fn calls_are_cancelled_when_the_client_is_killed() {
    let mut server = server();
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    agent.start_call("read", json!({})).await;
    let asked = server.asked().await;
    agent.child.start_kill().unwrap();
    asked.context.cancel().cancelled().await;
}
