//! Starting and stopping leaves nothing behind. One test alone, since it counts what the process has.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod upstream_support;

use rmcp::transport::streamable_http_server::StreamableHttpServerConfig;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use upstream_support::{
    Bench, Subprotocol, ask, at, http_server, server::ToolServer, soon, stdio, tcp_server, ws_server,
};

fn open_files() -> usize {
    std::fs::read_dir("/proc/self/fd").unwrap().count()
}

fn children() -> Vec<String> {
    let tasks = std::fs::read_dir("/proc/self/task").unwrap();
    let children =
        tasks.filter_map(|task| std::fs::read_to_string(task.unwrap().path().join("children")).ok());
    children
        .flat_map(|line| line.split_whitespace().map(str::to_owned).collect::<Vec<_>>())
        .collect()
}

fn tasks() -> usize {
    tokio::runtime::Handle::current().metrics().num_alive_tasks()
}

#[tokio::test(flavor = "multi_thread")]
async fn nothing_is_left_after_many_servers() {
    let config = StreamableHttpServerConfig::default();
    let http = http_server(ToolServer::default(), config, None, CancellationToken::new()).await;
    let tcp = tcp_server(ToolServer::default(), CancellationToken::new()).await;
    let ws = ws_server(Subprotocol::Chosen, Default::default()).await;
    let definitions = [
        stdio(json!({})),
        at("tcp", tcp, json!({})),
        at("ws", format!("ws://{ws}"), json!({})),
        at("http", format!("http://{http}/mcp"), json!({})),
        stdio(json!({"env":{"TOOL_SERVER_EXITS":"1"}})),
        at("tcp", "127.0.0.1:1", json!({})),
    ];
    let mut before = None;
    for round in 0..30 {
        for definition in &definitions {
            let bench = Bench::new(definition.clone());
            let upstream = bench.start().await;
            if upstream.is_up() {
                ask(&upstream, "echo", json!({"text":"x"})).await;
            }
            match round % 2 {
                0 => soon("the stop", upstream.stop("round over")).await,
                _ => drop(upstream),
            }
            bench.recorder.wait("tool_server_stopped", 1).await;
        }
        // The first rounds open what stays: a connection kept alive, a thread, a pidfd of the launcher.
        if round == 3 {
            before = Some((open_files(), tasks()));
        }
    }
    let (files, alive) = before.unwrap();
    soon(
        &format!("the end of everything: {files} files, {alive} tasks before"),
        async {
            // What the servers of this test have of a connection goes a moment later than ours.
            while open_files() > files || tasks() > alive || !children().is_empty() {
                tokio::task::yield_now().await;
            }
        },
    )
    .await;
}
