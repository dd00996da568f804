//! The one MCP server inside a sandbox: `oubliette-client`, and what the server does for it.
//!
//! The agent speaks MCP to the client on stdin and stdout; the client speaks JSON-RPC to the server over the
//! relay socket. It decides nothing: which tools there are and who may call them is the server's word, asked
//! for anew on every call.
//!
//! Where the server is at hand, the client lends it its stdin and stdout ([`loan`]): the server then stands
//! between agent and client ([`tap`]), answers ordinary calls itself and passes everything else on. A call so saves a process on its way there and back. The two look the same to an agent, and
//! when the server goes the client has its streams back.
//!
//! In the order data flows:
//!
//! - [`stdio`]: the agent's end: bytes in and out, lent or not.
//! - [`intake`]: the agent's lines: those the express lane takes, and the rest as it came.
//! - [`express`]: the short way of an ordinary tool call, past the MCP library; what may take it.
//! - [`mcp`]: everything else of MCP, for both lifecycles: handshakes, lists, unusual calls, change notices.
//! - [`call`]: one tool call, by either way: where its name leads, what the server is asked.
//! - [`patience`]: what an agent that asked for progress hears meanwhile.
//! - [`registry`]: the tools as they are now, and what a name means.
//! - [`link`]: the server's end: connecting, learning the tools, coming back after a loss.
//! - [`outcome`]: an answer of the relay as MCP sees it.
//! - [`out`]: lines on their way to the agent, in as few writes as can be.
//! - [`loan`]: how stdin and stdout are lent; [`journal`]: which calls are open meanwhile.
//! - [`tap`]: the server's side of it.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod call;
mod express;
mod intake;
pub mod journal;
mod link;
pub mod loan;
mod mcp;
mod out;
pub mod outcome;
mod patience;
mod registry;
mod stdio;
pub mod tap;

use std::{path::PathBuf, process::ExitCode, sync::Arc};

/// Serves stdin and stdout until the agent is gone.
pub async fn serve(socket: PathBuf, key: Option<String>) -> ExitCode {
    let registry = Arc::new(registry::Registry::default());
    let (stdin, out) = stdio::open(&socket, key.as_deref()).await;
    let link = link::Link::start(socket, key.map(link::Key::new), registry.clone());
    let beat = patience::Beat::default();
    mcp::serve(call::Calls { registry, link, beat }, stdin, out).await
}
