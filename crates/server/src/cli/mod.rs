//! The commands. Each acts on the home as its owner: through the running server, or on the home itself
//! when none runs.
//!
//! - [`client`]: how a command reaches the server or the home.
//! - [`output`]: how it says what came of it: for people, or as JSON.
//! - a file a command.

pub mod client;
pub mod output;
pub mod serve;
pub mod token;
pub mod up;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand};
use oubliette_home::Home;
use oubliette_protocol::Result;

use output::Output;

/// Coding agents in sandboxes, behind one tool gate.
#[derive(Debug, Parser)]
#[command(name = "oubliette", version, about, propagate_version = true)]
pub struct Cli {
    /// The home directory (default: $OUBLIETTE_HOME, else ~/.oubliette).
    #[arg(long, global = true, value_name = "DIR")]
    pub home: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long, global = true)]
    pub json: bool,
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Serve, making the home with samples and an admin token on the first run.
    Up(serve::Args),
    /// Serve an existing home, or an empty one.
    Serve(serve::Args),
    /// Create, list and revoke tokens.
    #[command(subcommand)]
    Token(token::Token),
}

/// What a command works with.
pub struct Context {
    /// The home.
    pub home: Home,
    /// How it says what came of it.
    pub output: Output,
}

/// Runs the command line of this process.
pub async fn run() -> ExitCode {
    let cli = Cli::parse();
    let output = if cli.json { Output::Json } else { Output::Text };
    let done = async {
        let home = Home::locate(cli.home, |name| std::env::var_os(name))?;
        dispatch(cli.command, Context { home, output }).await
    };
    match Box::pin(done).await {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            output.error(&error);
            ExitCode::FAILURE
        }
    }
}

async fn dispatch(command: Command, context: Context) -> Result<()> {
    match command {
        Command::Up(args) => up::run(args, context).await,
        Command::Serve(args) => serve::run(args, context).await,
        Command::Token(token) => token::run(token, context).await,
    }
}
