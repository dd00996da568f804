//! What `oubliette top` shows: sessions, calls in progress, approvals that wait, tool servers, servers.
//!
//! Calls in progress are found in the event logs of sessions that run: those that were begun and have no result. Each log is
//! read from where the last look ended.

use std::{
    collections::{HashMap, VecDeque},
    sync::Arc,
};

use jiff::Timestamp;
use oubliette_protocol::Result;
use serde::Serialize;
use serde_json::{Value, json};

use super::{client::ActionClient, output::field_text, style::fold_to_line, turn_display::format_arguments};

/// The most sessions of one status that are shown.
const MAX_SESSIONS: u32 = 200;
/// The most sessions whose logs are read at one look.
const MAX_FOLLOWED: usize = 50;
/// The most pages of one log that are read at one look.
const MAX_PAGES: usize = 5;
/// How many events a page has.
const PAGE_EVENTS: usize = 1_000;
/// How many events before a log's end a long log is read from.
const TAIL_EVENTS: i64 = 1_500;
/// How many events of a session are kept to be shown.
const KEPT_EVENTS: usize = 200;
/// Every how many looks the calls of sessions are counted anew.
const USAGE_EVERY: u64 = 5;
/// Longest text of arguments that is kept, in columns.
const MAX_ARGUMENTS: usize = 300;

/// What a server answered at one look, for itself and the servers it works with.
#[derive(Debug, Clone, Default, Serialize)]
pub(crate) struct ServerSnapshot {
    /// Where it is.
    pub url: String,
    /// Its version.
    pub version: String,
    /// Its sessions.
    pub sessions: Vec<TopSession>,
    /// Calls in progress, oldest first.
    pub calls: Vec<TopCall>,
    /// Approvals that wait, oldest first.
    pub approvals: Vec<TopApproval>,
    /// Tool servers that run in sessions, the worst first.
    pub tool_servers: Vec<TopToolServer>,
    /// The servers that make up this Oubliette, the one that was asked included.
    pub members: Vec<TopServer>,
    /// The last events of the session that was asked for.
    #[serde(skip)]
    pub events: Vec<Value>,
}

/// A session.
#[derive(Debug, Clone, Default, PartialEq, Serialize)]
pub(crate) struct TopSession {
    /// Its id.
    pub session_id: String,
    /// Its agent.
    pub agent: String,
    /// Its status; `waiting` if a call of it waits for approval.
    pub state: String,
    /// The number of its last turn.
    pub turn: u64,
    /// How long its turn has been running, in seconds; absent if none runs.
    pub turn_age_s: Option<u64>,
    /// How many calls it has made.
    pub calls: u64,
    /// Tokens its model requests used.
    pub tokens: u64,
    /// What they cost, if prices are known.
    pub cost_usd: Option<f64>,
    /// The beginning of its first message.
    pub title: String,
}

/// A call in progress.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TopCall {
    /// Its session.
    pub session_id: String,
    /// The session's agent.
    pub agent: String,
    /// The tool.
    pub tool: String,
    /// Its arguments on one line.
    pub arguments: String,
    /// How long it has been running, in seconds.
    pub age_s: u64,
}

/// An approval that waits.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TopApproval {
    /// Its id.
    pub approval_id: String,
    /// The session whose call waits.
    pub session_id: String,
    /// The session's agent.
    pub agent: String,
    /// The tool.
    pub tool: String,
    /// The call's arguments on one line.
    pub arguments: String,
    /// How long it has been waiting, in seconds.
    pub age_s: u64,
}

/// A tool server, in all sessions it runs in.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TopToolServer {
    /// Its id in the catalog.
    pub id: String,
    /// Its worst light: green, yellow or red.
    pub status: String,
    /// In how many sessions it runs.
    pub sessions: usize,
    /// Its last error.
    pub error: Option<String>,
}

/// A server.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub(crate) struct TopServer {
    /// Its id.
    pub server_id: String,
    /// Its base URL.
    pub address: String,
    /// Its version.
    pub version: String,
    /// How many active sessions run on it.
    pub sessions: u64,
    /// How long it has been running, in seconds.
    pub age_s: u64,
    /// How long ago it was last seen, in seconds.
    pub seen_s: u64,
}

