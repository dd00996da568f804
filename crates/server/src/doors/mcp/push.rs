//! A stateful MCP session's GET stream: events pulled from the durable log as the client reads.
//!
//! Nothing is queued for a client. The stream follows the logs of the sessions its MCP session messaged,
//! and the HTTP connection asks it for the next frame when it can take one, so a client that does not
//! read costs nobody anything. Dropping the stream is how a client's leaving is seen.

use std::{
    collections::{HashSet, VecDeque},
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
    Result,
    event::{Event, EventBody, LOGGER, Status},
};
use oubliette_store::Follow;
use parking_lot::Mutex;
use rmcp::{
    model::{
        ResourceUpdatedNotification, ResourceUpdatedNotificationParam, ServerJsonRpcMessage,
        ServerNotification,
    },
    transport::streamable_http_server::session::ServerSseMessage,
};
use tokio::sync::watch;

use super::listeners::{Listener, Log, Open};
use crate::{app::App, presence::Held};

/// Most places named in one frame's id. Others are replayed from where they were last messaged.
const MOST_PLACES: usize = 32;
const PREFIX: &str = "e";

/// Where a client was in each log, by the log's number in its MCP session.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Places(Vec<(usize, i64)>);

impl Places {
    /// Reads the id of one of our frames.
    pub fn parse(id: &str) -> Option<Self> {
        let rest = id.strip_prefix(PREFIX)?;
        let pairs = rest.split('-').map(|pair| {
            let (log, index) = pair.split_once('.')?;
            Some((log.parse().ok()?, index.parse().ok()?))
        });
        pairs
            .collect::<Option<Vec<_>>>()
            .filter(|p| p.len() <= MOST_PLACES)
            .map(Self)
    }

    fn of(&self, log: usize) -> Option<i64> {
        self.0.iter().find(|(l, _)| *l == log).map(|(_, index)| *index)
    }

    /// The newest place comes first; the oldest falls out.
    fn reached(&mut self, log: usize, index: i64) {
        self.0.retain(|(l, _)| *l != log);
        self.0.insert(0, (log, index));
        self.0.truncate(MOST_PLACES);
    }
}

impl std::fmt::Display for Places {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(PREFIX)?;
        for (i, (log, index)) in self.0.iter().enumerate() {
            let dash = if i == 0 { "" } else { "-" };
            write!(f, "{dash}{log}.{index}")?;
        }
        Ok(())
    }
}

/// The URI of a session's log.
pub fn uri(session: &oubliette_protocol::SessionId) -> String {
    format!("oubliette://sessions/{session}/events")
}

/// An event as the notification every caller knows.
#[expect(deprecated, reason = "the notification this contract pushes events with")]
pub fn notification(event: &Event) -> Result<ServerNotification> {
    use rmcp::model::{LoggingLevel, LoggingMessageNotification, LoggingMessageNotificationParam};
    let data = serde_json::to_value(event).map_err(oubliette_protocol::Error::internal)?;
    let mut params = LoggingMessageNotificationParam::new(LoggingLevel::Info, data);
    params.logger = Some(LOGGER.to_owned());
    Ok(ServerNotification::LoggingMessageNotification(
        LoggingMessageNotification::new(params),
    ))
}

type Followed = BoxStream<'static, (usize, Result<Arc<Event>>)>;

/// The frames of one GET stream.
struct Puller {
    app: Arc<App>,
    listener: Arc<Listener>,
    stream: u64,
    changes: watch::Receiver<u64>,
    version: Option<u64>,
    resumed: Places,
    places: Places,
    followed: SelectAll<Followed>,
    /// Which logs are followed now.
    attached: HashSet<usize>,
    ready: VecDeque<ServerSseMessage>,
    ended: BoxFuture<'static, ()>,
    /// Requests that are open already, until all were told again.
    returning: Option<BoxStream<'static, Result<Arc<Event>>>>,
    _held: Held,
    _open: Open,
}

impl Drop for Puller {
    fn drop(&mut self) {
        self.listener.stream_closed(self.stream);
    }
}

/// The frames of a GET stream, from where the client was or from where it last messaged each session.
pub fn frames(
    app: Arc<App>,
    listener: Arc<Listener>,
    resumed: Places,
) -> impl Stream<Item = ServerSseMessage> + Send + Sync {
    let grant = listener.owner().cloned();
    let auth = app.auth.clone();
    let ended: BoxFuture<'static, ()> = match grant {
        Some(grant) => Box::pin(async move { auth.ended(&grant).await }),
        None => Box::pin(std::future::pending()),
    };
    let key = Held::mcp_key(listener.owner(), &listener.id);
    // Held before the open requests are looked for, so that none falls in between.
    let held = Held::stream(&app, key.clone());
    let puller = Puller {
        stream: listener.stream_opened(),
        changes: listener.changes(),
        version: None,
        places: resumed.clone(),
        resumed,
        followed: SelectAll::new(),
        attached: HashSet::new(),
        ready: VecDeque::new(),
        ended,
        returning: Some(app.sessions.open_requests(&key).boxed()),
        _held: held,
        _open: listener.hold(),
        app,
        listener,
    };
    Shared(Mutex::new(Box::pin(futures::stream::unfold(
        puller,
        |mut puller| async move {
            let frame = puller.next().await?;
            Some((frame, puller))
        },
    ))))
}

