//! The caller relay under load and fault: every call ends exactly once, with its own answer or a true
//! error, and nothing is left.
//!
//! Agents are raw connections to the relay sockets, callers are event streams and plain requests, so that
//! two cores carry a hundred of each. `OUBLIETTE_SEED` repeats a run.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    sync::{
        Arc, Mutex,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use anyhow::{Context as _, Result, ensure};
use futures::{StreamExt as _, TryStreamExt as _, future::try_join_all, stream, stream::FuturesUnordered};
use oubliette_tests::{Api, Server, Socket, api::text, raw, seed, settles};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use tokio::sync::{Notify, Semaphore, watch};

const SESSIONS: u64 = 100;
const CALLS: u64 = 100;
/// How long a call may take before it is called lost: far longer than the server gives it, because a busy
/// machine may take long to begin it.
const LOST: Duration = Duration::from_secs(900);

/// What becomes of one call; decided by the seed alone, so that both sides know.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Fate {
    Answer,
    Fail,
    /// The caller never answers; the agent gives it up when all others are done.
    Ignore,
    /// The agent gives it up once the caller has heard of it.
    Cancel,
}

#[derive(Debug, Clone, Copy)]
struct Plan {
    fate: Fate,
    latency: Duration,
    /// A stranger tries first.
    forged: bool,
    /// The caller answers twice.
    twice: bool,
}

impl Plan {
    fn of(seed: u64, session: u64, call: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ (session << 32) ^ (call << 16));
        let fate = match rng.random_range(0..100) {
            0..80 => Fate::Answer,
            80..92 => Fate::Fail,
            92..94 => Fate::Ignore,
            _ => Fate::Cancel,
        };
        Self {
            fate,
            latency: Duration::from_millis(rng.random_range(0..400)),
            forged: rng.random_ratio(1, 10),
            twice: rng.random_ratio(1, 5),
        }
    }
}

/// One session in one storm, with what its two sides tell each other past the server.
struct Scene {
    number: u64,
    /// The last event before them.
    from: i64,
    seed: u64,
    session: String,
    socket: String,
    port: u16,
    token: String,
    caller: Arc<raw::Lanes>,
    stranger: Arc<raw::Lanes>,
    /// How many connections all callers together use to answer.
    room: Arc<Semaphore>,
    /// Calls to be given up that the caller has heard of.
    heard: Mutex<HashSet<u64>>,
    hearing: Notify,
    /// What the server said to each answer.
    answers: Mutex<HashMap<u64, Result<(), String>>>,
    /// The caller is done.
    over: watch::Sender<bool>,
    reconnects: AtomicU64,
    repeats: AtomicU64,
}

/// How a call ended, as the agent saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum Ending {
    Answered,
    Failed,
    Timeout,
    Lost,
    Cancelled,
}

impl Scene {
    fn plan(&self, call: u64) -> Plan {
        Plan::of(self.seed, self.number, call)
    }

    fn answer(&self, call: u64) -> Value {
        json!({ "session": self.number, "call": call })
    }

    /// The agent's side: all calls at once, over two connections. When only those are left that are never
    /// answered, it gives them up.
    async fn agent(&self) -> Result<Vec<Ending>> {
        let sockets = [
            Socket::open(&self.socket).await?,
            Socket::open(&self.socket).await?,
        ];
        let mut calls: FuturesUnordered<_> = (0..CALLS)
            .map(|call| self.call(call, &sockets[usize::from(call % 2 == 1)]))
            .collect();
        let ignored = |call: u64| self.plan(call).fate == Fate::Ignore;
        let mut left = (0..CALLS).filter(|call| !ignored(*call)).count();
        let mut endings = BTreeMap::new();
        while let Some((call, ending)) = calls.try_next().await? {
            ensure!(endings.insert(call, ending).is_none(), "call {call} ended twice");
            left -= usize::from(!ignored(call));
            self.over.send_replace(left == 0);
        }
        for socket in &sockets {
            let stray = socket.stray();
            ensure!(stray.is_empty(), "answers to nothing: {stray:?}");
        }
        Ok(endings.into_values().collect())
    }

