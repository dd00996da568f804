//! A session's event stream.

use anyhow::{Context as _, Result};
use futures::{StreamExt as _, stream::BoxStream};
use serde_json::Value;
use sse_stream::SseStream;

use crate::within_deadline;

/// The server-sent events of one session. Dropping it closes the connection.
pub struct SessionEventStream {
    stream: BoxStream<'static, Result<Value>>,
}

impl SessionEventStream {
    pub(crate) fn new(answer: reqwest::Response) -> Self {
        let frames = SseStream::from_bytes_stream(answer.bytes_stream());
        let events = frames.filter_map(|frame| async move {
            match frame {
                Ok(frame) => frame
                    .data
                    .map(|data| serde_json::from_str(&data).context("an event is JSON")),
                Err(why) => Some(Err(anyhow::anyhow!("the stream broke: {why}"))),
            }
        });
        Self {
            stream: events.boxed(),
        }
    }

    /// The next event; `None` when the stream ended.
    pub async fn next(&mut self) -> Option<Result<Value>> {
        self.stream.next().await
    }

    /// Waits for the next event for which `is` returns true; `what` names it in the error.
    pub async fn wait_for(&mut self, what: &str, is: impl Fn(&Value) -> bool) -> Result<Value> {
        let found = async {
            while let Some(event) = self.next().await {
                let event = event?;
                if is(&event) {
                    return Ok(event);
                }
            }
            anyhow::bail!("the stream ended before {what}")
        };
        within_deadline(what, found).await?
    }
}
