//! Sessions: time until an agent gets its first byte, throughput of the event log, memory of many sessions.

use std::{
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, future::try_join_all};
use oubliette_protocol::{
    SessionId,
    event::{EventBody, SessionStatus},
};
use oubliette_store::{SessionRow, Store};
use serde_json::{Value, json};
use tokio::process::Command;

use super::BenchEffort;
use crate::{
    clock,
    home::{BenchHome, BenchServer, RestClient, own_program, text_field},
    procs,
    report::{BenchReport, BenchTarget},
    stats::{TimingSamples, ms},
};

const NAME: &str = "sessions";
const BARE_BWRAP_ARGS: &str = "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --uid 1000 --gid 1000 \
                    --die-with-parent --ro-bind / / --proc /proc --dev /dev --tmpfs /tmp true";

pub(crate) async fn run(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    measure_first_byte(report, effort).await?;
    measure_appends(report, effort).await?;
    Box::pin(measure_replay(report, effort)).await?;
    Box::pin(measure_idle_memory(report, effort, IdlePolicy::KeepAgent)).await?;
    Box::pin(measure_idle_memory(report, effort, IdlePolicy::StopAgent)).await?;
    Box::pin(measure_running_sessions(report, effort)).await
}

async fn measure_first_byte(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let home = BenchHome::new("").await?;
    let own = own_program()?;
    let programs = Path::new(&own).parent().context("no directory")?;
    let runtime = json!({"kind": "acp", "command": [own, "as-agent"], "read_only": [programs]});
    home.write_agent("listener", json!({ "runtime": runtime }), None)?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let (mut ours, mut bare) = (TimingSamples::default(), TimingSamples::default());
    for round in 0..effort.scale(100) {
        let begun = clock::now();
        let status = Command::new("bwrap")
            .args(BARE_BWRAP_ARGS.split_whitespace())
            .stdin(Stdio::null())
            .status()
            .await?;
        ensure!(status.success(), "bare bwrap failed");
        let took = clock::since(begun);

        let begun = clock::now();
        let reply = rest
            .call_tool(
                "session_message",
                json!({"project_id": project, "agent": "listener", "message": "when?", "wait": true}),
            )
            .await?;
        let heard: u64 = text_field(&reply, "text")?.trim().parse().context("no time")?;
        rest.call_tool("session_end", json!({"session_id": reply["session_id"]}))
            .await?;
        // The first round is warm-up: its caches are cold.
        if round > 0 {
            bare.push(took);
            ours.push(clock::between(begun, heard));
        }
    }
    let what = "`session_message` to the agent's first byte of `initialize`";
    let note = format!("{} sessions", ours.len());
    report.add_row(
        NAME,
        format!("{what}, p50"),
        ours.p50(),
        "ms",
        BenchTarget::AtMost(60.0),
        note,
    );
    report.add_row(
        NAME,
        format!("{what}, p95"),
        ours.p95(),
        "ms",
        BenchTarget::AtMost(120.0),
        "",
    );
    let note = format!("p50 {:.1} ms, spawned and waited for", bare.p50());
    report.add_row(
        NAME,
        "the same to bare `bwrap … true`",
        ours.p50() / bare.p50(),
        "×",
        BenchTarget::AtMost(3.0),
        note,
    );
    server.stop().await
}

pub(super) fn delta_event() -> EventBody {
    EventBody::Delta {
        text: "a piece of text as an agent streams it, ".repeat(3),
    }
}

/// How many sessions append events at the same time.
pub(super) const APPENDING_SESSIONS: usize = 50;

async fn measure_appends(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let dir = tempfile::tempdir()?;
    let store = Store::open(&dir.path().join("oubliette.db")).await?;
    let sessions = (0..APPENDING_SESSIONS).map(|_| SessionId::generate()).collect();
    let rate = append_rate(&store, sessions, effort).await?;
    let note = "one event an append, each waited for";
    report.add_row(
        NAME,
        "events appended durably by 50 sessions",
        rate,
        "/s",
        BenchTarget::AtLeast(10_000.0),
        note,
    );
    store.close().await;
    Ok(())
}

/// How many events a second these sessions append together, one at a time each, every one waited for.
pub(super) async fn append_rate(store: &Store, sessions: Vec<SessionId>, effort: BenchEffort) -> Result<f64> {
    // Warm-up, not counted: a session's first event makes its log.
    try_join_all(
        sessions
            .iter()
            .map(|session| store.events().append(session, vec![delta_event()])),
    )
    .await?;
    let (begun, long) = (Instant::now(), Duration::from_millis(effort.scale(5000) as u64));
    let writers = sessions.into_iter().map(|session| {
        let log = store.events().clone();
        tokio::spawn(async move {
            let mut appended = 0;
            while begun.elapsed() < long {
                log.append(&session, vec![delta_event()]).await?;
                appended += 1;
            }
            anyhow::Ok(appended)
        })
    });
    let mut appended = 0;
    for writer in try_join_all(writers).await? {
        appended += writer?;
    }
    Ok(f64::from(appended) / begun.elapsed().as_secs_f64())
}

