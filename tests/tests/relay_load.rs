//! The caller relay under load and faults: every call ends exactly once, with its own answer or a correct
//! error, and no resources remain.
//!
//! Agents are raw connections to the relay sockets, and callers are raw HTTP connections, so that two cores
//! can run a hundred of each. `OUBLIETTE_SEED` repeats a run.

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
use oubliette_tests::{RelaySocketClient, SpawnedServer, ToolApi, api::text_field, raw, seed, wait_until};
use rand::{RngExt as _, SeedableRng as _, rngs::StdRng};
use serde_json::{Value, json};
use tokio::sync::{Notify, Semaphore, watch};

const SESSIONS: u64 = 100;
const CALLS: u64 = 100;
/// How long a call may take before the test fails: far longer than the server's own timeout, because a busy
/// machine may take long to start it.
const CALL_TIMEOUT: Duration = Duration::from_secs(900);

/// What happens to one call; derived from the seed, so that the agent's and the caller's side agree.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PlannedFate {
    Answer,
    Fail,
    /// The caller never answers; the agent cancels it when all others are done.
    Ignore,
    /// The agent cancels it once the caller has received it.
    Cancel,
}

#[derive(Debug, Clone, Copy)]
struct CallPlan {
    fate: PlannedFate,
    latency: Duration,
    /// Another principal tries to answer first.
    forged: bool,
    /// The caller answers twice.
    twice: bool,
}

impl CallPlan {
    fn of(seed: u64, session: u64, call: u64) -> Self {
        let mut rng = StdRng::seed_from_u64(seed ^ (session << 32) ^ (call << 16));
        let fate = match rng.random_range(0..100) {
            0..80 => PlannedFate::Answer,
            80..92 => PlannedFate::Fail,
            92..94 => PlannedFate::Ignore,
            _ => PlannedFate::Cancel,
        };
        Self {
            fate,
            latency: Duration::from_millis(rng.random_range(0..400)),
            forged: rng.random_ratio(1, 10),
            twice: rng.random_ratio(1, 5),
        }
    }
}

/// One session of the test, with the state its agent's and its caller's side share.
struct LoadTestSession {
    number: u64,
    /// The index of the last event before the calls.
    start_index: i64,
    seed: u64,
    session: String,
    socket: String,
    port: u16,
    token: String,
    caller: Arc<raw::RawToolPool>,
    stranger: Arc<raw::RawToolPool>,
    /// Limits how many answers all callers together send at once.
    answer_slots: Arc<Semaphore>,
    /// Calls to be cancelled that the caller has received.
    heard: Mutex<HashSet<u64>>,
    heard_changed: Notify,
    /// The server's response to each answer: accepted, or the error code.
    answers: Mutex<HashMap<u64, Result<(), String>>>,
    /// True when only calls that are never answered remain: the caller may stop.
    answerable_done: watch::Sender<bool>,
    reconnects: AtomicU64,
    repeats: AtomicU64,
}

/// How a call ended, as the agent saw it.
#[derive(Debug, Clone, PartialEq, Eq)]
enum ObservedEnding {
    Answered,
    Failed,
    Timeout,
    Lost,
    Cancelled,
}

impl LoadTestSession {
    fn plan(&self, call: u64) -> CallPlan {
        CallPlan::of(self.seed, self.number, call)
    }

    fn answer(&self, call: u64) -> Value {
        json!({ "session": self.number, "call": call })
    }

    /// The agent's side: all calls at once, over two connections. When only calls that are never answered
    /// remain, it cancels them.
    async fn run_agent(&self) -> Result<Vec<ObservedEnding>> {
        let sockets = [
            RelaySocketClient::open(&self.socket).await?,
            RelaySocketClient::open(&self.socket).await?,
        ];
        let mut calls: FuturesUnordered<_> = (0..CALLS)
            .map(|call| self.call(call, &sockets[usize::from(call % 2 == 1)]))
            .collect();
        let ignored = |call: u64| self.plan(call).fate == PlannedFate::Ignore;
        let mut left = (0..CALLS).filter(|call| !ignored(*call)).count();
        let mut endings = BTreeMap::new();
        while let Some((call, ending)) = calls.try_next().await? {
            ensure!(endings.insert(call, ending).is_none(), "call {call} ended twice");
            left -= usize::from(!ignored(call));
            self.answerable_done.send_replace(left == 0);
        }
        for socket in &sockets {
            let stray = socket.stray_answers();
            ensure!(stray.is_empty(), "answers to nothing: {stray:?}");
        }
        Ok(endings.into_values().collect())
    }

