//! `oubliette serve`: runs the server until SIGTERM or SIGINT.

use std::net::SocketAddr;

use oubliette_protocol::{Error, Result};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{CommandContext, client, output::OutputFormat, server_url};
use crate::{
    config::{self, ServerConfig},
    doors::mcp::fixtures,
    lifecycle::{self, RunningServer, ServeOptions},
    logging,
};

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
    let stop = ShutdownSignals::listen()?;
    ensure_not_running(&context).await?;
    let mut settings = load_settings(&args, &context)?;
    settings.config.test_fixtures = test_fixtures;
    let running = lifecycle::start(settings).await?;
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
    stop.serve_until_signal(running).await;
    Ok(())
}

/// Receives SIGTERM and SIGINT. Installed before the server starts, because it may be told to stop as soon as it is
/// seen to be ready.
pub(crate) struct ShutdownSignals {
    terminate: Signal,
    interrupt: Signal,
}

impl ShutdownSignals {
    /// Installs the handlers.
    pub(crate) fn listen() -> Result<Self> {
        let hear = |kind| signal(kind).map_err(Error::internal);
        Ok(Self {
            terminate: hear(SignalKind::terminate())?,
            interrupt: hear(SignalKind::interrupt())?,
        })
    }

    /// Lets the server run until a signal comes, then stops it once requests in flight are finished.
    pub(crate) async fn serve_until_signal(mut self, running: RunningServer) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
        tracing::info!("stopping: finishing requests in flight");
        let home = running.app.home.clone();
        running.stop().await;
        server_url::remove(&home);
    }
}
