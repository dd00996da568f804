//! Starting and stopping servers leaks no file, task or child. One test in its own binary, since it counts what
//! the whole process has open.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod upstream_support;

use rmcp::transport::streamable_http_server::StreamableHttpServerConfig;
use serde_json::json;
use tokio_util::sync::CancellationToken;
use upstream_support::{
    SubprotocolChoice, UpstreamFixture, call_text, http_server, remote_definition, server::ToolServer, soon,
    stdio_definition, tcp_server, ws_server,
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
async fn no_files_tasks_or_children_are_left_after_many_servers() {
    let config = StreamableHttpServerConfig::default();
    let http = http_server(ToolServer::default(), config, None, CancellationToken::new()).await;
    let tcp = tcp_server(ToolServer::default(), CancellationToken::new()).await;
    let ws = ws_server(SubprotocolChoice::Chosen, Default::default()).await;
    let definitions = [
        stdio_definition(json!({})),
        remote_definition("tcp", tcp, json!({})),
        remote_definition("ws", format!("ws://{ws}"), json!({})),
        remote_definition("http", format!("http://{http}/mcp"), json!({})),
        stdio_definition(json!({"env":{"TOOL_SERVER_EXITS":"1"}})),
        remote_definition("tcp", "127.0.0.1:1", json!({})),
    ];
    let mut before = None;
    for round in 0..30 {
        for definition in &definitions {
            let fixture = UpstreamFixture::new(definition.clone());
            let upstream = fixture.start().await;
            if upstream.is_up() {
                call_text(&upstream, "echo", json!({"text":"x"})).await;
            }
            match round % 2 {
                0 => soon("the stop", upstream.stop("round over")).await,
                _ => drop(upstream),
            }
            fixture.recorder.wait("tool_server_stopped", 1).await;
        }
        // Counted after the first rounds, which open what stays: a kept-alive connection, a thread, a pidfd of
        // the launcher.
        if round == 3 {
            before = Some((open_files(), tasks()));
        }
    }
    let (files, alive) = before.unwrap();
    soon(
        &format!("the end of everything: {files} files, {alive} tasks before"),
        async {
            // The test servers close their end of a connection a moment after the client closes its own.
            while open_files() > files || tasks() > alive || !children().is_empty() {
                tokio::task::yield_now().await;
            }
        },
    )
    .await;
}