    async fn call(&self, call: u64, socket: &RelaySocketClient) -> Result<(u64, ObservedEnding)> {
        let params = json!({ "tool": "echo", "arguments": { "call": call } });
        let (id, mut answer) = socket.request("caller_tool", params).await?;
        if self.plan(call).fate == PlannedFate::Cancel {
            let gave_up = tokio::select! {
                () = self.wait_until_caller_heard(call) => None,
                answer = &mut answer => Some(answer.context("the connection ended")?),
            };
            if let Some(answer) = gave_up {
                return Ok((call, self.check_answer(call, &answer)?));
            }
            socket.cancel(id).await?;
        }
        if self.plan(call).fate == PlannedFate::Ignore {
            let mut over = self.answerable_done.subscribe();
            let ended = tokio::select! {
                over = over.wait_for(|over| *over) => over.map(|_| None)?,
                answer = &mut answer => Some(answer.context("the connection ended")?),
            };
            if let Some(answer) = ended {
                return Ok((call, self.check_answer(call, &answer)?));
            }
            socket.cancel(id).await?;
        }
        let answer = tokio::time::timeout(CALL_TIMEOUT, answer)
            .await
            .with_context(|| format!("call {call} of session {} never ended", self.number))?
            .context("the connection ended")?;
        Ok((call, self.check_answer(call, &answer)?))
    }

    async fn wait_until_caller_heard(&self, call: u64) {
        loop {
            let hearing = self.heard_changed.notified();
            if self.heard.lock().unwrap().contains(&call) {
                return;
            }
            hearing.await;
        }
    }

