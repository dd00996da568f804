//! `oubliette up`: serve, and on the first run make everything that is needed to begin.

use oubliette_protocol::Result;
use serde_json::{Value, json};

use super::{Context, address, mcp_config::PLACEHOLDER, serve};
use crate::{first_run, lifecycle};

/// Serves until it is told to stop.
pub async fn run(args: serve::Args, context: Context) -> Result<()> {
    first_run::prepare(&context.home)?;
    let running = lifecycle::start(serve::settings(&args, &context)?).await?;
    let token = first_run::fill(&running.app).await?;
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
        let pasted = serde_json::to_string_pretty(&config).unwrap_or_default();
        format!(
            "Oubliette is running.\n\n  Console     {url}/\n  MCP         {url}/mcp\n  Token       {shown}\n\n\
             For an MCP client:\n\n{pasted}\n"
        )
    });
    address::announce(&running);
    let done = running.until_signalled().await;
    address::withdraw(&context.home);
    done
}

/// The config most MCP clients read.
pub fn client_config(url: &str, token: &str) -> Value {
    json!({ "mcpServers": { "oubliette": {
        "type": "http",
        "url": format!("{url}/mcp"),
        "headers": { "Authorization": format!("Bearer {token}") },
    } } })
}
