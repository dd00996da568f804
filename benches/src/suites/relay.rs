//! Calls of lent tools: from the agent's request to the caller and back.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use serde_json::json;

use super::BenchEffort;
use crate::{
    baseline,
    caller::{BenchCaller, lent_tool_context},
    clock,
    home::{BenchHome, BenchServer, client_command},
    http::HttpConnection,
    lines::JsonRpcLines,
    procs,
    report::{BenchReport, BenchTarget},
    stats::{TimingSamples, time_each},
};

const NAME: &str = "relay";
const SESSIONS: usize = 50;

pub(crate) async fn run(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let config = "[session]\nmax_sessions = 1000\n[relay]\ncaller_timeout = \"10m\"\n\
                  [server]\nrate_limit = { per_second = 1000000 }\nmax_connections = 100000";
    let home = BenchHome::new(config).await?;
    home.write_talker_agent("talker")?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let first = rest
        .start_session(&project, "talker", Some(lent_tool_context()))
        .await?;
    measure_single_call(report, effort, &server, &first).await?;

    let sessions = try_join_all((1..SESSIONS).map(async |_| {
        let mut rest = server.connect_rest().await?;
        rest.start_session(&project, "talker", Some(lent_tool_context()))
            .await
    }));
    let mut sessions = sessions.await?;
    sessions.push(first);
    measure_throughput(report, effort, &server, &sessions).await?;
    measure_waiting_calls(report, effort, &server, &sessions).await?;
    drop(rest);
    server.stop().await
}

/// Latency of one call at a time, interleaved with the parts of its floor.
async fn measure_single_call(
    report: &mut BenchReport,
    effort: BenchEffort,
    server: &BenchServer,
    session: &str,
) -> Result<()> {
    let socket = server.connect_rest().await?.relay_socket(session).await?;
    let mut agent = JsonRpcLines::spawn_mcp(&mut client_command(&socket, None)?).await?;
    let _caller = BenchCaller::follow_session(server, session).await?.serve();

    let mut echo = JsonRpcLines::spawn_mcp(&mut baseline::echo_command("floor", 0)?).await?;
    let floor = baseline::start_http_server("as-floor").await?;
    let mut post = HttpConnection::connect(floor.address, "").await?;
    let mut emit = HttpConnection::connect(floor.address, "").await?;
    let mut events = HttpConnection::connect(floor.address, "")
        .await?
        .into_event_stream("/events")
        .await?;

    let (ours, theirs) = (
        json!({"name": "bench_echo", "arguments": {"text": "hello"}}),
        json!({"name": "echo", "arguments": {"text": "hello"}}),
    );
    let body = json!({"session_id": session, "request_id": session, "result": "ok"}).to_string();
    let (mut whole, mut floor) = (TimingSamples::default(), TimingSamples::default());
    let mut parts: [TimingSamples; 3] = std::array::from_fn(|_| TimingSamples::default());
    for round in 0..=effort.scale(40) {
        let calls = time_each(50, async || agent.call("tools/call", &ours).await).await?;
        let mut bare = Vec::new();
        for _ in 0..50 {
            // One after the other, so that each part finds the other processes idle, as in a relayed call.
            let begun = clock::now();
            echo.call("tools/call", &theirs).await?;
            let stdio = clock::since(begun);
            let begun = clock::now();
            post.post("/post", "", &body).await?;
            let posted = clock::since(begun);
            emit.post("/emit", "", "").await?;
            let sent: u64 = events.next().await?.parse()?;
            bare.push([stdio, posted, clock::since(sent)]);
        }
        if round > 0 {
            whole.extend(calls);
            for times in bare {
                floor.push(times.iter().sum());
                for (part, time) in parts.iter_mut().zip(times) {
                    part.push(time);
                }
            }
        }
    }
    let [stdio, posted, heard] = parts.map(|times| times.p50());
    let (ours, floor) = (whole.p50(), floor.p50());
    let note = format!(
        "agent's line to its answer, {} calls, p99 {:.2} ms",
        whole.len(),
        whole.p99()
    );
    report.add_row(
        NAME,
        "a call of a caller's tool, p50",
        ours,
        "ms",
        BenchTarget::AtMost(2.0),
        note,
    );
    let note = format!(
        "floor {floor:.3} ms: stdio MCP echo {stdio:.3} + loopback POST {posted:.3} + event {heard:.3}, all bare"
    );
    report.add_row(
        NAME,
        "the same to its floor",
        ours / floor,
        "×",
        BenchTarget::AtMost(3.0),
        note,
    );
    Ok(())
}

