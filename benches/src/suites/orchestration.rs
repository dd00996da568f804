//! The tool plane: name resolution, calls of catalog tools, context builds and agent switches.

use std::{
    collections::HashSet,
    hint::black_box,
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use oubliette_protocol::{CatalogId, agent::AgentToolSettings};
use oubliette_tools::{
    allow::ToolRules,
    registry::{NameResolution, OfferedTools, ToolInfo, ToolRegistry},
};
use rmcp::{RoleClient, service::Peer};
use serde_json::{Value, json};

use super::BenchEffort;
use crate::{
    baseline, clock,
    home::{BenchHome, RestClient, client_command},
    report::{BenchReport, BenchTarget},
    stats::{TimingSamples, time_interleaved},
};

const NAME: &str = "orchestration";

pub(crate) async fn run(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    measure_name_resolution(report, effort)?;
    measure_tool_calls(report, effort).await?;
    Box::pin(measure_contexts_and_switches(report, effort, 0)).await?;
    Box::pin(measure_contexts_and_switches(report, effort, 200)).await
}

/// The time the registry takes to resolve a name.
fn measure_name_resolution(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
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
        offers.push(OfferedTools {
            id: format!("server-{server}").parse()?,
            down_reason: None,
            tools: tools.collect(),
        });
    }
    let known: HashSet<CatalogId> = offers.iter().map(|offer| offer.id.clone()).collect();
    let mut tools = AgentToolSettings {
        uses: known.iter().cloned().collect(),
        ..AgentToolSettings::default()
    };
    for server in 0..SERVERS {
        tools
            .aliases
            .insert(format!("alias_{server}"), format!("@server-{server}/tool_7"));
    }
    let registry = ToolRegistry::new(&tools, Arc::new(ToolRules::new(&tools)), &offers, Arc::new(known));
    let mut called = Vec::new();
    for server in 0..SERVERS {
        called.push(format!("alias_{server}"));
        for tool in 0..EACH {
            called.push(format!("@server-{server}/tool_{tool}"));
            called.push(format!("server-{server}_tool_{tool}"));
        }
    }
    let rounds = effort.scale(50);
    let begun = Instant::now();
    for _ in 0..rounds {
        for name in &called {
            match registry.resolve(black_box(name)) {
                NameResolution::Tool(entry) => drop(black_box(entry)),
                other => anyhow::bail!("{name}: {other:?}"),
            }
        }
    }
    let each = begun.elapsed().as_secs_f64() * 1e6 / (rounds * called.len()) as f64;
    let note = "aliases, canonical and plain names of 100 servers with 100 tools each";
    report.add_row(
        NAME,
        "resolving a name among 10,000 tools",
        each,
        "µs",
        BenchTarget::AtMost(1.0),
        note,
    );
    Ok(())
}