impl Puller {
    async fn next(&mut self) -> Option<ServerSseMessage> {
        loop {
            if let Some(frame) = self.ready.pop_front() {
                return Some(frame);
            }
            if let Some(open) = &mut self.returning {
                match open.next().await {
                    Some(Ok(event)) => self.deliver_again(&event),
                    Some(Err(error)) => {
                        tracing::error!(error = %error.for_log(), "open requests are not read")
                    }
                    None => self.returning = None,
                }
                continue;
            }
            // Marked as seen before it is looked at: what changes meanwhile wakes the stream again.
            let version = *self.changes.borrow_and_update();
            if self.version != Some(version) {
                self.attach();
                self.version = Some(version);
            }
            let speaking = self.listener.is_newest(self.stream) && !self.followed.is_empty();
            tokio::select! {
                biased;
                () = &mut self.ended => return None,
                () = self.app.stopping.cancelled() => return None,
                changed = self.changes.changed() => changed.ok()?,
                item = self.followed.next(), if speaking => match item {
                    Some((log, Ok(event))) => self.take(log, &event)?,
                    Some((_, Err(error))) => {
                        // The client comes back with the id of its last frame and loses nothing.
                        tracing::error!(error = %error.for_log(), "an event stream ended");
                        return None;
                    }
                    None => {}
                },
            }
        }
    }

    /// A request that still waits for this caller, if it lies before the place it comes back to.
    fn deliver_again(&mut self, event: &Event) {
        let logs = self.listener.logs();
        let mut numbered = logs.iter().enumerate();
        let Some((number, log)) = numbered.find(|(_, log)| log.session == event.session_id) else {
            return;
        };
        if event.index <= self.since(number, log)
            && let Ok(notification) = notification(event)
        {
            // Without an id of its own: it does not move the place the client is at.
            self.ready.push_back(ServerSseMessage::from_message(
                ServerJsonRpcMessage::notification(notification),
            ));
        }
    }

    /// The index a log is followed after. Where the client was is said once: a log that is followed again
    /// goes on where this stream was.
    fn since(&self, number: usize, log: &Log) -> i64 {
        self.places
            .of(number)
            .or_else(|| self.resumed.of(number))
            .unwrap_or(log.from)
    }

    /// Follows every log that is heard and not followed yet.
    fn attach(&mut self) {
        for (number, log) in self.listener.logs().into_iter().enumerate() {
            if self.attached.contains(&number) || !(log.events || log.signs) {
                continue;
            }
            let follow = self
                .app
                .store
                .events()
                .follow(&log.session, self.since(number, &log));
            self.followed.push(until_ended(number, follow).boxed());
            self.attached.insert(number);
        }
    }

    fn take(&mut self, number: usize, event: &Event) -> Option<()> {
        let log = self.listener.give(number, event.index)?;
        self.places.reached(number, event.index);
        if log.events && event.body.is_pushed() {
            self.frame(notification(event).ok()?);
        }
        if log.signs {
            let params = ResourceUpdatedNotificationParam::new(uri(&log.session));
            self.frame(ServerNotification::ResourceUpdatedNotification(
                ResourceUpdatedNotification::new(params),
            ));
        }
        Some(())
    }

    fn frame(&mut self, notification: ServerNotification) {
        let message = ServerJsonRpcMessage::notification(notification);
        self.ready
            .push_back(ServerSseMessage::new(self.places.to_string(), message));
    }
}

/// A log until its session has ended: a client that started thousands does not follow them all for ever.
fn until_ended(
    number: usize,
    follow: Follow<Arc<Event>>,
) -> impl Stream<Item = (usize, Result<Arc<Event>>)> + Send {
    futures::stream::unfold(Some(follow), move |follow| async move {
        let mut follow = follow?;
        let item = follow.next().await?;
        let over = matches!(&item, Ok(event) if matches!(event.body, EventBody::Status { status: Status::Ended, .. }));
        Some(((number, item), (!over).then_some(follow)))
    })
}

/// A stream that may be shared between threads although its state may not: it is only ever polled by
/// whoever owns it.
struct Shared<T>(Mutex<Pin<Box<dyn Stream<Item = T> + Send>>>);

impl<T> Stream for Shared<T> {
    type Item = T;

    fn poll_next(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<T>> {
        self.get_mut().0.get_mut().as_mut().poll_next(cx)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_frames_id_says_where_the_client_was() {
        let mut places = Places::default();
        places.reached(0, 4);
        places.reached(1, 0);
        places.reached(0, 5);
        assert_eq!(places.to_string(), "e0.5-1.0");
        assert_eq!(Places::parse("e0.5-1.0"), Some(places.clone()));
        assert_eq!((places.of(0), places.of(2)), (Some(5), None));
        for foreign in ["0", "1/2", "e", "e1", "ex.y", ""] {
            assert_eq!(Places::parse(foreign), None, "{foreign}");
        }
        for log in 0..100 {
            places.reached(log, 1);
        }
        assert_eq!(places.0.len(), MOST_PLACES);
    }
}
