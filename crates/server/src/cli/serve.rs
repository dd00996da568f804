//! `oubliette serve`.

use std::net::SocketAddr;

use oubliette_protocol::Result;
use serde_json::json;

use super::{Context, address, output::Output};
use crate::{config::{self, Config}, lifecycle::{self, Serve}, logging};

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
    Ok(Serve { home: context.home.clone(), config, insecure: args.insecure })
}

/// Serves until it is told to stop.
pub async fn run(args: Args, context: Context) -> Result<()> {
    let running = lifecycle::start(settings(&args, &context)?).await?;
    let url = running.url();
    let shape = json!({ "url": format!("{url}/"), "mcp_url": format!("{url}/mcp"), "home": running.app.home.root() });
    match context.output {
        Output::Json => context.output.result(&shape, |_| String::new()),
        Output::Text => context.output.result(&shape, |_| format!("Oubliette is serving {url}/")),
    }
    address::announce(&running);
    let done = running.until_signalled().await;
    address::withdraw(&context.home);
    done
}
