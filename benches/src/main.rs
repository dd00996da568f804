//! Oubliette's benchmarks.
//!
//! Starts the real release programs, each suite with a home directory of its own, and uses them as their users
//! do: over loopback HTTP, over a session's relay socket, through `oubliette-client`. A number that depends on the
//! machine is reported as a ratio to a floor: the same work by bare programs, measured in the same run and
//! interleaved with it.
//!
//! - [`suites`]: the measurements, one file per suite.
//! - [`home`]: a home directory and its server; [`caller`]: a program that lends a tool.
//! - [`postgres`]: a PostgreSQL of the run's own; [`cluster`]: several servers on it.
//! - [`actors`]: this program run in another role: a bare MCP echo server, a bare HTTP server, a model provider, an agent
//!   that reports when its first input arrived; [`baseline`] starts them.
//! - [`http`], [`mcp`], [`lines`]: minimal clients without libraries, whose cost would be in the numbers.
//! - [`stats`], [`procs`], [`clock`], [`report`]: timing samples, process memory, the monotonic clock, the results
//!   table.

mod actors;
mod baseline;
mod caller;
mod clock;
mod cluster;
mod home;
mod http;
mod lines;
mod mcp;
mod postgres;
mod procs;
mod report;
mod stats;
mod suites;

use std::process::ExitCode;

use clap::Parser;

use report::BenchReport;
use suites::{BenchEffort, BenchSuite};

/// Measures Oubliette beside a floor taken in the same run, and beside peers.
#[derive(Debug, Parser)]
#[command(name = "oubliette-bench")]
struct BenchArgs {
    /// Only this suite; may be given several times.
    #[arg(long, value_enum)]
    suite: Vec<BenchSuite>,
    /// Do a tenth of the work: a check that the suites run, not numbers to quote.
    #[arg(long)]
    quick: bool,
    /// Install the peers (cargo and npm, into target/) if they are missing.
    #[arg(long)]
    peers: bool,
    /// Print JSON on stdout instead of a table.
    #[arg(long)]
    json: bool,
}

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    // Before any thread is started: an actor's start-up time is measured.
    if let Some(code) = actors::run_actor(&arguments) {
        return code;
    }
    let arguments = BenchArgs::parse();
    let runtime = tokio::runtime::Builder::new_multi_thread()
        .worker_threads(2)
        .enable_all()
        .build();
    let report = match runtime {
        Ok(runtime) => runtime.block_on(run_suites(&arguments)),
        Err(error) => {
            eprintln!("error: {error}");
            return ExitCode::FAILURE;
        }
    };
    match (arguments.json, serde_json::to_string_pretty(&report)) {
        (true, Ok(json)) => println!("{json}"),
        _ => println!("{}", report.markdown()),
    }
    // A missed target is a result; only a suite that could not run makes the program fail.
    match report.broken.is_empty() {
        true => ExitCode::SUCCESS,
        false => ExitCode::FAILURE,
    }
}

async fn run_suites(arguments: &BenchArgs) -> BenchReport {
    let effort = if arguments.quick {
        BenchEffort::Quick
    } else {
        BenchEffort::Full
    };
    let mut report = BenchReport::default();
    for suite in BenchSuite::ALL {
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