/// What to look at.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct SnapshotRequest {
    /// Ended and failed sessions too.
    pub all_sessions: bool,
    /// The session whose events are wanted.
    pub opened: Option<String>,
}

/// Looks at one server again and again.
pub(crate) struct ServerWatch {
    client: Arc<ActionClient>,
    url: String,
    logs: HashMap<String, TurnLog>,
    /// Calls made, by session.
    calls_made: HashMap<String, u64>,
    looks: u64,
}

impl ServerWatch {
    /// Watches the server behind the client.
    pub(crate) fn new(client: Arc<ActionClient>, url: String) -> Self {
        Self {
            client,
            url,
            logs: HashMap::new(),
            calls_made: HashMap::new(),
            looks: 0,
        }
    }

    /// Looks at the server.
    pub(crate) async fn look(&mut self, wanted: &SnapshotRequest) -> Result<ServerSnapshot> {
        let client = Arc::clone(&self.client);
        let (info, approvals, servers, members) = tokio::try_join!(
            client.call("server_info", json!({})),
            client.call("approval_list", json!({ "status": "pending", "limit": 200 })),
            client.call("catalog_status", json!({})),
            client.call("server_list", json!({})),
        )?;
        let sessions = list_sessions(&client, wanted.all_sessions).await?;
        if self.looks.is_multiple_of(USAGE_EVERY) {
            self.count_calls(&sessions).await?;
        }
        self.looks += 1;
        let now = Timestamp::now();
        self.read_logs(&sessions, wanted.opened.as_deref()).await?;
        let approvals: Vec<TopApproval> = rows(&approvals, "approvals")
            .rev()
            .map(|row| approval_row(row, now))
            .collect();
        let session_rows = sessions
            .iter()
            .map(|session| self.session_row(session, &approvals, now));
        let mut snapshot = ServerSnapshot {
            url: self.url.clone(),
            version: field_text(&info, "version"),
            sessions: session_rows.collect(),
            calls: Vec::new(),
            tool_servers: group_servers(&servers),
            members: rows(&members, "servers")
                .map(|row| member_row(row, now))
                .collect(),
            events: Vec::new(),
            approvals,
        };
        for session in &snapshot.sessions {
            if let Some(log) = self.logs.get(&session.session_id) {
                snapshot.calls.extend(log.calls(session, now));
            }
        }
        snapshot.calls.sort_by_key(|call| std::cmp::Reverse(call.age_s));
        if let Some(log) = wanted.opened.as_ref().and_then(|opened| self.logs.get(opened)) {
            snapshot.events = log.recent.iter().cloned().collect();
        }
        Ok(snapshot)
    }

    fn session_row(&self, session: &Value, approvals: &[TopApproval], now: Timestamp) -> TopSession {
        let id = field_text(session, "session_id");
        let status = field_text(session, "status");
        let waits = approvals.iter().any(|approval| approval.session_id == id);
        let usage = &session["usage"];
        let tokens = ["input_tokens", "output_tokens"].map(|field| usage[field].as_u64().unwrap_or(0));
        let began = match status.as_str() {
            "running" | "starting" => self.logs.get(&id).and_then(|log| log.turn_began),
            _ => None,
        };
        TopSession {
            agent: field_text(session, "agent"),
            state: if waits { "waiting".into() } else { status },
            turn: session["turn"].as_u64().unwrap_or(0),
            turn_age_s: began.map(|began| seconds_between(began, now)),
            calls: self.calls_made.get(&id).copied().unwrap_or(0),
            tokens: tokens[0].saturating_add(tokens[1]),
            cost_usd: usage["cost_usd"].as_f64(),
            title: fold_to_line(&field_text(session, "title"), 80),
            session_id: id,
        }
    }

