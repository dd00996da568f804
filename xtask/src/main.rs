//! `cargo xtask up | test | bench`: the commands of README, each doing all its own set-up.
//!
//! - [`sh`]: running programs, and telling how each step went.
//! - [`setup`]: what the tests need on a fresh machine, installed when it can be.
//! - [`build`]: the console and the release programs.
//! - [`check`]: everything `cargo xtask test` runs.

mod build;
mod check;
mod setup;
mod sh;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, runs, tests and measures Oubliette.")]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Build the release programs and run `oubliette up`: home, token and server in one go.
    Up {
        /// Passed on to `oubliette up`, for example `--listen 127.0.0.1:9000`.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Build the console and the release programs into target/release.
    Build,
    /// Install what the tests need, and stop there.
    Setup,
    /// Run everything: formatting, lints, docs, licences, unit and end-to-end tests.
    Test {
        /// Run only the steps whose name contains this.
        #[arg(long)]
        only: Option<String>,
    },
    /// Measure against the floor and against peers.
    Bench {
        /// Passed on to the bench program; `--help` lists the suites.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
}

fn main() -> ExitCode {
    let root = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("..");
    let root = root.canonicalize().unwrap_or(root);
    let done = match Cli::parse().command {
        Command::Up { args } => build::up(&root, &args),
        Command::Build => build::release(&root),
        Command::Setup => setup::all(&root),
        Command::Test { only } => check::run_steps(&root, only.as_deref()),
        Command::Bench { args } => build::bench(&root, &args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