/// Time to replay a long log: from the store directly, and over HTTP to a client.
async fn measure_replay(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let events = effort.scale(100_000) / 1000 * 1000;
    let home = BenchHome::new("").await?;
    home.write_talker_agent("talker")?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let session = rest.start_session(&project, "talker", None).await?;
    let known = rest
        .call_tool("session_get", json!({ "session_id": session }))
        .await?;
    rest.call_tool("session_end", json!({ "session_id": session }))
        .await?;
    server.stop().await?;

    let store = Store::open(&home.path().join("oubliette.db")).await?;
    let id = write_event_log(&store, &known, events).await?;
    let begun = clock::now();
    let replayed = store.events().follow(&id, -1).take(events).count().await;
    let took = clock::since(begun).as_secs_f64();
    store.close().await;
    ensure!(replayed == events, "{replayed} events");
    report.add_row(
        NAME,
        format!("replay of {events} events from the log"),
        took,
        "s",
        BenchTarget::AtMost(1.0),
        "",
    );

    let server = home.start().await?;
    let begun = clock::now();
    let mut stream = server
        .connect_rest()
        .await?
        .0
        .into_event_stream(&format!("/api/sessions/{id}/events"))
        .await?;
    for _ in 0..events {
        stream.next().await?;
    }
    let took = clock::since(begun).as_secs_f64();
    report.add_row(
        NAME,
        "the same to a client, as server-sent events",
        took,
        "s",
        BenchTarget::AtMost(1.0),
        "",
    );
    server.stop().await
}

/// Writes an ended session with this many events; `like` gives its project and workspace.
async fn write_event_log(store: &Store, like: &Value, events: usize) -> Result<SessionId> {
    let id = SessionId::generate();
    let now = oubliette_store::now();
    let row = SessionRow {
        session_id: id.clone(),
        project_id: text_field(like, "project_id")?.parse()?,
        workspace_id: text_field(like, "workspace_id")?.parse()?,
        agent: "talker".parse()?,
        status: SessionStatus::Ended,
        reason: None,
        parent_id: None,
        root_id: id.clone(),
        depth: 0,
        turn: 0,
        created_at: now,
        updated_at: now,
        created_by: None,
        title: None,
        agent_session: None,
        isolation: None,
        images: None,
    };
    store.session_insert(row).await?;
    for _ in 0..events / 1000 {
        store
            .events()
            .append(&id, (0..1000).map(|_| delta_event()).collect())
            .await?;
    }
    Ok(id)
}

/// Whether the server stops the agent of an idle session.
#[derive(Clone, Copy, PartialEq)]
enum IdlePolicy {
    KeepAgent,
    StopAgent,
}

/// Starts sessions, four at a time, and waits for the first turn of each.
async fn start_sessions(server: &BenchServer, project: &str, agent: &str, count: usize) -> Result<()> {
    const AT_ONCE: usize = 4;
    let starters = (0..AT_ONCE).map(async |starter| {
        let mut rest = server.connect_rest().await?;
        for _ in (starter..count).step_by(AT_ONCE) {
            rest.start_session(project, agent, None).await?;
        }
        anyhow::Ok(())
    });
    try_join_all(starters).await?;
    Ok(())
}

