//! The caller relay over very many calls: the server's resources do not grow with their number.
//!
//! `OUBLIETTE_RELAY_CALLS` sets how many (default 10,000). Most are answered; some fail, time out, are
//! cancelled, or lose their agent or their caller. Every call ends exactly once.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::{
    collections::{BTreeMap, HashMap},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, bail, ensure};
use futures::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream};
use oubliette_tests::{
    RelaySocketClient, SpawnedServer, ToolApi, api::text_field, raw, wait_until, within_deadline,
};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

const CONFIG: &str = "[relay]\ncaller_timeout = '4s'\nreconnect_grace = '300ms'\n";
const SESSIONS: u64 = 4;
/// How many calls of one session are open at once.
const OPEN_CALLS_PER_SESSION: usize = 64;
/// How many connections one caller sends its answers over.
const ANSWER_CONNECTIONS: usize = 3;
/// After how many requests a caller closes its stream and opens a new one.
const REQUESTS_PER_STREAM: u64 = 500;
/// After every this many streams the caller stays away for longer than the grace period.
const LONG_ABSENCE_EVERY: u64 = 4;

/// What happens to a call; decided by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CallFate {
    Answer,
    Fail,
    Ignore,
    /// The agent cancels it.
    Cancel,
    /// The agent closes its connection.
    HangUp,
}

impl CallFate {
    fn of(call: u64) -> Self {
        match call % 500 {
            7 => CallFate::Ignore,
            n if n % 100 == 11 => CallFate::HangUp,
            n if n % 50 == 21 => CallFate::Cancel,
            n if n % 20 == 5 => CallFate::Fail,
            _ => CallFate::Answer,
        }
    }
}

/// How many calls the test makes.
fn total_calls() -> u64 {
    let given = std::env::var("OUBLIETTE_RELAY_CALLS").ok();
    given.and_then(|n| n.parse().ok()).unwrap_or(10_000)
}

struct LeakTestSession {
    session: String,
    socket: String,
    port: u16,
    token: String,
    ended: Mutex<BTreeMap<&'static str, u64>>,
    done: AtomicU64,
    agent_done: watch::Sender<bool>,
}

impl LeakTestSession {
    /// The agent's side: makes the calls, a limited number at a time.
    async fn run_agent(&self, calls: u64) -> Result<()> {
        let socket = RelaySocketClient::open(&self.socket).await?;
        stream::iter(0..calls)
            .map(|call| self.call(&socket, call))
            .buffer_unordered(OPEN_CALLS_PER_SESSION)
            .try_for_each(|ending| {
                *self.ended.lock().unwrap().entry(ending).or_default() += 1;
                self.done.fetch_add(1, Ordering::Relaxed);
                std::future::ready(Ok(()))
            })
            .await?;
        ensure!(
            socket.stray_answers().is_empty(),
            "answers to nothing: {:?}",
            socket.stray_answers()
        );
        self.agent_done.send_replace(true);
        Ok(())
    }

