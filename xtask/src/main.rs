//! `cargo xtask up | build | setup | test | soak | bench`: the commands of README, each with its own set-up.
//!
//! - [`process`]: running programs, and recording how each step ended.
//! - [`setup`]: installing what the tests need on a fresh machine.
//! - [`build`]: the console and the release programs.
//! - [`test_steps`]: the steps of `cargo xtask test`.

mod build;
mod process;
mod setup;
mod test_steps;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

#[derive(Parser)]
#[command(name = "cargo xtask", about = "Builds, runs, tests and measures Oubliette.")]
struct XtaskCli {
    #[command(subcommand)]
    command: XtaskCommand,
}

#[derive(Subcommand)]
enum XtaskCommand {
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
    /// Kill the release server at random moments under load and check that nothing acknowledged is lost.
    Soak {
        /// Passed on to tests/python/soak.py, for example `--rounds 1000 --seed 7`; `--help` lists the options.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
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
    let done = match XtaskCli::parse().command {
        XtaskCommand::Up { args } => build::run_up(&root, &args),
        XtaskCommand::Build => build::build_release(&root),
        XtaskCommand::Setup => setup::install_all(&root),
        XtaskCommand::Test { only } => test_steps::run_steps(&root, only.as_deref()),
        XtaskCommand::Soak { args } => build::run_soak(&root, &args),
        XtaskCommand::Bench { args } => build::run_bench(&root, &args),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error:#}");
            ExitCode::FAILURE
        }
    }
}
