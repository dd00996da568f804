//! What servers tell each other: the body of a passed-on action, and the lines of the answer.
//!
//! An answer is a stream of lines, one JSON object each. The last one is the action's outcome; before it come what the
//! action tells its client meanwhile, and every two seconds a sign of life. A line of a kind that a server does not know
//! is skipped, and so is a field of a request's body, so that servers of two versions can run side by side. A field that may not
//! be skipped needs a path of its own, which an older server refuses.

use std::{collections::VecDeque, time::Duration};

use bytes::{Bytes, BytesMut};
use futures::{Stream, StreamExt as _};
use oubliette_protocol::{
    CallerId, Error, JsonObject, SessionId, event::SessionEvent, relay::ProgressReport,
};
use oubliette_session::{HoldKind, PresenceKey};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use serde_json::Value;

/// How often a line is sent at least.
pub(super) const LINE_INTERVAL: Duration = Duration::from_secs(2);
/// Without a line for this long the other server is taken for gone. A server without a heartbeat for 8 s is declared dead.
pub(super) const MAX_SILENCE: Duration = Duration::from_secs(10);
/// Maximum size of one line, in bytes.
const MAX_LINE_BYTES: usize = 64 * 1024 * 1024;
/// Maximum size of a request's body between servers, in bytes. Arguments have at most 4 MiB at a client's door, and
/// escaping makes them longer.
pub(super) const MAX_BODY_BYTES: usize = 20 * 1024 * 1024;

/// The body of a passed-on action.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct PassedOnCall {
    pub(super) arguments: JsonObject,
    /// Names the call in a later [`CallSignal`].
    pub(super) call_id: String,
    /// The stateful MCP session the client made it in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) mcp_session: Option<String>,
    /// Whether the client wants progress.
    #[serde(default)]
    pub(super) progress: bool,
    /// Whether the client wants session events on the answer.
    #[serde(default)]
    pub(super) events: bool,
}

/// One line of an answer.
#[derive(Debug, Serialize, Deserialize)]
#[serde(tag = "line", rename_all = "snake_case")]
pub(super) enum AnswerLine {
    /// The other server works on it.
    Alive,
    /// A presence hold is registered.
    Held,
    /// The session that a message goes to, and the index of the last event before it.
    Messaged { session_id: SessionId, since: i64 },
    /// The same, of a message whose turn is waited for.
    Awaited { session_id: SessionId, since: i64 },
    /// A session event for the client.
    Event { event: Box<SessionEvent> },
    /// Progress for the client.
    Progress { report: ProgressReport },
    /// The action's result.
    Done { result: Value },
    /// The action's error, as its client gets it.
    Failed { error: Error },
    /// Nothing was done: another server runs the session now.
    Moved,
    /// A line of a later version.
    #[serde(other)]
    Unknown,
}

/// Tells a passed-on call, or a hold, something while it is open.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CallSignal {
    pub(super) call_id: String,
}

/// Marks callers as present at the owner of their session, as long as the request is open.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(super) struct HoldRequest {
    pub(super) call_id: String,
    pub(super) key: PresenceKey,
    pub(super) kind: HoldKind,
}

/// Asks for a session's events after an index, for a caller that is present meanwhile. They come as server-sent events.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct CallerStream {
    pub(super) session_id: SessionId,
    pub(super) caller_id: CallerId,
    pub(super) since: i64,
}

/// Asks for the open requests of the callers that a stream belongs to.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct OpenRequestsQuery {
    pub(super) key: PresenceKey,
}

/// Says that a stateful MCP session was closed.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ClosedMcpSession {
    pub(super) mcp_session: String,
}

/// A line as it is sent.
pub(super) fn encode_line(line: &impl Serialize) -> Bytes {
    let mut text = serde_json::to_vec(line).unwrap_or_else(|error| {
        tracing::error!(%error, "serializing a line for another server failed");
        br#"{"line":"failed","error":{"code":"internal","message":"the answer could not be sent"}}"#.to_vec()
    });
    text.push(b'\n');
    text.into()
}

