//! `oubliette serve`: runs the server until SIGTERM or SIGINT.

use std::{net::SocketAddr, time::Duration};

use oubliette_protocol::{Error, ErrorCode, Result};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{CommandContext, client, output::OutputFormat, server_url};
use crate::{
    config::{self, ServerConfig},
    doors::mcp::fixtures,
    lifecycle::{self, RunningServer, ServeOptions},
    logging, reload,
    restart::{self, ProgramStart, RESTARTED_VARIABLE},
    service_manager::ServiceManager,
};

/// How long a server that starts anew waits before it tries its database again.
const START_RETRY: Duration = Duration::from_secs(1);

/// Arguments of `serve` and `up`.
#[derive(Debug, clap::Args)]
pub(crate) struct ListenArgs {
    /// Address and port to listen on (default: [server] listen, else 127.0.0.1:8080).
    #[arg(long, value_name = "ADDR", value_parser = parse_listen_arg)]
    pub listen: Option<SocketAddr>,
    /// Allow another address than loopback without TLS.
    #[arg(long)]
    pub insecure: bool,
}

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub(crate) struct ServeArgs {
    /// The options that `up` has as well.
    #[command(flatten)]
    pub args: ListenArgs,
    /// Serve the tools that the MCP conformance suite asks for.
    #[arg(long, hide = true)]
    pub test_fixtures: bool,
}

fn parse_listen_arg(text: &str) -> Result<SocketAddr, String> {
    config::parse_listen(text).map_err(|e| e.message)
}

/// Reads the configuration, applies the command line's options, and starts logging.
pub(crate) fn load_settings(args: &ListenArgs, context: &CommandContext) -> Result<ServeOptions> {
    context.require_home("serve")?;
    let mut config = ServerConfig::load(&context.home.config_path(), &|name| std::env::var(name).ok())?;
    if let Some(listen) = args.listen {
        config.listen = listen;
    }
    logging::start(&config.log);
    Ok(ServeOptions {
        home: context.home.clone(),
        config,
        insecure: args.insecure,
    })
}

/// Fails, with the running server's URL, if this home has a server already.
pub(crate) async fn ensure_not_running(context: &CommandContext) -> Result<()> {
    match client::is_running(&context.home).await {
        true => Err(Error::conflict(format!(
            "a server is running for {} already, at {}/: use that one, or stop it first",
            context.home.root().display(),
            server_url::lookup(&context.home).await?
        ))),
        false => Ok(()),
    }
}

/// Runs `oubliette serve`.
pub(crate) async fn run(ServeArgs { args, test_fixtures }: ServeArgs, context: CommandContext) -> Result<()> {
    if test_fixtures && std::env::var_os(fixtures::ENABLE_VARIABLE).is_none_or(|set| set != "1") {
        return Err(Error::invalid(format!(
            "--test-fixtures is for the MCP conformance suite and takes {}=1 beside it; no other server wants it",
            fixtures::ENABLE_VARIABLE
        )));
    }
    let program = ProgramStart::of_this_process();
    let mut stop = ShutdownSignals::listen()?;
    ensure_not_running(&context).await?;
    let mut settings = load_settings(&args, &context)?;
    settings.config.test_fixtures = test_fixtures;
    let Some(running) = start(settings, &mut stop).await? else {
        return Ok(());
    };
    server_url::publish(&running);
    let url = running.url();
    let shape =
        json!({ "url": format!("{url}/"), "mcp_url": format!("{url}/mcp"), "home": running.app.home.root() });
    match context.output {
        OutputFormat::Json => context.output.print_result(&shape, |_| String::new()),
        OutputFormat::Text => context
            .output
            .print_result(&shape, |_| format!("Oubliette is serving {url}/")),
    }
    match stop.serve_until_signal(running).await? {
        ServeEnd::Stopped => Ok(()),
        ServeEnd::Fenced => program.restart(stop.wait_for_end()).await,
    }
}

