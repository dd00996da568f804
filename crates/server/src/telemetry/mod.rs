//! Exports traces to an OpenTelemetry collector: one trace for each turn, one span for each tool call.
//!
//! It reads the same logs as every other reader, so no session waits for it: tool calls, blocked calls, model
//! requests and health changes come from the debugger's log; turns come from the log of each session whose context
//! is built. Without `[otlp] endpoint` there is no task and no HTTP client.
//!
//! - `turns`: where a session's turns begin and end.
//! - `span`: a span and its ids, which are derived from session and turn.
//! - `exporter`: a bounded queue of spans, sent in batches with one request at a time.

mod exporter;
mod span;
mod turns;

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::StreamExt as _;
use oubliette_protocol::{
    Result, SessionId,
    debug::{DebugBody, DebugEvent},
    event::{EventBody, SessionEvent, SessionStatus},
};
use oubliette_session::Sessions;
use oubliette_store::{DebugFilter, LogFollower, Store};
use tokio::task::JoinHandle;
use tokio_stream::StreamMap;
use tokio_util::sync::CancellationToken;

pub(crate) use self::exporter::OtlpCollector;
use self::{exporter::SpanQueue, span::OtlpSpan, turns::TurnTracker};

/// How many of a session's last events are searched for the beginning of the turn its context is built for.
const TURN_START_SEARCH: usize = 256;
/// How many events are read at once when the server stops.
const READ_BATCH: usize = 512;

/// The running export: one task that watches the logs, one that sends spans.
#[derive(Debug)]
pub(crate) struct Telemetry {
    stop: CancellationToken,
    watch_task: JoinHandle<()>,
    send_task: JoinHandle<()>,
}

impl Telemetry {
    /// Starts exporting to `collector` what happens from now on.
    pub(crate) async fn start(
        collector: OtlpCollector,
        store: Store,
        sessions: Arc<Sessions>,
    ) -> Result<Self> {
        let last_seen = store.debugger().last_index().await?;
        let (queue, sending) = collector.connect()?;
        let watcher = TelemetryWatcher {
            store,
            sessions,
            queue,
            last_seen,
            turns: HashMap::new(),
            streams: StreamMap::new(),
        };
        let stop = CancellationToken::new();
        Ok(Self {
            watch_task: tokio::spawn(watcher.run(stop.clone())),
            stop,
            send_task: tokio::spawn(sending),
        })
    }

    /// Stops watching and sends the remaining spans, as far as that can be done within `timeout`.
    pub(crate) async fn finish(mut self, timeout: Duration) {
        self.stop.cancel();
        let sent = async {
            let _ = (&mut self.watch_task).await;
            let _ = (&mut self.send_task).await;
        };
        if tokio::time::timeout(timeout, sent).await.is_err() {
            tracing::debug!("sending the last spans to the OTLP collector timed out; they are dropped");
            self.watch_task.abort();
            self.send_task.abort();
        }
    }
}

/// Follows the logs and turns their events into spans.
struct TelemetryWatcher {
    store: Store,
    sessions: Arc<Sessions>,
    queue: SpanQueue,
    /// Index of the last debugger event handled.
    last_seen: i64,
    /// The followed sessions: those whose context is built.
    turns: HashMap<SessionId, TurnTracker>,
    streams: StreamMap<SessionId, LogFollower<Arc<SessionEvent>>>,
}