    async fn call(&self, call: u64, socket: &Socket) -> Result<(u64, Ending)> {
        let params = json!({ "tool": "echo", "arguments": { "call": call } });
        let (id, mut answer) = socket.request("caller_tool", params).await?;
        if self.plan(call).fate == Fate::Cancel {
            let gave_up = tokio::select! {
                () = self.heard_of(call) => None,
                answer = &mut answer => Some(answer.context("the connection ended")?),
            };
            if let Some(answer) = gave_up {
                return Ok((call, self.judge(call, &answer)?));
            }
            socket.cancel(id).await?;
        }
        if self.plan(call).fate == Fate::Ignore {
            let mut over = self.over.subscribe();
            let ended = tokio::select! {
                over = over.wait_for(|over| *over) => over.map(|_| None)?,
                answer = &mut answer => Some(answer.context("the connection ended")?),
            };
            if let Some(answer) = ended {
                return Ok((call, self.judge(call, &answer)?));
            }
            socket.cancel(id).await?;
        }
        let answer = tokio::time::timeout(LOST, answer)
            .await
            .with_context(|| format!("call {call} of session {} never ended", self.number))?
            .context("the connection ended")?;
        Ok((call, self.judge(call, &answer)?))
    }

    async fn heard_of(&self, call: u64) {
        loop {
            let hearing = self.hearing.notified();
            if self.heard.lock().unwrap().contains(&call) {
                return;
            }
            hearing.await;
        }
    }

    /// Its own answer, or an error that is true.
    fn judge(&self, call: u64, answer: &Value) -> Result<Ending> {
        let wrong = || {
            format!(
                "call {call} of session {} with {:?} got {answer}",
                self.number,
                self.plan(call)
            )
        };
        let ending = match (answer.get("result"), answer["error"]["data"]["code"].as_str()) {
            (Some(result), None) => {
                ensure!(*result == self.answer(call), wrong());
                Ending::Answered
            }
            (None, Some("tool_error")) => {
                ensure!(answer["error"]["code"] == -32000, wrong());
                ensure!(answer["error"]["message"] == format!("no {call}"), wrong());
                Ending::Failed
            }
            (None, Some("timeout")) => {
                ensure!(answer["error"]["code"] == -32004, wrong());
                Ending::Timeout
            }
            (None, Some("caller_disconnected")) => {
                ensure!(answer["error"]["code"] == -32005, wrong());
                Ending::Lost
            }
            (None, Some("unavailable")) => Ending::Cancelled,
            _ => anyhow::bail!(wrong()),
        };
        let true_ending = match self.plan(call).fate {
            // A machine that is too busy loses callers and runs out of time; that is true, too.
            _ if matches!(ending, Ending::Lost | Ending::Timeout) => true,
            Fate::Answer => ending == Ending::Answered,
            Fate::Fail => ending == Ending::Failed,
            Fate::Ignore | Fate::Cancel => ending == Ending::Cancelled,
        };
        ensure!(true_ending, wrong());
        Ok(ending)
    }

