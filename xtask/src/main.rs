//! `cargo xtask up | build | docs | dist | setup | test | fuzz | soak | agents | bench | cluster`: the commands of README, each with its own set-up.
//!
//! - [`process`]: running programs, and recording how each step ended.
//! - [`setup`]: installing what the tests need on a fresh machine.
//! - [`build`]: the console and the release programs.
//! - [`dist`]: what is handed to users.
//! - [`book`]: the book and its reference. [`links`]: links of the documents.
//! - [`test_steps`]: the steps of `cargo xtask test`. [`fuzz`]: the fuzz targets. [`postgres`]: the tests' PostgreSQL.
//! - [`cluster`]: the tests' Kubernetes.

mod book;
mod build;
mod cluster;
mod dist;
mod fuzz;
mod links;
mod postgres;
mod process;
mod setup;
mod test_steps;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};

use crate::fuzz::FuzzOptions;

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
    /// Write the reference from the code, build the book into docs/book, from where the server's build embeds it, and check
    /// its links.
    Docs,
    /// Make the tarball, the Debian package, the image's context, the bill of materials and checksums, in target/dist.
    Dist {
        /// Which build to make them of.
        #[arg(long, value_enum, default_value = "release")]
        profile: dist::DistProfile,
    },
    /// Install what the tests need, and stop there.
    Setup,
    /// Run everything: formatting, lints, docs, licences, unit and end-to-end tests.
    Test {
        /// Run only the steps whose name contains this.
        #[arg(long)]
        only: Option<String>,
    },
    /// Run the fuzz targets, each for some time, and say what was found.
    Fuzz {
        /// How long each target runs, in seconds.
        #[arg(long, default_value_t = 60)]
        seconds: u64,
        /// Only this target; may be given several times.
        #[arg(long)]
        target: Vec<String>,
        /// What makes the inputs; by default libFuzzer where there is a C++ compiler.
        #[arg(long)]
        engine: Option<fuzz::FuzzEngine>,
        /// Run one target on this file only, such as a finding.
        #[arg(long, requires = "target", conflicts_with_all = ["seconds", "engine"])]
        input: Option<PathBuf>,
    },
    /// Kill the release server at random moments under load and check that nothing acknowledged is lost. With `--servers 3`, kill,
    /// freeze or cut off one of several servers, or their PostgreSQL.
    Soak {
        /// Passed on to tests/python/soak.py, for example `--rounds 1000 --seed 7`; `--help` lists the options.
        #[arg(trailing_var_arg = true, allow_hyphen_values = true)]
        args: Vec<String>,
    },
    /// Run every preset's real agent against a fake model, check what users rely on, and write docs/agents.md.
    Agents {
        /// Only these presets, for example `claude`; the rows of the others stay.
        names: Vec<String>,
    },
    /// A Kubernetes of one node for the tests, from Go modules and the system's packages. With KUBECONFIG another one is used.
    #[command(subcommand)]
    Cluster(cluster::ClusterCommand),
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
        XtaskCommand::Docs => book::run_docs(&root),
        XtaskCommand::Dist { profile } => dist::run_dist(&root, profile),
        XtaskCommand::Setup => setup::install_all(&root),
        XtaskCommand::Test { only } => test_steps::run_steps(&root, only.as_deref()),
        XtaskCommand::Fuzz {
            seconds,
            target: targets,
            engine,
            input,
        } => match (input, targets.first()) {
            (Some(input), Some(target)) => fuzz::run_input(&root, target, &input),
            _ => fuzz::run_targets(
                &root,
                &FuzzOptions {
                    seconds,
                    targets,
                    engine,
                },
            ),
        },
        XtaskCommand::Soak { args } => build::run_soak(&root, &args),
        XtaskCommand::Agents { names } => build::run_agents(&root, &names),
        XtaskCommand::Cluster(command) => cluster::run_command(&root, command),
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