    async fn call(&self, socket: &RelaySocketClient, call: u64) -> Result<&'static str> {
        let params = json!({ "tool": "echo", "arguments": { "call": call } });
        if CallFate::of(call) == CallFate::HangUp {
            let own = RelaySocketClient::open(&self.socket).await?;
            let (_, answer) = own.request("caller_tool", params).await?;
            // Closes at any stage: before the caller hears of the call, before its answer, or after.
            let _ = tokio::time::timeout(Duration::from_millis(call % 5), answer).await;
            return Ok("hung up");
        }
        let (id, answer) = socket.request("caller_tool", params).await?;
        if CallFate::of(call) == CallFate::Cancel {
            tokio::time::sleep(Duration::from_millis(call % 5)).await;
            socket.cancel(id).await?;
        }
        let answer = within_deadline("a call to end", answer)
            .await?
            .context("the connection ended")?;
        self.check_answer(call, &answer)
    }

    /// Checks that the answer is this call's own result, or an error that fits its fate.
    fn check_answer(&self, call: u64, answer: &Value) -> Result<&'static str> {
        let code = answer["error"]["data"]["code"].as_str();
        let (fate, result) = (CallFate::of(call), answer.get("result"));
        Ok(match (result, code) {
            // A cancelled call may have been answered just before.
            (Some(value), None) if *value == json!({ "call": call }) && fate != CallFate::Ignore => {
                "answered"
            }
            (None, Some("tool_error")) if fate == CallFate::Fail => "failed",
            (None, Some("unavailable")) if fate == CallFate::Cancel => "cancelled",
            // On a busy machine any call may time out.
            (None, Some("timeout")) => "timed out",
            (None, Some("caller_disconnected")) => "lost",
            _ => bail!("call {call} with {fate:?} got {answer}"),
        })
    }

    /// The caller's side: its stream closes again and again, sometimes for longer than the grace period.
    async fn run_caller(&self) -> Result<()> {
        let mut over = self.agent_done.subscribe();
        let (answers, queue) = mpsc::channel::<Value>(OPEN_CALLS_PER_SESSION);
        let queue = Arc::new(tokio::sync::Mutex::new(queue));
        let senders = try_join_all((0..ANSWER_CONNECTIONS).map(|_| self.send_answers(queue.clone())));
        let listening = async move {
            let (mut last, mut times) = (-1, 0);
            // Recent request ids: delivery is at least once, and each request must be answered once.
            let mut known: HashMap<String, i64> = HashMap::new();
            while !*over.borrow() {
                let opened =
                    raw::RawEventStream::open(self.port, &self.token, &self.session, "app", last).await;
                let mut stream = opened?;
                for _ in 0..REQUESTS_PER_STREAM {
                    let event = tokio::select! {
                        event = stream.next_of("caller_tool_request") => event?,
                        _ = over.wait_for(|over| *over) => break,
                    };
                    let index = event["index"].as_i64().context("index")?;
                    last = last.max(index);
                    if known.insert(text_field(&event, "request_id")?, index).is_none()
                        && let Some(response) = self.response(&event)?
                    {
                        answers.send(response).await?;
                    }
                }
                drop(stream);
                known.retain(|_, index| *index > last - 10_000);
                times += 1;
                if times % LONG_ABSENCE_EVERY == 0 {
                    // The simulated fault: longer than the grace period, even if the server notices it late.
                    tokio::time::sleep(Duration::from_secs(2)).await;
                }
            }
            anyhow::Ok(())
        };
        tokio::try_join!(listening, senders)?;
        Ok(())
    }

    fn response(&self, event: &Value) -> Result<Option<Value>> {
        let call = event["arguments"]["call"].as_u64().context("call")?;
        let mut response = json!({ "session_id": self.session, "request_id": event["request_id"] });
        match CallFate::of(call) {
            CallFate::Ignore => return Ok(None),
            CallFate::Fail => response["error"] = json!("no"),
            CallFate::Answer | CallFate::Cancel | CallFate::HangUp => {
                response["result"] = event["arguments"].clone()
            }
        }
        Ok(Some(response))
    }

    async fn send_answers(&self, queue: Arc<tokio::sync::Mutex<mpsc::Receiver<Value>>>) -> Result<()> {
        let mut connection = raw::RawToolConnection::open(self.port, &self.token).await?;
        loop {
            let Some(response) = queue.lock().await.recv().await else {
                return Ok(());
            };
            let (status, _) = connection.post("caller_tool_response", &response).await?;
            // 404: cancelled, or too late.
            ensure!(matches!(status, 200 | 404), "HTTP {status} to {response}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn very_many_calls_leave_nothing() -> Result<()> {
    let mut server = SpawnedServer::start(CONFIG).await?;
    let project = server.admin().create_project(SESSIONS).await?;
    server
        .admin()
        .put_scripted_agent("idle", json!([[{ "say": "here" }]]))
        .await?;
    let token = server.create_token("write").await?;
    let (mut test_sessions, caller) = (Vec::new(), ToolApi::new(&server.url(), &token));
    for _ in 0..SESSIONS {
        let session = caller.start_idle_session(&project).await?;
        test_sessions.push(LeakTestSession {
            socket: server.admin().relay_socket(&session).await?,
            session,
            port: server.port(),
            token: token.clone(),
            ended: Mutex::default(),
            done: AtomicU64::new(0),
            agent_done: watch::Sender::new(false),
        });
    }
    drop(caller);
    let before = server.wait_at_rest().await?;
    let (calls, started, fresh) = (total_calls() / SESSIONS, Instant::now(), server.resident_bytes()?);
    let done = || {
        test_sessions
            .iter()
            .map(|s| s.done.load(Ordering::Relaxed))
            .sum::<u64>()
    };
    // The first third fills bounded caches, remembered requests and the allocator's reserves; memory is compared
    // from then on.
    let memory = async {
        while done() < calls * SESSIONS / 3 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        server.resident_bytes()
    };
    let agents = try_join_all(
        test_sessions
            .iter()
            .map(|test_session| test_session.run_agent(calls)),
    );
    let callers = try_join_all(test_sessions.iter().map(LeakTestSession::run_caller));
    let (memory, _, _) = tokio::try_join!(memory, agents, callers)?;
    let took = started.elapsed().as_secs_f64();
    let after = server.check_nothing_left(before).await?;
    let mut ended: BTreeMap<&str, u64> = BTreeMap::new();
    for (ending, count) in test_sessions.iter().flat_map(|s| s.ended.lock().unwrap().clone()) {
        *ended.entry(ending).or_default() += count;
    }
    println!(
        "{} calls in {took:.1} s: {ended:?}\nbefore {before:?}\nafter  {after:?}",
        done()
    );
    let resident = server.resident_bytes()?;
    println!(
        "resident: {} KiB, after a third {} KiB, at the end {} KiB",
        fresh >> 10,
        memory >> 10,
        resident >> 10
    );
    ensure!(done() == calls * SESSIONS);
    for ending in ["answered", "failed", "timed out", "lost", "cancelled", "hung up"] {
        ensure!(ended.contains_key(ending), "no call {ending}");
    }
    let grown = resident.saturating_sub(memory) >> 20;
    ensure!(grown < 32, "the server grew by {grown} MiB");
    for test_session in &test_sessions {
        // The agent may get its answer shortly before the call's end is in the log.
        wait_until("the log to be whole", || async {
            let whole = check_log(server.admin(), test_session, calls).await;
            whole.map_err(|why| why.to_string())
        })
        .await?;
    }
    server.stop().await
}

/// Checks that the log has exactly one end for each request, and a request for each end.
async fn check_log(admin: &ToolApi, test_session: &LeakTestSession, calls: u64) -> Result<()> {
    // Reading the log takes too long after a very long run; the counts of the run must do.
    if calls > 100_000 {
        return Ok(());
    }
    let mut open: HashMap<String, u64> = HashMap::new();
    let (mut asked, mut ended) = (0, 0);
    for event in admin.all_events(&test_session.session).await? {
        match event["type"].as_str() {
            Some("caller_tool_request") => {
                asked += 1;
                let call = event["arguments"]["call"].as_u64().context("call")?;
                ensure!(
                    open.insert(text_field(&event, "request_id")?, call).is_none(),
                    "an id twice"
                );
            }
            Some("caller_tool_done") => {
                ended += 1;
                let known = open.remove(&text_field(&event, "request_id")?);
                ensure!(
                    known.is_some(),
                    "an end without a beginning, or a second one: {event}"
                );
            }
            _ => {}
        }
    }
    ensure!(open.is_empty() && asked == ended, "still open: {open:?}");
    ensure!(asked <= calls, "{asked} requests for {calls} calls");
    Ok(())
}
