//! Starts the bare programs that Oubliette is compared with (see [`crate::actors`]) and calls them.

use std::{net::SocketAddr, process::Stdio};

use anyhow::{Context, Result};
use rmcp::{
    RoleClient, ServiceExt,
    model::CallToolRequestParams,
    service::{Peer, RunningService},
    transport::TokioChildProcess,
};
use serde_json::{Map, Value, json};
use tokio::{
    io::{AsyncBufReadExt, BufReader},
    process::{Child, Command},
};

use crate::home::own_program;

/// The command of the bare MCP echo server on stdio.
pub(crate) fn echo_command(tag: &str, delay_ms: u64) -> Result<Command> {
    let mut command = Command::new(own_program()?);
    command.args(["as-echo", tag, &delay_ms.to_string()]);
    Ok(command)
}

/// A bare HTTP server, killed when dropped.
pub(crate) struct BareHttpServer {
    pub(crate) address: SocketAddr,
    _child: Child,
}

/// Starts a bare HTTP server; `part` is its actor: `as-echo-http`, `as-floor` or `as-model`.
pub(crate) async fn start_http_server(part: &str) -> Result<BareHttpServer> {
    let mut child = Command::new(own_program()?)
        .arg(part)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no stdout")?)
        .read_line(&mut line)
        .await?;
    Ok(BareHttpServer {
        address: line.trim().parse()?,
        _child: child,
    })
}

/// An rmcp client connected to a program's stdio, as an agent would use it.
pub(crate) async fn rmcp_client(command: Command) -> Result<RunningService<RoleClient, ()>> {
    let (transport, _) = TokioChildProcess::builder(command)
        .stderr(Stdio::null())
        .spawn()?;
    let running = ().serve(transport).await?;
    running.list_all_tools().await?;
    Ok(running)
}

/// Calls an echo tool once.
pub(crate) async fn call_echo(peer: &Peer<RoleClient>, tool: &str) -> Result<()> {
    let arguments: Map<String, Value> = Map::from_iter([("text".to_owned(), json!("hello"))]);
    let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
    let result = peer.call_tool(params).await?;
    anyhow::ensure!(result.is_error != Some(true), "{tool} failed: {result:?}");
    Ok(())
}