    /// Counts the calls of the sessions that are shown.
    async fn count_calls(&mut self, sessions: &[Value]) -> Result<()> {
        let first = sessions
            .iter()
            .filter_map(|session| session["created_at"].as_str())
            .min();
        let Some(first) = first else { return Ok(()) };
        let arguments = json!({ "group_by": "session", "since": first });
        let report = self.client.call("usage_report", arguments).await?;
        let counted = rows(&report, "rows")
            .map(|row| (field_text(row, "key"), row["tool_calls"].as_u64().unwrap_or(0)));
        self.calls_made = counted.collect();
        Ok(())
    }

    /// Reads on in the logs of sessions that run, and of the one that is opened.
    async fn read_logs(&mut self, sessions: &[Value], opened: Option<&str>) -> Result<()> {
        let runs = |session: &&Value| {
            matches!(
                session["status"].as_str(),
                Some("running" | "starting" | "switching")
            )
        };
        let running = sessions
            .iter()
            .filter(runs)
            .map(|session| field_text(session, "session_id"));
        let mut followed: Vec<String> = running.take(MAX_FOLLOWED).collect();
        if let Some(opened) = opened.filter(|opened| !followed.iter().any(|id| id == opened)) {
            followed.push(opened.to_owned());
        }
        self.logs.retain(|id, _| followed.contains(id));
        for id in followed {
            let log = self.logs.entry(id.clone()).or_default();
            log.read(&self.client, &id).await?;
        }
        Ok(())
    }
}

/// The sessions to show, those that run first.
async fn list_sessions(client: &ActionClient, all: bool) -> Result<Vec<Value>> {
    let active = ["running", "starting", "switching", "idle"];
    let over = ["failed", "ended"];
    let mut sessions = Vec::new();
    for status in active.iter().chain(over.iter().filter(|_| all)) {
        let arguments = json!({ "status": status, "limit": MAX_SESSIONS });
        let mut page = client.call("session_list", arguments).await?;
        if let Value::Array(rows) = page["sessions"].take() {
            sessions.extend(rows);
        }
    }
    Ok(sessions)
}

fn rows<'a>(answer: &'a Value, name: &str) -> std::slice::Iter<'a, Value> {
    answer[name].as_array().map_or(&[][..], Vec::as_slice).iter()
}

fn approval_row(row: &Value, now: Timestamp) -> TopApproval {
    let asked = row["requested_at"].as_str().and_then(|at| at.parse().ok());
    TopApproval {
        approval_id: field_text(row, "approval_id"),
        session_id: field_text(row, "session_id"),
        agent: field_text(row, "agent"),
        tool: fold_to_line(&field_text(row, "tool"), 64),
        arguments: fold_to_line(&format_arguments(&row["arguments"]), MAX_ARGUMENTS),
        age_s: asked.map_or(0, |asked| seconds_between(asked, now)),
    }
}

fn member_row(row: &Value, now: Timestamp) -> TopServer {
    let age = |field: &str| {
        let at = row[field].as_str().and_then(|at| at.parse().ok());
        at.map_or(0, |at| seconds_between(at, now))
    };
    TopServer {
        server_id: fold_to_line(&field_text(row, "server_id"), 64),
        address: fold_to_line(&field_text(row, "address"), MAX_ARGUMENTS),
        version: fold_to_line(&field_text(row, "version"), 64),
        sessions: row["sessions"].as_u64().unwrap_or(0),
        age_s: age("since"),
        seen_s: age("last_seen"),
    }
}

/// One row a tool server: its worst light, and the error that goes with it.
fn group_servers(answer: &Value) -> Vec<TopToolServer> {
    let mut grouped: Vec<TopToolServer> = Vec::new();
    for server in rows(answer, "servers") {
        let (id, status) = (field_text(server, "id"), field_text(server, "status"));
        let error = server["error"]
            .as_str()
            .map(|error| fold_to_line(error, MAX_ARGUMENTS));
        match grouped.iter_mut().find(|row| row.id == id) {
            Some(row) => {
                row.sessions += 1;
                if light_rank(&status) < light_rank(&row.status) {
                    (row.status, row.error) = (status, error);
                }
            }
            None => grouped.push(TopToolServer {
                id,
                status,
                sessions: 1,
                error,
            }),
        }
    }
    grouped.sort_by(|a, b| (light_rank(&a.status), &a.id).cmp(&(light_rank(&b.status), &b.id)));
    grouped
}

