//! Reads request bodies, bounded in size and time.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body_util::BodyExt as _;
use oubliette_protocol::OverBudget;

use super::token_budget::RequestCharge;

/// Maximum size of a request body at any door, in bytes, unless an action takes more.
pub(crate) const MAX_BODY_BYTES: usize = 4 * 1024 * 1024;

/// Why a body could not be read.
#[derive(Debug)]
pub(crate) enum BodyError {
    /// More than may be sent.
    TooLarge,
    /// The client disconnected, or did not send the whole body in time.
    Incomplete,
    /// More than may be kept for its token at once.
    OverBudget(OverBudget),
}

/// A request's body, with what it is charged while it is kept.
pub(crate) struct RequestBody {
    pub(crate) bytes: Bytes,
    pub(crate) charge: RequestCharge,
}

/// How long a client may take to send a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Maximum size of a request body of somebody who is not authenticated yet, in bytes.
pub(crate) const MAX_ANONYMOUS_BODY_BYTES: usize = 4 * 1024;
/// How long somebody who is not authenticated may take to send a body.
const ANONYMOUS_BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads the body of an authenticated request to its end. It is charged as it comes: a client can send many bodies and end
/// none of them.
pub(crate) async fn read(
    headers: &HeaderMap,
    body: Body,
    charge: RequestCharge,
) -> Result<RequestBody, BodyError> {
    read_up_to(headers, body, MAX_BODY_BYTES, charge).await
}

/// Reads the body of an authenticated request that may have this many bytes.
pub(crate) async fn read_up_to(
    headers: &HeaderMap,
    body: Body,
    most: usize,
    charge: RequestCharge,
) -> Result<RequestBody, BodyError> {
    tokio::time::timeout(BODY_TIMEOUT, read_bounded(headers, body, most, charge))
        .await
        .unwrap_or(Err(BodyError::Incomplete))
}

/// Reads a small body before anybody is authenticated.
pub(crate) async fn read_anonymous(headers: &HeaderMap, body: Body) -> Result<Bytes, BodyError> {
    let charge = RequestCharge::unlimited();
    let read = read_bounded(headers, body, MAX_ANONYMOUS_BODY_BYTES, charge);
    let read = tokio::time::timeout(ANONYMOUS_BODY_TIMEOUT, read).await;
    read.unwrap_or(Err(BodyError::Incomplete)).map(|body| body.bytes)
}

/// Reads a body of at most `max_bytes`. What is left of a larger one is discarded when its connection is closed
/// ([`lingering_close`](super::lingering_close)).
async fn read_bounded(
    headers: &HeaderMap,
    mut body: Body,
    max_bytes: usize,
    mut charge: RequestCharge,
) -> Result<RequestBody, BodyError> {
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|n| n > max_bytes) {
        return Err(BodyError::TooLarge);
    }
    let mut first: Option<Bytes> = None;
    let mut rest = BytesMut::new();
    let mut total = 0;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Incomplete)?.into_data() else {
            continue;
        };
        total += data.len();
        if total > max_bytes {
            return Err(BodyError::TooLarge);
        }
        charge.receive(total).map_err(BodyError::OverBudget)?;
        // Most bodies are one frame: those are not copied.
        match first.take() {
            None if rest.is_empty() => first = Some(data),
            None => rest.extend_from_slice(&data),
            Some(before) => {
                rest.reserve(announced.unwrap_or(before.len() + data.len()));
                rest.extend_from_slice(&before);
                rest.extend_from_slice(&data);
            }
        }
    }
    let bytes = first.unwrap_or_else(|| rest.freeze());
    Ok(RequestBody { bytes, charge })
}
