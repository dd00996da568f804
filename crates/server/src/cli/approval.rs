//! `oubliette approvals`, `approve` and `deny`: calls that wait for a person to allow them.

use std::time::Duration;

use oubliette_protocol::{ErrorCode, Result};
use serde_json::{Value, json};

use super::{
    CommandContext,
    approval_watch::ApprovalWatch,
    client::ActionClient,
    output::{OutputFormat, field_text, format_listing, print_line},
    resolve::{self, set_if_some},
    style::fold_to_line,
    turn_display::format_arguments,
};
use crate::hidden_chars::write_out_deceptive_chars;

/// How often `--watch` looks for changes.
const WATCH_INTERVAL: Duration = Duration::from_secs(1);
/// How often a server that is away is asked again.
const AWAY_INTERVAL: Duration = Duration::from_secs(1);

/// Arguments of `oubliette approvals`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Decide with: oubliette approve ID, or oubliette deny ID --reason WHY\n\n\
    Examples:\n  oubliette approvals\n  oubliette approvals --watch\n  oubliette approvals --status denied --project demo"
)]
pub(crate) struct ApprovalsArgs {
    /// Keep printing new and decided approvals until Ctrl-C.
    #[arg(long)]
    watch: bool,
    /// Only those with this status: pending, allowed, denied, expired, cancelled, or all.
    #[arg(long, value_name = "STATUS", default_value = "pending")]
    status: String,
    /// Only those of this session, or of the `last` one.
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Only those of this project, by id or name.
    #[arg(long, short, value_name = "PROJECT")]
    project: Option<String>,
    /// List at most this many, 1 to 1000.
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u32,
    /// Continue after a page: its `next_cursor`.
    #[arg(long, value_name = "CURSOR", conflicts_with = "watch")]
    cursor: Option<String>,
}

/// Arguments of `oubliette approve`.
#[derive(Debug, clap::Args)]
pub(crate) struct ApproveArgs {
    /// The approval (`appr_…`).
    id: String,
    /// Why it is allowed, for the record: at most 2000 characters.
    #[arg(long, value_name = "R")]
    reason: Option<String>,
    /// Let later calls of the session pass that meet the same rule.
    #[arg(long)]
    remember: bool,
}

/// Arguments of `oubliette deny`.
#[derive(Debug, clap::Args)]
pub(crate) struct DenyArgs {
    /// The approval (`appr_…`).
    id: String,
    /// Why it is denied, which the agent is told: at most 2000 characters.
    #[arg(long, value_name = "R")]
    reason: Option<String>,
}

/// Runs `oubliette approvals`.
pub(crate) async fn list(args: ApprovalsArgs, context: CommandContext) -> Result<()> {
    let client = ActionClient::connect(&context).await?;
    let listed = print_list(&args, &context, &client).await;
    client.close().await;
    listed
}

async fn print_list(args: &ApprovalsArgs, context: &CommandContext, client: &ActionClient) -> Result<()> {
    let mut arguments = json!({ "limit": args.limit });
    if let Some(session) = &args.session {
        arguments["session_id"] = json!(resolve::session_id(client, session).await?);
    }
    let project = resolve::optional_project_id(client, args.project.as_deref()).await?;
    set_if_some(&mut arguments, "project_id", project);
    set_if_some(&mut arguments, "cursor", args.cursor.as_ref());
    if args.watch {
        return watch(arguments, context.output, client).await;
    }
    if args.status != "all" {
        arguments["status"] = json!(args.status);
    }
    let page = client.call("approval_list", arguments).await?;
    context.output.print_result(&page, format_approvals);
    Ok(())
}

/// Formats the answer of `approval_list`.
pub(crate) fn format_approvals(page: &Value) -> String {
    let columns = [
        ("APPROVAL", "approval_id"),
        ("STATUS", "status"),
        ("REQUESTED", "requested_at"),
        ("AGENT", "agent"),
        ("TOOL", "tool"),
        ("ARGUMENTS", "arguments"),
    ];
    let mut rows = page["approvals"].as_array().cloned().unwrap_or_default();
    for row in &mut rows {
        for name in ["tool", "arguments"] {
            row[name] = json!(write_out_deceptive_chars(&field_text(row, name)));
        }
    }
    format_listing(&rows, &columns, "No call waits for approval.")
}

