//! Request bodies, bounded.

use std::time::Duration;

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http::{HeaderMap, header};
use http_body_util::BodyExt as _;

/// The largest body any door takes.
pub const MOST: usize = 4 * 1024 * 1024;
/// How much more of a body that is too large is read, so that its sender gets to hear why.
const DRAIN: usize = 64 * 1024 * 1024;
const DRAIN_TIME: Duration = Duration::from_secs(5);

/// Why there is no body.
#[derive(Debug)]
pub enum BodyError {
    /// More than [`MOST`].
    TooLarge,
    /// The client broke off.
    Broken,
}

/// How long a whole body may take.
const WHOLE: Duration = Duration::from_secs(60);

/// Reads a whole body.
pub async fn read(headers: &HeaderMap, body: Body) -> Result<Bytes, BodyError> {
    tokio::time::timeout(WHOLE, gather(headers, body))
        .await
        .unwrap_or(Err(BodyError::Broken))
}

async fn gather(headers: &HeaderMap, mut body: Body) -> Result<Bytes, BodyError> {
    let announced = headers
        .get(header::CONTENT_LENGTH)
        .and_then(|v| v.to_str().ok()?.parse::<usize>().ok());
    if announced.is_some_and(|n| n > MOST) {
        drain(body).await;
        return Err(BodyError::TooLarge);
    }
    let mut first: Option<Bytes> = None;
    let mut rest = BytesMut::new();
    let mut total = 0;
    while let Some(frame) = body.frame().await {
        let Ok(data) = frame.map_err(|_| BodyError::Broken)?.into_data() else {
            continue;
        };
        total += data.len();
        if total > MOST {
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

/// Reads on for a while and throws it away: a connection closed on unread bytes is reset, and the
/// answer with it.
async fn drain(mut body: Body) {
    let _ = tokio::time::timeout(DRAIN_TIME, async {
        let mut total = 0;
        while let Some(Ok(frame)) = body.frame().await {
            total += frame.data_ref().map_or(0, Bytes::len);
            if total > DRAIN {
                break;
            }
        }
    })
    .await;
}
