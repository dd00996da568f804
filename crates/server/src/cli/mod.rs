//! The command line of `oubliette`: argument parsing, one file per subcommand, and what they share.
//!
//! Every command performs actions: on a server elsewhere with a token, if `--url`, `OUBLIETTE_URL` or a context names one;
//! else as the home's owner, over the control socket of the running server, or, when no server runs, on the home's
//! database and files directly.
//!
//! Shared by the commands, in the order a command uses them:
//! - [`resolve`], [`files`]: project names, `last`, files and stdin, turned into arguments of actions.
//! - [`folder_copy`]: the present folder as a new workspace.
//! - [`contexts`]: servers elsewhere that a user has logged in to. [`remote`]: requests to one.
//! - [`client`]: performs actions through a server or on the home. [`server_url`]: the running server's URL.
//! - [`line_editor`], [`chat_history`], [`chat_completion`], [`chat_commands`]: the prompt of a chat.
//! - [`turn`], [`turn_keys`], [`approval_prompt`], [`approval_layout`], [`debug`]: follow a session in the terminal.
//! - [`approval_watch`]: which approvals are new or were decided since the last look.
//! - [`turn_display`], [`live_view`], [`status_line`], [`markdown`], [`markdown_inline`], [`markdown_table`], [`screen`]: how a turn looks there.
//! - [`explain`]: starts tools without a session. [`workspace_files`]: lists a workspace's folders. [`log_lines`]: lines of the
//!   server's log.
//! - [`top_data`], [`top_view`], [`top_frame`]: what `oubliette top` shows.
//! - [`output`], [`style`]: results as text or JSON; colours and sanitising.
//! - [`value_candidates`]: what shells complete.

#![allow(
    rustdoc::broken_intra_doc_links,
    rustdoc::invalid_html_tags,
    reason = "doc comments on arguments are printed by --help, where `[server]` and `<slug>` are literal text"
)]

pub(crate) mod agent;
pub(crate) mod agent_test;
pub(crate) mod approval;
pub(crate) mod approval_layout;
pub(crate) mod approval_prompt;
pub(crate) mod approval_watch;
pub(crate) mod audit;
pub(crate) mod backup;
pub(crate) mod chat;
pub(crate) mod chat_commands;
pub(crate) mod chat_completion;
pub(crate) mod chat_history;
pub(crate) mod client;
pub(crate) mod completions;
pub(crate) mod contexts;
pub(crate) mod debug;
pub(crate) mod doctor;
pub(crate) mod explain;
pub(crate) mod files;
pub(crate) mod folder_copy;
pub(crate) mod gitignore;
pub(crate) mod library;
pub(crate) mod line_editor;
pub(crate) mod live_view;
pub(crate) mod log_lines;
pub(crate) mod login;
pub(crate) mod logs;
pub(crate) mod markdown;
pub(crate) mod markdown_inline;
pub(crate) mod markdown_table;
pub(crate) mod mcp_config;
pub(crate) mod output;
pub(crate) mod program;
pub(crate) mod project;
pub(crate) mod remote;
pub(crate) mod resolve;
pub mod run;
pub(crate) mod screen;
pub(crate) mod serve;
pub(crate) mod server;
pub(crate) mod server_url;
pub(crate) mod session;
pub(crate) mod status;
pub(crate) mod status_line;
pub(crate) mod store;
pub(crate) mod style;
pub(crate) mod token;
pub(crate) mod tool;
pub(crate) mod top;
pub(crate) mod top_data;
pub(crate) mod top_frame;
pub(crate) mod top_view;
pub(crate) mod turn;
pub(crate) mod turn_display;
pub(crate) mod turn_keys;
pub(crate) mod up;
pub(crate) mod usage;
pub(crate) mod value_candidates;
pub(crate) mod workspace;
pub(crate) mod workspace_files;
pub(crate) mod workspace_sync;

use std::{path::PathBuf, process::ExitCode};

use clap::{Parser, Subcommand, error::ErrorKind};
use oubliette_home::HomeDir;
use oubliette_protocol::{Error, Result};

use contexts::ContextFile;
use output::{OutputFormat, print_line};
use remote::RemoteServer;

const EXAMPLES: &str = "\
Begin:
  oubliette up                                    serve; the first run makes all that is needed
  oubliette run --agent demo \"Show me around\"     one turn, live in this terminal
  oubliette chat --agent assistant                many turns, switching agents as you go
  oubliette mcp-config claude-code                connect an MCP client
  oubliette doctor                                what works here, and the remedy for what does not

  oubliette login https://oubliette.example.com   act on a server elsewhere from now on

