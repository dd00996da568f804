//! A JSON-RPC 2.0 peer over any byte stream, one message a line.
//!
//! Both ends are the same [`RpcPeer`]: each may call the other, many calls are open at once, answers are sent
//! in the order they are ready, and a call that is dropped here is cancelled at the other side. The crate
//! knows two methods, both about requests themselves: `cancel {id}` and
//! `progress {id, progress, total?, message?}`. Every other method belongs to the [`PeerHandler`].
//!
//! Nothing here grows without bound. A line is at most [`PeerLimits::max_line_bytes`] long and the read buffer
//! grows with what has arrived; requests in flight, pending calls and queued bytes are counted, and all of it is
//! charged to [`PeerLimits::budget`], which many connections share. The reader
//! never waits for the writer, so two peers that flood each other cannot deadlock: the `queue` module says
//! how.
//!
//! In the order data flows:
//!
//! - `lines`: bytes → lines, bounded.
//! - [`message`]: a line → a request, notification or response, and back. Pure; [`fuzz_line`] drives it.
//! - `serving`: requests of the other side that are in progress.
//! - `calls`: our own requests that wait for an answer; `prepared_call`: one of them.
//! - `queue`: lines waiting to be written, and who has to wait for space.
//! - [`peer`]: the two tasks of a connection, and the handle that users of the crate hold.
//! - [`error`]: how a call fails, why a connection ended.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod calls;
pub mod error;
mod lines;
pub mod message;
pub mod peer;
mod prepared_call;
mod queue;
mod serving;

pub use calls::CallOptions;
pub use error::{CallError, CloseReason};
pub use lines::LineSplitter;
pub use message::{RejectedLine, RpcId, RpcMessage, parse_line};
use oubliette_protocol::ByteBudget;
pub use oubliette_protocol::relay::{ProgressCallback, ProgressReport, RpcError};
pub use peer::{PeerHandler, RpcPeer};
pub use prepared_call::PreparedCall;
pub use serving::RequestContext;

/// Bounds on what one connection may use.
#[derive(Debug, Clone)]
pub struct PeerLimits {
    /// Maximum length of a line, newline excluded; a longer one ends the connection.
    pub max_line_bytes: usize,
    /// Maximum number of the other side's requests in progress; more are refused with `limit_exceeded`.
    pub max_in_flight: usize,
    /// Maximum number of our own calls without an answer yet; a further call fails at once.
    pub max_pending_calls: usize,
    /// Bytes queued for writing before calls, notifications and answers wait for space.
    pub max_queue_bytes: usize,
    /// Bytes of queued refusals before the connection is closed: the other side sends without reading.
    pub max_refusal_bytes: usize,
    /// What unfinished lines, requests in progress and queued lines are charged to. A request or an answer that does not
    /// fit fails with `limit_exceeded`; a line that does not fit ends the connection with that error.
    pub budget: ByteBudget,
}

impl Default for PeerLimits {
    fn default() -> Self {
        Self {
            max_line_bytes: oubliette_protocol::relay::MAX_LINE_BYTES,
            max_in_flight: 12_000,
            max_pending_calls: 12_000,
            max_queue_bytes: 4 * 1024 * 1024,
            max_refusal_bytes: 8 * 1024 * 1024,
            budget: ByteBudget::default(),
        }
    }
}

/// Feeds arbitrary bytes through the line splitter and the parser; for the fuzzer. Panics only when an
/// invariant is broken: a message that was accepted must survive being written and read again.
#[doc(hidden)]
pub fn fuzz_line(bytes: &[u8]) {
    for line in bytes.split(|b| *b == b'\n') {
        let Ok(message) = parse_line(line) else { continue };
        let Ok(written) = message.to_line(usize::MAX) else {
            continue;
        };
        assert_eq!(
            memchr::memchr(b'\n', &written),
            Some(written.len() - 1),
            "one message, one line"
        );
        let again = parse_line(&written[..written.len() - 1]);
        assert_eq!(
            again.as_ref(),
            Ok(&message),
            "a message must survive the round trip"
        );
    }
}
