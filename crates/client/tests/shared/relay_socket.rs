//! What only a client does that makes its calls over the relay socket: it outlives the server.

use serde_json::json;

use crate::support::{Streams, TestServer};

#[tokio::test]
async fn a_lost_server_fails_calls_at_once_and_is_found_again() {
    let myapp = json!({"caller_id":"myapp","tools":[{"name":"send_notification"},{"name":"plain"}]});
    let mut server = TestServer::with_callers(Streams::KeptByClient, &[myapp]);
    let mut agent = server.agent();
    agent.initialize().await;
    agent.names().await;
    let id = agent.start_call("myapp_plain", json!({})).await;
    let asked = server.asked().await;
    server.stop_listening();
    server.peer().await.close();
    let lost = agent.answer(id).await["result"].clone();
    assert_eq!(
        (&lost["isError"], &lost["structuredContent"]["error"]["code"]),
        (&json!(true), &json!("unavailable"))
    );
    drop(asked);
    let away = agent.call("myapp_plain", json!({})).await;
    assert_eq!(away["structuredContent"]["error"]["code"], "unavailable");
    assert!(
        away["content"][0]["text"]
            .as_str()
            .unwrap()
            .contains("not reachable")
    );
    assert_eq!(
        agent.names().await.len(),
        2,
        "the agent keeps its tools meanwhile"
    );

    *server.script.callers.lock() = vec![json!({"caller_id":"back","tools":[{"name":"again"}]})];
    server.listen();
    agent.notice("notifications/tools/list_changed").await;
    assert_eq!(agent.names().await, ["back_again"]);
    let id = agent.start_call("back_again", json!({})).await;
    server.asked().await.answer(json!("works"));
    assert_eq!(agent.answer(id).await["result"]["content"][0]["text"], "works");
}
