//! The caller relay over very many calls: what the server holds does not grow with their number.
//!
//! `OUBLIETTE_RELAY_CALLS` says how many; a million is a run of its own. Most are answered; some fail, time
//! out, are given up, lose their agent or their caller. Every one ends, once.

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
use oubliette_tests::{Api, Server, Socket, api::text, raw, settles, within};
use serde_json::{Value, json};
use tokio::sync::{mpsc, watch};

const CONFIG: &str = "[relay]\ncaller_timeout = '4s'\nreconnect_grace = '300ms'\n";
const SESSIONS: u64 = 4;
/// Calls of one session that are open at once.
const WIDE: usize = 64;
/// Connections one caller answers over.
const LANES: usize = 3;
/// Requests after which a caller's stream is broken off and opened again.
const BROKEN_AFTER: u64 = 500;
/// Every so many of these the caller is away for longer than it may be.
const AWAY_EACH: u64 = 4;

/// What becomes of a call, by its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Answer,
    Fail,
    Ignore,
    /// The agent gives it up.
    Cancel,
    /// The agent's connection ends.
    HangUp,
}

impl Fate {
    fn of(call: u64) -> Self {
        match call % 500 {
            7 => Fate::Ignore,
            n if n % 100 == 11 => Fate::HangUp,
            n if n % 50 == 21 => Fate::Cancel,
            n if n % 20 == 5 => Fate::Fail,
            _ => Fate::Answer,
        }
    }
}

/// How many calls there are to be.
fn wanted() -> u64 {
    let given = std::env::var("OUBLIETTE_RELAY_CALLS").ok();
    given.and_then(|n| n.parse().ok()).unwrap_or(10_000)
}

struct Scene {
    session: String,
    socket: String,
    port: u16,
    token: String,
    ended: Mutex<BTreeMap<&'static str, u64>>,
    done: AtomicU64,
    over: watch::Sender<bool>,
}

impl Scene {
    /// The agent: so many calls, a window of them at a time.
    async fn agent(&self, calls: u64) -> Result<()> {
        let socket = Socket::open(&self.socket).await?;
        stream::iter(0..calls)
            .map(|call| self.call(&socket, call))
            .buffer_unordered(WIDE)
            .try_for_each(|ending| {
                *self.ended.lock().unwrap().entry(ending).or_default() += 1;
                self.done.fetch_add(1, Ordering::Relaxed);
                std::future::ready(Ok(()))
            })
            .await?;
        ensure!(
            socket.stray().is_empty(),
            "answers to nothing: {:?}",
            socket.stray()
        );
        self.over.send_replace(true);
        Ok(())
    }

