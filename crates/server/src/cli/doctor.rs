//! `oubliette doctor`: runs the checks of [`crate::doctor`] and prints them.

use oubliette_protocol::Result;
use serde_json::Value;

use super::{
    CommandContext, CommandOutcome, ServerTarget,
    client::{self, ActionClient},
    output::field_text,
    server_url,
    style::{AnsiStyle, strip_control_chars},
};
use crate::doctor;

/// Runs the checks: in the server if one runs, because its environment and rights are what matters.
pub(crate) async fn run(context: CommandContext) -> Result<CommandOutcome> {
    let report = match &context.target {
        ServerTarget::Remote(remote) => {
            let client = ActionClient::connect_running(&context).await?;
            let mut report = client.call("doctor", serde_json::json!({})).await?;
            if let Some(checks) = report["checks"].as_array_mut() {
                checks.insert(0, doctor::listening_check(remote.url()));
            }
            report
        }
        ServerTarget::Home if client::is_running(&context.home).await => {
            let mut report = ActionClient::connect_running(&context)
                .await?
                .call("doctor", serde_json::json!({}))
                .await?;
            let url = server_url::lookup(&context.home).await?;
            if let Some(checks) = report["checks"].as_array_mut() {
                checks.insert(0, doctor::listening_check(&url));
            }
            report
        }
        ServerTarget::Home => doctor::examine_stopped(&context.home).await,
    };
    context.output.print_result(&report, format_report);
    Ok(match report["ok"] == true {
        true => CommandOutcome::Done,
        false => CommandOutcome::Failed,
    })
}

fn format_report(report: &Value) -> String {
    let paint = AnsiStyle::stdout();
    let checks = report["checks"].as_array().map_or(&[][..], Vec::as_slice);
    let widest = checks
        .iter()
        .map(|c| field_text(c, "name").chars().count())
        .max()
        .unwrap_or(0);
    let mut lines = Vec::new();
    for check in checks {
        let mark = match (check["ok"] == true, check["essential"] == true) {
            (true, _) => paint.green("✓"),
            (false, true) => paint.red("✗"),
            (false, false) => paint.yellow("–"),
        };
        lines.push(
            format!(
                "{mark} {:widest$}  {}",
                field_text(check, "name"),
                strip_control_chars(&field_text(check, "detail"))
            )
            .trim_end()
            .to_owned(),
        );
        if let Some(remedy) = check["remedy"].as_str() {
            lines.push(format!(
                "  {:widest$}  {}",
                "",
                paint.bold(&format!("→ {}", strip_control_chars(remedy)))
            ));
        }
    }
    lines.push(String::new());
    let missing = report["missing"].as_array().map_or(&[][..], Vec::as_slice);
    lines.push(match (report["ok"] == true, missing.is_empty()) {
        (true, true) => paint.green("Everything that is needed works."),
        (true, false) => {
            let missing = missing.iter().filter_map(Value::as_str).map(strip_control_chars);
            let list: String = missing.map(|one| format!("\n  - {one}")).collect();
            paint.yellow(&format!("The server works. Missing for real work:{list}"))
        }
        (false, _) => paint.red("Something that is needed does not work: see ✗ above."),
    });
    lines.join("\n")
}