/// Why no line could be read.
#[derive(Debug, thiserror::Error)]
pub(super) enum LineError {
    #[error("the connection broke")]
    Broken(#[source] reqwest::Error),
    #[error("a line has more than {MAX_LINE_BYTES} bytes")]
    TooLong,
    #[error("a line is not of the expected form")]
    Malformed(#[source] serde_json::Error),
    #[error("nothing came for {} s", MAX_SILENCE.as_secs())]
    Silent,
}

/// Reads the lines of an answer.
pub(super) struct AnswerLineReader<S> {
    chunks: S,
    unread: BytesMut,
    /// How much of `unread` has no line end.
    searched: usize,
    lines: VecDeque<Bytes>,
}

impl<S: Stream<Item = reqwest::Result<Bytes>> + Unpin> AnswerLineReader<S> {
    pub(super) fn new(chunks: S) -> Self {
        Self {
            chunks,
            unread: BytesMut::new(),
            searched: 0,
            lines: VecDeque::new(),
        }
    }

    /// The next line; `None` at the end.
    pub(super) async fn next<T: DeserializeOwned>(&mut self) -> Result<Option<T>, LineError> {
        loop {
            if let Some(line) = self.lines.pop_front() {
                return serde_json::from_slice(&line)
                    .map(Some)
                    .map_err(LineError::Malformed);
            }
            let chunk = tokio::time::timeout(MAX_SILENCE, self.chunks.next())
                .await
                .map_err(|_| LineError::Silent)?;
            let Some(chunk) = chunk else { return Ok(None) };
            self.unread.extend_from_slice(&chunk.map_err(LineError::Broken)?);
            while let Some(end) = self.unread[self.searched..].iter().position(|b| *b == b'\n') {
                let line = self.unread.split_to(self.searched + end + 1).freeze();
                self.lines.push_back(line);
                self.searched = 0;
            }
            self.searched = self.unread.len();
            if self.unread.len() > MAX_LINE_BYTES {
                return Err(LineError::TooLong);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn fields_of_a_later_version_are_skipped() {
        let of_later = |text: &str| text.replacen('{', "{\"of_a_later_version\":[1],", 1);
        let call = of_later(r#"{"arguments":{"a":1},"call_id":"c"}"#);
        let call: PassedOnCall = serde_json::from_str(&call).unwrap();
        assert_eq!((call.call_id.as_str(), call.arguments.len()), ("c", 1));
        let signal: CallSignal = serde_json::from_str(&of_later(r#"{"call_id":"c"}"#)).unwrap();
        assert_eq!(signal.call_id, "c");
        let closed: ClosedMcpSession = serde_json::from_str(&of_later(r#"{"mcp_session":"m"}"#)).unwrap();
        assert_eq!(closed.mcp_session, "m");
    }

    #[tokio::test]
    async fn lines_are_read_however_they_were_cut_and_unknown_kinds_are_skipped() {
        let text = [
            encode_line(&AnswerLine::Alive),
            Bytes::from_static(b"{\"line\":\"of a later version\",\"more\":1}\n"),
            encode_line(&AnswerLine::Done {
                result: serde_json::json!({ "a": "b\nc" }),
            }),
        ]
        .concat();
        for size in [1, 7, text.len()] {
            let chunks = text.chunks(size).map(|chunk| Ok(Bytes::copy_from_slice(chunk)));
            let mut reader = AnswerLineReader::new(futures::stream::iter(chunks));
            assert!(matches!(reader.next().await, Ok(Some(AnswerLine::Alive))));
            assert!(matches!(reader.next().await, Ok(Some(AnswerLine::Unknown))));
            match reader.next().await {
                Ok(Some(AnswerLine::Done { result })) => assert_eq!(result["a"], "b\nc"),
                other => panic!("{other:?}"),
            }
            assert!(matches!(reader.next::<AnswerLine>().await, Ok(None)));
        }
        let mut reader =
            AnswerLineReader::new(futures::stream::iter([Ok(Bytes::from_static(b"nonsense\n"))]));
        assert!(matches!(
            reader.next::<AnswerLine>().await,
            Err(LineError::Malformed(_))
        ));
    }
}
