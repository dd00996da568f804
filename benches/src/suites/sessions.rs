//! Sessions: how soon an agent hears, what the log bears, what many of them cost.

use std::{
    path::Path,
    process::Stdio,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, ensure};
use futures::{StreamExt, future::try_join_all};
use oubliette_protocol::{
    SessionId,
    event::{EventBody, Status},
};
use oubliette_store::{SessionRow, Store};
use serde_json::{Value, json};
use tokio::process::Command;

use super::Effort;
use crate::{
    clock,
    home::{Home, Rest, Server, own, text},
    procs,
    report::{Report, Target},
    stats::{Times, ms},
};

const NAME: &str = "sessions";
const BARE: &str = "--unshare-user --unshare-pid --unshare-net --unshare-ipc --unshare-uts --uid 1000 --gid 1000 \
                    --die-with-parent --ro-bind / / --proc /proc --dev /dev --tmpfs /tmp true";

pub(crate) async fn run(report: &mut Report, effort: Effort) -> Result<()> {
    first_byte(report, effort).await?;
    appends(report, effort).await?;
    Box::pin(replay(report, effort)).await?;
    Box::pin(idle(report, effort, Sleep::Never)).await?;
    Box::pin(idle(report, effort, Sleep::Soon)).await?;
    Box::pin(running(report, effort)).await
}

async fn first_byte(report: &mut Report, effort: Effort) -> Result<()> {
    let home = Home::new("").await?;
    let own = own()?;
    let programs = Path::new(&own).parent().context("no directory")?;
    let runtime = json!({"kind": "acp", "command": [own, "as-agent"], "read_only": [programs]});
    home.agent("listener", json!({ "runtime": runtime }), None)?;
    let server = home.start().await?;
    let mut rest = server.rest().await?;
    let project = rest.project("one", json!({})).await?;
    let (mut ours, mut bare) = (Times::default(), Times::default());
    for round in 0..effort.of(100) {
        let begun = clock::now();
        let status = Command::new("bwrap")
            .args(BARE.split_whitespace())
            .stdin(Stdio::null())
            .status()
            .await?;
        ensure!(status.success(), "bare bwrap failed");
        let took = clock::since(begun);

        let begun = clock::now();
        let reply = rest
            .tool(
                "session_message",
                json!({"project_id": project, "agent": "listener", "message": "when?", "wait": true}),
            )
            .await?;
        let heard: u64 = text(&reply, "text")?.trim().parse().context("no time")?;
        rest.tool("session_end", json!({"session_id": reply["session_id"]}))
            .await?;
        // The first of each finds nothing in the caches.
        if round > 0 {
            bare.push(took);
            ours.push(clock::between(begun, heard));
        }
    }
    let what = "`session_message` to the agent's first byte of `initialize`";
    let note = format!("{} sessions", ours.len());
    report.row(
        NAME,
        format!("{what}, p50"),
        ours.p50(),
        "ms",
        Target::AtMost(60.0),
        note,
    );
    report.row(
        NAME,
        format!("{what}, p95"),
        ours.p95(),
        "ms",
        Target::AtMost(120.0),
        "",
    );
    let note = format!("p50 {:.1} ms, spawned and waited for", bare.p50());
    report.row(
        NAME,
        "the same to bare `bwrap … true`",
        ours.p50() / bare.p50(),
        "×",
        Target::AtMost(3.0),
        note,
    );
    server.stop().await
}

fn delta() -> EventBody {
    EventBody::Delta {
        text: "a piece of text as an agent streams it, ".repeat(3),
    }
}

async fn appends(report: &mut Report, effort: Effort) -> Result<()> {
    const SESSIONS: usize = 50;
    let dir = tempfile::tempdir()?;
    let store = Store::open(&dir.path().join("oubliette.db")).await?;
    let (begun, long) = (Instant::now(), Duration::from_millis(effort.of(5000) as u64));
    let writers = (0..SESSIONS).map(|_| {
        let log = store.events().clone();
        tokio::spawn(async move {
            let (session, mut appended) = (SessionId::generate(), 0);
            while begun.elapsed() < long {
                log.append(&session, vec![delta()]).await?;
                appended += 1;
            }
            anyhow::Ok(appended)
        })
    });
    let mut appended = 0;
    for writer in try_join_all(writers).await? {
        appended += writer?;
    }
    let rate = f64::from(appended) / begun.elapsed().as_secs_f64();
    let note = "one event an append, each waited for";
    report.row(
        NAME,
        "events appended durably by 50 sessions",
        rate,
        "/s",
        Target::AtLeast(10_000.0),
        note,
    );
    store.close().await;
    Ok(())
}

