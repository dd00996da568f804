//! The command line of `oubliette`: argument parsing, one file per subcommand, and what they share.
//!
//! Every command performs actions as the home's owner: over the control socket of the running server, or, when
//! no server runs, on the home's database and files directly.
//!
//! Shared by the commands, in the order a command uses them:
//! - [`resolve`], [`files`]: project names, `last`, files and stdin, turned into arguments of actions.
//! - [`client`]: performs actions through the server or on the home. [`server_url`]: the running server's URL.
//! - [`turn`], [`turn_display`], [`debug`]: follow a session in the terminal.
//! - [`import`], [`trial`], [`explain`]: read other clients' tool servers, start tools without a session.
//! - [`output`], [`style`]: results as text or JSON; colours and sanitising.

#![allow(
    rustdoc::broken_intra_doc_links,
    rustdoc::invalid_html_tags,
    reason = "doc comments on arguments are printed by --help, where `[server]` and `<slug>` are literal text"
)]

pub(crate) mod agent;
pub(crate) mod audit;
pub(crate) mod chat;
pub(crate) mod client;
pub(crate) mod completions;
pub(crate) mod debug;
pub(crate) mod doctor;
pub(crate) mod explain;
pub(crate) mod files;
pub(crate) mod import;
pub(crate) mod mcp_config;
pub(crate) mod output;
pub(crate) mod project;
pub(crate) mod resolve;
pub mod run;
pub(crate) mod serve;
pub(crate) mod server_url;
pub(crate) mod session;
pub(crate) mod style;
pub(crate) mod token;
pub(crate) mod tool;
pub(crate) mod trial;
pub(crate) mod turn;
pub(crate) mod turn_display;
pub(crate) mod up;
pub(crate) mod workspace;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand, error::ErrorKind};
use oubliette_home::HomeDir;
use oubliette_protocol::{Error, Result};

use output::{OutputFormat, print_line};

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
pub(crate) struct CommandLine {
    /// The home directory (default: $OUBLIETTE_HOME, else ~/.oubliette).
    #[arg(long, global = true, value_name = "DIR")]
    pub home: Option<PathBuf>,
    /// Print the result as JSON.
    #[arg(long, global = true)]
    pub json: bool,
    /// The subcommand.
    #[command(subcommand)]
    pub command: CliCommand,
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub(crate) enum CliCommand {
    /// Serve, making the home with samples and an admin token on the first run.
    Up(serve::ListenArgs),
    /// Serve an existing home, or an empty one.
    Serve(serve::ServeArgs),
    /// Run one turn, live in the terminal.
    Run(run::RunArgs),
    /// Chat with an agent, switching agents as you go.
    Chat(chat::ChatArgs),
    /// Create, list, show, change and delete projects.
    #[command(subcommand)]
    Project(project::ProjectCommand),
    /// Create, list, compare and delete workspaces.
    #[command(subcommand)]
    Workspace(workspace::WorkspaceCommand),
    /// List, follow, message, switch and end sessions.
    #[command(subcommand)]
    Session(session::SessionCommand),
    /// List, show, write and delete agents.
    #[command(subcommand)]
    Agent(agent::AgentCommand),
    /// The catalog of tools, and the tools of sessions: list, add, test, explain, call.
    #[command(subcommand, alias = "catalog")]
    Tool(tool::ToolCommand),
    /// Create, list and revoke tokens.
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// List the audit log: who changed what, newest first.
    Audit(audit::AuditArgs),
    /// Check the installation; print a remedy for each failed check.
    Doctor,
    /// Print the configuration that connects an MCP client to this server.
    McpConfig(mcp_config::McpConfigArgs),
    /// Print a shell's completion script.
    Completions(completions::CompletionsArgs),
}

/// What every command is given: the home it acts on and the output format.
pub struct CommandContext {
    /// The home directory the command acts on.
    pub home: HomeDir,
    /// The format results are printed in.
    pub output: OutputFormat,
}

impl CommandContext {
    /// ` --home DIR` for a command line shown to the user; empty for the default home.
    pub fn home_flag(&self) -> String {
        home_flag(&self.home)
    }
}

/// ` --home DIR`, or nothing when commands find this home without the option.
fn home_flag(home: &HomeDir) -> String {
    let usual =
        HomeDir::locate(None, |name| std::env::var_os(name)).is_ok_and(|usual| usual.root() == home.root());
    match usual {
        true => String::new(),
        false => format!(" --home {}", home.root().display()),
    }
}

/// The exit code of a command that has already printed its result.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CommandOutcome {
    /// Exit code 0.
    Done,
    /// Exit code 1.
    Failed,
}

/// Parses this process's arguments, runs the command and returns its exit code.
pub async fn run() -> ExitCode {
    let cli = match CommandLine::try_parse() {
        Ok(cli) => cli,
        Err(error) => return report_usage_error(&error),
    };
    let output = if cli.json {
        OutputFormat::Json
    } else {
        OutputFormat::Text
    };
    let done = async {
        let home = HomeDir::locate(cli.home, |name| std::env::var_os(name))?;
        dispatch(cli.command, CommandContext { home, output }).await
    };
    match Box::pin(done).await {
        Ok(CommandOutcome::Done) => ExitCode::SUCCESS,
        Ok(CommandOutcome::Failed) => ExitCode::FAILURE,
        Err(error) => {
            output.print_error(&error);
            ExitCode::FAILURE
        }
    }
}

/// Prints clap's error or help text. Exit code 2 for wrong usage, 0 for `--help` and `--version`.
fn report_usage_error(error: &clap::Error) -> ExitCode {
    let wrong = error.use_stderr();
    // Parsing failed, so `CommandLine::json` is not available: look for the option in the raw arguments.
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
        print_line(&Error::invalid(said).body().to_string());
    }
    let _ = error.print();
    match wrong {
        true => ExitCode::from(2),
        false => ExitCode::SUCCESS,
    }
}

async fn dispatch(command: CliCommand, context: CommandContext) -> Result<CommandOutcome> {
    let done = match command {
        CliCommand::Up(args) => up::run(args, context).await,
        CliCommand::Serve(args) => serve::run(args, context).await,
        CliCommand::Project(project) => project::run(project, context).await,
        CliCommand::Workspace(workspace) => workspace::run(workspace, context).await,
        CliCommand::Agent(agent) => agent::run(agent, context).await,
        CliCommand::Token(token) => token::run(token, context).await,
        CliCommand::Audit(audit) => audit::run(audit, context).await,
        CliCommand::Run(args) => return run::run(args, context).await,
        CliCommand::Chat(args) => return chat::run(args, context).await,
        CliCommand::Session(session) => return session::run(session, context).await,
        CliCommand::Tool(tool) => return tool::run(tool, context).await,
        CliCommand::Doctor => return doctor::run(context).await,
        CliCommand::McpConfig(args) => return mcp_config::run(args, context).await,
        CliCommand::Completions(args) => return completions::run(&args, &context),
    };
    done.map(|()| CommandOutcome::Done)
}
