//! How fast Oubliette is.
//!
//! Starts the real release programs in homes of their own and asks them as their users do: over loopback HTTP,
//! over a session's relay socket, through `oubliette-client`. Where a number depends on the machine it is told
//! as a ratio to a floor taken in the same run, in turn with it.
//!
//! - [`suites`]: what is measured, a file each.
//! - [`home`]: a home and its server; [`caller`]: a program that lends a tool.
//! - [`actors`]: this program started as something else: a bare echo server, a bare HTTP server, an agent that
//!   knows when it was spoken to; [`bare`] starts them.
//! - [`http`], [`mcp`], [`lines`]: clients by hand, so that no library's cost is in the numbers.
//! - [`stats`], [`procs`], [`clock`], [`report`]: times, memory, one clock, the table.

mod actors;
mod bare;
mod caller;
mod clock;
mod home;
mod http;
mod lines;
mod mcp;
mod procs;
mod report;
mod stats;
mod suites;

use std::process::ExitCode;

use clap::Parser;

use report::Report;
use suites::{Effort, Suite};

/// Measures Oubliette beside a floor taken in the same run, and beside peers.
#[derive(Debug, Parser)]
#[command(name = "oubliette-bench")]
struct Arguments {
    /// Only this suite; may be given several times.
    #[arg(long, value_enum)]
    suite: Vec<Suite>,
    /// A tenth of the work: to see that it runs, not to quote.
    #[arg(long)]
    quick: bool,
    /// Install the peers (cargo and npm, into target/) if they are missing.
    #[arg(long)]
    peers: bool,
    /// JSON on stdout instead of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // Before any thread: these parts are measured.
    if let Some(code) = actors::play(&arguments) {
        return code;
    }
    let arguments = Arguments::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let report = match runtime {
        Ok(runtime) => runtime.block_on(run(&arguments)),
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    match (arguments.json, serde_json::to_string_pretty(&report)) {
        (true, Ok(json)) => println!("{json}"),
        _ => println!("{}", report.markdown()),
    }
    // A target missed is a finding; a suite that broke is a failure.
    match report.broken.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

async fn run(arguments: &Arguments) -> Report {
    let effort = if arguments.quick {
        Effort::Quick
    } else {
        Effort::Full
    };
    let mut report = Report::default();
    for suite in Suite::ALL {
        if !arguments.suite.is_empty() && !arguments.suite.contains(&suite) {
            continue;
        }
        eprintln!("{suite:?}");
        if let Err(error) = Box::pin(suite.run(&mut report, effort, arguments.peers)).await {
            eprintln!("  broken: {error:#}");
            report.broken.push(format!("{suite:?}: {error:#}"));
        }
    }
    report
}