Every command takes --json. Exit codes: 0 done, 1 failed, 2 wrong usage.";

/// What `--version` prints: the version, commit and build.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("OUBLIETTE_BUILD"), ")");

/// Coding agents in sandboxes, behind one tool gate.
#[derive(Debug, Parser)]
#[command(name = "oubliette", version = VERSION, propagate_version = true, after_help = EXAMPLES)]
pub(crate) struct CommandLine {
    /// The home directory (default: $OUBLIETTE_HOME, else ~/.oubliette).
    #[arg(long, global = true, value_name = "DIR")]
    pub home: Option<PathBuf>,
    /// Act on the server at this URL, with the token in $OUBLIETTE_TOKEN or of a login (default: $OUBLIETTE_URL, else
    /// the context in use).
    #[arg(long, global = true, value_name = "URL", conflicts_with = "context")]
    pub url: Option<String>,
    /// Act on the server of this context; `local` is the home directory.
    #[arg(long, global = true, value_name = "NAME")]
    pub context: Option<String>,
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
    /// Exchange agents and catalog entries with a directory, such as a team's repository.
    #[command(subcommand)]
    Library(library::LibraryCommand),
    /// Install, list and remove packages for agents and tool servers.
    #[command(subcommand)]
    Program(program::ProgramCommand),
    /// List calls that wait for a person to allow them.
    Approvals(approval::ApprovalsArgs),
    /// Allow a call that waits for approval.
    Approve(approval::ApproveArgs),
    /// Deny a call that waits for approval.
    Deny(approval::DenyArgs),
    /// Create, list and revoke tokens.
    #[command(subcommand)]
    Token(token::TokenCommand),
    /// List the audit log: who changed what, newest first.
    Audit(audit::AuditArgs),
    /// Sum what sessions used: tokens, cost, tool calls, turns.
    Usage(usage::UsageArgs),
    /// Write the database, the definitions and the workspaces into one file, also while the server runs.
    Backup(backup::BackupArgs),
    /// Put a backup into a home and its database; no server may run.
    Restore(backup::RestoreArgs),
    /// Move the database between SQLite and PostgreSQL.
    #[command(subcommand)]
    Store(store::StoreCommand),
    /// Show what the server is, what runs and what waits for a person.
    Status,
    /// Show the log of the server on this machine.
    Logs(logs::LogsArgs),
    /// Watch sessions, calls in progress, approvals, tool servers and servers, live.
    Top(top::TopArgs),
    /// Log in to a server elsewhere; commands act on it from then on.
    Login(login::LoginArgs),
    /// List the servers you have logged in to, and choose the one that commands act on.
    Context(login::ContextArgs),
    /// List the servers that make up this Oubliette.
    #[command(subcommand)]
    Server(server::ServerCommand),
    /// Check the installation; print a remedy for each failed check.
    Doctor,
    /// Print the configuration that connects an MCP client to this server.
    McpConfig(mcp_config::McpConfigArgs),
    /// Print a shell's completion script.
    Completions(completions::CompletionsArgs),
}

/// What a command acts on.
#[derive(Debug, Clone)]
pub(crate) enum ServerTarget {
    /// The home directory, through its server if one runs.
    Home,
    /// A server elsewhere.
    Remote(RemoteServer),
}

/// What every command is given: what it acts on and the output format.
pub struct CommandContext {
    /// The home directory of this machine.
    pub home: HomeDir,
    /// What the command acts on.
    pub(crate) target: ServerTarget,
    /// `--url`, as it was given.
    pub(crate) url: Option<String>,
    /// The format results are printed in.
    pub output: OutputFormat,
}

impl CommandContext {
    /// ` --home DIR` for a command line shown to the user; empty for the default home.
    pub fn home_flag(&self) -> String {
        home_flag(&self.home)
    }

