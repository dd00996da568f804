//! `oubliette serve`.

use std::net::SocketAddr;

use oubliette_protocol::{Error, Result};
use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};

use super::{Context, address, client, output::Output};
use crate::{
    config::{self, Config},
    doors::mcp::fixtures,
    lifecycle::{self, Running, Serve},
    logging,
};

/// Arguments of `serve` and `up`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Address and port to listen on (default: [server] listen, else 127.0.0.1:8080).
    #[arg(long, value_name = "ADDR", value_parser = listen)]
    pub listen: Option<SocketAddr>,
    /// Allow another address than loopback without TLS.
    #[arg(long)]
    pub insecure: bool,
}

/// Arguments of `serve`.
#[derive(Debug, clap::Args)]
pub struct ServeArgs {
    /// What `up` takes too.
    #[command(flatten)]
    pub args: Args,
    /// Serve the tools that the MCP conformance suite asks for.
    #[arg(long, hide = true)]
    pub test_fixtures: bool,
}

fn listen(text: &str) -> Result<SocketAddr, String> {
    config::parse_listen(text).map_err(|e| e.message)
}

/// Reads the configuration, with what the command line says on top.
pub fn settings(args: &Args, context: &Context) -> Result<Serve> {
    let mut config = Config::load(&context.home.config_path(), &|name| std::env::var(name).ok())?;
    if let Some(listen) = args.listen {
        config.listen = listen;
    }
    logging::start(&config.log);
    Ok(Serve {
        home: context.home.clone(),
        config,
        insecure: args.insecure,
    })
}

/// A home has one server: a second one is told where the first is.
pub async fn refuse_second(context: &Context) -> Result<()> {
    match client::is_running(&context.home).await {
        true => Err(Error::conflict(format!(
            "a server is running for {} already, at {}/: use that one, or stop it first",
            context.home.root().display(),
            address::of(&context.home).await?
        ))),
        false => Ok(()),
    }
}

/// Serves until it is told to stop.
pub async fn run(ServeArgs { args, test_fixtures }: ServeArgs, context: Context) -> Result<()> {
    if test_fixtures && std::env::var_os(fixtures::VARIABLE).is_none_or(|set| set != "1") {
        return Err(Error::invalid(format!(
            "--test-fixtures is for the MCP conformance suite and takes {}=1 beside it; no other server wants it",
            fixtures::VARIABLE
        )));
    }
    let stop = Stop::listen()?;
    refuse_second(&context).await?;
    let mut settings = settings(&args, &context)?;
    settings.config.test_fixtures = test_fixtures;
    let running = lifecycle::start(settings).await?;
    address::announce(&running);
    let url = running.url();
    let shape =
        json!({ "url": format!("{url}/"), "mcp_url": format!("{url}/mcp"), "home": running.app.home.root() });
    match context.output {
        Output::Json => context.output.result(&shape, |_| String::new()),
        Output::Text => context
            .output
            .result(&shape, |_| format!("Oubliette is serving {url}/")),
    }
    stop.serve(running).await;
    Ok(())
}

/// SIGTERM and SIGINT, heard from before the server is up: whoever sees it ready may already stop it.
pub struct Stop {
    terminate: Signal,
    interrupt: Signal,
}

impl Stop {
    /// From now on they are ours.
    pub fn listen() -> Result<Self> {
        let hear = |kind| signal(kind).map_err(Error::internal);
        Ok(Self {
            terminate: hear(SignalKind::terminate())?,
            interrupt: hear(SignalKind::interrupt())?,
        })
    }

    /// Serves until one comes, then finishes what is in flight.
    pub async fn serve(mut self, running: Running) {
        tokio::select! {
            _ = self.terminate.recv() => {}
            _ = self.interrupt.recv() => {}
        }
        tracing::info!("stopping: finishing what is in flight");
        let home = running.app.home.clone();
        running.stop().await;
        address::withdraw(&home);
    }
}
