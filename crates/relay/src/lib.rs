//! A JSON-RPC 2.0 peer over any byte stream, one message a line.
//!
//! Both ends are the same [`Peer`]: each may call the other, many calls are open at once, answers come
//! as they are ready, and giving up on a call reaches the other side. The crate knows two methods, both
//! about requests themselves: `cancel {id}` and `progress {id, progress, total?, message?}`. Everything
//! else is the [`Handler`]'s.
//!
//! Nothing here grows without bound. A line is at most [`Limits::line`] long and memory follows what has
//! arrived, not what is announced; requests in flight, calls waiting and bytes queued are counted. The
//! reader never waits for the writer, so two peers that flood each other cannot stop each other: see
//! [`queue`](self) for how.
//!
//! In the order data flows:
//!
//! - `lines`: bytes → lines, bounded.
//! - [`message`]: a line → a request, notification or response, and back. Pure; [`fuzz_line`] drives it.
//! - `serving`: requests of the other side that are being worked on.
//! - `calls`: our own requests that wait for an answer.
//! - `queue`: lines on their way out, and who has to wait for room.
//! - `quiet`: a Unix stream that wakes nobody without need.
//! - [`peer`]: the two tasks of a connection, and what users of the crate hold.
//! - [`error`]: how a call fails, why a connection ended.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

mod calls;
pub mod error;
mod lines;
pub mod message;
pub mod peer;
mod queue;
mod quiet;
mod serving;

pub use calls::{CallOptions, OnProgress, Progress};
pub use error::{CallError, Closed};
pub use message::{Id, Message, Refused, parse_line};
pub use oubliette_protocol::relay::RpcError;
pub use peer::{Asked, Handler, Peer};
pub use serving::RequestContext;

/// What one connection may cost.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Longest line, newline excluded; a longer one ends the connection.
    pub line: usize,
    /// Requests of the other side worked on at once; more are refused with `limit_exceeded`.
    pub in_flight: usize,
    /// Our own calls waiting at once; more fail at once.
    pub waiting: usize,
    /// Bytes queued for writing before calls, notifications and answers wait for room.
    pub queue: usize,
    /// Bytes of refusals queued before a side that floods us and does not read is hung up on.
    pub refusals: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            line: oubliette_protocol::relay::MAX_LINE,
            in_flight: 12_000,
            waiting: 12_000,
            queue: 4 * 1024 * 1024,
            refusals: 8 * 1024 * 1024,
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
