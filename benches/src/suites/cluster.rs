//! PostgreSQL, and several servers on one database: throughput of the event log, calls whose caller is at another server
//! than their session, lists from one server and from three, the time until another server goes on, the start.

use std::time::{Duration, Instant};

use anyhow::{Context, Result, ensure};
use futures::future::try_join_all;
use oubliette_protocol::{ProjectId, SessionId, WorkspaceId, WorkspacePolicy, event::SessionStatus};
use oubliette_store::{
    ClusterOptions, ProjectRow, SessionRow, Store, StoreLocation, StoreOptions, WorkspaceRow,
};
use rustix::process::Signal;
use serde_json::json;

use super::{
    BenchEffort,
    sessions::{APPENDING_SESSIONS, append_rate, delta_event},
};
use crate::{
    caller::{BenchCaller, lent_tool_context},
    clock,
    cluster::BenchCluster,
    home::{BenchHome, HomeOptions, RestClient, client_command},
    lines::JsonRpcLines,
    postgres::BenchPostgres,
    procs::{self, MachineCpuTime},
    report::{BenchReport, BenchTarget},
    stats::{TimingSamples, time_interleaved},
};

const NAME: &str = "PostgreSQL and several servers";
/// How many servers share the database.
const SERVERS: usize = 3;
/// How many requests for lists are under way at the same time.
const LISTS_AT_ONCE: usize = 24;
/// How long a request of a client may be refused while its session changes servers, before the suite fails.
const TAKEOVER_TIMEOUT: Duration = Duration::from_secs(120);
/// How long a client waits after a refusal.
const RETRY_WAIT: Duration = Duration::from_millis(20);

pub(crate) async fn run(report: &mut BenchReport, effort: BenchEffort) -> Result<()> {
    let postgres = BenchPostgres::start().await?;
    Box::pin(measure_appends(report, effort, &postgres)).await?;
    measure_start(report, effort, &postgres).await?;
    let mut cluster = BenchCluster::start(&postgres, "cluster", SERVERS).await?;
    let project = cluster
        .connect_rest(0)
        .await?
        .create_project("one", json!({}))
        .await?;
    measure_relayed_call(report, effort, &cluster, &project).await?;
    measure_lists(report, effort, &cluster).await?;
    for (loss, samples) in [(ServerLoss::Killed, 5), (ServerLoss::Frozen, 3)] {
        measure_takeover(report, effort.scale(samples), &mut cluster, &project, loss).await?;
    }
    cluster.stop().await
}

/// The event log on PostgreSQL, of a server alone and of one of a cluster, beside bare commits.
async fn measure_appends(
    report: &mut BenchReport,
    effort: BenchEffort,
    postgres: &BenchPostgres,
) -> Result<()> {
    let url = postgres.create_schema("alone").await?;
    let store = Store::open_at(&StoreLocation::Postgres(url.parse()?), &StoreOptions::default()).await?;
    let sessions = (0..APPENDING_SESSIONS).map(|_| SessionId::generate()).collect();
    let alone = append_rate(&store, sessions, effort).await?;
    store.close().await;
    let (bare, bare_note) = bare_commit_rates(effort, postgres).await?;

    let url = postgres.create_schema("member").await?;
    let options = StoreOptions {
        cluster: Some(ClusterOptions {
            address: "http://127.0.0.1:1".into(),
            key_fingerprint: "bench".into(),
        }),
        ..StoreOptions::default()
    };
    let store = Store::open_at(&StoreLocation::Postgres(url.parse()?), &options).await?;
    let sessions = insert_sessions(&store).await?;
    let member = append_rate(&store, sessions, effort).await?;
    store.close().await;

    let what = "events appended durably by 50 sessions, on PostgreSQL";
    let note = "one event an append, each waited for";
    report.add_row(NAME, what, alone, "/s", BenchTarget::AtLeast(15_000.0), note);
    let what = "the same to bare commits of PostgreSQL";
    report.add_row(NAME, what, alone / bare, "×", BenchTarget::None, bare_note);
    let what = "events appended durably by 50 sessions, by a server of a cluster";
    let note = "each transaction checks its lease and that it owns the sessions";
    report.add_row(NAME, what, member, "/s", BenchTarget::AtLeast(15_000.0), note);
    Ok(())
}

/// Rows like an event's that 50 connections insert and commit, one row a commit each; and a note that says how many one
/// connection alone does.
async fn bare_commit_rates(effort: BenchEffort, postgres: &BenchPostgres) -> Result<(f64, String)> {
    postgres
        .execute(
            "CREATE SCHEMA bare; CREATE TABLE bare.events (log bigint NOT NULL, idx bigint NOT NULL, ts bigint NOT NULL, \
             body text NOT NULL, PRIMARY KEY (log, idx))",
        )
        .await?;
    let body = serde_json::to_string(&delta_event())?.replace('\'', "''");
    let script = tempfile::NamedTempFile::new()?;
    let insert = format!(
        "\\set idx random(0, 1000000000000000000)\n\
         INSERT INTO bare.events (log, idx, ts, body) VALUES (:client_id, :idx, 0, '{body}');\n"
    );
    std::fs::write(script.path(), insert)?;
    let long = Duration::from_millis(effort.scale(5000) as u64);
    let many = postgres
        .pgbench_rate(script.path(), APPENDING_SESSIONS, long)
        .await?;
    let one = postgres.pgbench_rate(script.path(), 1, long).await?;
    let note = format!(
        "pgbench: {APPENDING_SESSIONS} connections that each insert and commit one such row at a time {many:.0}/s, one connection {one:.0}/s"
    );
    Ok((many, note))
}

