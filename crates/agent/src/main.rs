//! `oubliette-agent`: the built-in agent, an ACP agent on stdio.
//!
//! It runs inside a sandbox without network access and holds no provider key. Requests to the model go to
//! a loopback address that the server forwards, tools come from the MCP servers named in `session/new`
//! (`oubliette-client`), and the conversation is stored by the host through the `_oubliette/memory`
//! methods. It makes no permission decisions: the server does.
//!
//! In the order a turn happens:
//!
//! - [`config`]: prompt and model, from `OUBLIETTE_AGENT_CONFIG`.
//! - [`acp`]: the ACP methods it implements; [`session`]: one conversation and its running turn.
//! - [`memory`]: the conversation so far, stored by the host.
//! - [`script`]: a fixed list of steps in place of a model; [`model`]: a model provider over HTTP.
//! - [`turn`]: the tool calls of either kind; [`tool_servers`]: the MCP servers behind them.
//! - [`updates`]: `session/update` notifications while a turn runs; [`call_report`]: the size limits of calls and
//!   results in them.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod acp;
mod call_report;
mod config;
mod memory;
mod model;
mod script;
mod session;
mod tool_servers;
mod turn;
mod updates;

use std::process::ExitCode;

fn main() -> ExitCode {
    if let Some(first) = std::env::args().nth(1) {
        return answer_flag(&first);
    }
    // One thread: hundreds of agents may run on two cores, and each mostly waits.
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => {
            eprintln!("oubliette-agent: cannot start: {error}");
            return ExitCode::FAILURE;
        }
    };
    let config = config::AgentProcessConfig::from_env();
    if let Err(error) = &config {
        eprintln!("oubliette-agent: {error}");
    }
    let served = runtime.block_on(acp::serve(config));
    // Do not wait for tool servers: they end when their stdin closes with this process, and waiting
    // would only keep the processes of an ended session alive.
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
