//! Tools that callers lend: from the agent's line to the caller and back.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use futures::future::try_join_all;
use serde_json::json;

use super::Effort;
use crate::{
    bare,
    caller::{Caller, lent},
    clock,
    home::{Home, Server, client},
    http::Http,
    lines::Lines,
    procs,
    report::{Report, Target},
    stats::{Times, timed},
};

const NAME: &str = "relay";
const SESSIONS: usize = 50;

pub(crate) async fn run(report: &mut Report, effort: Effort) -> Result<()> {
    let config = "[session]\nmax_sessions = 1000\n[relay]\ncaller_timeout = \"10m\"\n\
                  [server]\nrate_limit = { per_second = 1000000 }";
    let home = Home::new(config).await?;
    home.talker("talker")?;
    let server = home.start().await?;
    let mut rest = server.rest().await?;
    let project = rest.project("one", json!({})).await?;
    let first = rest.session(&project, "talker", Some(lent())).await?;
    one(report, effort, &server, &first).await?;

    let sessions = try_join_all((1..SESSIONS).map(async |_| {
        let mut rest = server.rest().await?;
        rest.session(&project, "talker", Some(lent())).await
    }));
    let mut sessions = sessions.await?;
    sessions.push(first);
    many(report, effort, &server, &sessions).await?;
    waiting(report, effort, &server, &sessions).await?;
    drop(rest);
    server.stop().await
}

/// One call at a time, in turn with the parts of its floor.
async fn one(report: &mut Report, effort: Effort, server: &Server, session: &str) -> Result<()> {
    let socket = server.rest().await?.socket(session).await?;
    let mut agent = Lines::mcp(&mut client(&socket, None)?).await?;
    let _caller = Caller::attend(server, session).await?.serve();

    let mut echo = Lines::mcp(&mut bare::echo("floor", 0)?).await?;
    let floor = bare::http("as-floor").await?;
    let mut post = Http::connect(floor.address, "").await?;
    let mut emit = Http::connect(floor.address, "").await?;
    let mut events = Http::connect(floor.address, "").await?.listen("/events").await?;

    let (ours, theirs) = (
        json!({"name": "bench_echo", "arguments": {"text": "hello"}}),
        json!({"name": "echo", "arguments": {"text": "hello"}}),
    );
    let body = json!({"session_id": session, "request_id": session, "result": "ok"}).to_string();
    let (mut whole, mut floor) = (Times::default(), Times::default());
    let mut parts: [Times; 3] = std::array::from_fn(|_| Times::default());
    for round in 0..=effort.of(40) {
        let calls = timed(50, async || agent.call("tools/call", &ours).await).await?;
        let mut bare = Vec::new();
        for _ in 0..50 {
            // One after the other, so that each finds the others asleep, as in a call.
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
    report.row(
        NAME,
        "a call of a caller's tool, p50",
        ours,
        "ms",
        Target::AtMost(2.0),
        note,
    );
    let note = format!(
        "floor {floor:.3} ms: stdio MCP echo {stdio:.3} + loopback POST {posted:.3} + event {heard:.3}, all bare"
    );
    report.row(
        NAME,
        "the same to its floor",
        ours / floor,
        "×",
        Target::AtMost(3.0),
        note,
    );
    Ok(())
}

/// Every session with calls under way all the time.
async fn many(report: &mut Report, effort: Effort, server: &Server, sessions: &[String]) -> Result<()> {
    const OPEN: usize = 8;
    let _callers: Vec<_> = try_join_all(
        sessions
            .iter()
            .map(async |session| anyhow::Ok(Caller::attend(server, session).await?.serve())),
    )
    .await?;
    let long = Duration::from_millis(effort.of(8000) as u64);
    let mut rest = server.rest().await?;
    let (mut sockets, mut clients) = (Vec::new(), Vec::new());
    for session in sessions {
        let socket = rest.socket(session).await?;
        sockets.push(Lines::connect(&socket).await?);
        clients.push(Lines::mcp(&mut client(&socket, None)?).await?);
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
            Target::AtLeast(5000.0),
        ),
        (
            &mut clients,
            by_client,
            "each through its `oubliette-client`",
            Target::None,
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
        report.row(
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

/// Calls that nobody answers yet.
async fn waiting(report: &mut Report, effort: Effort, server: &Server, sessions: &[String]) -> Result<()> {
    let each = effort.of(10_000) / sessions.len();
    let calls = each * sessions.len();
    let mut rest = server.rest().await?;
    let mut pairs = Vec::new();
    for session in sessions {
        let caller = Caller::attend(server, session).await?;
        pairs.push((Lines::connect(&rest.socket(session).await?).await?, caller));
    }
    let before = procs::settled(server.pid).await?;
    let params = json!({"tool": "echo", "arguments": {"text": "hello"}});
    let held = try_join_all(pairs.into_iter().map(async |(mut lines, mut caller)| {
        let mut requests = Vec::new();
        for _ in 0..each {
            lines.send("caller_tool", &params).await?;
        }
        for _ in 0..each {
            requests.push(caller.request().await?);
        }
        anyhow::Ok((lines, caller, requests))
    }))
    .await?;
    let after = procs::settled(server.pid).await?;
    let each_call = (after.rss - before.rss) / calls as f64;
    let note = format!(
        "{calls} waiting at once, server {:.0} → {:.0} MiB",
        before.rss / 1024.0,
        after.rss / 1024.0
    );
    report.row(
        NAME,
        "memory of a waiting call",
        each_call,
        "KiB",
        Target::AtMost(20.0),
        note,
    );

    let answered = try_join_all(held.into_iter().map(async |(mut lines, mut caller, requests)| {
        for request in &requests {
            caller.answer(request).await?;
        }
        for _ in &requests {
            lines.answer().await?;
        }
        anyhow::Ok(requests.len())
    }));
    let answered: usize = answered.await?.into_iter().sum();
    ensure!(answered == calls, "{answered} of {calls} were answered");
    report.row(
        NAME,
        "calls waiting at once, all answered in the end",
        answered as f64,
        "",
        Target::AtLeast(calls as f64),
        "",
    );
    Ok(())
}
