//! `oubliette-client`: the one MCP server inside a sandbox.
//!
//! The agent speaks MCP to it on stdin and stdout; it speaks JSON-RPC to the server over the relay
//! socket. It decides nothing: which tools there are and who may call them is the server's word, asked
//! for anew on every call.
//!
//! In the order data flows:
//!
//! - [`stdio`]: the agent's end: bytes in and out, and the moment the agent is gone.
//! - [`intake`]: the agent's lines: those the express lane takes, and the rest as the MCP library reads it.
//! - [`express`]: the short way of an ordinary tool call, past the MCP library; what may take it.
//! - [`mcp`]: everything else of MCP, for both lifecycles: handshakes, lists, unusual calls, change notices.
//! - [`call`]: one tool call, by either way: where its name leads, what the server is asked.
//! - [`patience`]: what an agent that asked for progress hears meanwhile.
//! - [`registry`]: the tools as they are now, and what a name means.
//! - [`link`]: the server's end: connecting, learning the tools, coming back after a loss.
//! - [`outcome`]: an answer of the relay as MCP sees it.
//! - [`out`]: lines on their way to the agent, in as few writes as can be.
//!
//! The same binary is the sandbox's first process (`oubliette-client sandbox-init`), so that a sandbox
//! needs one program of ours only. That mode runs before any runtime or thread exists.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod call;
mod express;
mod intake;
mod link;
mod mcp;
mod out;
mod outcome;
mod patience;
mod registry;
mod stdio;

use std::{ffi::OsString, process::ExitCode, sync::Arc};

use oubliette_protocol::relay::{KEY_ENV, SOCKET_ENV, SOCKET_PATH};

const HELP: &str = "\
oubliette-client: the tools of an Oubliette session, as an MCP server on stdin and stdout.

Usage: oubliette-client [--help | --version]

An agent starts it; it is of no use by hand outside a sandbox. Environment:
  OUBLIETTE_SOCKET   the session's relay socket (default /mcp/relay.sock)
  OUBLIETTE_API_KEY  a token: Oubliette's own tools are offered as oubliette_<name>
";

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1).peekable();
    // First of all: the inner stage forks and drops rights, which must happen while there is one thread.
    if args.peek().is_some_and(|arg| arg == "sandbox-init") {
        args.next();
        oubliette_sandbox::inner::main(args)
    }
    match args.next().as_ref().map(|arg| arg.to_string_lossy()).as_deref() {
        None => serve(),
        Some("--help" | "-h") => {
            print!("{HELP}");
            ExitCode::SUCCESS
        }
        Some("--version" | "-V") => {
            println!("oubliette-client {}", env!("CARGO_PKG_VERSION"));
            ExitCode::SUCCESS
        }
        Some(other) => {
            eprintln!("oubliette-client: unknown argument {other:?}; try --help");
            ExitCode::from(2)
        }
    }
}

fn serve() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => {
            eprintln!("oubliette-client: cannot start: {why}");
            return ExitCode::FAILURE;
        }
    };
    let socket = std::env::var_os(SOCKET_ENV).filter(|path| !path.is_empty());
    let socket = socket.unwrap_or_else(|| OsString::from(SOCKET_PATH));
    let key = std::env::var(KEY_ENV)
        .ok()
        .filter(|key| !key.is_empty())
        .map(link::Key::new);
    let code = runtime.block_on(async move {
        let registry = Arc::new(registry::Registry::default());
        let link = link::Link::start(socket.into(), key, registry.clone());
        let beat = patience::Beat::default();
        mcp::serve(call::Calls { registry, link, beat }).await
    });
    // A blocking read of stdin may still be under way; nothing of ours waits for it.
    runtime.shutdown_background();
    code
}
