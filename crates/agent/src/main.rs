//! `oubliette-agent`: the built-in agent, an ACP agent on stdio.
//!
//! It runs inside a sandbox, holds no key and knows no network: its model is asked at a loopback
//! address that ends in the server, its tools are those of the MCP servers `session/new` names
//! (`oubliette-client`), and what it remembers is kept by its host through the `_oubliette/memory`
//! methods. It decides nothing about what a tool may do: the server does.
//!
//! In the order a turn happens:
//!
//! - [`config`]: what it is told to be, from `OUBLIETTE_AGENT_CONFIG`.
//! - [`acp`]: the methods it answers; [`session`]: one conversation and its running turn.
//! - [`memory`]: what was said before, kept by the host.
//! - [`script`]: a model that follows a file; [`model`]: one that is asked over HTTP.
//! - [`turn`]: tool calls as both make them; [`tools`]: the MCP servers behind them.
//! - [`voice`]: everything it says while a turn runs; [`report`]: how much of a call and its result.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod acp;
mod config;
mod memory;
mod model;
mod report;
mod script;
mod session;
mod tools;
mod turn;
mod voice;

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(first) = std::env::args().nth(1) {
        return answer_flag(&first);
    }
    // One thread: two hundred of these may run on two cores, and each mostly waits.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("oubliette-agent: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let config = config::Config::from_env();
    if let Err(error) = &config {
        eprintln!("oubliette-agent: {error}");
    }
    let served = runtime.block_on(acp::serve(config));
    // What is left are tool servers, which end when their stdin closes with this process. Waiting
    // for them here would only keep a dead session's processes alive.
    runtime.shutdown_background();
    match served {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("oubliette-agent: {error}");
            ExitCode::FAILURE
        }
    }
}

fn answer_flag(flag: &str) -> ExitCode {
    match flag {
        "--version" | "-V" => println!("oubliette-agent {}", env!("CARGO_PKG_VERSION")),
        "--help" | "-h" => println!(
            "oubliette-agent: an ACP agent on stdin and stdout, started by the Oubliette server.\n\n\
             It takes no arguments. OUBLIETTE_AGENT_CONFIG holds JSON: {{\"prompt\", \"model\", \"script\", \"base_url\"}}, \
             or @ and the path of a file with it."
        ),
        other => {
            eprintln!("oubliette-agent: unexpected argument {other:?}; it takes none, see --help");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
