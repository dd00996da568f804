//! `oubliette usage`: what sessions used.

use oubliette_protocol::Result;
use serde_json::{Value, json};

use super::{
    CommandContext,
    client::ActionClient,
    output::format_listing,
    resolve::{self, set_if_some},
};

/// Arguments of `oubliette usage`.
#[derive(Debug, clap::Args)]
pub(crate) struct UsageArgs {
    /// What there is a row for: project, session, agent, model, token or day.
    #[arg(long, value_name = "GROUP", default_value = "day")]
    by: String,
    /// Only what this project used, by id or name.
    #[arg(long, value_name = "PROJECT")]
    project: Option<String>,
    /// Only what this session used.
    #[arg(long, value_name = "ID")]
    session: Option<String>,
    /// Only what was used at this time or later (RFC 3339).
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only what was used before this time (RFC 3339).
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
}

/// Runs `oubliette usage`.
pub(crate) async fn run(args: UsageArgs, context: CommandContext) -> Result<()> {
    let client = ActionClient::connect(&context).await?;
    let done = print_report(args, &context, &client).await;
    client.close().await;
    done
}

async fn print_report(args: UsageArgs, context: &CommandContext, client: &ActionClient) -> Result<()> {
    let heading = args.by.to_uppercase();
    let mut arguments = json!({ "group_by": args.by });
    set_if_some(
        &mut arguments,
        "project_id",
        resolve::optional_project_id(client, args.project.as_deref()).await?,
    );
    set_if_some(&mut arguments, "session_id", args.session);
    set_if_some(&mut arguments, "since", args.since);
    set_if_some(&mut arguments, "until", args.until);
    let report = client.call("usage_report", arguments).await?;
    context
        .output
        .print_result(&report, |report| format_report(report, &heading));
    Ok(())
}

/// Formats the answer of `usage_report`; `heading` names what its rows are of.
pub(crate) fn format_report(report: &Value, heading: &str) -> String {
    let columns = [
        (heading, "key"),
        ("REQUESTS", "requests"),
        ("INPUT", "input_tokens"),
        ("CACHED", "cached_tokens"),
        ("OUTPUT", "output_tokens"),
        ("USD", "cost_usd"),
        ("CALLS", "tool_calls"),
        ("TURNS", "turns"),
    ];
    let mut rows = report["rows"].as_array().cloned().unwrap_or_default();
    if !rows.is_empty() {
        let mut total = report["total"].clone();
        total["key"] = json!("total");
        rows.push(total);
    }
    rows.iter_mut().for_each(show_cost);
    rows.iter_mut().for_each(mark_estimate);
    format_listing(&rows, &columns, "Nothing was used yet.")
}

/// Marks counts with `≈` if some of them are estimated.
fn mark_estimate(row: &mut Value) {
    if row["estimated"] == json!(true) {
        for field in ["input_tokens", "output_tokens", "cost_usd"] {
            let shown = match &row[field] {
                Value::String(text) => text.clone(),
                Value::Null => continue,
                number => number.to_string(),
            };
            row[field] = json!(format!("≈{shown}"));
        }
    }
}

fn show_cost(row: &mut Value) {
    if let Some(usd) = row["cost_usd"].as_f64() {
        row["cost_usd"] = json!(format!("{usd:.4}"));
    }
}
