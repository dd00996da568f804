//! Oubliette's own tools, asked for from inside a sandbox.

use anyhow::Result;
use serde_json::json;

use super::Effort;
use crate::{
    home::{Home, client, text},
    lines::Lines,
    mcp::{Mcp, Revision},
    report::{Report, Target},
    stats::side_by_side,
};

const NAME: &str = "oubliette's own tools";

pub(crate) async fn run(report: &mut Report, effort: Effort) -> Result<()> {
    let home = Home::new("").await?;
    home.talker("talker")?;
    let server = home.start().await?;
    let mut rest = server.rest().await?;
    let project = rest.project("one", json!({})).await?;
    let session = rest.session(&project, "talker", None).await?;
    let socket = rest.socket(&session).await?;
    let made = rest
        .tool(
            "token_create",
            json!({"name": "key", "scope": "read", "project_id": project}),
        )
        .await?;
    // The same token both ways, so that both see the same.
    let key = text(&made, "token")?;
    let mut agent = Lines::mcp(&mut client(&socket, Some(&key))?).await?;
    let inside = json!({"name": "oubliette_project_list", "arguments": {}});
    for (revision, what) in [(Revision::Legacy, "stateful"), (Revision::Modern, "stateless")] {
        let mut outside = Mcp::open(server.address, "/mcp", &key, revision).await?;
        let none = json!({});
        let (ours, floor) = side_by_side(
            effort.of(40),
            100,
            async || agent.call("tools/call", &inside).await,
            async || outside.call("project_list", &none).await,
        )
        .await?;
        let note = format!("p50 {:.3} ms against {:.3} ms", ours.p50(), floor.p50());
        let what = format!(
            "`oubliette_project_list` through `oubliette-client` to `project_list` over `/mcp` ({what})"
        );
        report.row(
            NAME,
            what,
            ours.p50() / floor.p50(),
            "×",
            Target::AtMost(1.5),
            note,
        );
    }
    drop(rest);
    server.stop().await
}
