//! The commands. Each acts on the home as its owner: through the running server, or on the home itself
//! when none runs.
//!
//! - [`client`]: how a command reaches the server or the home. [`address`]: where the server listens.
//! - [`output`], [`style`]: how it says what came of it: for people, or as JSON.
//! - [`live`], [`turn`], [`debug`]: sessions in the terminal. [`trial`], [`paste`]: tools before there is one.
//! - [`names`], [`files`]: what people write, as what actions take.
//! - a file a command.

#![allow(
    rustdoc::broken_intra_doc_links,
    rustdoc::invalid_html_tags,
    reason = "the comments on arguments are what --help prints: `[server]` and `<slug>` are meant as they stand"
)]

pub mod address;
pub mod agent;
pub mod audit;
pub mod chat;
pub mod client;
pub mod completions;
pub mod debug;
pub mod doctor;
pub mod explain;
pub mod files;
pub mod live;
pub mod mcp_config;
pub mod names;
pub mod output;
pub mod paste;
pub mod project;
pub mod run;
pub mod serve;
pub mod session;
pub mod style;
pub mod token;
pub mod tool;
pub mod trial;
pub mod turn;
pub mod up;
pub mod workspace;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand, error::ErrorKind};
use oubliette_home::Home;
use oubliette_protocol::{Error, Result};

use output::{Output, say};

const EXAMPLES: &str = "\
Begin:
  oubliette up                                    serve; on the first run, make everything that is needed
  oubliette run --agent demo \"Show me around\"     one turn, live in this terminal
  oubliette chat --agent assistant                many turns, switching agents as you go
  oubliette mcp-config claude-code                connect an MCP client
  oubliette doctor                                what works here, and the remedy for what does not

Every command takes --json. Exit codes: 0 done, 1 failed, 2 wrong usage.";

/// Coding agents in sandboxes, behind one tool gate.
#[derive(Debug, Parser)]
#[command(name = "oubliette", version, about, propagate_version = true, after_help = EXAMPLES)]
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
    Serve(serve::ServeArgs),
    /// Run one turn, live in the terminal.
    Run(run::Args),
    /// Chat with an agent, switching agents as you go.
    Chat(chat::Args),
    /// Create, list, show, change and delete projects.
    #[command(subcommand)]
    Project(project::Project),
    /// Create, list, compare and delete workspaces.
    #[command(subcommand)]
    Workspace(workspace::Workspace),
    /// List, follow, message, switch and end sessions.
    #[command(subcommand)]
    Session(session::Session),
    /// List, show, write and delete agents.
    #[command(subcommand)]
    Agent(agent::Agent),
    /// The catalog of tools, and the tools of sessions: list, add, test, explain, call.
    #[command(subcommand, alias = "catalog")]
    Tool(tool::Tool),
    /// Create, list and revoke tokens.
    #[command(subcommand)]
    Token(token::Token),
    /// Who changed what, newest first.
    Audit(audit::Audit),
    /// Say what works here, and the remedy for what does not.
    Doctor,
    /// Print what to paste into an MCP client.
    McpConfig(mcp_config::Args),
    /// Print a shell's completion script.
    Completions(completions::Args),
}

/// What a command works with.
pub struct Context {
    /// The home.
    pub home: Home,
    /// How it says what came of it.
    pub output: Output,
}

impl Context {
    /// What another command needs to find this home: nothing when it is the usual one.
    pub fn home_flag(&self) -> String {
        home_flag(&self.home)
    }
}

/// ` --home DIR`, unless it is the home commands use by themselves.
fn home_flag(home: &Home) -> String {
    let usual =
        Home::locate(None, |name| std::env::var_os(name)).is_ok_and(|usual| usual.root() == home.root());
    match usual {
        true => String::new(),
        false => format!(" --home {}", home.root().display()),
    }
}

/// How a command that has said everything ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Verdict {
    /// Well.
    Done,
    /// Not well.
    Failed,
}

/// Runs the command line of this process.
pub async fn run() -> ExitCode {
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => return misused(&error),
    };
    let output = if cli.json { Output::Json } else { Output::Text };
    let done = async {
        let home = Home::locate(cli.home, |name| std::env::var_os(name))?;
        dispatch(cli.command, Context { home, output }).await
    };
    match Box::pin(done).await {
        Ok(Verdict::Done) => ExitCode::SUCCESS,
        Ok(Verdict::Failed) => ExitCode::FAILURE,
        Err(error) => {
            output.error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Wrong usage, or a wish for help.
fn misused(error: &clap::Error) -> ExitCode {
    let wrong = error.use_stderr();
    // Whether JSON is wanted is not known of a line that could not be read; having written it will do.
    let json = std::env::args_os()
        .skip(1)
        .take_while(|arg| arg != "--")
        .any(|arg| arg == "--json");
    if wrong && json && error.kind() != ErrorKind::DisplayHelpOnMissingArgumentOrSubcommand {
        let text = error.render().to_string();
        let said = text
            .split("\n\n")
            .next()
            .unwrap_or_default()
            .trim()
            .trim_start_matches("error: ");
        say(&Error::invalid(said).body().to_string());
    }
    let _ = error.print();
    match wrong {
        true => ExitCode::from(2),
        false => ExitCode::SUCCESS,
    }
}

async fn dispatch(command: Command, context: Context) -> Result<Verdict> {
    let done = match command {
        Command::Up(args) => up::run(args, context).await,
        Command::Serve(args) => serve::run(args, context).await,
        Command::Project(project) => project::run(project, context).await,
        Command::Workspace(workspace) => workspace::run(workspace, context).await,
        Command::Agent(agent) => agent::run(agent, context).await,
        Command::Token(token) => token::run(token, context).await,
        Command::Audit(audit) => audit::run(audit, context).await,
        Command::Run(args) => return run::run(args, context).await,
        Command::Chat(args) => return chat::run(args, context).await,
        Command::Session(session) => return session::run(session, context).await,
        Command::Tool(tool) => return tool::run(tool, context).await,
        Command::Doctor => return doctor::run(context).await,
        Command::McpConfig(args) => return mcp_config::run(args, context).await,
        Command::Completions(args) => return completions::run(&args, &context),
    };
    done.map(|()| Verdict::Done)
}