    /// Checks that the answer is this call's own result, or an error that fits its plan.
    fn check_answer(&self, call: u64, answer: &Value) -> Result<ObservedEnding> {
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
                ObservedEnding::Answered
            }
            (None, Some("tool_error")) => {
                ensure!(answer["error"]["code"] == -32000, wrong());
                ensure!(answer["error"]["message"] == format!("no {call}"), wrong());
                ObservedEnding::Failed
            }
            (None, Some("timeout")) => {
                ensure!(answer["error"]["code"] == -32004, wrong());
                ObservedEnding::Timeout
            }
            (None, Some("caller_disconnected")) => {
                ensure!(answer["error"]["code"] == -32005, wrong());
                ObservedEnding::Lost
            }
            (None, Some("unavailable")) => ObservedEnding::Cancelled,
            _ => anyhow::bail!(wrong()),
        };
        let true_ending = match self.plan(call).fate {
            // On a busy machine any call may time out or lose its caller.
            _ if matches!(ending, ObservedEnding::Lost | ObservedEnding::Timeout) => true,
            PlannedFate::Answer => ending == ObservedEnding::Answered,
            PlannedFate::Fail => ending == ObservedEnding::Failed,
            PlannedFate::Ignore | PlannedFate::Cancel => ending == ObservedEnding::Cancelled,
        };
        ensure!(true_ending, wrong());
        Ok(ending)
    }

    /// The caller's side: its stream closes again and again, and is sometimes reopened from the first event.
    async fn run_caller(self: Arc<Self>) -> Result<()> {
        let mut over = self.answerable_done.subscribe();
        let mut rng = StdRng::seed_from_u64(self.seed.wrapping_add(self.number));
        let (mut last, mut known) = (self.start_index, HashSet::new());
        let mut work = tokio::task::JoinSet::new();
        while !*over.borrow() {
            let since = if rng.random_ratio(1, 8) {
                self.start_index
            } else {
                last
            };
            // An overloaded server may refuse the stream; try again.
            let opened = raw::RawEventStream::open(self.port, &self.token, &self.session, "app", since);
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
                if known.insert(text_field(&event, "request_id")?) {
                    work.spawn(self.clone().answer_request(event));
                } else {
                    self.repeats.fetch_add(1, Ordering::Relaxed);
                }
            }
            drop(stream);
            self.reconnects.fetch_add(1, Ordering::Relaxed);
            // The simulated fault: the caller is away for a moment.
            tokio::time::sleep(Duration::from_millis(rng.random_range(0..60))).await;
        }
        while let Some(served) = work.join_next().await {
            served??;
        }
        Ok(())
    }

    /// Handles one request as planned: answers late, twice or not at all, perhaps after a forged answer.
    async fn answer_request(self: Arc<Self>, event: Value) -> Result<()> {
        let call = event["arguments"]["call"].as_u64().context("call")?;
        let plan = self.plan(call);
        let mut response = json!({ "session_id": self.session, "request_id": event["request_id"] });
        if plan.forged {
            let mut forged = response.clone();
            forged["result"] = json!("forged");
            // After the call has ended and left the server's memory, the refusal is `not_found`.
            let said = self.respond(&self.stranger, &forged).await?;
            let refused = said
                .as_ref()
                .is_err_and(|code| code == "permission_denied" || code == "not_found");
            ensure!(refused, "forged: {said:?}");
        }
        if plan.fate == PlannedFate::Cancel {
            self.heard.lock().unwrap().insert(call);
            self.heard_changed.notify_waiters();
        }
        tokio::time::sleep(plan.latency).await;
        match plan.fate {
            PlannedFate::Answer => response["result"] = self.answer(call),
            PlannedFate::Fail => response["error"] = json!(format!("no {call}")),
            PlannedFate::Ignore | PlannedFate::Cancel => return Ok(()),
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

    /// Sends an answer; a refusal is returned as its error code. While the server is overloaded (503) it retries.
    async fn respond(&self, whose: &raw::RawToolPool, response: &Value) -> Result<Result<(), String>> {
        let _place = self.answer_slots.acquire().await?;
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

    /// Checks that agent, caller and event log agree on how each call ended.
    async fn check_log(&self, admin: &ToolApi, endings: &[ObservedEnding]) -> Result<()> {
        // The agent may get its answer shortly before the call's end is in the log.
        let log = wait_until("every end to be in the log", || async {
            let log = admin.all_events(&self.session).await.map_err(|e| e.to_string())?;
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
                    let before = asked.insert(text_field(event, "request_id")?, call);
                    ensure!(before.is_none(), "a request id twice");
                }
                Some("caller_tool_done") => {
                    let call = asked
                        .get(&text_field(event, "request_id")?)
                        .context("done before it was asked")?;
                    outcomes
                        .entry(*call)
                        .or_default()
                        .push(text_field(event, "outcome")?);
                }
                _ => {}
            }
        }
        let answers = self.answers.lock().unwrap();
        for (call, ending) in (0..CALLS).zip(endings) {
            let outcome = match ending {
                ObservedEnding::Answered => "answered",
                ObservedEnding::Failed => "error",
                ObservedEnding::Timeout => "timeout",
                ObservedEnding::Lost => "disconnected",
                ObservedEnding::Cancelled => "cancelled",
            };
            let said = outcomes.get(&call);
            // A cancel may cross with a timeout or a disconnect; then the agent does not learn which came first.
            let lost = |all: &Vec<String>| *all == ["timeout"] || *all == ["disconnected"];
            let at_once = *ending == ObservedEnding::Cancelled && said.is_some_and(lost);
            // A call cancelled before its request event was written has no end event.
            let unasked = *ending == ObservedEnding::Cancelled && !asked.values().any(|asked| *asked == call);
            ensure!(
                at_once || unasked || said.is_some_and(|all| *all == [outcome]),
                "call {call} ended {ending:?}, the log says {said:?}"
            );
            match (answers.get(&call), ending) {
                (Some(Ok(())), ObservedEnding::Answered | ObservedEnding::Failed)
                | (None, ObservedEnding::Cancelled | ObservedEnding::Timeout | ObservedEnding::Lost) => {}
                (Some(Err(code)), ObservedEnding::Timeout | ObservedEnding::Lost) if code == "not_found" => {}
                (said, ending) => anyhow::bail!("call {call} ended {ending:?}, its answer {said:?}"),
            }
        }
        Ok(())
    }
}

/// The server under test, its sessions, and the token of each session's caller.
struct LoadTestFixture {
    server: SpawnedServer,
    seed: u64,
    stranger: String,
    sessions: Vec<(String, String, String)>,
}

impl LoadTestFixture {
    async fn start(seed: u64) -> Result<Self> {
        // As long as possible: a session's timer runs until its last deadline, and nothing may remain after a
        // minute.
        let config =
            "[server]\nmax_connections = 100000\n[relay]\ncaller_timeout = '50s'\nreconnect_grace = '40s'\n";
        let server = SpawnedServer::start(config).await?;
        let project = server.admin().create_project(SESSIONS).await?;
        server
            .admin()
            .put_scripted_agent("idle", json!([[{ "say": "here" }]]))
            .await?;
        let mut tokens = Vec::new();
        for _ in 0..5 {
            tokens.push(server.create_token("write").await?);
        }
        let stranger = server.create_token("write").await?;
        let (admin, url) = (ToolApi::new(&server.url(), server.admin().token()), server.url());
        let sessions = stream::iter(0..SESSIONS as usize)
            .map(|number| {
                let (admin, token, project) = (&admin, &tokens[number % tokens.len()], &project);
                let caller = ToolApi::new(&url, token);
                async move {
                    let id = caller.start_idle_session(project).await?;
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

    /// Makes a hundred calls in each session at once, with all faults, and checks how they ended.
    async fn run_all_calls(&self) -> Result<()> {
        let started = Instant::now();
        let port = self.server.port();
        let new_pool = |token: &str| Arc::new(raw::RawToolPool::new(port, token));
        let (stranger, room) = (new_pool(&self.stranger), Arc::new(Semaphore::new(200)));
        let (mut test_sessions, mut callers) = (Vec::new(), HashMap::new());
        for (number, (session, socket, token)) in (0..).zip(&self.sessions) {
            let log = self.server.admin().all_events(session).await?;
            test_sessions.push(Arc::new(LoadTestSession {
                number,
                start_index: log.len() as i64 - 1,
                seed: self.seed,
                session: session.clone(),
                socket: socket.clone(),
                port,
                token: token.clone(),
                caller: callers.entry(token).or_insert_with(|| new_pool(token)).clone(),
                stranger: stranger.clone(),
                answer_slots: room.clone(),
                heard: Mutex::default(),
                heard_changed: Notify::new(),
                answers: Mutex::default(),
                answerable_done: watch::Sender::new(false),
                reconnects: AtomicU64::new(0),
                repeats: AtomicU64::new(0),
            }));
        }
        let listeners: Vec<_> = test_sessions
            .iter()
            .map(|test_session| tokio::spawn(test_session.clone().run_caller()))
            .collect();
        // Begin when every caller is present: a call without a present caller fails at once.
        wait_until("every caller to be there", || async {
            let held = self
                .server
                .footprint()
                .await
                .map_err(|e| e.to_string())?
                .caller_connections;
            (held == SESSIONS).then_some(()).ok_or(format!("{held} are"))
        })
        .await?;
        let agents = test_sessions.iter().map(|test_session| {
            let test_session = test_session.clone();
            async move { tokio::spawn(async move { test_session.run_agent().await }).await? }
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
        for (test_session, endings) in test_sessions.iter().zip(&endings) {
            test_session.check_log(self.server.admin(), endings).await?;
        }
        let count = |ending: ObservedEnding| endings.iter().flatten().filter(|e| **e == ending).count();
        let sum = |of: fn(&LoadTestSession) -> &AtomicU64| {
            test_sessions
                .iter()
                .map(|s| of(s).load(Ordering::Relaxed))
                .sum::<u64>()
        };
        let (answered, failed) = (count(ObservedEnding::Answered), count(ObservedEnding::Failed));
        let (timeout, cancelled) = (count(ObservedEnding::Timeout), count(ObservedEnding::Cancelled));
        let lost = count(ObservedEnding::Lost);
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
async fn every_call_ends_once_with_its_own_answer_or_a_correct_error() -> Result<()> {
    let mut fixture = LoadTestFixture::start(seed()).await?;
    let before = fixture.server.wait_at_rest().await?;
    fixture.run_all_calls().await?;
    let after = fixture.server.check_nothing_left(before).await?;
    println!("before {before:?}\nafter  {after:?}");
    fixture.server.stop().await
}