fn light_rank(status: &str) -> u8 {
    match status {
        "red" => 0,
        "yellow" => 1,
        _ => 2,
    }
}

/// Whole seconds from one time to a later one; 0 if it is not later, because this machine's clock may differ.
fn seconds_between(from: Timestamp, to: Timestamp) -> u64 {
    u64::try_from(to.duration_since(from).as_secs()).unwrap_or(0)
}

/// What a session's log says of its turn.
#[derive(Debug, Default)]
struct TurnLog {
    /// The index of the last event read; none before the first look.
    last_index: Option<i64>,
    turn_began: Option<Timestamp>,
    open: Vec<RunningToolCall>,
    recent: VecDeque<Value>,
}

#[derive(Debug)]
struct RunningToolCall {
    id: String,
    tool: String,
    arguments: String,
    began: Option<Timestamp>,
}

impl TurnLog {
    async fn read(&mut self, client: &ActionClient, session: &str) -> Result<()> {
        let is_first = self.last_index.is_none();
        for page in 0..MAX_PAGES {
            let since = self.last_index.unwrap_or(-1);
            let arguments = json!({ "session_id": session, "since_index": since, "max_events": PAGE_EVENTS });
            let answer = client.call("session_events", arguments).await?;
            let events = rows(&answer, "events");
            let count = events.len();
            if is_first && page == 0 && count == PAGE_EVENTS {
                // A long log: what matters is at its end.
                self.last_index = Some((last_index(client, session).await? - TAIL_EVENTS).max(-1));
                continue;
            }
            events.for_each(|event| self.observe(event));
            self.last_index = answer["last_index"].as_i64().or(Some(since));
            if count < PAGE_EVENTS {
                break;
            }
        }
        Ok(())
    }

    fn observe(&mut self, event: &Value) {
        let time = || event["ts"].as_str().and_then(|ts| ts.parse().ok());
        match event["type"].as_str().unwrap_or_default() {
            // Too many to be worth a line each; the message has their text.
            "delta" | "thought" | "usage" => return,
            "message" if event["role"] == "user" => {
                self.turn_began = time();
                self.open.clear();
            }
            "tool_call" => {
                let id = field_text(event, "tool_call_id");
                self.open.retain(|call| call.id != id);
                self.open.push(RunningToolCall {
                    id,
                    tool: fold_to_line(&field_text(event, "tool"), 64),
                    arguments: fold_to_line(&format_arguments(&event["arguments"]), MAX_ARGUMENTS),
                    began: time(),
                });
            }
            "tool_result" => {
                let id = field_text(event, "tool_call_id");
                self.open.retain(|call| call.id != id);
            }
            "turn_completed" => {
                self.open.clear();
                self.turn_began = None;
            }
            _ => {}
        }
        self.recent.push_back(event.clone());
        if self.recent.len() > KEPT_EVENTS {
            self.recent.pop_front();
        }
    }

    fn calls(&self, session: &TopSession, now: Timestamp) -> Vec<TopCall> {
        let row = |call: &RunningToolCall| TopCall {
            session_id: session.session_id.clone(),
            agent: session.agent.clone(),
            tool: call.tool.clone(),
            arguments: call.arguments.clone(),
            age_s: call.began.map_or(0, |began| seconds_between(began, now)),
        };
        self.open.iter().map(row).collect()
    }
}

/// The index of the last event of a long log, found by halving: reading all of it would take too long.
async fn last_index(client: &ActionClient, session: &str) -> Result<i64> {
    let has_after = async |index: i64| -> Result<bool> {
        let arguments = json!({ "session_id": session, "since_index": index, "max_events": 1 });
        let answer = client.call("session_events", arguments).await?;
        Ok(rows(&answer, "events").len() > 0)
    };
    // There is an event after `low`, and none after `high`.
    let (mut low, mut high) = (-1, PAGE_EVENTS as i64);
    while has_after(high).await? {
        (low, high) = (high, high.saturating_mul(2));
    }
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        match has_after(middle).await? {
            true => low = middle,
            false => high = middle,
        }
    }
    Ok(high)
}

#[cfg(test)]
mod tests;