/// Prints each approval when it is seen first and when its status changes.
async fn watch(arguments: Value, output: OutputFormat, client: &ActionClient) -> Result<()> {
    let list = async |asked: Value| client.call("approval_list", asked).await;
    let (mut watched, mut first) = (ApprovalWatch::new(arguments), true);
    let mut is_away = false;
    loop {
        let changed = match watched.poll(list).await {
            Ok(changed) => changed,
            // A server that restarts comes back.
            Err(error) if !first && error.code == ErrorCode::Unavailable => {
                if !is_away {
                    eprintln!("the server is away: {}; waiting for it", error.message);
                }
                is_away = true;
                tokio::time::sleep(AWAY_INTERVAL).await;
                continue;
            }
            Err(error) => return Err(error),
        };
        if std::mem::take(&mut is_away) {
            eprintln!("the server is back");
        }
        for row in &changed {
            match output {
                OutputFormat::Json => print_line(&row.to_string()),
                OutputFormat::Text => print_line(&format_change(row)),
            }
        }
        first = false;
        tokio::time::sleep(WATCH_INTERVAL).await;
    }
}

/// An approval as a line: its state, what it is for and why it ended.
fn format_change(row: &Value) -> String {
    let why = match row["reason"].as_str() {
        Some(reason) => format!(" · {reason}"),
        None => String::new(),
    };
    let line = format!(
        "{} {} {}: {} {}{why}",
        field_text(row, "approval_id"),
        field_text(row, "status"),
        field_text(row, "agent"),
        write_out_deceptive_chars(&field_text(row, "tool")),
        write_out_deceptive_chars(&format_arguments(&row["arguments"])),
    );
    fold_to_line(&line, 500)
}

/// Runs `oubliette approve`.
pub(crate) async fn approve(args: ApproveArgs, context: CommandContext) -> Result<()> {
    let mut arguments = json!({ "approval_id": args.id, "decision": "allow" });
    set_if_some(&mut arguments, "reason", args.reason);
    set_if_some(&mut arguments, "remember", args.remember.then_some("session"));
    decide(arguments, &context).await
}

/// Runs `oubliette deny`.
pub(crate) async fn deny(args: DenyArgs, context: CommandContext) -> Result<()> {
    let mut arguments = json!({ "approval_id": args.id, "decision": "deny" });
    set_if_some(&mut arguments, "reason", args.reason);
    decide(arguments, &context).await
}

async fn decide(arguments: Value, context: &CommandContext) -> Result<()> {
    let client = ActionClient::connect(context).await?;
    let decided = client.call("approval_decide", arguments).await;
    client.close().await;
    context.output.print_result(&decided?, format_decision);
    Ok(())
}

/// Formats the answer of `approval_decide`.
pub(crate) fn format_decision(row: &Value) -> String {
    let line = format!(
        "{} {}: {} {}",
        field_text(row, "approval_id"),
        field_text(row, "status"),
        write_out_deceptive_chars(&field_text(row, "tool")),
        write_out_deceptive_chars(&format_arguments(&row["arguments"]))
    );
    fold_to_line(&line, 500)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_could_not_be_seen_is_written_out_wherever_an_approval_is_shown() {
        let row = json!({
            "approval_id": "appr_1", "status": "pending", "agent": "a", "tool": "t\u{202e}x",
            "arguments": {"argv": ["rm", "a\u{200b}b\u{a0}c\u{202e}"]},
        });
        let page = json!({ "approvals": [row] });
        for shown in [
            format_approvals(&page),
            format_change(&row),
            format_decision(&row),
        ] {
            assert!(
                shown.contains(r"t\u202ex") && shown.contains(r"a\u200bb\u00a0c\u202e"),
                "{shown}"
            );
        }
    }
}