/// The debugger events that begin or end following a session, or become spans.
fn traced_kinds() -> DebugFilter {
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

impl TelemetryWatcher {
    async fn run(mut self, stop: CancellationToken) {
        let mut debugger = self.store.debugger().follow(traced_kinds(), self.last_seen);
        loop {
            tokio::select! {
                // The debugger's log first: what happened in a turn is written there no later than the turn's end
                // is written in the session's log.
                biased;
                () = stop.cancelled() => break,
                event = debugger.next() => match event {
                    Some(Ok(event)) => self.on_debug_event(&event).await,
                    Some(Err(_)) => tokio::time::sleep(Duration::from_secs(1)).await,
                    None => break,
                },
                Some((session, event)) = self.streams.next(), if !self.streams.is_empty() => match event {
                    Ok(event) => self.on_session_event(&event).await,
                    Err(_) => self.unfollow_session(&session),
                },
            }
        }
        self.catch_up().await;
    }

    /// Handles every event that was written before the stop.
    async fn catch_up(&mut self) {
        self.store.debugger().flush().await;
        while let Ok(events) = self
            .store
            .debugger()
            .read(&traced_kinds(), self.last_seen, READ_BATCH)
            .await
            && !events.is_empty()
        {
            for event in events {
                self.on_debug_event(&event).await;
            }
        }
        let sessions: Vec<(SessionId, i64)> =
            self.turns.iter().map(|(s, t)| (s.clone(), t.last_seen)).collect();
        for (session, mut seen) in sessions {
            while let Ok(events) = self.store.events().read(&session, seen, READ_BATCH).await
                && let Some(last) = events.last()
            {
                seen = last.index;
                for event in events {
                    self.on_session_event(&event).await;
                }
            }
        }
    }

    /// Handles an event of the debugger's log.
    async fn on_debug_event(&mut self, event: &DebugEvent) {
        self.last_seen = event.index;
        let Some(session) = &event.session_id else { return };
        match &event.body {
            DebugBody::BuildStarted { .. } => {
                if let Err(error) = self.follow_session(session, event).await {
                    tracing::debug!(%session, error = %error.for_log(), "reading the session's log failed; its turns are not traced");
                }
            }
            DebugBody::TeardownFinished { .. } => {
                if self.turns.get(session).is_some_and(|turns| !turns.in_turn()) {
                    self.unfollow_session(session);
                }
            }
            body => {
                let in_turn = self.turns.get(session).is_some_and(TurnTracker::in_turn);
                let turn = match body {
                    DebugBody::ToolCall { turn, .. } | DebugBody::ToolBlocked { turn, .. } => *turn,
                    DebugBody::HealthChanged { .. } if !in_turn => None,
                    _ => self.sessions.current_turn(session),
                };
                if let Some(span) = OtlpSpan::from_debug_event(event, session, turn.filter(|turn| *turn > 0))
                {
                    self.queue.push_or_drop(span);
                }
            }
        }
    }

    /// Follows a session's log, from the beginning of the turn its context is built for, if there is one.
    async fn follow_session(&mut self, session: &SessionId, built: &DebugEvent) -> Result<()> {
        if let Some(turns) = self.turns.get_mut(session) {
            turns.agent = built.agent.clone();
            return Ok(());
        }
        let log = self.store.events();
        let last = log.last_index(session).await?;
        let from = last.saturating_sub_unsigned(TURN_START_SEARCH as u64).max(-1);
        let tail = log.read(session, from, TURN_START_SEARCH).await?;
        let since = turns::find_turn_start(&tail, built.ts).unwrap_or(from);
        let turns = TurnTracker::new(built.agent.clone(), since);
        self.streams.insert(session.clone(), log.follow(session, since));
        self.turns.insert(session.clone(), turns);
        Ok(())
    }

    fn unfollow_session(&mut self, session: &SessionId) {
        self.turns.remove(session);
        self.streams.remove(session);
    }

    /// Handles an event of a session's log.
    async fn on_session_event(&mut self, event: &SessionEvent) {
        let session = &event.session_id;
        let Some(turns) = self.turns.get_mut(session) else {
            return;
        };
        if turns.needs_turn_number(event)
            && let Ok(Some(row)) = self.store.session_get(session).await
        {
            // The row's turn number is written in one transaction with the message.
            turns.set_turn_number(row.turn);
        }
        if let Some(span) = turns.observe(event) {
            self.queue.push_or_drop(span);
        }
        if let EventBody::Status {
            status: SessionStatus::Ended,
            ..
        } = event.body
        {
            self.unfollow_session(session);
        }
    }
}
