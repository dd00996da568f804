//! The server by itself: time until ready, idle memory, the cost of a call and of long lists.

use anyhow::Result;
use serde_json::json;

use super::BenchEffort;
use crate::{
    baseline,
    home::{BenchHome, BenchServer},
    mcp::{BenchMcpRevision, McpHttpClient},
    procs,
    report::{BenchReport, BenchTarget},
    stats::{TimingSamples, time_each, time_interleaved},
};

const NAME: &str = "foundation";

pub(crate) async fn run(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let home = BenchHome::new("").await?;
    home.write_talker_agent("talker")?;
    let server = home.start().await?;
    server
        .connect_rest()
        .await?
        .create_project("one", json!({}))
        .await?;
    server.stop().await?;

    measure_start(report, effort, &home).await?;
    let server = home.start().await?;
    measure_memory(report, &server).await?;
    measure_calls(report, effort, &server).await?;
    server.stop().await?;
    Box::pin(measure_lists(report, effort)).await
}

async fn measure_start(report: &mut BenchReport, effort: BenchEffort, home: &BenchHome) -> Result<()> {
    let mut times = TimingSamples::default();
    for _ in 0..effort.scale(20) {
        let server = home.spawn().await?;
        times.push(server.wait_ready().await?);
        server.stop().await?;
    }
    let note = format!("p95 {:.0} ms, {} starts", times.p95(), times.len());
    report.add_row(
        NAME,
        "start of the process to `/ready`, p50",
        times.p50(),
        "ms",
        BenchTarget::AtMost(150.0),
        note,
    );
    Ok(())
}

async fn measure_memory(report: &mut BenchReport, server: &BenchServer) -> Result<()> {
    let memory = procs::memory_once_stable(server.pid).await?;
    let note = format!(
        "resident, the program's own pages with it; proportional {:.1} MiB",
        memory.pss / 1024.0
    );
    report.add_row(
        NAME,
        "idle memory",
        memory.rss / 1024.0,
        "MiB",
        BenchTarget::AtMost(20.0),
        note,
    );
    Ok(())
}

async fn measure_calls(report: &mut BenchReport, effort: BenchEffort, server: &BenchServer) -> Result<()> {
    let bare = baseline::start_http_server("as-echo-http").await?;
    for (revision, what) in [
        (BenchMcpRevision::Legacy, "stateful"),
        (BenchMcpRevision::Modern, "stateless"),
    ] {
        let mut ours = McpHttpClient::open(server.address, "/mcp", &server.token, revision).await?;
        let mut echo = McpHttpClient::open(bare.address, "/mcp", "", revision).await?;
        let (none, text) = (json!({}), json!({"text": "hello"}));
        let (ours, floor) = time_interleaved(
            effort.scale(40),
            100,
            async || ours.call("project_list", &none).await,
            async || echo.call("echo", &text).await,
        )
        .await?;
        let note = format!("p50 {:.3} ms against {:.3} ms", ours.p50(), floor.p50());
        let what = format!("`project_list` over `/mcp` ({what}) to a bare rmcp echo");
        report.add_row(
            NAME,
            what,
            ours.p50() / floor.p50(),
            "×",
            BenchTarget::AtMost(1.5),
            note,
        );
    }
    Ok(())
}

async fn measure_lists(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    const AT_ONCE: usize = 8;
    let (projects, agents) = (effort.scale(10_000), effort.scale(1000));
    let home = BenchHome::new("").await?;
    for n in 0..agents {
        home.write_talker_agent(&format!("agent-{n:04}"))?;
    }
    let server = home.start().await?;
    let mut makers = Vec::new();
    for maker in 0..AT_ONCE {
        let mut rest = server.connect_rest().await?;
        makers.push(async move {
            for n in (maker..projects).step_by(AT_ONCE) {
                rest.call_unparsed(
                    "project_create",
                    &json!({"name": format!("project {n}")}).to_string(),
                )
                .await?;
            }
            anyhow::Ok(())
        });
    }
    let begun = crate::clock::now();
    futures::future::try_join_all(makers).await?;
    let took = crate::clock::since(begun);
    report.add_row(
        NAME,
        format!("making {projects} projects"),
        projects as f64 / took.as_secs_f64(),
        "/s",
        BenchTarget::None,
        format!("{AT_ONCE} at once, each with its workspace"),
    );

    let mut rest = server.connect_rest().await?;
    let mut pages = TimingSamples::default();
    let mut cursor = None;
    loop {
        let mut page = None;
        let arguments = match &cursor {
            None => json!({}),
            Some(cursor) => json!({ "cursor": cursor }),
        };
        let time = time_each(1, async || {
            page = Some(rest.call_tool("project_list", arguments.clone()).await?);
            Ok(())
        });
        pages.extend(time.await?);
        cursor = page.and_then(|page| page["next_cursor"].as_str().map(str::to_owned));
        if cursor.is_none() {
            break;
        }
    }
    let note = format!(
        "the slowest of {} pages of 100; p50 {:.2} ms",
        pages.len(),
        pages.p50()
    );
    report.add_row(
        NAME,
        format!("a page of {projects} projects"),
        pages.percentile(100.0),
        "ms",
        BenchTarget::AtMost(20.0),
        note,
    );

    let times = time_each(effort.scale(50), async || {
        rest.call_unparsed("agent_list", "{}").await
    })
    .await?;
    let note = format!("the slowest of {}; p50 {:.2} ms", times.len(), times.p50());
    report.add_row(
        NAME,
        format!("a page of {agents} agents"),
        times.percentile(100.0),
        "ms",
        BenchTarget::AtMost(20.0),
        note,
    );
    drop(rest);
    server.stop().await?;
    let server = home.spawn().await?;
    let took = server.wait_ready().await?;
    let what = format!("start with {projects} projects and {agents} agents");
    report.add_row(NAME, what, crate::stats::ms(took), "ms", BenchTarget::None, "");
    server.stop().await
}
