//! The session events of a stateful MCP session's GET stream, pulled from the durable log as the client reads.
//!
//! Nothing is queued for a client. The stream follows the logs of the Oubliette sessions that the MCP session sent
//! messages to, and the HTTP connection polls it for the next frame when the client can take one, so a client that
//! does not read costs no memory and delays nobody. The stream is dropped when the client disconnects.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use futures::{
    Stream, StreamExt as _,
    future::BoxFuture,
    stream::{BoxStream, SelectAll},
};
use oubliette_protocol::{
    Result, ServerId,
    event::{EVENT_LOGGER, EventBody, SessionEvent, SessionStatus},
};
use oubliette_session::HoldKind;
use oubliette_store::LogFollower;
use parking_lot::Mutex;
use rmcp::{
    model::{
        ResourceUpdatedNotification, ResourceUpdatedNotificationParam, ServerJsonRpcMessage,
        ServerNotification,
    },
    transport::streamable_http_server::session::ServerSseMessage,
};
use tokio::sync::watch;

use super::mcp_sessions::{LogSubscription, McpSession, McpSessionGuard};
use crate::{
    app::App, doors::token_budget::StreamCharge, hop::presence::RemoteHold, presence::PresenceGuard,
};

/// Maximum number of positions in one event id. Logs that are left out are replayed from the client's last message to
/// their session.
const MAX_POSITIONS: usize = 32;
/// The prefix of our event ids, which tells them from rmcp's.
const EVENT_ID_PREFIX: &str = "e";

/// The index a client has reached in each log, by the log's number in its MCP session; newest first. As text it is the
/// event id of a frame, e.g. `e0.5-1.0`.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct StreamPositions(Vec<(usize, i64)>);

impl StreamPositions {
    /// Parses an event id of ours; `None` for any other.
    pub(crate) fn parse(id: &str) -> Option<Self> {
        let rest = id.strip_prefix(EVENT_ID_PREFIX)?;
        let pairs = rest.split('-').map(|pair| {
            let (log, index) = pair.split_once('.')?;
            Some((log.parse().ok()?, index.parse().ok()?))
        });
        pairs
            .collect::<Option<Vec<_>>>()
            .filter(|p| p.len() <= MAX_POSITIONS)
            .map(Self)
    }

    fn index_in(&self, log: usize) -> Option<i64> {
        self.0.iter().find(|(l, _)| *l == log).map(|(_, index)| *index)
    }

    /// Sets a log's index and moves it to the front; past the maximum the last is dropped.
    fn advance(&mut self, log: usize, index: i64) {
        self.0.retain(|(l, _)| *l != log);
        self.0.insert(0, (log, index));
        self.0.truncate(MAX_POSITIONS);
    }
}

impl std::fmt::Display for StreamPositions {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(EVENT_ID_PREFIX)?;
        for (i, (log, index)) in self.0.iter().enumerate() {
            let dash = if i == 0 { "" } else { "-" };
            write!(f, "{dash}{log}.{index}")?;
        }
        Ok(())
    }
}

/// The resource URI of a session's log.
pub(crate) fn events_uri(session: &oubliette_protocol::SessionId) -> String {
    format!("oubliette://sessions/{session}/events")
}

/// An event as the `notifications/message` that callers get.
#[expect(deprecated, reason = "the notification this contract pushes events with")]
pub(crate) fn event_notification(event: &SessionEvent) -> Result<ServerNotification> {
    use rmcp::model::{LoggingLevel, LoggingMessageNotification, LoggingMessageNotificationParam};
    let data = serde_json::to_value(event).map_err(oubliette_protocol::Error::internal)?;
    let mut params = LoggingMessageNotificationParam::new(LoggingLevel::Info, data);
    params.logger = Some(EVENT_LOGGER.to_owned());
    Ok(ServerNotification::LoggingMessageNotification(
        LoggingMessageNotification::new(params),
    ))
}

/// The events of one log, each with the log's number in its MCP session.
type NumberedEvents = BoxStream<'static, (usize, Result<Arc<SessionEvent>>)>;

