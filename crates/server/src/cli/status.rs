//! `oubliette status`: what the server is, what runs and what waits for a person.

use oubliette_protocol::Result;
use serde_json::{Value, json};

use super::{
    CommandContext, ServerTarget,
    client::ActionClient,
    output::{field_text, format_fields, format_listing},
    server_url,
};

/// How many sessions are shown.
const MAX_SHOWN: usize = 20;

/// Runs `oubliette status`.
pub(crate) async fn run(context: CommandContext) -> Result<()> {
    let client = ActionClient::connect_running(&context).await?;
    let url = match &context.target {
        ServerTarget::Remote(remote) => remote.url().to_owned(),
        ServerTarget::Home => server_url::lookup(&context.home).await?,
    };
    let info = client.call("server_info", json!({})).await?;
    let sessions = client.list("session_list", "sessions", json!({}), None).await?;
    let mut active: Vec<Value> = sessions["sessions"].as_array().cloned().unwrap_or_default();
    active.retain(|session| session["status"] != "ended" && session["status"] != "failed");
    let pending = client
        .list("approval_list", "approvals", json!({ "status": "pending" }), None)
        .await?;
    let pending = pending["approvals"].as_array().map_or(0, Vec::len);
    let agents = client.list("agent_list", "agents", json!({}), None).await?;
    let broken: Vec<Value> = agents["agents"]
        .as_array()
        .into_iter()
        .flatten()
        .filter(|agent| agent["error"].is_string())
        .map(|agent| json!({ "slug": agent["slug"], "error": agent["error"] }))
        .collect();
    let status = json!({
        "url": url,
        "version": info["version"],
        "driver": info["driver"],
        "isolation": info["isolation"],
        "active_sessions": active.len(),
        "pending_approvals": pending,
        "broken_agents": broken,
        "sessions": active,
    });
    context.output.print_result(&status, format_status);
    Ok(())
}

fn format_status(status: &Value) -> String {
    let fields = [
        "url",
        "version",
        "driver",
        "isolation",
        "active_sessions",
        "pending_approvals",
    ];
    let mut text = format_fields(status, &fields);
    for broken in status["broken_agents"].as_array().into_iter().flatten() {
        let (slug, error) = (field_text(broken, "slug"), field_text(broken, "error"));
        text.push_str(&format!(
            "\n✗ agent {slug}: {}",
            super::style::fold_to_line(&error, 200)
        ));
    }
    let sessions = status["sessions"].as_array().map_or(&[][..], Vec::as_slice);
    if sessions.is_empty() {
        return text;
    }
    let columns = [
        ("SESSION", "session_id"),
        ("STATUS", "status"),
        ("AGENT", "agent"),
        ("TURN", "turn"),
        ("UPDATED", "updated_at"),
        ("TITLE", "title"),
    ];
    let shown = &sessions[..sessions.len().min(MAX_SHOWN)];
    text.push_str(&format!("\n\n{}", format_listing(shown, &columns, "")));
    if sessions.len() > MAX_SHOWN {
        text.push_str(&format!(
            "\n… and {} more: oubliette session list",
            sessions.len() - MAX_SHOWN
        ));
    }
    text
}
