//! Tool servers behind the gate: calls, contexts, switches, names.

use std::{
    collections::HashSet,
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use oubliette_protocol::{CatalogId, agent::AgentTools};
use oubliette_tools::{
    allow::Rules,
    registry::{Found, Offer, Registry, ToolInfo},
};
use rmcp::{RoleClient, service::Peer};
use serde_json::{Value, json};

use super::Effort;
use crate::{
    bare, clock,
    home::{Home, Rest, client},
    report::{Report, Target},
    stats::{Times, side_by_side},
};

const NAME: &str = "orchestration";

pub(crate) async fn run(report: &mut Report, effort: Effort) -> Result<()> {
    names(report, effort)?;
    calls(report, effort).await?;
    Box::pin(contexts(report, effort, 0)).await?;
    Box::pin(contexts(report, effort, 200)).await
}

/// The registry by itself.
fn names(report: &mut Report, effort: Effort) -> Result<()> {
    const SERVERS: usize = 100;
    const EACH: usize = 100;
    let schema = Arc::new(json!({"type": "object"}));
    let mut offers = Vec::new();
    for server in 0..SERVERS {
        let tools = (0..EACH).map(|tool| {
            Arc::new(ToolInfo {
                name: format!("tool_{tool}").into(),
                description: String::new(),
                input_schema: schema.clone(),
                note: None,
            })
        });
        offers.push(Offer {
            id: format!("server-{server}").parse()?,
            down: None,
            tools: tools.collect(),
        });
    }
    let known: HashSet<CatalogId> = offers.iter().map(|offer| offer.id.clone()).collect();
    let mut tools = AgentTools {
        uses: known.iter().cloned().collect(),
        ..AgentTools::default()
    };
    for server in 0..SERVERS {
        tools
            .aliases
            .insert(format!("alias_{server}"), format!("@server-{server}/tool_7"));
    }
    let registry = Registry::new(&tools, Arc::new(Rules::new(&tools)), &offers, Arc::new(known));
    let mut called = Vec::new();
    for server in 0..SERVERS {
        called.push(format!("alias_{server}"));
        for tool in 0..EACH {
            called.push(format!("@server-{server}/tool_{tool}"));
            called.push(format!("server-{server}_tool_{tool}"));
        }
    }
    let rounds = effort.of(50);
    let begun = Instant::now();
    for _ in 0..rounds {
        for name in &called {
            match registry.resolve(black_box(name)) {
                Found::Tool(entry) => drop(black_box(entry)),
                other => anyhow::bail!("{name}: {other:?}"),
            }
        }
    }
    let each = begun.elapsed().as_secs_f64() * 1e6 / (rounds * called.len()) as f64;
    let note = "aliases, canonical and plain names of 100 servers with 100 tools each";
    report.row(
        NAME,
        "resolving a name among 10,000 tools",
        each,
        "µs",
        Target::AtMost(1.0),
        note,
    );
    Ok(())
}

/// The same rmcp client on the echo server itself and on `oubliette-client`.
async fn calls(report: &mut Report, effort: Effort) -> Result<()> {
    let home = Home::new("").await?;
    home.echo("echo", "plane", 0)?;
    let tools = json!({"use": ["echo"]});
    home.agent(
        "talker",
        json!({ "tools": tools }),
        Some(json!({"turns": [[{"say": "ok"}]]})),
    )?;
    let server = home.start().await?;
    let mut rest = server.rest().await?;
    let project = rest.project("one", json!({})).await?;
    let session = rest.session(&project, "talker", None).await?;
    let socket = rest.socket(&session).await?;
    let ours = bare::rmcp(client(&socket, None)?).await?;
    let direct = bare::rmcp(bare::echo("direct", 0)?).await?;

    let (through, alone) = side_by_side(
        effort.of(40),
        100,
        async || bare::call(&ours, "echo_echo").await,
        async || bare::call(&direct, "echo").await,
    )
    .await?;
    let note = format!(
        "p50 {:.3} ms against {:.3} ms, p99 {:.2} against {:.2}",
        through.p50(),
        alone.p50(),
        through.p99(),
        alone.p99()
    );
    let added = through.p50() - alone.p50();
    report.row(
        NAME,
        "added to a call of a stdio tool, p50",
        added,
        "ms",
        Target::AtMost(0.2),
        note,
    );

    let (mut ours_rate, mut direct_rate) = (0.0, 0.0);
    // Many turns: where the kernel puts the threads of either side differs from turn to turn.
    let (rounds, long) = (16, Duration::from_millis(effort.of(500) as u64));
    for _ in 0..rounds {
        ours_rate += eight(&ours, "echo_echo", long).await? / f64::from(rounds);
        direct_rate += eight(&direct, "echo", long).await? / f64::from(rounds);
    }
    let note = format!("{ours_rate:.0}/s against {direct_rate:.0}/s");
    let share = 100.0 * ours_rate / direct_rate;
    report.row(
        NAME,
        "throughput with 8 calls at once, of direct",
        share,
        "%",
        Target::AtLeast(50.0),
        note,
    );
    drop(rest);
    server.stop().await
}

/// Calls a second with eight under way.
async fn eight(peer: &Peer<RoleClient>, tool: &str, long: Duration) -> Result<f64> {
    let begun = Instant::now();
    let callers = (0..8).map(async |_| {
        let mut done = 0_u32;
        while begun.elapsed() < long {
            bare::call(peer, tool).await?;
            done += 1;
        }
        anyhow::Ok(done)
    });
    let done: u32 = try_join_all(callers).await?.into_iter().sum();
    Ok(f64::from(done) / begun.elapsed().as_secs_f64())
}

/// Two agents with three servers each, the slowest of which takes `slow_ms` before it answers.
async fn contexts(report: &mut Report, effort: Effort, slow_ms: u64) -> Result<()> {
    let home = Home::new("").await?;
    for agent in ["one", "two"] {
        for (server, delay) in [("a", 0), ("b", slow_ms / 2), ("c", slow_ms)] {
            home.echo(&format!("{agent}-{server}"), "context", delay)?;
        }
        let servers = ["a", "b", "c"].map(|server| format!("{agent}-{server}"));
        let uses = json!({ "use": servers });
        home.agent(
            agent,
            json!({ "tools": uses }),
            Some(json!({"turns": [[{"say": "ok"}]]})),
        )?;
    }
    let server = home.start().await?;
    let mut rest = server.rest().await?;
    let project = rest.project("one", json!({})).await?;
    let session = rest.session(&project, "one", None).await?;

    let (mut own, mut switches) = (Times::default(), Times::default());
    for round in 0..effort.of(30) {
        let begun = clock::now();
        let bare = bare::rmcp(bare::echo("own-start", slow_ms)?).await?;
        let started = clock::since(begun);
        bare.cancel().await?;
        let to = if round % 2 == 0 { "two" } else { "one" };
        let begun = clock::now();
        rest.tool(
            "session_switch_agent",
            json!({"session_id": session, "agent": to}),
        )
        .await?;
        if round > 0 {
            own.push(started);
            switches.push(clock::since(begun));
        }
    }
    let builds = builds(&mut rest, &session).await?;
    ensure!(
        builds.len() >= own.len(),
        "{} builds in the debugger",
        builds.len()
    );
    let which = match slow_ms {
        0 => "three servers".to_owned(),
        ms => format!("three servers, one slow by {ms} ms"),
    };
    let note = format!(
        "p50 {:.1} ms, slowest server by itself {:.1} ms",
        builds.p50(),
        own.p50()
    );
    let over = builds.p50() - own.p50();
    report.row(
        NAME,
        format!("building a context over its slowest start ({which})"),
        over,
        "ms",
        Target::AtMost(50.0),
        note,
    );
    let note = format!("p50 {:.1} ms, p95 {:.1} ms", switches.p50(), switches.p95());
    let over = switches.p50() - own.p50();
    report.row(
        NAME,
        format!("an idle switch over its slowest start ({which})"),
        over,
        "ms",
        Target::AtMost(150.0),
        note,
    );
    drop(rest);
    server.stop().await
}

/// How long the contexts of a session took to build, as the debugger tells.
async fn builds(rest: &mut Rest, session: &str) -> Result<Times> {
    let query = json!({"session_id": session, "kinds": ["build_finished"], "max_events": 1000});
    let page = rest.tool("debugger_events", query).await?;
    let mut times = Times::default();
    let took = |event: &Value| event["took_ms"].as_u64().context("a build without its time");
    // The first one found nothing in the caches.
    for event in page["events"].as_array().into_iter().flatten().skip(1) {
        times.push(Duration::from_millis(took(event)?));
    }
    Ok(times)
}