/// Produces the frames of one GET stream.
struct EventPuller {
    app: Arc<App>,
    mcp_session: Arc<McpSession>,
    stream_number: u64,
    changes: watch::Receiver<u64>,
    seen_change: Option<u64>,
    resumed: StreamPositions,
    positions: StreamPositions,
    followed: SelectAll<NumberedEvents>,
    /// The numbers of the logs that are followed.
    attached: HashSet<usize>,
    ready: VecDeque<ServerSseMessage>,
    ended: BoxFuture<'static, ()>,
    /// Requests to the client's tools that were open before this stream, until all are sent again.
    open_requests: Option<BoxStream<'static, Result<Arc<SessionEvent>>>>,
    charge: StreamCharge,
    /// What marks its callers as present at other servers of the cluster.
    remote_presence: HashMap<ServerId, RemoteHold>,
    _presence: PresenceGuard,
    _session_guard: McpSessionGuard,
}

impl Drop for EventPuller {
    fn drop(&mut self) {
        self.mcp_session.unregister_stream(self.stream_number);
    }
}

/// The frames of a GET stream, after the positions of a client that resumes, else after its last message to each
/// session.
pub(crate) fn event_frames(
    app: Arc<App>,
    mcp_session: Arc<McpSession>,
    resumed: StreamPositions,
) -> impl Stream<Item = ServerSseMessage> + Send + Sync {
    let grant = mcp_session.owner().cloned();
    let auth = app.auth.clone();
    let ended: BoxFuture<'static, ()> = match grant {
        Some(grant) => Box::pin(async move { auth.wait_until_ended(&grant).await }),
        None => Box::pin(std::future::pending()),
    };
    let key = PresenceGuard::mcp_key(mcp_session.owner(), &mcp_session.id);
    // Present before its open requests are read, so that no request is made in between and missed.
    let presence = PresenceGuard::for_stream(&app, key.clone());
    let mut open_requests = vec![app.sessions.open_requests(&key).boxed()];
    let mut remote_presence = HashMap::new();
    if let Some(hop) = &app.hop {
        for peer in mcp_session.peers() {
            let hold = hop.hold_at(peer.clone(), key.clone(), HoldKind::Stream);
            // Present before they are read, there as well.
            let requests = hop.open_requests_at(peer.clone(), key.clone(), hold.held());
            open_requests.push(requests.map(Ok).boxed());
            remote_presence.insert(peer.server_id, hold);
        }
    }
    let puller = EventPuller {
        stream_number: mcp_session.register_stream(),
        changes: mcp_session.changes(),
        seen_change: None,
        positions: resumed.clone(),
        resumed,
        followed: SelectAll::new(),
        attached: HashSet::new(),
        ready: VecDeque::new(),
        ended,
        open_requests: Some(futures::stream::iter(open_requests).flatten().boxed()),
        remote_presence,
        charge: app.token_budgets.stream_of(mcp_session.owner()),
        _presence: presence,
        _session_guard: mcp_session.keep_open(),
        app,
        mcp_session,
    };
    SyncStream(Mutex::new(Box::pin(futures::stream::unfold(
        puller,
        |mut puller| async move {
            let frame = puller.next_frame().await?;
            Some((frame, puller))
        },
    ))))
}

