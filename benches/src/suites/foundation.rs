//! The server by itself: how soon it is ready, what it holds, what a call and a long list cost.

use anyhow::Result;
use serde_json::json;

use super::Effort;
use crate::{
    bare,
    home::{Home, Server},
    mcp::{Mcp, Revision},
    procs,
    report::{Report, Target},
    stats::{Times, side_by_side, timed},
};

const NAME: &str = "foundation";

pub(crate) async fn run(report: &mut Report, effort: Effort) -> Result<()> {
    let home = Home::new("").await?;
    home.talker("talker")?;
    let server = home.start().await?;
    server.rest().await?.project("one", json!({})).await?;
    server.stop().await?;

    start(report, effort, &home).await?;
    let server = home.start().await?;
    memory(report, &server).await?;
    calls(report, effort, &server).await?;
    server.stop().await?;
    Box::pin(lists(report, effort)).await
}

async fn start(report: &mut Report, effort: Effort, home: &Home) -> Result<()> {
    let mut times = Times::default();
    for _ in 0..effort.of(20) {
        let server = home.spawn().await?;
        times.push(server.ready().await?);
        server.stop().await?;
    }
    let note = format!("p95 {:.0} ms, {} starts", times.p95(), times.len());
    report.row(
        NAME,
        "start of the process to `/ready`, p50",
        times.p50(),
        "ms",
        Target::AtMost(150.0),
        note,
    );
    Ok(())
}

async fn memory(report: &mut Report, server: &Server) -> Result<()> {
    let memory = procs::settled(server.pid).await?;
    let note = format!(
        "resident, the program's own pages with it; proportional {:.1} MiB",
        memory.pss / 1024.0
    );
    report.row(
        NAME,
        "idle memory",
        memory.rss / 1024.0,
        "MiB",
        Target::AtMost(20.0),
        note,
    );
    Ok(())
}

async fn calls(report: &mut Report, effort: Effort, server: &Server) -> Result<()> {
    let bare = bare::http("as-echo-http").await?;
    for (revision, what) in [(Revision::Legacy, "stateful"), (Revision::Modern, "stateless")] {
        let mut ours = Mcp::open(server.address, "/mcp", &server.token, revision).await?;
        let mut echo = Mcp::open(bare.address, "/mcp", "", revision).await?;
        let (none, text) = (json!({}), json!({"text": "hello"}));
        let (ours, floor) = side_by_side(
            effort.of(40),
            100,
            async || ours.call("project_list", &none).await,
            async || echo.call("echo", &text).await,
        )
        .await?;
        let note = format!("p50 {:.3} ms against {:.3} ms", ours.p50(), floor.p50());
        let what = format!("`project_list` over `/mcp` ({what}) to a bare rmcp echo");
        report.row(
            NAME,
            what,
            ours.p50() / floor.p50(),
            "×",
            Target::AtMost(1.5),
            note,
        );
    }
    Ok(())
}

async fn lists(report: &mut Report, effort: Effort) -> Result<()> {
    const AT_ONCE: usize = 8;
    let (projects, agents) = (effort.of(10_000), effort.of(1000));
    let home = Home::new("").await?;
    for n in 0..agents {
        home.talker(&format!("agent-{n:04}"))?;
    }
    let server = home.start().await?;
    let mut makers = Vec::new();
    for maker in 0..AT_ONCE {
        let mut rest = server.rest().await?;
        makers.push(async move {
            for n in (maker..projects).step_by(AT_ONCE) {
                rest.call(
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
    report.row(
        NAME,
        format!("making {projects} projects"),
        projects as f64 / took.as_secs_f64(),
        "/s",
        Target::None,
        format!("{AT_ONCE} at once, each with its workspace"),
    );

    let mut rest = server.rest().await?;
    let mut pages = Times::default();
    let mut cursor = None;
    loop {
        let mut page = None;
        let arguments = match &cursor {
            None => json!({}),
            Some(cursor) => json!({ "cursor": cursor }),
        };
        let time = timed(1, async || {
            page = Some(rest.tool("project_list", arguments.clone()).await?);
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
    report.row(
        NAME,
        format!("a page of {projects} projects"),
        pages.percentile(100.0),
        "ms",
        Target::AtMost(20.0),
        note,
    );

    let times = timed(effort.of(50), async || rest.call("agent_list", "{}").await).await?;
    let note = format!("the slowest of {}; p50 {:.2} ms", times.len(), times.p50());
    report.row(
        NAME,
        format!("a page of {agents} agents"),
        times.percentile(100.0),
        "ms",
        Target::AtMost(20.0),
        note,
    );
    drop(rest);
    server.stop().await?;
    let server = home.spawn().await?;
    let took = server.ready().await?;
    let what = format!("start with {projects} projects and {agents} agents");
    report.row(NAME, what, crate::stats::ms(took), "ms", Target::None, "");
    server.stop().await
}
