//! The audit log: who is named as the one who did something, and what it was done to.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::InProcessServer;
use serde_json::{Value, json};

async fn entries(server: &InProcessServer, action: &str) -> Vec<Value> {
    let filter = json!({ "action": action });
    let (status, log) = server.tool(&server.admin, "audit_list", filter).await;
    assert_eq!(status, 200, "{log}");
    log["entries"].as_array().unwrap().clone()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_login_is_anonymous_and_not_the_owners() {
    let server = InProcessServer::start().await;
    for token in ["oub_wrong", &server.admin] {
        let request = server.post("/api/login").json(&json!({ "token": token }));
        request.send().await.unwrap();
    }
    let logins = entries(&server, "login").await;
    let [accepted, refused] = &logins[..] else {
        panic!("{logins:?}")
    };
    assert_eq!(refused["outcome"], "unauthenticated");
    assert_eq!(
        (&refused["principal"], refused.get("token_id")),
        (&json!("anonymous"), None)
    );
    assert_eq!(accepted["outcome"], "ok");
    assert_eq!(accepted["principal"], accepted["token_id"]);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_start_of_a_session_has_its_id_as_target() {
    let server = InProcessServer::start().await;
    let project = server.project("p").await;
    let definition =
        json!({ "name": "a", "prompt": "p", "runtime": { "kind": "acp", "command": ["/nowhere/agent"] } });
    let put = server
        .app
        .library
        .agent_put("broken".parse().unwrap(), definition, Default::default());
    put.await.unwrap();
    let message = json!({ "project_id": project, "agent": "broken", "message": "go" });
    let (status, reply) = server
        .tool(&server.admin, "session_message", message.clone())
        .await;
    assert_eq!(status, 200, "{reply}");
    let started = entries(&server, "session_message").await;
    assert_eq!(
        (&started[0]["outcome"], &started[0]["target"]),
        (&json!("ok"), &reply["session_id"])
    );

    // Its turn fails, but the session was started.
    let mut waiting = message;
    waiting["wait"] = true.into();
    let (status, reply) = server.tool(&server.admin, "session_message", waiting).await;
    assert_ne!(status, 200, "{reply}");
    let (_, sessions) = server.tool(&server.admin, "session_list", json!({})).await;
    let failed = entries(&server, "session_message").await;
    assert_ne!(failed[0]["outcome"], "ok");
    assert_eq!(
        failed[0]["target"], sessions["sessions"][0]["session_id"],
        "{sessions}"
    );
    server.stop().await;
}
