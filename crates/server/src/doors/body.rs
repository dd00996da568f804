//! Reads request bodies, bounded in size and time.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body_util::BodyExt as _;

/// Maximum size of a request body at any door, in bytes.
pub(crate) const MAX_BODY_BYTES: usize = 4 * 1024 * 1024;
/// How much more of a body that is too large is read and discarded, so that its sender gets the response.
const DRAIN_MAX_BYTES: usize = 64 * 1024 * 1024;
const DRAIN_TIMEOUT: Duration = Duration::from_secs(5);

/// Why a body could not be read.
#[derive(Debug)]
pub(crate) enum BodyError {
    /// More than [`MAX_BODY_BYTES`].
    TooLarge,
    /// The client disconnected, or did not send the whole body in time.
    Incomplete,
}

/// How long a client may take to send a body.
const BODY_TIMEOUT: Duration = Duration::from_secs(60);

/// Reads a body to its end.
pub(crate) async fn read(headers: &HeaderMap, body: Body) -> Result<Bytes, BodyError> {
    tokio::time::timeout(BODY_TIMEOUT, read_bounded(headers, body))
        .await
        .unwrap_or(Err(BodyError::Incomplete))
}

async fn read_bounded(headers: &HeaderMap, mut body: Body) -> Result<Bytes, BodyError> {
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|n| n > MAX_BODY_BYTES) {
        drain(body).await;
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
        if total > MAX_BODY_BYTES {
            drain(body).await;
            return Err(BodyError::TooLarge);
        }
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
    Ok(first.unwrap_or_else(|| rest.freeze()))
}

/// Reads and discards the rest of a body, within bounds: closing a connection with unread bytes resets it, and the
/// client would not get the response.
async fn drain(mut body: Body) {
    let _ = tokio::time::timeout(DRAIN_TIMEOUT, async {
        let mut total = 0;
        while let Some(Ok(frame)) = body.frame().await {
            total += frame.data_ref().map_or(0, Bytes::len);
            if total > DRAIN_MAX_BYTES {
                break;
            }
        }
    })
    .await;
}
