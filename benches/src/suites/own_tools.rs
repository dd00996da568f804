//! The cost of calling Oubliette's own tools from inside a sandbox.

use anyhow::Result;
use serde_json::json;

use super::BenchEffort;
use crate::{
    home::{BenchHome, client_command, text_field},
    lines::JsonRpcLines,
    mcp::{BenchMcpRevision, McpHttpClient},
    report::{BenchReport, BenchTarget},
    stats::time_interleaved,
};

const NAME: &str = "oubliette's own tools";

pub(crate) async fn run(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let home = BenchHome::new("").await?;
    home.write_talker_agent("talker")?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let session = rest.start_session(&project, "talker", None).await?;
    let socket = rest.relay_socket(&session).await?;
    let made = rest
        .call_tool(
            "token_create",
            json!({"name": "key", "scope": "read", "project_id": project}),
        )
        .await?;
    // The same token for both, so that both list the same projects.
    let key = text_field(&made, "token")?;
    let mut agent = JsonRpcLines::spawn_mcp(&mut client_command(&socket, Some(&key))?).await?;
    let inside = json!({"name": "oubliette_project_list", "arguments": {}});
    for (revision, what) in [
        (BenchMcpRevision::Legacy, "stateful"),
        (BenchMcpRevision::Modern, "stateless"),
    ] {
        let mut outside = McpHttpClient::open(server.address, "/mcp", &key, revision).await?;
        let none = json!({});
        let (ours, floor) = time_interleaved(
            effort.scale(40),
            100,
            async || agent.call("tools/call", &inside).await,
            async || outside.call("project_list", &none).await,
        )
        .await?;
        let note = format!("p50 {:.3} ms against {:.3} ms", ours.p50(), floor.p50());
        let what = format!(
            "`oubliette_project_list` through `oubliette-client` to `project_list` over `/mcp` ({what})"
        );
        report.add_row(
            NAME,
            what,
            ours.p50() / floor.p50(),
            "×",
            BenchTarget::AtMost(1.5),
            note,
        );
    }
    drop(rest);
    server.stop().await
}