/// From the log by itself, and over HTTP to a client.
async fn replay(report: &mut Report, effort: Effort) -> Result<()> {
    let events = effort.of(100_000) / 1000 * 1000;
    let home = Home::new("").await?;
    home.talker("talker")?;
    let server = home.start().await?;
    let mut rest = server.rest().await?;
    let project = rest.project("one", json!({})).await?;
    let session = rest.session(&project, "talker", None).await?;
    let known = rest.tool("session_get", json!({ "session_id": session })).await?;
    rest.tool("session_end", json!({ "session_id": session })).await?;
    server.stop().await?;

    let store = Store::open(&home.path().join("oubliette.db")).await?;
    let id = log_of(&store, &known, events).await?;
    let begun = clock::now();
    let replayed = store.events().follow(&id, -1).take(events).count().await;
    let took = clock::since(begun).as_secs_f64();
    store.close().await;
    ensure!(replayed == events, "{replayed} events");
    report.row(
        NAME,
        format!("replay of {events} events from the log"),
        took,
        "s",
        Target::AtMost(1.0),
        "",
    );

    let server = home.start().await?;
    let begun = clock::now();
    let mut stream = server
        .rest()
        .await?
        .0
        .listen(&format!("/api/sessions/{id}/events"))
        .await?;
    for _ in 0..events {
        stream.next().await?;
    }
    let took = clock::since(begun).as_secs_f64();
    report.row(
        NAME,
        "the same to a client, as server-sent events",
        took,
        "s",
        Target::AtMost(1.0),
        "",
    );
    server.stop().await
}

/// A session that is over, with so many events.
async fn log_of(store: &Store, like: &Value, events: usize) -> Result<SessionId> {
    let id = SessionId::generate();
    let now = oubliette_store::now();
    let row = SessionRow {
        session_id: id.clone(),
        project_id: text(like, "project_id")?.parse()?,
        workspace_id: text(like, "workspace_id")?.parse()?,
        agent: "talker".parse()?,
        status: Status::Ended,
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
    };
    store.session_insert(row).await?;
    for _ in 0..events / 1000 {
        store
            .events()
            .append(&id, (0..1000).map(|_| delta()).collect())
            .await?;
    }
    Ok(id)
}

/// Whether an idle session gives its agent back.
#[derive(Clone, Copy, PartialEq)]
enum Sleep {
    Never,
    Soon,
}

/// Starts sessions, a few at once, each through its first turn.
async fn sessions(server: &Server, project: &str, agent: &str, count: usize) -> Result<()> {
    const AT_ONCE: usize = 4;
    let starters = (0..AT_ONCE).map(async |starter| {
        let mut rest = server.rest().await?;
        for _ in (starter..count).step_by(AT_ONCE) {
            rest.session(project, agent, None).await?;
        }
        anyhow::Ok(())
    });
    try_join_all(starters).await?;
    Ok(())
}