/// Latency and throughput of the same rmcp client, directly on the echo server and through `oubliette-client`.
async fn measure_tool_calls(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let home = BenchHome::new("").await?;
    home.write_sandboxed_echo("echo", "plane", 0)?;
    let tools = json!({"use": ["echo"]});
    home.write_agent(
        "talker",
        json!({ "tools": tools }),
        Some(json!({"turns": [[{"say": "ok"}]]})),
    )?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let session = rest.start_session(&project, "talker", None).await?;
    let socket = rest.relay_socket(&session).await?;
    let ours = baseline::rmcp_client(client_command(&socket, None)?).await?;
    let direct = baseline::rmcp_client(baseline::echo_command("direct", 0)?).await?;

    let (through, alone) = time_interleaved(
        effort.scale(40),
        100,
        async || baseline::call_echo(&ours, "echo_echo").await,
        async || baseline::call_echo(&direct, "echo").await,
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
    report.add_row(
        NAME,
        "added to a call of a stdio tool, p50",
        added,
        "ms",
        BenchTarget::AtMost(0.2),
        note,
    );

    let (mut ours_rate, mut direct_rate) = (0.0, 0.0);
    // Many short rounds: on which processors the kernel places the threads differs from round to round.
    let (rounds, long) = (16, Duration::from_millis(effort.scale(500) as u64));
    for _ in 0..rounds {
        ours_rate += rate_of_eight(&ours, "echo_echo", long).await? / f64::from(rounds);
        direct_rate += rate_of_eight(&direct, "echo", long).await? / f64::from(rounds);
    }
    let note = format!("{ours_rate:.0}/s against {direct_rate:.0}/s");
    let share = 100.0 * ours_rate / direct_rate;
    report.add_row(
        NAME,
        "throughput with 8 calls at once, of direct",
        share,
        "%",
        BenchTarget::AtLeast(50.0),
        note,
    );
    drop(rest);
    server.stop().await
}

/// Calls per second with eight in flight.
async fn rate_of_eight(peer: &Peer<RoleClient>, tool: &str, long: Duration) -> Result<f64> {
    let begun = Instant::now();
    let callers = (0..8).map(async |_| {
        let mut done = 0_u32;
        while begun.elapsed() < long {
            baseline::call_echo(peer, tool).await?;
            done += 1;
        }
        anyhow::Ok(done)
    });
    let done: u32 = try_join_all(callers).await?.into_iter().sum();
    Ok(f64::from(done) / begun.elapsed().as_secs_f64())
}

/// The time to build a context and to switch agents: two agents with three servers each, the slowest of which
/// needs `slow_ms` to start.
async fn measure_contexts_and_switches(
    report: &mut BenchReport,
    effort: BenchEffort,
    slow_ms: u64,
) -> Result<()> {
    let home = BenchHome::new("").await?;
    for agent in ["one", "two"] {
        for (server, delay) in [("a", 0), ("b", slow_ms / 2), ("c", slow_ms)] {
            home.write_sandboxed_echo(&format!("{agent}-{server}"), "context", delay)?;
        }
        let servers = ["a", "b", "c"].map(|server| format!("{agent}-{server}"));
        let uses = json!({ "use": servers });
        home.write_agent(
            agent,
            json!({ "tools": uses }),
            Some(json!({"turns": [[{"say": "ok"}]]})),
        )?;
    }
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let session = rest.start_session(&project, "one", None).await?;

    let (mut own, mut switches) = (TimingSamples::default(), TimingSamples::default());
    for round in 0..effort.scale(30) {
        let begun = clock::now();
        let bare = baseline::rmcp_client(baseline::echo_command("own-start", slow_ms)?).await?;
        let started = clock::since(begun);
        bare.cancel().await?;
        let to = if round % 2 == 0 { "two" } else { "one" };
        let begun = clock::now();
        rest.call_tool(
            "session_switch_agent",
            json!({"session_id": session, "agent": to}),
        )
        .await?;
        if round > 0 {
            own.push(started);
            switches.push(clock::since(begun));
        }
    }
    let builds = context_build_times(&mut rest, &session).await?;
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
    report.add_row(
        NAME,
        format!("building a context over its slowest start ({which})"),
        over,
        "ms",
        BenchTarget::AtMost(50.0),
        note,
    );
    let note = format!("p50 {:.1} ms, p95 {:.1} ms", switches.p50(), switches.p95());
    let over = switches.p50() - own.p50();
    report.add_row(
        NAME,
        format!("an idle switch over its slowest start ({which})"),
        over,
        "ms",
        BenchTarget::AtMost(150.0),
        note,
    );
    drop(rest);
    server.stop().await
}

/// How long the contexts of a session took to build, from the debugger's events.
async fn context_build_times(rest: &mut RestClient, session: &str) -> Result<TimingSamples> {
    let query = json!({"session_id": session, "kinds": ["build_finished"], "max_events": 1000});
    let page = rest.call_tool("debugger_events", query).await?;
    let mut times = TimingSamples::default();
    let took = |event: &Value| event["took_ms"].as_u64().context("a build without its time");
    // The first build is warm-up.
    for event in page["events"].as_array().into_iter().flatten().skip(1) {
        times.push(Duration::from_millis(took(event)?));
    }
    Ok(times)
}