impl EventPuller {
    async fn next_frame(&mut self) -> Option<ServerSseMessage> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            if let Some(open) = &mut self.open_requests {
                match open.next().await {
                    Some(Ok(event)) => self.redeliver(&event),
                    Some(Err(error)) => {
                        tracing::error!(error = %error.for_log(), "reading a caller's open requests failed")
                    }
                    None => self.open_requests = None,
                }
                continue;
            }
            // Marked as seen before the subscriptions are read: a change in between wakes the stream again.
            let version = *self.changes.borrow_and_update();
            if self.seen_change != Some(version) {
                self.follow_new_logs();
                self.hold_at_peers();
                self.seen_change = Some(version);
            }
            let may_send = self.mcp_session.is_newest_stream(self.stream_number) && !self.followed.is_empty();
            tokio::select! {
                biased;
                () = &mut self.ended => return None,
                () = self.app.stopping.cancelled() => return None,
                changed = self.changes.changed() => changed.ok()?,
                item = self.followed.next(), if may_send => match item {
                    Some((log, Ok(event))) => self.handle_event(log, &event)?,
                    Some((_, Err(error))) => {
                        // The client reconnects with the id of its last frame and misses nothing.
                        tracing::error!(error = %error.for_log(), "reading the log failed; the event stream ends");
                        return None;
                    }
                    None => {}
                },
            }
        }
    }

    /// Sends a request that still waits for this caller again, if following the log would not reach it.
    fn redeliver(&mut self, event: &SessionEvent) {
        let logs = self.mcp_session.subscriptions();
        let mut numbered = logs.iter().enumerate();
        let Some((number, log)) = numbered.find(|(_, log)| log.session == event.session_id) else {
            return;
        };
        if event.index <= self.start_index(number, log)
            && let Ok(notification) = event_notification(event)
        {
            // Without an event id, so that it does not change the client's position.
            self.ready.push_back(ServerSseMessage::from_message(
                ServerJsonRpcMessage::notification(notification),
            ));
        }
    }

    /// The index after which a log is followed: this stream's own position, else the client's when it resumed, else
    /// the subscription's.
    fn start_index(&self, number: usize, log: &LogSubscription) -> i64 {
        self.positions
            .index_in(number)
            .or_else(|| self.resumed.index_in(number))
            .unwrap_or(log.replay_after)
    }

    /// Follows every subscribed log that is not followed yet.
    fn follow_new_logs(&mut self) {
        for (number, log) in self.mcp_session.subscriptions().into_iter().enumerate() {
            if self.attached.contains(&number) || !(log.push_events || log.notify_updates) {
                continue;
            }
            let follow = self
                .app
                .store
                .events()
                .follow(&log.session, self.start_index(number, &log));
            self.followed.push(until_ended(number, follow).boxed());
            self.attached.insert(number);
        }
    }

    /// Marks the client's callers as present at the other servers that run sessions it sent messages to.
    fn hold_at_peers(&mut self) {
        let Some(hop) = &self.app.hop else { return };
        for peer in self.mcp_session.peers() {
            let key = PresenceGuard::mcp_key(self.mcp_session.owner(), &self.mcp_session.id);
            self.remote_presence
                .entry(peer.server_id.clone())
                .or_insert_with(|| hop.hold_at(peer, key, HoldKind::Stream));
        }
    }

    fn handle_event(&mut self, number: usize, event: &SessionEvent) -> Option<()> {
        let log = self.mcp_session.record_sent(number, event.index)?;
        self.positions.advance(number, event.index);
        if log.push_events && event.body.is_pushed() {
            if let Err(over) = self.charge.send(event) {
                tracing::warn!(%over, "an event stream ends: its client does not read");
                return None;
            }
            self.queue_frame(event_notification(event).ok()?);
        }
        if log.notify_updates {
            let params = ResourceUpdatedNotificationParam::new(events_uri(&log.session));
            self.queue_frame(ServerNotification::ResourceUpdatedNotification(
                ResourceUpdatedNotification::new(params),
            ));
        }
        Some(())
    }

    fn queue_frame(&mut self, notification: ServerNotification) {
        let message = ServerJsonRpcMessage::notification(notification);
        self.ready
            .push_back(ServerSseMessage::new(self.positions.to_string(), message));
    }
}

/// A log's events up to the one that ends its session, so that a client that started thousands of sessions does not
/// follow all of them for ever.
fn until_ended(
    number: usize,
    follow: LogFollower<Arc<SessionEvent>>,
) -> impl Stream<Item = (usize, Result<Arc<SessionEvent>>)> + Send {
    futures::stream::unfold(Some(follow), move |follow| async move {
        let mut follow = follow?;
        let item = follow.next().await?;
        let over = matches!(&item, Ok(event) if matches!(event.body, EventBody::Status { status: SessionStatus::Ended, .. }));
        Some(((number, item), (!over).then_some(follow)))
    })
}

/// Makes a stream `Sync`, which rmcp demands. Never locked: polling needs `&mut`, so only the owner can.
struct SyncStream<T>(Mutex<Pin<Box<dyn Stream<Item = T> + Send>>>);

impl<T> Stream for SyncStream<T> {
    type Item = T;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        self.get_mut().0.get_mut().as_mut().poll_next(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_id_holds_the_clients_position_in_each_log() {
        let mut positions = StreamPositions::default();
        positions.advance(0, 4);
        positions.advance(1, 0);
        positions.advance(0, 5);
        assert_eq!(positions.to_string(), "e0.5-1.0");
        assert_eq!(StreamPositions::parse("e0.5-1.0"), Some(positions.clone()));
        assert_eq!((positions.index_in(0), positions.index_in(2)), (Some(5), None));
        for foreign in ["0", "1/2", "e", "e1", "ex.y", ""] {
            assert_eq!(StreamPositions::parse(foreign), None, "{foreign}");
        }
        for log in 0..100 {
            positions.advance(log, 1);
        }
        assert_eq!(positions.0.len(), MAX_POSITIONS);
    }
}
