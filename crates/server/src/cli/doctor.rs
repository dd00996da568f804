//! `oubliette doctor`.

use oubliette_protocol::Result;
use serde_json::Value;

use super::{
    Context, Verdict, address,
    client::{self, Client},
    output::field,
    style::{Paint, clean},
};
use crate::doctor;

/// Looks, through the running server if there is one: it is its view that counts.
pub async fn run(context: Context) -> Result<Verdict> {
    let report = match client::is_running(&context.home).await {
        true => {
            let mut report = Client::running(&context.home)
                .await?
                .call("doctor", serde_json::json!({}))
                .await?;
            let url = address::of(&context.home).await?;
            if let Some(checks) = report["checks"].as_array_mut() {
                checks.insert(0, doctor::listening(&url));
            }
            report
        }
        false => doctor::examine_stopped(&context.home).await,
    };
    context.output.result(&report, shown);
    Ok(match report["ok"] == true {
        true => Verdict::Done,
        false => Verdict::Failed,
    })
}

fn shown(report: &Value) -> String {
    let paint = Paint::stdout();
    let checks = report["checks"].as_array().map_or(&[][..], Vec::as_slice);
    let widest = checks
        .iter()
        .map(|c| field(c, "name").chars().count())
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
                field(check, "name"),
                clean(&field(check, "detail"))
            )
            .trim_end()
            .to_owned(),
        );
        if let Some(remedy) = check["remedy"].as_str() {
            lines.push(format!(
                "  {:widest$}  {}",
                "",
                paint.bold(&format!("→ {}", clean(remedy)))
            ));
        }
    }
    lines.push(String::new());
    lines.push(match report["ok"] == true {
        true => paint.green("Everything that is needed works."),
        false => paint.red("Something that is needed does not work: see ✗ above."),
    });
    lines.join("\n")
}
