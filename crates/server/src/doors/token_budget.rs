//! What the doors keep in memory for a client, charged to the token behind it: large requests while they are served, and
//! events and large answers until they have been read.
//!
//! A request has megabytes at most, but parsed it takes many times its length if it is many small values.
//!
//! A stream keeps the event it is sending and little else, but an event can have megabytes, and a client can open many
//! streams and read from none. They are not charged to the session: its agent's calls would fail.

use std::{
    collections::HashMap,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use axum::{body::Body, response::Response};
use bytes::Bytes;
use http_body::{Body as HttpBody, Frame, SizeHint};
use oubliette_protocol::{
    ByteBudget, ByteCharge, OverBudget, TokenId, budget::parsed_bytes, size::json_bytes,
};
use parking_lot::Mutex;
use serde::Serialize;

use crate::auth::Grant;

/// Events, requests and pieces of answers up to this are not charged.
const UNCHARGED_BYTES: usize = 64 * 1024;
/// How many tokens may have a budget before those that use none are forgotten.
const MAX_UNUSED: usize = 256;

/// The budgets of all tokens; each is as large as a session's.
#[derive(Debug, Clone)]
pub(crate) struct TokenBudgets(Arc<BudgetTable>);

#[derive(Debug)]
struct BudgetTable {
    server: ByteBudget,
    limit: usize,
    by_token: Mutex<HashMap<Option<TokenId>, ByteBudget>>,
}

impl TokenBudgets {
    pub(crate) fn new(server: ByteBudget, limit: usize) -> Self {
        Self(Arc::new(BudgetTable {
            server,
            limit,
            by_token: Mutex::default(),
        }))
    }

    /// The charge of one request.
    pub(crate) fn request_of(&self, grant: Option<&Grant>) -> RequestCharge {
        RequestCharge(self.budget_of(grant).empty_charge())
    }

    /// The charge of one stream.
    pub(crate) fn stream_of(&self, grant: Option<&Grant>) -> StreamCharge {
        StreamCharge(self.budget_of(grant).empty_charge())
    }

    /// Charges an answer until it has been written to its connection: a client can ask for many and read none.
    pub(crate) fn charge_answer(&self, grant: &Grant, answer: Response) -> Result<Response, OverBudget> {
        let budget = self.budget_of(Some(grant));
        let size = answer.body().size_hint().exact();
        let size = size.and_then(|bytes| usize::try_from(bytes).ok());
        let charge = match size.filter(|bytes| *bytes > UNCHARGED_BYTES) {
            Some(bytes) => Some(budget.charge(bytes)?),
            None => None,
        };
        Ok(answer.map(|body| Body::new(ChargedBody { body, budget, charge })))
    }

    fn budget_of(&self, grant: Option<&Grant>) -> ByteBudget {
        let token = grant.and_then(Grant::token_id).cloned();
        let mut by_token = self.0.by_token.lock();
        if by_token.len() >= MAX_UNUSED && !by_token.contains_key(&token) {
            by_token.retain(|_, budget| budget.used() > 0);
        }
        let budget = by_token
            .entry(token)
            .or_insert_with(|| self.0.server.part("session_buffer_mb", self.0.limit));
        budget.clone()
    }
}

/// What one request is charged: its body while it is received and served.
#[derive(Debug)]
pub(crate) struct RequestCharge(ByteCharge);

impl RequestCharge {
    /// For a request that is charged nothing.
    pub(crate) fn unlimited() -> Self {
        Self(ByteBudget::default().empty_charge())
    }

    /// Charges what was received so far.
    pub(crate) fn receive(&mut self, bytes: usize) -> Result<(), OverBudget> {
        self.0.resize(if bytes > UNCHARGED_BYTES { bytes } else { 0 })
    }

    /// Charges a whole body as what it takes once it is parsed.
    pub(crate) fn parse(&mut self, body: &[u8]) -> Result<(), OverBudget> {
        match body.len() > UNCHARGED_BYTES {
            true => self.0.resize(parsed_bytes(body)),
            false => Ok(()),
        }
    }
}

/// A body whose large pieces are charged until they have been written.
struct ChargedBody {
    body: Body,
    budget: ByteBudget,
    /// What was charged for the first large piece.
    charge: Option<ByteCharge>,
}

impl HttpBody for ChargedBody {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let frame = match ready!(Pin::new(&mut self.body).poll_frame(cx)) {
            Some(Ok(frame)) => frame,
            end => return Poll::Ready(end),
        };
        let data = match frame.into_data() {
            Ok(data) if data.len() > UNCHARGED_BYTES => data,
            Ok(data) => return Poll::Ready(Some(Ok(Frame::data(data)))),
            Err(trailers) => return Poll::Ready(Some(Ok(trailers))),
        };
        let charge = match self.charge.take() {
            Some(charge) => Ok(charge),
            None => self.budget.charge(data.len()),
        };
        Poll::Ready(Some(match charge {
            // The connection drops them when they are written.
            Ok(charge) => Ok(Frame::data(Bytes::from_owner(ChargedBytes {
                data,
                _charge: charge,
            }))),
            Err(over) => Err(axum::Error::new(over)),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// Bytes with what they are charged.
struct ChargedBytes {
    data: Bytes,
    _charge: ByteCharge,
}

impl AsRef<[u8]> for ChargedBytes {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

/// What one stream is charged.
#[derive(Debug)]
pub(crate) struct StreamCharge(ByteCharge);

impl StreamCharge {
    /// Charges the event that is sent now instead of the one before.
    pub(crate) fn send(&mut self, event: &impl Serialize) -> Result<(), OverBudget> {
        let bytes = json_bytes(event);
        self.0.resize(if bytes > UNCHARGED_BYTES { bytes } else { 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_large_request_is_charged_what_it_takes_parsed_and_a_small_one_nothing() {
        let server = ByteBudget::new("server_buffer_mb", 64 << 20);
        let budgets = TokenBudgets::new(server.clone(), 16 << 20);
        let numbers = format!("[{}1]", "1,".repeat(100_000));
        let mut first = budgets.request_of(None);
        first.parse(numbers.as_bytes()).unwrap();
        assert!(first.0.bytes() > 100_000 * size_of::<serde_json::Value>());
        let mut second = budgets.request_of(None);
        assert!(second.parse(numbers.as_bytes()).is_err());
        assert!(second.parse(b"{}").is_ok());
        let text = format!("\"{}\"", "x".repeat(1 << 20));
        assert!(second.parse(text.as_bytes()).is_ok());
        drop((first, second));
        let mut third = budgets.request_of(None);
        assert!(third.parse(numbers.as_bytes()).is_ok());
        drop(third);
        assert_eq!(server.used(), 0);
    }

    #[test]
    fn bodies_are_charged_while_they_are_received() {
        let server = ByteBudget::new("server_buffer_mb", 64 << 20);
        let budgets = TokenBudgets::new(server.clone(), 16 << 20);
        let mut received: Vec<_> = (0..4).map(|_| budgets.request_of(None)).collect();
        let fits = received.iter_mut().filter_map(|body| body.receive(4 << 20).ok());
        assert_eq!(fits.count(), 3);
        assert_eq!(server.used(), 12 << 20);
        assert!(
            received[3].receive(UNCHARGED_BYTES).is_ok(),
            "small ones are free"
        );
        drop(received);
        assert_eq!(server.used(), 0);
    }

    #[test]
    fn streams_of_one_token_share_a_budget_and_small_events_are_free() {
        let server = ByteBudget::new("server_buffer_mb", 64 << 20);
        let budgets = TokenBudgets::new(server.clone(), 1 << 20);
        let large = "x".repeat(500_000);
        let mut streams: Vec<_> = (0..3).map(|_| budgets.stream_of(None)).collect();
        assert!(streams[0].send(&large).is_ok());
        assert!(
            streams[1].send(&large).is_err(),
            "a reserve is kept for small charges"
        );
        assert!(streams[2].send(&"small").is_ok());
        assert!(streams[0].send(&"small").is_ok());
        assert!(streams[1].send(&large).is_ok());
        drop(streams);
        assert_eq!(server.used(), 0);
    }
}