    /// Refuses a command that works on this machine's home directory only, if a server elsewhere is chosen.
    pub(crate) fn require_home(&self, command: &str) -> Result<()> {
        match &self.target {
            ServerTarget::Home => Ok(()),
            ServerTarget::Remote(remote) => Err(Error::invalid(format!(
                "`oubliette {command}` works on the home directory of the machine it runs on, not through {}: run it there, \
                 or add `--context local` for the home directory here",
                remote.url()
            ))),
        }
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

/// Answers a shell that asks what it could complete, and ends the process; returns if none asks. Before anything else.
pub fn answer_shell() {
    value_candidates::answer_shell();
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
        let choice = (cli.url.as_deref(), cli.context.as_deref());
        // These choose a server, or always serve the home: a broken choice must not keep them from it.
        let target = match &cli.command {
            CliCommand::Login(_) | CliCommand::Context(_) | CliCommand::McpConfig(_) => ServerTarget::Home,
            CliCommand::Completions(_) => ServerTarget::Home,
            CliCommand::Up(_) | CliCommand::Serve(_) if choice == (None, None) => ServerTarget::Home,
            _ => choose_target(&home, choice)?,
        };
        let context = CommandContext {
            home,
            target,
            url: cli.url,
            output,
        };
        Box::pin(dispatch(cli.command, context)).await
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

/// What a command acts on: `--url`, `--context`, `OUBLIETTE_URL`, the context in use, the home, in this order.
fn choose_target(home: &HomeDir, choice: (Option<&str>, Option<&str>)) -> Result<ServerTarget> {
    let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.trim().is_empty());
    let from_env = variable("OUBLIETTE_URL");
    let url = match choice {
        (Some(url), _) => Some(url.to_owned()),
        (None, Some(_)) => None,
        (None, None) => from_env,
    };
    if let Some(url) = url {
        let url = contexts::check_server_url(&url)?;
        let token = match variable(login::TOKEN_VARIABLE) {
            Some(token) => token.trim().to_owned().into(),
            None => match ContextFile::load(home)?.by_url(&url) {
                Some(known) => known.token.clone(),
                None => {
                    return Err(Error::unauthenticated(format!(
                        "there is no token for {url}: run `oubliette login {url}`, or set OUBLIETTE_TOKEN"
                    )));
                }
            },
        };
        return Ok(ServerTarget::Remote(RemoteServer::new(url, token)?));
    }
    let file = ContextFile::load(home)?;
    let name = match choice.1 {
        Some(contexts::LOCAL) => None,
        Some(name) => Some(name),
        None => file.current.as_deref(),
    };
    match name {
        None => Ok(ServerTarget::Home),
        Some(name) => {
            let known = file.get(name)?;
            let remote = RemoteServer::new(known.url.clone(), known.token.clone())?;
            Ok(ServerTarget::Remote(remote))
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
    if wrong
        && let Some(line) = tool::with_separator(
            std::env::args_os()
                .skip(1)
                .map(|arg| arg.to_string_lossy().into_owned()),
        )
    {
        eprintln!("\nThe command that starts a tool server stands after `--`: {line}");
    }
    match wrong {
        true => ExitCode::from(2),
        false => ExitCode::SUCCESS,
    }
}

async fn dispatch(command: CliCommand, context: CommandContext) -> Result<CommandOutcome> {
    let done = match command {
        CliCommand::Status => status::run(context).await,
        CliCommand::Logs(args) => logs::run(args, context).await,
        CliCommand::Backup(args) => Box::pin(backup::backup(args, context)).await,
        CliCommand::Restore(args) => Box::pin(backup::restore(args, context)).await,
        CliCommand::Store(command) => Box::pin(store::run(command, context)).await,
        CliCommand::Library(command) => Box::pin(library::run(command, context)).await,
        CliCommand::Top(args) => top::run(args, context).await,
        CliCommand::Server(command) => server::run(command, context).await,
        CliCommand::Login(args) => login::login(args, context).await,
        CliCommand::Context(args) => login::run(args, &context),
        CliCommand::Up(args) => Box::pin(up::run(args, context)).await,
        CliCommand::Serve(args) => serve::run(args, context).await,
        CliCommand::Project(project) => project::run(project, context).await,
        CliCommand::Workspace(workspace) => workspace::run(workspace, context).await,
        CliCommand::Agent(agent) => agent::run(agent, context).await,
        CliCommand::Program(program) => program::run(program, context).await,
        CliCommand::Approvals(args) => approval::list(args, context).await,
        CliCommand::Approve(args) => approval::approve(args, context).await,
        CliCommand::Deny(args) => approval::deny(args, context).await,
        CliCommand::Token(token) => token::run(token, context).await,
        CliCommand::Audit(audit) => audit::run(audit, context).await,
        CliCommand::Usage(args) => usage::run(args, context).await,
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
