//! The Rust caller library against the real server: an agent in a sandbox calls lent functions while
//! connections are cut and the server is killed.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::sync::{Arc, Mutex};

use anyhow::{Result, ensure};
use oubliette_caller::{Message, Oubliette};
use oubliette_tests::{CuttableProxy, SpawnedServer, within_deadline};
use serde_json::{Value, json};

const CONFIG: &str = "[relay]\nreconnect_grace = '20s'\n";

#[derive(serde::Deserialize, schemars::JsonSchema)]
struct Number {
    /// The number of the call.
    n: u64,
}

fn calls(tool: &str, numbers: std::ops::Range<u64>) -> Vec<Value> {
    numbers
        .map(|n| json!({ "call": { "tool": tool, "arguments": { "n": n } } }))
        .collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lent_functions_are_served_through_cut_connections() -> Result<()> {
    let mut server = SpawnedServer::start(CONFIG).await?;
    let project = server.admin().create_project(10).await?;
    let mut turn = calls("app_count", 0..5);
    turn.push(json!({ "say": "done" }));
    server
        .admin()
        .put_scripted_agent("counter", json!([turn]))
        .await?;
    let link = Arc::new(CuttableProxy::forward_to(server.port()).await?);
    let ran = Arc::new(Mutex::new(Vec::new()));
    let indexes = Arc::new(Mutex::new(Vec::new()));
    let (cut, noted, heard) = (link.clone(), ran.clone(), indexes.clone());
    let session = Oubliette::connect(&link.url(), server.create_token("write").await?)?
        .lend("app")
        .tool("count", "Counts.", move |number: Number| {
            noted.lock().unwrap().push(number.n);
            // Cut while the function runs: the stream and the answer need new connections.
            cut.cut_connections();
            async move { Ok::<_, String>(json!({ "counted": number.n })) }
        })
        .on_event(move |event| heard.lock().unwrap().push(event.index))
        .start(Message::new("go").agent("counter").project(project))
        .await?;
    let done = within_deadline("the turn", session.turn(1)).await??;
    ensure!(done.text == "done", "{done:?}");
    ensure!(*ran.lock().unwrap() == [0, 1, 2, 3, 4], "each ran once");
    let log = server.admin().all_events(session.id()).await?;
    let results = log.iter().filter(|event| event["type"] == "tool_result");
    ensure!(results.clone().count() == 5 && results.clone().all(|event| event["ok"] == true));
    session.end().await?;
    let heard = indexes.lock().unwrap().clone();
    let whole: Vec<i64> = (0..heard.len() as i64).collect();
    ensure!(heard == whole, "every event once and in order: {heard:?}");
    server.stop().await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_session_is_followed_across_a_kill_of_the_server() -> Result<()> {
    let mut server = SpawnedServer::start(CONFIG).await?;
    let project = server.admin().create_project(10).await?;
    let turns = json!([[{ "say": "first" }], [{ "say": "second" }]]);
    server.admin().put_scripted_agent("quiet", turns).await?;
    let token = server.create_token("write").await?;
    let mut session = Oubliette::connect(&server.url(), &token)?
        .lend("app")
        .tool("count", "Counts.", |number: Number| async move {
            Ok::<_, String>(number.n)
        })
        .start(Message::new("go").agent("quiet").project(project))
        .await?;
    ensure!(within_deadline("the first turn", session.turn(1)).await??.text == "first");
    server.kill().await?;
    server.spawn_and_wait_ready().await?;
    let second = within_deadline("the second turn", session.ask("again")).await??;
    ensure!(second.turn == 2 && second.text == "second", "{second:?}");
    session.end().await?;
    server.stop().await
}