    /// The caller's side: a stream that breaks again and again, sometimes from the start.
    async fn listen(self: Arc<Self>) -> Result<()> {
        let mut over = self.over.subscribe();
        let mut rng = StdRng::seed_from_u64(self.seed.wrapping_add(self.number));
        let (mut last, mut known) = (self.from, HashSet::new());
        let mut work = tokio::task::JoinSet::new();
        while !*over.borrow() {
            let since = if rng.random_ratio(1, 8) { self.from } else { last };
            // A server that is too busy says so; whoever listens comes back.
            let opened = raw::Lines::open(self.port, &self.token, &self.session, "app", since);
            let Ok(mut stream) = opened.await else {
                tokio::time::sleep(Duration::from_millis(200)).await;
                continue;
            };
            for _ in 0..rng.random_range(10..80) {
                let event = tokio::select! {
                    event = stream.next_of("caller_tool_request") => event,
                    _ = over.wait_for(|over| *over) => break,
                };
                let Ok(event) = event else { break };
                last = last.max(event["index"].as_i64().context("index")?);
                if known.insert(text(&event, "request_id")?) {
                    work.spawn(self.clone().serve(event));
                } else {
                    self.repeats.fetch_add(1, Ordering::Relaxed);
                }
            }
            drop(stream);
            self.reconnects.fetch_add(1, Ordering::Relaxed);
            // The fault itself: a caller that is away for a moment.
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..60))).await;
        }
        while let Some(served) = work.join_next().await {
            served??;
        }
        Ok(())
    }

    /// One request: perhaps forged, late, twice; or not at all.
    async fn serve(self: Arc<Self>, event: Value) -> Result<()> {
        let call = event["arguments"]["call"].as_u64().context("call")?;
        let plan = self.plan(call);
        let mut response = json!({ "session_id": self.session, "request_id": event["request_id"] });
        if plan.forged {
            let mut forged = response.clone();
            forged["result"] = json!("forged");
            // Once it is over, and long forgotten, nobody knows any more whose it was.
            let said = self.respond(&self.stranger, &forged).await?;
            let refused = said
                .as_ref()
                .is_err_and(|code| code == "permission_denied" || code == "not_found");
            ensure!(refused, "forged: {said:?}");
        }
        if plan.fate == Fate::Cancel {
            self.heard.lock().unwrap().insert(call);
            self.hearing.notify_waiters();
        }
        tokio::time::sleep(plan.latency).await;
        match plan.fate {
            Fate::Answer => response["result"] = self.answer(call),
            Fate::Fail => response["error"] = json!(format!("no {call}")),
            Fate::Ignore | Fate::Cancel => return Ok(()),
        }
        let said = self.respond(&self.caller, &response).await?;
        if plan.twice {
            let again = self.respond(&self.caller, &response).await?;
            let code = if said.is_ok() { "conflict" } else { "not_found" };
            ensure!(
                again.as_ref().is_err_and(|said| said == code),
                "given twice: {again:?}"
            );
        }
        self.answers.lock().unwrap().insert(call, said);
        Ok(())
    }

    /// Gives an answer; the refusal is its code. A server that is too busy is asked again.
    async fn respond(&self, whose: &raw::Lanes, response: &Value) -> Result<Result<(), String>> {
        let _place = self.room.acquire().await?;
        loop {
            let (status, said) = whose.post("caller_tool_response", response).await?;
            match (status, said["error"]["code"].as_str()) {
                (200, None) => return Ok(Ok(())),
                (503, _) => tokio::time::sleep(Duration::from_millis(200)).await,
                (_, Some(code)) => return Ok(Err(code.to_owned())),
                _ => anyhow::bail!("HTTP {status}: {said}"),
            }
        }
    }

    /// Agent, caller and log must tell the same story.
    async fn compare(&self, admin: &Api, endings: &[Ending]) -> Result<()> {
        // An end is on its way to the log before the agent hears of it, and in it soon after.
        let log = settles("every end to be in the log", || async {
            let log = admin.log(&self.session).await.map_err(|e| e.to_string())?;
            let count = |kind: &str| log.iter().filter(|event| event["type"] == kind).count();
            let (asked, ended) = (count("caller_tool_request"), count("caller_tool_done"));
            (asked <= ended)
                .then_some(log)
                .ok_or(format!("{asked} were asked, {ended} have ended"))
        })
        .await?;
        let mut asked = HashMap::new();
        let mut outcomes: HashMap<u64, Vec<String>> = HashMap::new();
        for (index, event) in log.iter().enumerate() {
            ensure!(event["index"] == index, "a hole before {event}");
            match event["type"].as_str() {
                Some("caller_tool_request") => {
                    let call = event["arguments"]["call"].as_u64().context("call")?;
                    let before = asked.insert(text(event, "request_id")?, call);
                    ensure!(before.is_none(), "a request id twice");
                }
                Some("caller_tool_done") => {
                    let call = asked
                        .get(&text(event, "request_id")?)
                        .context("done before it was asked")?;
                    outcomes.entry(*call).or_default().push(text(event, "outcome")?);
                }
                _ => {}
            }
        }
        let answers = self.answers.lock().unwrap();
        for (call, ending) in (0..CALLS).zip(endings) {
            let outcome = match ending {
                Ending::Answered => "answered",
                Ending::Failed => "error",
                Ending::Timeout => "timeout",
                Ending::Lost => "disconnected",
                Ending::Cancelled => "cancelled",
            };
            let said = outcomes.get(&call);
            // Whoever gives a call up just when it is over need not learn which came first.
            let lost = |all: &Vec<String>| *all == ["timeout"] || *all == ["disconnected"];
            let at_once = *ending == Ending::Cancelled && said.is_some_and(lost);
            // One that is given up before it was ever asked has no end, either.
            let unasked = *ending == Ending::Cancelled && !asked.values().any(|asked| *asked == call);
            ensure!(
                at_once || unasked || said.is_some_and(|all| *all == [outcome]),
                "call {call} ended {ending:?}, the log says {said:?}"
            );
            match (answers.get(&call), ending) {
                (Some(Ok(())), Ending::Answered | Ending::Failed)
                | (None, Ending::Cancelled | Ending::Timeout | Ending::Lost) => {}
                (Some(Err(code)), Ending::Timeout | Ending::Lost) if code == "not_found" => {}
                (said, ending) => anyhow::bail!("call {call} ended {ending:?}, its answer {said:?}"),
            }
        }
        Ok(())
    }
}

/// Where storms happen: the server, its sessions, and the token of each one's caller.
struct Field {
    server: Server,
    seed: u64,
    stranger: String,
    sessions: Vec<(String, String, String)>,
}

