//! What sessions do, told to an OpenTelemetry collector: one trace a turn, one span a tool call.
//!
//! It is one more reader of the logs, so nothing it watches waits for it: the debugger's log gives calls,
//! blocks, model requests and health; the log of each session whose context is built gives its turns.
//! Without `[otlp] endpoint` there is no task and no client.
//!
//! - `span`: a span and its ids, which follow from session and turn.
//! - `turns`: where a session's turns begin and end.
//! - `send`: a bounded queue and one request at a time.

mod send;
mod span;
mod turns;

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::StreamExt as _;
use oubliette_protocol::{
    Result, SessionId,
    debug::{DebugBody, DebugEvent},
    event::{Event, EventBody, Status},
};
use oubliette_session::Sessions;
use oubliette_store::{DebugFilter, Follow, Store};
use tokio::task::JoinHandle;
use tokio_stream::StreamMap;
use tokio_util::sync::CancellationToken;

pub use self::send::Collector;
use self::{send::Outbox, span::Span, turns::Turns};

/// How far back the begin of a turn is looked for when its context is built.
const TAIL: usize = 256;
/// Events read at once when the server stops.
const PIECE: usize = 512;

/// The export, under way.
#[derive(Debug)]
pub struct Telemetry {
    stop: CancellationToken,
    watching: JoinHandle<()>,
    sending: JoinHandle<()>,
}

impl Telemetry {
    /// Tells `collector` what happens from now on.
    pub async fn start(collector: Collector, store: Store, sessions: Arc<Sessions>) -> Result<Self> {
        let seen = store.debugger().last_index().await?;
        let (outbox, sending) = collector.open()?;
        let watcher = Watcher {
            store,
            sessions,
            outbox,
            seen,
            turns: HashMap::new(),
            streams: StreamMap::new(),
        };
        let stop = CancellationToken::new();
        Ok(Self {
            watching: tokio::spawn(watcher.run(stop.clone())),
            stop,
            sending: tokio::spawn(sending),
        })
    }

    /// Sends what has happened so far, as far as that can be done within `patience`.
    pub async fn finish(mut self, patience: Duration) {
        self.stop.cancel();
        let sent = async {
            let _ = (&mut self.watching).await;
            let _ = (&mut self.sending).await;
        };
        if tokio::time::timeout(patience, sent).await.is_err() {
            tracing::debug!("the collector did not take the last spans in time");
            self.watching.abort();
            self.sending.abort();
        }
    }
}

struct Watcher {
    store: Store,
    sessions: Arc<Sessions>,
    outbox: Outbox,
    /// The last debugger event that was looked at.
    seen: i64,
    /// Sessions whose context is built.
    turns: HashMap<SessionId, Turns>,
    streams: StreamMap<SessionId, Follow<Arc<Event>>>,
}

fn wanted() -> DebugFilter {
    let kinds = [
        "build_started",
        "teardown_finished",
        "tool_call",
        "tool_blocked",
        "health_changed",
        "model_request",
    ];
    DebugFilter {
        kinds: Some(kinds.map(str::to_owned).to_vec()),
        ..DebugFilter::default()
    }
}

impl Watcher {
    async fn run(mut self, stop: CancellationToken) {
        let mut debugger = self.store.debugger().follow(wanted(), self.seen);
        loop {
            tokio::select! {
                // The debugger first: what happened in a turn is written no later than the turn's end.
                biased;
                () = stop.cancelled() => break,
                event = debugger.next() => match event {
                    Some(Ok(event)) => self.happened(&event).await,
                    Some(Err(_)) => tokio::time::sleep(Duration::from_secs(1)).await,
                    None => break,
                },
                Some((session, event)) = self.streams.next(), if !self.streams.is_empty() => match event {
                    Ok(event) => self.said(&event).await,
                    Err(_) => self.leave(&session),
                },
            }
        }
        self.catch_up().await;
    }

    /// Everything that was written before the end.
    async fn catch_up(&mut self) {
        self.store.debugger().flush().await;
        while let Ok(events) = self.store.debugger().read(&wanted(), self.seen, PIECE).await
            && !events.is_empty()
        {
            for event in events {
                self.happened(&event).await;
            }
        }
        let sessions: Vec<(SessionId, i64)> = self.turns.iter().map(|(s, t)| (s.clone(), t.seen)).collect();
        for (session, mut seen) in sessions {
            while let Ok(events) = self.store.events().read(&session, seen, PIECE).await
                && let Some(last) = events.last()
            {
                seen = last.index;
                for event in events {
                    self.said(&event).await;
                }
            }
        }
    }

    /// An event of the debugger.
    async fn happened(&mut self, event: &DebugEvent) {
        self.seen = event.index;
        let Some(session) = &event.session_id else { return };
        match &event.body {
            DebugBody::BuildStarted { .. } => {
                if let Err(error) = self.join(session, event).await {
                    tracing::debug!(%session, error = %error.for_log(), "the session's turns are not traced");
                }
            }
            DebugBody::TeardownFinished { .. } => {
                if self.turns.get(session).is_some_and(|turns| !turns.under_way()) {
                    self.leave(session);
                }
            }
            body => {
                let under_way = self.turns.get(session).is_some_and(Turns::under_way);
                let turn = match body {
                    DebugBody::ToolCall { turn, .. } | DebugBody::ToolBlocked { turn, .. } => *turn,
                    DebugBody::HealthChanged { .. } if !under_way => None,
                    _ => self.sessions.current_turn(session),
                };
                if let Some(span) = Span::of(event, session, turn.filter(|turn| *turn > 0)) {
                    self.outbox.push(span);
                }
            }
        }
    }

    /// Follows a session from the begin of the turn that its context is built for, if it is for one.
    async fn join(&mut self, session: &SessionId, built: &DebugEvent) -> Result<()> {
        if let Some(turns) = self.turns.get_mut(session) {
            turns.agent = built.agent.clone();
            return Ok(());
        }
        let log = self.store.events();
        let last = log.last_index(session).await?;
        let from = last.saturating_sub_unsigned(TAIL as u64).max(-1);
        let tail = log.read(session, from, TAIL).await?;
        let since = turns::begin(&tail, built.ts).unwrap_or(from);
        let turns = Turns::new(built.agent.clone(), since);
        self.streams.insert(session.clone(), log.follow(session, since));
        self.turns.insert(session.clone(), turns);
        Ok(())
    }

    fn leave(&mut self, session: &SessionId) {
        self.turns.remove(session);
        self.streams.remove(session);
    }

    /// An event of a session.
    async fn said(&mut self, event: &Event) {
        let session = &event.session_id;
        let Some(turns) = self.turns.get_mut(session) else {
            return;
        };
        if turns.needs_number(event)
            && let Ok(Some(row)) = self.store.session_get(session).await
        {
            // Written together with the message.
            turns.number(row.turn);
        }
        if let Some(span) = turns.take(event) {
            self.outbox.push(span);
        }
        if let EventBody::Status {
            status: Status::Ended,
            ..
        } = event.body
        {
            self.leave(session);
        }
    }
}