/// Throughput with calls in flight in every session.
async fn measure_throughput(
    report: &mut BenchReport,
    effort: BenchEffort,
    server: &BenchServer,
    sessions: &[String],
) -> Result<()> {
    const OPEN: usize = 8;
    let _callers: Vec<_> = try_join_all(
        sessions
            .iter()
            .map(async |session| anyhow::Ok(BenchCaller::follow_session(server, session).await?.serve())),
    )
    .await?;
    let long = Duration::from_millis(effort.scale(8000) as u64);
    let mut rest = server.connect_rest().await?;
    let (mut sockets, mut clients) = (Vec::new(), Vec::new());
    for session in sessions {
        let socket = rest.relay_socket(session).await?;
        sockets.push(JsonRpcLines::connect(&socket).await?);
        clients.push(JsonRpcLines::spawn_mcp(&mut client_command(&socket, None)?).await?);
    }
    let by_socket = (
        "caller_tool",
        json!({"tool": "echo", "arguments": {"text": "hello"}}),
    );
    let by_client = (
        "tools/call",
        json!({"name": "bench_echo", "arguments": {"text": "hello"}}),
    );
    for (lines, (method, params), way, target) in [
        (
            &mut sockets,
            by_socket,
            "on their relay sockets",
            BenchTarget::AtLeast(5000.0),
        ),
        (
            &mut clients,
            by_client,
            "each through its `oubliette-client`",
            BenchTarget::None,
        ),
    ] {
        let begun = Instant::now();
        let floods = lines.iter_mut().map(|lines| {
            let params = &params;
            async move { lines.flood(method, params, OPEN, || begun.elapsed() < long).await }
        });
        let answered: usize = try_join_all(floods).await?.into_iter().sum();
        let rate = answered as f64 / begun.elapsed().as_secs_f64();
        let note = format!("{OPEN} under way in each; callers and agents on the same cores");
        report.add_row(
            NAME,
            format!("relayed calls over {SESSIONS} sessions, {way}"),
            rate,
            "/s",
            target,
            note,
        );
    }
    Ok(())
}

/// Memory of calls that wait for their caller's answer.
async fn measure_waiting_calls(
    report: &mut BenchReport,
    effort: BenchEffort,
    server: &BenchServer,
    sessions: &[String],
) -> Result<()> {
    let each = effort.scale(10_000) / sessions.len();
    let calls = each * sessions.len();
    let mut rest = server.connect_rest().await?;
    let mut pairs = Vec::new();
    for session in sessions {
        let caller = BenchCaller::follow_session(server, session).await?;
        pairs.push((
            JsonRpcLines::connect(&rest.relay_socket(session).await?).await?,
            caller,
        ));
    }
    let before = procs::memory_once_stable(server.pid).await?;
    let params = json!({"tool": "echo", "arguments": {"text": "hello"}});
    let held = try_join_all(pairs.into_iter().map(async |(mut lines, mut caller)| {
        let mut requests = Vec::new();
        for _ in 0..each {
            lines.send("caller_tool", &params).await?;
        }
        for _ in 0..each {
            requests.push(caller.next_request().await?);
        }
        anyhow::Ok((lines, caller, requests))
    }))
    .await?;
    let after = procs::memory_once_stable(server.pid).await?;
    let each_call = (after.rss - before.rss) / calls as f64;
    let note = format!(
        "{calls} waiting at once, server {:.0} → {:.0} MiB",
        before.rss / 1024.0,
        after.rss / 1024.0
    );
    report.add_row(
        NAME,
        "memory of a waiting call",
        each_call,
        "KiB",
        BenchTarget::AtMost(20.0),
        note,
    );

    let answered = try_join_all(held.into_iter().map(async |(mut lines, mut caller, requests)| {
        for request in &requests {
            caller.answer(request).await?;
        }
        for _ in &requests {
            lines.next_answer().await?;
        }
        anyhow::Ok(requests.len())
    }));
    let answered: usize = answered.await?.into_iter().sum();
    ensure!(answered == calls, "{answered} of {calls} were answered");
    report.add_row(
        NAME,
        "calls waiting at once, all answered in the end",
        answered as f64,
        "",
        BenchTarget::AtLeast(calls as f64),
        "",
    );
    Ok(())
}