/// Rows of a project and of its sessions, for events that are appended without a server.
async fn insert_sessions(store: &Store) -> Result<Vec<SessionId>> {
    let (project_id, workspace_id) = (ProjectId::generate(), WorkspaceId::generate());
    let now = oubliette_store::now();
    let project = ProjectRow {
        project_id: project_id.clone(),
        name: "one".into(),
        description: String::new(),
        agent: None,
        env: Default::default(),
        api_key_scope: None,
        sandbox: json!({}),
        limits: json!({}),
        default_workspace: workspace_id.clone(),
        workspaces: WorkspacePolicy::Shared,
        created_at: now,
        updated_at: now,
    };
    let workspace = WorkspaceRow {
        workspace_id: workspace_id.clone(),
        project_id: project_id.clone(),
        name: "default".into(),
        env: Default::default(),
        source: None,
        created_at: now,
    };
    store.project_create(project, workspace).await?;
    let mut sessions = Vec::with_capacity(APPENDING_SESSIONS);
    for _ in 0..APPENDING_SESSIONS {
        let id = SessionId::generate();
        let row = SessionRow {
            session_id: id.clone(),
            project_id: project_id.clone(),
            workspace_id: workspace_id.clone(),
            agent: "talker".parse()?,
            status: SessionStatus::Idle,
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
        sessions.push(id);
    }
    Ok(sessions)
}

async fn measure_start(
    report: &mut BenchReport,
    effort: BenchEffort,
    postgres: &BenchPostgres,
) -> Result<()> {
    let url = postgres.create_schema("start").await?;
    let options = HomeOptions {
        env: vec![("OUBLIETTE_STORE_URL", url)],
        ..HomeOptions::default()
    };
    // Making its token makes the tables, which no measured start has to.
    let home = BenchHome::with_options("", options).await?;
    let mut times = TimingSamples::default();
    for _ in 0..effort.scale(20) {
        let server = home.spawn().await?;
        times.push(server.wait_ready().await?);
        server.stop().await?;
    }
    let note = format!("p95 {:.0} ms, {} starts", times.p95(), times.len());
    let what = "start of the process to `/ready` on PostgreSQL, p50";
    report.add_row(NAME, what, times.p50(), "ms", BenchTarget::None, note);
    Ok(())
}

/// A call of a caller's tool whose session is at the first server: the caller's stream and its answers are at the second, or
/// at the first as well.
async fn measure_relayed_call(
    report: &mut BenchReport,
    effort: BenchEffort,
    cluster: &BenchCluster,
    project: &str,
) -> Result<()> {
    let mut rest = cluster.connect_rest(0).await?;
    let mut agents = Vec::new();
    let mut callers = Vec::new();
    for caller_at in [1, 0] {
        let session = rest
            .start_session(project, "talker", Some(lent_tool_context()))
            .await?;
        let socket = rest.relay_socket(&session).await?;
        agents.push(JsonRpcLines::spawn_mcp(&mut client_command(&socket, None)?).await?);
        callers.push(
            BenchCaller::follow_session(cluster.server(caller_at)?, &session)
                .await?
                .serve(),
        );
    }
    let [elsewhere, here] = &mut agents[..] else {
        anyhow::bail!("two agents");
    };
    let call = json!({"name": "bench_echo", "arguments": {"text": "hello"}});
    let (elsewhere, here) = time_interleaved(
        effort.scale(20),
        50,
        async || elsewhere.call("tools/call", &call).await,
        async || here.call("tools/call", &call).await,
    )
    .await?;
    let note = format!(
        "agent's line to its answer, {} calls, p99 {:.2} ms",
        elsewhere.len(),
        elsewhere.p99()
    );
    let what = "a call of a caller's tool, its caller at another server than the session, p50";
    report.add_row(NAME, what, elsewhere.p50(), "ms", BenchTarget::AtMost(3.0), note);
    let note = format!("the same cluster, in turn; p99 {:.2} ms", here.p99());
    let what = "the same, its caller at the session's server, p50";
    report.add_row(NAME, what, here.p50(), "ms", BenchTarget::None, note);
    Ok(())
}

/// How many lists of projects a second one server gives, and all of them together.
async fn measure_lists(report: &mut BenchReport, effort: BenchEffort, cluster: &BenchCluster) -> Result<()> {
    const ROUNDS: usize = 4;
    let long = Duration::from_millis(effort.scale(8000) as u64) / ROUNDS as u32;
    let (mut at_one, mut at_all) = (Vec::new(), Vec::new());
    for number in 0..LISTS_AT_ONCE {
        at_one.push(cluster.connect_rest(0).await?);
        at_all.push(cluster.connect_rest(number % cluster.len()).await?);
    }
    // Warm-up, not counted: connections to the database are opened.
    list_rate(&mut at_one, long / 4).await?;
    list_rate(&mut at_all, long / 4).await?;
    let (mut one, mut all, mut busy) = (0.0, 0.0, 0.0);
    for _ in 0..ROUNDS {
        let before = MachineCpuTime::now()?;
        one += list_rate(&mut at_one, long).await? / ROUNDS as f64;
        busy += MachineCpuTime::now()?.busy_since(before) / ROUNDS as f64;
        all += list_rate(&mut at_all, long).await? / ROUNDS as f64;
    }
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let percent = busy * 100.0;
    let what = "`project_list` of one server";
    let note = format!(
        "{LISTS_AT_ONCE} under way; clients, server and database on the same {cores} cores, which are {percent:.0} % busy"
    );
    report.add_row(NAME, what, one, "/s", BenchTarget::None, note);
    // Twice the lists take twice the processor time.
    let (target, note) = match busy <= 0.5 {
        true => (BenchTarget::AtLeast(2.0), format!("{all:.0}/s")),
        false => (
            BenchTarget::None,
            format!(
                "{all:.0}/s; no target here: {cores} cores are {percent:.0} % busy already when one server is asked, and twice as \
                 many lists take twice as much (≥ 2× where it is at most half)"
            ),
        ),
    };
    let what = format!("`project_list` of {SERVERS} servers to that of one");
    report.add_row(NAME, what, all / one, "×", target, note);
    Ok(())
}

/// How many lists of projects a second these clients get, one at a time each.
async fn list_rate(clients: &mut [RestClient], long: Duration) -> Result<f64> {
    let begun = Instant::now();
    let lists = clients.iter_mut().map(async |client| {
        let mut listed = 0_u32;
        while begun.elapsed() < long {
            client.call_unparsed("project_list", "{}").await?;
            listed += 1;
        }
        anyhow::Ok(listed)
    });
    let listed: u32 = try_join_all(lists).await?.into_iter().sum();
    Ok(f64::from(listed) / begun.elapsed().as_secs_f64())
}

/// How a server is lost.
#[derive(Clone, Copy)]
enum ServerLoss {
    /// Its process is killed, which another one on the same machine sees.
    Killed,
    /// It is stopped with SIGSTOP: as of one whose machine is gone, only its silence tells.
    Frozen,
}

/// The time from the loss of the server that runs a session until a message sent through another one has been answered by
/// its agent. The client sends it at once, and again after each refusal.
async fn measure_takeover(
    report: &mut BenchReport,
    samples: usize,
    cluster: &mut BenchCluster,
    project: &str,
    loss: ServerLoss,
) -> Result<()> {
    let mut times = TimingSamples::default();
    for _ in 0..samples {
        let session = cluster
            .connect_rest(0)
            .await?
            .start_session(project, "talker", None)
            .await?;
        let mut other = cluster.connect_rest(1).await?;
        let lost_at = match loss {
            ServerLoss::Killed => cluster.kill(0).await?,
            ServerLoss::Frozen => {
                let at = clock::now();
                procs::send_signal(cluster.server(0)?.pid, Signal::STOP);
                at
            }
        };
        let answered =
            tokio::time::timeout(TAKEOVER_TIMEOUT, send_until_answered(&mut other, &session)).await;
        times.push(clock::since(lost_at));
        match loss {
            ServerLoss::Killed => cluster.start_again(0).await?,
            ServerLoss::Frozen => {
                procs::send_signal(cluster.server(0)?.pid, Signal::CONT);
                cluster.wait_until_whole().await?;
            }
        }
        answered.context("no other server goes on with the session")??;
    }
    let what = match loss {
        ServerLoss::Killed => "`kill -9` of a session's server until another one has answered a message",
        ServerLoss::Frozen => {
            "the same after the server was frozen, which only its silence tells, as of another machine's"
        }
    };
    let note = format!(
        "the slowest of {}; p50 {:.2} s",
        times.len(),
        times.p50() / 1000.0
    );
    let slowest = times.percentile(100.0) / 1000.0;
    report.add_row(NAME, what, slowest, "s", BenchTarget::AtMost(15.0), note);
    Ok(())
}

async fn send_until_answered(rest: &mut RestClient, session: &str) -> Result<()> {
    let message = json!({"session_id": session, "message": "go on", "wait": true}).to_string();
    loop {
        let answer = rest.0.post("/api/tools/session_message", "", &message).await?;
        if answer.status == 200 {
            return Ok(());
        }
        let error = answer.json()?;
        ensure!(
            error["error"]["code"] == "unavailable",
            "status {}: {error}",
            answer.status
        );
        tokio::time::sleep(RETRY_WAIT).await;
    }
}
