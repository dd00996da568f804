//! `oubliette-client`: the one MCP server inside a sandbox.
//!
//! The agent speaks MCP to it on stdin and stdout; it speaks JSON-RPC to the server over the session's relay socket.
//! It decides nothing: which tools there are and who may call them is the server's decision, made on every call.
//!
//! In a local sandbox it hands stdin and stdout off to the server (crate `oubliette-handoff`), which answers ordinary
//! calls itself; the client then gets only the other lines, and ends when the server does. Elsewhere it makes every
//! call over the relay socket and reconnects when the server comes back.
//!
//! In the order data flows:
//!
//! - [`stdio`]: the agent's end: stdin and stdout, handed off or not.
//! - [`mcp`]: MCP in both lifecycles, by the MCP library: handshakes, lists, unusual calls, change notifications.
//!   Ordinary calls take the fast path of `oubliette-handoff` instead.
//! - [`relay_calls`]: one tool call over the relay socket.
//! - [`session_tools`]: the tools of the session, and where a call of each name goes.
//! - [`server_connection`]: the relay socket's end: connecting, loading the tools, reconnecting.
//!
//! For an agent that takes MCP servers only over HTTP, [`with_http`] starts the agent and [`http_server`] beside it, which
//! serves the same tools on the sandbox's loopback.
//!
//! The same program is a sandbox's first process (`oubliette-client sandbox-init`), so that a sandbox needs only one
//! program of ours. That mode runs before any runtime or thread exists. In a container `oubliette-client remote-stage` is
//! the first process, which connects the container to the server. [`connect`] is another mode, for git: a tunnel through
//! the sandbox's proxy.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod connect;
mod http_server;
mod mcp;
mod relay_calls;
mod server_connection;
mod session_tools;
mod stdio;
mod with_http;

use std::{ffi::OsString, path::PathBuf, process::ExitCode, sync::Arc};

use oubliette_protocol::relay::{HANDOFF_SOCKET_ENV, KEY_ENV, SOCKET_ENV, SOCKET_PATH};

const HELP: &str = "\
oubliette-client: the tools of an Oubliette session, as an MCP server on stdin and stdout.

Usage: oubliette-client [--help | --version]
       oubliette-client with-http PORT PROGRAM [ARG…]   the tools at http://127.0.0.1:PORT/mcp, and the program

An agent starts it; it is of no use by hand outside a sandbox. Environment:
  OUBLIETTE_SOCKET          the session's relay socket (default /mcp/relay.sock)
  OUBLIETTE_HANDOFF_SOCKET  a socket of the server: stdin and stdout are handed off to it, and the client ends
                            when the server does (default: none, the relay socket carries every call)
  OUBLIETTE_API_KEY         a token: Oubliette's own tools are offered as oubliette_<name>
  OUBLIETTE_MCP_TOKEN       with-http: the bearer token that every request must have
";

fn main() -> ExitCode {
    let mut args = std::env::args_os().skip(1).peekable();
    // First of all: the inner stage forks and drops rights, which must happen while there is one thread.
    if args.peek().is_some_and(|arg| arg == "sandbox-init") {
        args.next();
        oubliette_sandbox::inner::main(args)
    }
    if args.peek().is_some_and(|arg| arg == "remote-stage") {
        args.next();
        oubliette_sandbox::stage::container::main(args)
    }
    match args.next().as_ref().map(|arg| arg.to_string_lossy()).as_deref() {
        None => run(),
        Some("with-http") => with_http::main(args),
        Some("http-server") => match args.next() {
            Some(_) => with_http::detach(),
            None => http_server::main(),
        },
        Some("connect") => connect::main(args.map(|arg| arg.to_string_lossy().into_owned())),
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

/// What the environment says.
struct ClientEnv {
    relay_socket: PathBuf,
    handoff_socket: Option<PathBuf>,
    key: Option<String>,
}

impl ClientEnv {
    fn read() -> Self {
        let path = |name| std::env::var_os(name).filter(|path| !path.is_empty());
        Self {
            relay_socket: path(SOCKET_ENV)
                .unwrap_or_else(|| OsString::from(SOCKET_PATH))
                .into(),
            handoff_socket: path(HANDOFF_SOCKET_ENV).map(Into::into),
            key: std::env::var(KEY_ENV).ok().filter(|key| !key.is_empty()),
        }
    }
}

fn run() -> ExitCode {
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(why) => {
            eprintln!("oubliette-client: cannot start: {why}");
            return ExitCode::FAILURE;
        }
    };
    let code = runtime.block_on(serve(ClientEnv::read()));
    // A blocking read of stdin may still be under way; nothing waits for it.
    runtime.shutdown_background();
    code
}

/// Serves stdin and stdout until the agent is gone, or the server they were handed off to.
async fn serve(env: ClientEnv) -> ExitCode {
    let agent = stdio::open(env.handoff_socket.as_deref(), env.key.as_deref()).await;
    let tools = Arc::new(session_tools::SessionTools::default());
    let key = env.key.map(server_connection::AgentKey::new);
    let server = server_connection::ServerConnection::start(env.relay_socket, key, tools.clone());
    mcp::serve(relay_calls::RelayCalls::new(tools, server), agent).await
}