/// Starts the server. One that was started anew by itself waits for its database; none if it is told to stop meanwhile.
pub(crate) async fn start(
    settings: ServeOptions,
    stop: &mut ShutdownSignals,
) -> Result<Option<RunningServer>> {
    if std::env::var_os(RESTARTED_VARIABLE).is_none() {
        return lifecycle::start(settings).await.map(Some);
    }
    restart::reap_inherited_children()?;
    if settings.config.cluster.is_none() {
        return lifecycle::start(settings).await.map(Some);
    }
    let starting = async {
        loop {
            match lifecycle::start(settings.clone()).await {
                Err(error) if error.code == ErrorCode::Unavailable => {
                    tracing::warn!(error = %error.for_log(), "starting anew failed; trying again");
                    tokio::time::sleep(START_RETRY).await;
                }
                started => return started.map(Some),
            }
        }
    };
    // The database may be away for long.
    tokio::select! {
        biased;
        () = stop.wait_for_end() => Ok(None),
        started = starting => started,
    }
}

/// How a server that ran has ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ServeEnd {
    /// It was told to stop.
    Stopped,
    /// Other servers of its cluster have taken over what it ran: it has to start anew.
    Fenced,
}

/// Receives SIGTERM, SIGINT and SIGHUP. Installed before the server starts, because it may be told to stop as soon as it is
/// seen to be ready.
pub(crate) struct ShutdownSignals {
    terminate: Signal,
    interrupt: Signal,
    hangup: Signal,
}

impl ShutdownSignals {
    /// Installs the handlers.
    pub(crate) fn listen() -> Result<Self> {
        let hear = |kind| signal(kind).map_err(Error::internal);
        Ok(Self {
            terminate: hear(SignalKind::terminate())?,
            interrupt: hear(SignalKind::interrupt())?,
            hangup: hear(SignalKind::hangup())?,
        })
    }

    /// Waits for SIGTERM or SIGINT.
    pub(crate) async fn wait_for_end(&mut self) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
    }

    /// Waits for a signal to stop. SIGHUP has the server read its configuration again.
    async fn wait_for_stop(&mut self, running: &RunningServer) {
        loop {
            tokio::select! {
                _ = self.terminate.recv() => return,
                _ = self.interrupt.recv() => return,
                _ = self.hangup.recv() => {
                    reload::reload(&running.app).await;
                }
            }
        }
    }

    /// Lets the server run until a signal to stop comes, then stops it once requests in flight are finished. SIGHUP has it
    /// read its configuration again. An error if it had to stop because another server has taken over its database.
    pub(crate) async fn serve_until_signal(&mut self, running: RunningServer) -> Result<ServeEnd> {
        let manager = ServiceManager::from_env(&|name| std::env::var(name).ok());
        let outcome = tokio::select! {
            biased;
            () = wait_until_fenced(&running) => {
                // Nothing is finished or written: it is not this server's any more.
                running.app.sessions.abandon();
                server_url::remove(&running.app.home);
                return Ok(ServeEnd::Fenced);
            }
            () = self.wait_for_stop(&running) => Ok(ServeEnd::Stopped),
            () = tell_manager(manager.as_ref(), &running) => Ok(ServeEnd::Stopped),
            () = running.app.store.wait_until_superseded() => Err(Error::conflict(
                "another oubliette has taken over the database: this server has stopped; see which of them is to run",
            )),
        };
        if let Err(error) = &outcome {
            tracing::error!(error = %error.message, "the database belongs to another server");
        }
        if let Some(manager) = &manager {
            manager.stopping();
        }
        tracing::info!("stopping: finishing requests in flight");
        let home = running.app.home.clone();
        running.stop().await;
        server_url::remove(&home);
        outcome
    }
}

/// Waits until this server of a cluster has to start anew; for ever without a cluster.
async fn wait_until_fenced(running: &RunningServer) {
    match running.app.store.cluster() {
        Some(member) => member.wait_until_fenced().await,
        None => std::future::pending().await,
    }
}

/// Tells the service manager, if there is one, that the server is ready and then that it is alive. Never ends.
async fn tell_manager(manager: Option<&ServiceManager>, running: &RunningServer) {
    match manager {
        Some(manager) => {
            manager.ready(&running.url());
            manager.keep_watchdog_quiet(&running.app).await;
        }
        None => std::future::pending().await,
    }
}
