//! A model provider that answers at once: every POST gets the same streamed answer, in Anthropic's form. Below
//! [`UNREAD_PATH`] its status is an error's, for which usage is not read.

use std::{convert::Infallible, time::Duration};

use anyhow::Result;
use axum::{
    Router,
    body::Body,
    extract::Path,
    http::{StatusCode, header},
    response::IntoResponse,
    routing::post,
};
use futures::{StreamExt as _, stream};
use serde_json::json;

/// Where answers are the same but for their status.
pub(crate) const UNREAD_PATH: &str = "unread";

/// How many pieces of text an answer has.
const PIECES: usize = 40;
/// How long after the first piece the second comes.
const FIRST_PAUSE: Duration = Duration::from_millis(2);

pub(crate) fn run() -> Result<()> {
    super::serve_until_stdin_ends(|| Router::new().route("/{*path}", post(answer)))
}

async fn answer(Path(path): Path<String>, _: String) -> impl IntoResponse {
    let status = match path.starts_with(UNREAD_PATH) {
        true => StatusCode::BAD_REQUEST,
        false => StatusCode::OK,
    };
    let usage = json!({"input_tokens": 100, "output_tokens": 1});
    let begin = json!({"type": "message_start", "message": {"id": "m", "model": "m", "role": "assistant", "content": [], "usage": usage}});
    let piece = json!({"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": "a few words of text "}});
    let last = json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": {"output_tokens": 200}});
    let events = [begin]
        .into_iter()
        .chain(std::iter::repeat_n(piece, PIECES))
        .chain([last, json!({"type": "message_stop"})]);
    let events = stream::iter(events.enumerate()).then(async |(number, event)| {
        // As a model does, it takes its time after the first piece: what comes at once is one write, not a stream.
        if number == 1 {
            tokio::time::sleep(FIRST_PAUSE).await;
        }
        let kind = event["type"].as_str().unwrap_or_default().to_owned();
        Ok::<_, Infallible>(format!("event: {kind}\ndata: {event}\n\n"))
    });
    (
        status,
        [(header::CONTENT_TYPE, "text/event-stream")],
        Body::from_stream(events),
    )
}