    async fn call(&self, socket: &Socket, call: u64) -> Result<&'static str> {
        let params = json!({ "tool": "echo", "arguments": { "call": call } });
        if Fate::of(call) == Fate::HangUp {
            let own = Socket::open(&self.socket).await?;
            let (_, answer) = own.request("caller_tool", params).await?;
            // Heard or not yet heard, answered or not: the server must cope with each.
            let _ = tokio::time::timeout(Duration::from_millis(call % 5), answer).await;
            return Ok("hung up");
        }
        let (id, answer) = socket.request("caller_tool", params).await?;
        if Fate::of(call) == Fate::Cancel {
            tokio::time::sleep(Duration::from_millis(call % 5)).await;
            socket.cancel(id).await?;
        }
        let answer = within("a call to end", answer)
            .await?
            .context("the connection ended")?;
        self.judge(call, &answer)
    }

    /// Its own answer, or an error that is true.
    fn judge(&self, call: u64, answer: &Value) -> Result<&'static str> {
        let code = answer["error"]["data"]["code"].as_str();
        let (fate, result) = (Fate::of(call), answer.get("result"));
        Ok(match (result, code) {
            // One that is given up may have been answered just before.
            (Some(value), None) if *value == json!({ "call": call }) && fate != Fate::Ignore => "answered",
            (None, Some("tool_error")) if fate == Fate::Fail => "failed",
            (None, Some("unavailable")) if fate == Fate::Cancel => "cancelled",
            // A busy machine runs out of time by itself.
            (None, Some("timeout")) => "timed out",
            (None, Some("caller_disconnected")) => "lost",
            _ => bail!("call {call} with {fate:?} got {answer}"),
        })
    }

    /// The caller: a stream that breaks off again and again, sometimes for too long.
    async fn caller(&self) -> Result<()> {
        let mut over = self.over.subscribe();
        let (answers, queue) = mpsc::channel::<Value>(WIDE);
        let queue = Arc::new(tokio::sync::Mutex::new(queue));
        let lanes = try_join_all((0..LANES).map(|_| self.lane(queue.clone())));
        let listening = async move {
            let (mut last, mut times) = (-1, 0);
            // The last ones: at least once is not once, and the caller answers each once.
            let mut known: HashMap<String, i64> = HashMap::new();
            while !*over.borrow() {
                let opened = raw::Lines::open(self.port, &self.token, &self.session, "app", last).await;
                let mut stream = opened?;
                for _ in 0..BROKEN_AFTER {
                    let event = tokio::select! {
                        event = stream.next_of("caller_tool_request") => event?,
                        _ = over.wait_for(|over| *over) => break,
                    };
                    let index = event["index"].as_i64().context("index")?;
                    last = last.max(index);
                    if known.insert(text(&event, "request_id")?, index).is_none()
                        && let Some(response) = self.response(&event)?
                    {
                        answers.send(response).await?;
                    }
                }
                drop(stream);
                known.retain(|_, index| *index > last - 10_000);
                times += 1;
                if times % AWAY_EACH == 0 {
                    // The fault itself: longer than the grace, also for a server that notices it late.
                    tokio::time::sleep(Duration::from_secs(2)).await;
                }
            }
            anyhow::Ok(())
        };
        tokio::try_join!(listening, lanes)?;
        Ok(())
    }

    fn response(&self, event: &Value) -> Result<Option<Value>> {
        let call = event["arguments"]["call"].as_u64().context("call")?;
        let mut response = json!({ "session_id": self.session, "request_id": event["request_id"] });
        match Fate::of(call) {
            Fate::Ignore => return Ok(None),
            Fate::Fail => response["error"] = json!("no"),
            Fate::Answer | Fate::Cancel | Fate::HangUp => response["result"] = event["arguments"].clone(),
        }
        Ok(Some(response))
    }

    async fn lane(&self, queue: Arc<tokio::sync::Mutex<mpsc::Receiver<Value>>>) -> Result<()> {
        let mut lane = raw::Lane::open(self.port, &self.token).await?;
        loop {
            let Some(response) = queue.lock().await.recv().await else {
                return Ok(());
            };
            let (status, _) = lane.post("caller_tool_response", &response).await?;
            // Not found: given up, or too late.
            ensure!(matches!(status, 200 | 404), "HTTP {status} to {response}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn very_many_calls_leave_nothing() -> Result<()> {
    let mut server = Server::start(CONFIG).await?;
    let project = server.admin().project(SESSIONS).await?;
    server
        .admin()
        .scripted("idle", json!([[{ "say": "here" }]]))
        .await?;
    let token = server.token("write").await?;
    let (mut scenes, caller) = (Vec::new(), Api::new(&server.url(), &token));
    for _ in 0..SESSIONS {
        let session = caller.idle_session(&project).await?;
        scenes.push(Scene {
            socket: server.admin().relay_socket(&session).await?,
            session,
            port: server.port(),
            token: token.clone(),
            ended: Mutex::default(),
            done: AtomicU64::new(0),
            over: watch::Sender::new(false),
        });
    }
    drop(caller);
    let before = server.at_rest().await?;
    let (calls, started, fresh) = (wanted() / SESSIONS, Instant::now(), server.resident()?);
    let done = || scenes.iter().map(|s| s.done.load(Ordering::Relaxed)).sum::<u64>();
    // The first of them fill what is bounded: caches, remembered requests, the allocator's reserves.
    let memory = async {
        while done() < calls * SESSIONS / 3 {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
        server.resident()
    };
    let agents = try_join_all(scenes.iter().map(|scene| scene.agent(calls)));
    let callers = try_join_all(scenes.iter().map(Scene::caller));
    let (memory, _, _) = tokio::try_join!(memory, agents, callers)?;
    let took = started.elapsed().as_secs_f64();
    let after = server.nothing_left(before).await?;
    let mut ended: BTreeMap<&str, u64> = BTreeMap::new();
    for (ending, count) in scenes.iter().flat_map(|s| s.ended.lock().unwrap().clone()) {
        *ended.entry(ending).or_default() += count;
    }
    println!(
        "{} calls in {took:.1} s: {ended:?}\nbefore {before:?}\nafter  {after:?}",
        done()
    );
    let resident = server.resident()?;
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
    for scene in &scenes {
        // An end is on its way to the log before the agent hears of it, and in it soon after.
        settles("the log to be whole", || async {
            let whole = compare(server.admin(), scene, calls).await;
            whole.map_err(|why| why.to_string())
        })
        .await?;
    }
    server.stop().await
}

/// The log has one end for each request, and a request for each end.
async fn compare(admin: &Api, scene: &Scene, calls: u64) -> Result<()> {
    // A log of a million is counted by what the run saw; reading it all is for the short one.
    if calls > 100_000 {
        return Ok(());
    }
    let mut open: HashMap<String, u64> = HashMap::new();
    let (mut asked, mut ended) = (0, 0);
    for event in admin.log(&scene.session).await? {
        match event["type"].as_str() {
            Some("caller_tool_request") => {
                asked += 1;
                let call = event["arguments"]["call"].as_u64().context("call")?;
                ensure!(
                    open.insert(text(&event, "request_id")?, call).is_none(),
                    "an id twice"
                );
            }
            Some("caller_tool_done") => {
                ended += 1;
                let known = open.remove(&text(&event, "request_id")?);
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
