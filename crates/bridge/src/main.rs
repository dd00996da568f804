//! `oubliette-client`: the one MCP server inside a sandbox. The library of the same name says how.
//!
//! The same binary is the sandbox's first process (`oubliette-client sandbox-init`), so that a sandbox
//! needs one program of ours only. That mode runs before any runtime or thread exists.

use std::{ffi::OsString, process::ExitCode};

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
    let key = std::env::var(KEY_ENV).ok().filter(|key| !key.is_empty());
    let code = runtime.block_on(oubliette_bridge::serve(socket.into(), key));
    // A blocking read of stdin may still be under way; nothing of ours waits for it.
    runtime.shutdown_background();
    code
}
