//! Reading the responses of an HTTP tool server: each message is bounded, and charged to the session's budget while it is
//! read. One that there is no room for fails its own request and no other.

use std::{
    borrow::Cow,
    future::ready,
    io,
    sync::{Arc, OnceLock},
};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream, stream::BoxStream};
use oubliette_protocol::{ByteCharge, OverBudget};
use reqwest::Response;
use rmcp::{
    model::{RequestId, ServerJsonRpcMessage},
    transport::streamable_http_client::{SseError, StreamableHttpError},
};
use sse_stream::{Sse, SseStream};

use super::{
    fault::error_chain,
    http::HttpError,
    limits,
    lines::message_too_large,
    traffic::{ConnectionEnd, TrafficFilter},
};

/// Reads the responses of one server.
#[derive(Clone)]
pub(super) struct ResponseReader {
    url: Arc<str>,
    pub(super) traffic: Arc<TrafficFilter>,
}

/// Why a body was not read.
pub(super) enum BodyFailure {
    /// There is no room for it.
    OverBudget(OverBudget),
    /// It could not be read, or is too large.
    Http(HttpError),
}

impl From<BodyFailure> for HttpError {
    fn from(failure: BodyFailure) -> Self {
        match failure {
            BodyFailure::OverBudget(over) => io::Error::other(over).into(),
            BodyFailure::Http(error) => error,
        }
    }
}

impl ResponseReader {
    /// Reads responses of the server at `url`.
    pub(super) fn new(url: Arc<str>, traffic: Arc<TrafficFilter>) -> Self {
        Self { url, traffic }
    }

    /// Marks the connection as lost if the request failed at the connection rather than in its response.
    pub(super) fn connection_lost(&self, error: reqwest::Error) -> HttpError {
        let error = error.without_url();
        if error.is_connect() || error.is_request() || error.is_body() {
            self.end_with_fault(format!("{} cannot be reached: {}", self.url, error_chain(&error)));
        }
        StreamableHttpError::Client(error)
    }

    fn end_with_fault(&self, reason: String) {
        self.traffic.ended.set(ConnectionEnd::Fault(reason.into()));
    }

    /// Charges the body of a request.
    pub(super) fn charge_request(&self, bytes: usize) -> Result<ByteCharge, HttpError> {
        let charged = self.traffic.buffers.charge(bytes);
        charged.map_err(|over| io::Error::other(over).into())
    }

    /// Reads a body of at most [`limits::MAX_MESSAGE_BYTES`].
    pub(super) async fn read_body(&self, mut response: Response) -> Result<Bytes, BodyFailure> {
        let mut body = Vec::new();
        let mut charge = self.traffic.buffers.empty_charge();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| BodyFailure::Http(self.connection_lost(error)))?
        {
            let bytes = body.len() + chunk.len();
            if bytes > limits::MAX_MESSAGE_BYTES {
                self.end_with_fault(message_too_large());
                return Err(BodyFailure::Http(unexpected_response(message_too_large())));
            }
            charge_buffer(&mut charge, bytes).map_err(BodyFailure::OverBudget)?;
            body.extend_from_slice(&chunk);
        }
        Ok(body.into())
    }

    /// The answer to a request whose response was not read: an empty one where whoever waits learns the reason
    /// elsewhere, else the error.
    pub(super) fn fail_request(
        &self,
        id: Option<&RequestId>,
        failure: BodyFailure,
    ) -> Result<ServerJsonRpcMessage, HttpError> {
        match (&failure, id) {
            (BodyFailure::OverBudget(over), Some(id)) => {
                let answered = self.traffic.fail_http_request(id, *over);
                answered.ok_or_else(|| failure.into())
            }
            _ => Err(failure.into()),
        }
    }

    /// Reads a stream of events, each of at most `most` bytes. `request` is the request it is the response to.
    pub(super) fn read_events(
        &self,
        response: Response,
        most: usize,
        request: Option<RequestId>,
    ) -> BoxStream<'static, Result<Sse, SseError>> {
        let over_budget = Arc::new(OnceLock::new());
        let (reader, over) = (self.clone(), over_budget.clone());
        let state = (SseEventSize::default(), self.traffic.buffers.empty_charge());
        let bytes = response.bytes_stream().map_err(io::Error::other);
        let bytes = bytes.scan(state, move |(event, charge), chunk| {
            let next = chunk.map(|chunk| {
                if !event.add(&chunk, most) {
                    reader.end_with_fault(message_too_large());
                    return Some(Err(io::Error::other(message_too_large())));
                }
                match charge_buffer(charge, event.bytes) {
                    Ok(()) => Some(Ok(chunk)),
                    Err(why) => {
                        // Ends the stream; what it was the response to fails below.
                        let _ = over.set(why);
                        None
                    }
                }
            });
            ready(next.unwrap_or_else(|error| Some(Err(error))))
        });
        let (traffic, reader) = (self.traffic.clone(), self.clone());
        let answered = move |mut event: Sse| {
            // The result of a call is kept by the filter; the library gets an empty response in its place.
            if let Some(data) = event.data.take() {
                let data = Bytes::from(data);
                let answered = traffic
                    .intercept_http_response(&data)
                    .and_then(|message| serde_json::to_string(&message).ok());
                event.data = Some(answered.unwrap_or_else(|| String::from_utf8_lossy(&data).into_owned()));
            }
            event
        };
        let failed = stream::once(async move {
            let why: OverBudget = *over_budget.get()?;
            let answered = request.and_then(|id| reader.traffic.fail_http_request(&id, why));
            let text = answered.and_then(|answered| serde_json::to_string(&answered).ok());
            if text.is_none() {
                // The call that waits for it would never be answered.
                reader.end_with_fault(why.to_string());
            }
            text.map(|text| Ok(Sse::default().data(text)))
        });
        SseStream::from_bytes_stream(bytes)
            .map_ok(answered)
            .chain(failed.filter_map(ready))
            .boxed()
    }
}

/// Charges a buffer of this many bytes; small ones are not charged.
fn charge_buffer(charge: &mut ByteCharge, bytes: usize) -> Result<(), OverBudget> {
    charge.resize(match bytes > limits::UNCHARGED_BUFFER_BYTES {
        true => bytes,
        false => 0,
    })
}

/// The library's error for a response that is none of MCP.
pub(super) fn unexpected_response(what: String) -> HttpError {
    StreamableHttpError::UnexpectedServerResponse(Cow::Owned(what))
}

/// Size of the SSE event being read, in bytes, to bound events before they are complete.
#[derive(Default)]
struct SseEventSize {
    bytes: usize,
    line_bytes: usize,
}

impl SseEventSize {
    /// Adds a chunk; returns false when an event exceeds `most` bytes.
    fn add(&mut self, chunk: &[u8], most: usize) -> bool {
        for &byte in chunk {
            match byte {
                b'\n' if self.line_bytes == 0 => self.bytes = 0,
                b'\n' => self.line_bytes = 0,
                b'\r' => {}
                _ => self.line_bytes += 1,
            }
            self.bytes += 1;
            if self.bytes > most {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_measured_from_blank_line_to_blank_line() {
        let mut size = SseEventSize::default();
        assert!(size.add(b"data: 12345\r\n\r\ndata: 12345\n", 16));
        assert!(size.add(b"\ndata: 1234", 16));
        assert!(!size.add(b"567890", 16));
    }
}