impl Field {
    async fn start(seed: u64) -> Result<Self> {
        // As long as may be: a session's clock goes on until the last deadline it knew, and nothing may be
        // left within a minute.
        let server = Server::start("[relay]\ncaller_timeout = '50s'\nreconnect_grace = '40s'\n").await?;
        let project = server.admin().project(SESSIONS).await?;
        server
            .admin()
            .scripted("idle", json!([[{ "say": "here" }]]))
            .await?;
        let mut tokens = Vec::new();
        for _ in 0..5 {
            tokens.push(server.token("write").await?);
        }
        let stranger = server.token("write").await?;
        let (admin, url) = (Api::new(&server.url(), server.admin().token()), server.url());
        let sessions = stream::iter(0..SESSIONS as usize)
            .map(|number| {
                let (admin, token, project) = (&admin, &tokens[number % tokens.len()], &project);
                let caller = Api::new(&url, token);
                async move {
                    let id = caller.idle_session(project).await?;
                    let socket = admin.relay_socket(&id).await?;
                    anyhow::Ok((id, socket, token.clone()))
                }
            })
            .buffer_unordered(8)
            .try_collect()
            .await?;
        Ok(Self {
            server,
            seed,
            stranger,
            sessions,
        })
    }

    /// A hundred calls in each session at once, everything that can go wrong going wrong.
    async fn storm(&self) -> Result<()> {
        let started = Instant::now();
        let port = self.server.port();
        let lanes = |token: &str| Arc::new(raw::Lanes::new(port, token));
        let (stranger, room) = (lanes(&self.stranger), Arc::new(Semaphore::new(200)));
        let (mut scenes, mut callers) = (Vec::new(), HashMap::new());
        for (number, (session, socket, token)) in (0..).zip(&self.sessions) {
            let log = self.server.admin().log(session).await?;
            scenes.push(Arc::new(Scene {
                number,
                from: log.len() as i64 - 1,
                seed: self.seed,
                session: session.clone(),
                socket: socket.clone(),
                port,
                token: token.clone(),
                caller: callers.entry(token).or_insert_with(|| lanes(token)).clone(),
                stranger: stranger.clone(),
                room: room.clone(),
                heard: Mutex::default(),
                hearing: Notify::new(),
                answers: Mutex::default(),
                over: watch::Sender::new(false),
                reconnects: AtomicU64::new(0),
                repeats: AtomicU64::new(0),
            }));
        }
        let listeners: Vec<_> = scenes
            .iter()
            .map(|scene| tokio::spawn(scene.clone().listen()))
            .collect();
        // Whoever is there at the beginning may leave; nobody comes too late.
        settles("every caller to be there", || async {
            let held = self.server.footprint().await.map_err(|e| e.to_string())?.held;
            (held == SESSIONS).then_some(()).ok_or(format!("{held} are"))
        })
        .await?;
        let agents = scenes.iter().map(|scene| {
            let scene = scene.clone();
            async move { tokio::spawn(async move { scene.agent().await }).await? }
        });
        let endings = try_join_all(agents).await?;
        for listener in listeners {
            listener.await??;
        }
        println!(
            "{} calls in {:.1} s",
            endings.iter().map(Vec::len).sum::<usize>(),
            started.elapsed().as_secs_f64()
        );
        for (scene, endings) in scenes.iter().zip(&endings) {
            scene.compare(self.server.admin(), endings).await?;
        }
        let count = |ending: Ending| endings.iter().flatten().filter(|e| **e == ending).count();
        let sum =
            |of: fn(&Scene) -> &AtomicU64| scenes.iter().map(|s| of(s).load(Ordering::Relaxed)).sum::<u64>();
        let (answered, failed) = (count(Ending::Answered), count(Ending::Failed));
        let (timeout, cancelled) = (count(Ending::Timeout), count(Ending::Cancelled));
        let lost = count(Ending::Lost);
        let (reconnects, repeats) = (sum(|s| &s.reconnects), sum(|s| &s.repeats));
        println!(
            "{answered} answered, {failed} failed, {timeout} timed out, {lost} lost, {cancelled} cancelled"
        );
        println!("{reconnects} reconnects, {repeats} requests heard again");
        ensure!(reconnects > SESSIONS && repeats > 0, "nobody was ever away");
        ensure!(
            answered > endings.len() * CALLS as usize / 4,
            "hardly anything was answered"
        );
        Ok(())
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_call_ends_once_with_its_own_answer_or_a_true_error() -> Result<()> {
    let mut field = Field::start(seed()).await?;
    let before = field.server.at_rest().await?;
    field.storm().await?;
    let after = field.server.nothing_left(before).await?;
    println!("before {before:?}\nafter  {after:?}");
    field.server.stop().await
}
