//! The bare things, started: this program in one of its other parts.

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

use crate::home::own;

/// The echo server on stdio, as a command.
pub(crate) fn echo(tag: &str, delay_ms: u64) -> Result<Command> {
    let mut command = Command::new(own()?);
    command.args(["as-echo", tag, &delay_ms.to_string()]);
    Ok(command)
}

/// A bare HTTP server.
pub(crate) struct Bare {
    pub(crate) address: SocketAddr,
    _child: Child,
}

/// Starts one: `as-echo-http` or `as-floor`.
pub(crate) async fn http(part: &str) -> Result<Bare> {
    let mut child = Command::new(own()?)
        .arg(part)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()?;
    let mut line = String::new();
    BufReader::new(child.stdout.take().context("no stdout")?)
        .read_line(&mut line)
        .await?;
    Ok(Bare {
        address: line.trim().parse()?,
        _child: child,
    })
}

/// A rmcp client on a program's stdio, as an agent has it.
pub(crate) async fn rmcp(command: Command) -> Result<RunningService<RoleClient, ()>> {
    let (transport, _) = TokioChildProcess::builder(command)
        .stderr(Stdio::null())
        .spawn()?;
    let running = ().serve(transport).await?;
    running.list_all_tools().await?;
    Ok(running)
}

/// One call of an echo tool.
pub(crate) async fn call(peer: &Peer<RoleClient>, tool: &str) -> Result<()> {
    let arguments: Map<String, Value> = Map::from_iter([("text".to_owned(), json!("hello"))]);
    let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
    let result = peer.call_tool(params).await?;
    anyhow::ensure!(result.is_error != Some(true), "{tool} failed: {result:?}");
    Ok(())
}
