//! `oubliette up`: serve, and on the first run make everything that is needed to begin.

use oubliette_protocol::Result;
use serde_json::{Value, json};

use super::{Context, address, mcp_config::PLACEHOLDER, serve};
use crate::{app::App, doors::net, first_run, lifecycle};

/// Serves until it is told to stop.
pub async fn run(args: serve::Args, context: Context) -> Result<()> {
    let stop = serve::Stop::listen()?;
    serve::refuse_second(&context).await?;
    first_run::prepare(&context.home)?;
    let settings = serve::settings(&args, &context)?;
    let token = fill(&settings).await?;
    let running = lifecycle::start(settings).await?;
    address::announce(&running);
    let url = running.url();
    let config = client_config(&url, token.as_deref().unwrap_or(PLACEHOLDER));
    let kept = running.app.home.admin_token_path();
    let mut shape = json!({
        "url": format!("{url}/"),
        "mcp_url": format!("{url}/mcp"),
        "home": running.app.home.root(),
        "admin_token_file": kept,
        "mcp_config": config,
    });
    if let Some(token) = &token {
        shape["token"] = json!(token);
    }
    context.output.result(&shape, |_| {
        let shown = match &token {
            Some(token) => format!("{token}\n              (admin; shown this once, kept in {})", kept.display()),
            None => format!("the admin token is in {}", kept.display()),
        };
        let flag = context.home_flag();
        let pasted = serde_json::to_string_pretty(&config).unwrap_or_default();
        format!(
            "Oubliette is running.\n\n  Console     {url}/\n  MCP         {url}/mcp\n  Token       {shown}\n\n\
             For an MCP client (`oubliette mcp-config CLIENT` has it for yours):\n\n{pasted}\n\n\
             Try it in another terminal:  oubliette{flag} run --agent demo \"Show me around\"\n"
        )
    });
    stop.serve(running).await;
    Ok(())
}

/// Fills a new home before anybody can ask it for something. Whether the port can be had is seen first:
/// what is shown once must not be lost to that.
async fn fill(settings: &lifecycle::Serve) -> Result<Option<String>> {
    if settings.home.admin_token_path().exists() {
        return Ok(None);
    }
    drop(net::bind(settings.config.listen).await?);
    let app = App::open(settings.home.clone(), settings.config.clone()).await?;
    let token = first_run::fill(&app).await;
    app.close().await;
    token
}

/// The config most MCP clients read.
pub fn client_config(url: &str, token: &str) -> Value {
    json!({ "mcpServers": { "oubliette": {
        "type": "http",
        "url": format!("{url}/mcp"),
        "headers": { "Authorization": format!("Bearer {token}") },
    } } })
}