async fn measure_idle_memory(report: &mut BenchReport, effort: BenchEffort, sleep: IdlePolicy) -> Result<()> {
    let many = effort.scale(300);
    let (nap, what) = match sleep {
        IdlePolicy::KeepAgent => ("1h", "agent kept"),
        IdlePolicy::StopAgent => ("1s", "agent given back"),
    };
    let home = BenchHome::new(&format!("[session]\nmax_sessions = 2000\nidle_sleep = \"{nap}\"")).await?;
    home.write_talker_agent("talker")?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    // Warm-up: what the first sessions load is shared by all of them and not counted.
    start_sessions(&server, &project, "talker", 8).await?;
    let before = procs::memory_once_stable(server.pid).await?;
    start_sessions(&server, &project, "talker", many).await?;
    if sleep == IdlePolicy::StopAgent {
        while !procs::descendants(server.pid).is_empty() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    let after = procs::memory_once_stable(server.pid).await?;
    let each = (after.rss - before.rss) / many as f64;
    let note = format!("server alone, {many} sessions");
    report.add_row(
        NAME,
        format!("memory of an idle session ({what})"),
        each,
        "KiB",
        BenchTarget::AtMost(100.0),
        note,
    );
    let note = format!("resident; {:.1} MiB before", before.rss / 1024.0);
    let what = format!("server with {many} idle sessions ({what})");
    report.add_row(
        NAME,
        what,
        after.rss / 1024.0,
        "MiB",
        BenchTarget::AtMost(80.0),
        note,
    );
    drop(rest);
    server.stop().await
}

/// Sessions that are all in a turn at the same time: each calls a lent tool that is answered only when all
/// sessions have called it.
async fn measure_running_sessions(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let many = effort.scale(200);
    let home = BenchHome::new(
        // All callers come from one address, which has a quarter of the connections.
        "[server]\nmax_connections = 4096\n[session]\nmax_sessions = 2000\nstart_timeout = \"5m\"\n\
         [relay]\ncaller_timeout = \"10m\"",
    )
    .await?;
    let call = json!({"call": {"tool": "bench_echo", "arguments": {}}});
    home.write_agent(
        "worker",
        json!({}),
        Some(json!({"turns": [[call, {"say": "done"}]]})),
    )?;
    let server = home.start().await?;
    let mut rest = server.connect_rest().await?;
    let project = rest.create_project("one", json!({})).await?;
    let begun = clock::now();
    let arrived = tokio::sync::Barrier::new(many + 1);
    let mut workers = Vec::new();
    for _ in 0..many {
        workers.push(run_worker_session(&server, &project, &arrived));
    }
    let counted = async {
        arrived.wait().await;
        let took = clock::since(begun);
        let query = json!({"project_id": project, "status": "running", "limit": 1000});
        let list = rest.call_tool("session_list", query).await?;
        let running = list["sessions"].as_array().map_or(0, Vec::len);
        let processes = procs::descendants(server.pid);
        let memory = procs::total_memory(&processes).pss / 1024.0;
        let own = procs::process_memory(server.pid)?.rss / 1024.0;
        // Everything is measured: let the sessions end.
        arrived.wait().await;
        anyhow::Ok((took, running, processes.len(), memory, own))
    };
    // The first failure ends both: nobody would be left to wait for.
    let (done, counted) = futures::future::try_join(try_join_all(workers), counted).await?;
    let (took, running, processes, memory, own) = counted;
    let ended = done.len();
    ensure!(ended == many, "{ended} of {many} turns ended well");
    let note = format!(
        "all in one turn after {:.1} s; {processes} processes with {memory:.0} MiB, server {own:.0} MiB",
        ms(took) / 1000.0
    );
    let target = BenchTarget::AtLeast(many as f64);
    report.add_row(
        NAME,
        "sessions running at once, each in a sandbox",
        running as f64,
        "",
        target,
        note,
    );
    drop(rest);
    server.stop().await
}

/// Runs one session until its turn has completed.
async fn run_worker_session(
    server: &BenchServer,
    project: &str,
    arrived: &tokio::sync::Barrier,
) -> Result<()> {
    let mut rest = server.connect_rest().await?;
    let message = json!({"project_id": project, "agent": "worker", "message": "go", "context": crate::caller::lent_tool_context()});
    let session = text_field(&rest.call_tool("session_message", message).await?, "session_id")?;
    let mut since = -1;
    let request = wait_for_event(&mut rest, &session, &mut since, "caller_tool_request").await?;
    {
        // While it waits for the others it keeps the caller present with an open poll.
        let mut present = server.connect_rest().await?;
        let listening = async {
            let mut since = since;
            wait_for_event(&mut present, &session, &mut since, "turn_completed").await
        };
        tokio::select! {
            ended = listening => { ended?; anyhow::bail!("a turn ended before all had begun") }
            () = async { arrived.wait().await; arrived.wait().await; } => {}
        }
    }
    let answer = json!({"session_id": session, "request_id": request["request_id"], "result": "ok"});
    rest.call_tool("caller_tool_response", answer).await?;
    wait_for_event(&mut rest, &session, &mut since, "turn_completed").await?;
    Ok(())
}

/// Waits for the next event of a type, by long polling.
async fn wait_for_event(rest: &mut RestClient, session: &str, since: &mut i64, kind: &str) -> Result<Value> {
    loop {
        let query = json!({"session_id": session, "since_index": *since, "wait_ms": 20_000});
        let page = rest.call_tool("session_events", query).await?;
        let events = page["events"].as_array().cloned().unwrap_or_default();
        for event in events {
            *since = event["index"].as_i64().unwrap_or(*since);
            if event["type"] == kind {
                return Ok(event);
            }
            ensure!(event["type"] != "error" && event["status"] != "failed", "{event}");
        }
    }
}