async fn idle(report: &mut Report, effort: Effort, sleep: Sleep) -> Result<()> {
    let many = effort.of(300);
    let (nap, what) = match sleep {
        Sleep::Never => ("1h", "agent kept"),
        Sleep::Soon => ("1s", "agent given back"),
    };
    let home = Home::new(&format!("[session]\nmax_sessions = 2000\nidle_sleep = \"{nap}\"")).await?;
    home.talker("talker")?;
    let server = home.start().await?;
    let mut rest = server.rest().await?;
    let project = rest.project("one", json!({})).await?;
    // What the first sessions bring in stays for all of them.
    sessions(&server, &project, "talker", 8).await?;
    let before = procs::settled(server.pid).await?;
    sessions(&server, &project, "talker", many).await?;
    if sleep == Sleep::Soon {
        while !procs::below(server.pid).is_empty() {
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    }
    let after = procs::settled(server.pid).await?;
    let each = (after.rss - before.rss) / many as f64;
    let note = format!("server alone, {many} sessions");
    report.row(
        NAME,
        format!("memory of an idle session ({what})"),
        each,
        "KiB",
        Target::AtMost(100.0),
        note,
    );
    let note = format!("resident; {:.1} MiB before", before.rss / 1024.0);
    let what = format!("server with {many} idle sessions ({what})");
    report.row(NAME, what, after.rss / 1024.0, "MiB", Target::AtMost(80.0), note);
    drop(rest);
    server.stop().await
}

/// Sessions that are all in a turn at the same moment: each calls a tool that is answered only when all have.
async fn running(report: &mut Report, effort: Effort) -> Result<()> {
    let many = effort.of(200);
    let home = Home::new(
        "[session]\nmax_sessions = 2000\nstart_timeout = \"5m\"\n[relay]\ncaller_timeout = \"10m\"",
    )
    .await?;
    let call = json!({"call": {"tool": "bench_echo", "arguments": {}}});
    home.agent(
        "worker",
        json!({}),
        Some(json!({"turns": [[call, {"say": "done"}]]})),
    )?;
    let server = home.start().await?;
    let mut rest = server.rest().await?;
    let project = rest.project("one", json!({})).await?;
    let begun = clock::now();
    let arrived = tokio::sync::Barrier::new(many + 1);
    let mut workers = Vec::new();
    for _ in 0..many {
        workers.push(worker(&server, &project, &arrived));
    }
    let counted = async {
        arrived.wait().await;
        let took = clock::since(begun);
        let query = json!({"project_id": project, "status": "running", "limit": 1000});
        let list = rest.tool("session_list", query).await?;
        let running = list["sessions"].as_array().map_or(0, Vec::len);
        let processes = procs::below(server.pid);
        let memory = procs::memory_of(&processes).pss / 1024.0;
        let own = procs::memory(server.pid)?.rss / 1024.0;
        // All are counted: now they may end.
        arrived.wait().await;
        anyhow::Ok((took, running, processes.len(), memory, own))
    };
    let (done, counted) = futures::future::join(try_join_all(workers), counted).await;
    let (took, running, processes, memory, own) = counted?;
    let ended = done?.len();
    ensure!(ended == many, "{ended} of {many} turns ended well");
    let note = format!(
        "all in one turn after {:.1} s; {processes} processes with {memory:.0} MiB, server {own:.0} MiB",
        ms(took) / 1000.0
    );
    let target = Target::AtLeast(many as f64);
    report.row(
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

/// One session from its message to its last word.
async fn worker(server: &Server, project: &str, arrived: &tokio::sync::Barrier) -> Result<()> {
    let mut rest = server.rest().await?;
    let message =
        json!({"project_id": project, "agent": "worker", "message": "go", "context": crate::caller::lent()});
    let session = text(&rest.tool("session_message", message).await?, "session_id")?;
    let mut since = -1;
    let request = event(&mut rest, &session, &mut since, "caller_tool_request").await?;
    {
        // Waiting for the others, it stays present by listening.
        let mut present = server.rest().await?;
        let listening = async {
            let mut since = since;
            event(&mut present, &session, &mut since, "turn_completed").await
        };
        tokio::select! {
            ended = listening => { ended?; anyhow::bail!("a turn ended before all had begun") }
            () = async { arrived.wait().await; arrived.wait().await; } => {}
        }
    }
    let answer = json!({"session_id": session, "request_id": request["request_id"], "result": "ok"});
    rest.tool("caller_tool_response", answer).await?;
    event(&mut rest, &session, &mut since, "turn_completed").await?;
    Ok(())
}

/// The next event of a type, by long polls.
async fn event(rest: &mut Rest, session: &str, since: &mut i64, kind: &str) -> Result<Value> {
    loop {
        let query = json!({"session_id": session, "since_index": *since, "wait_ms": 20_000});
        let page = rest.tool("session_events", query).await?;
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
