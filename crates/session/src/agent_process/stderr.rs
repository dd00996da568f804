//! Keeps the end of what an agent writes to stderr, to explain why it failed.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio_util::sync::CancellationToken;

/// How many bytes are kept.
const TAIL_BYTES: usize = 4 * 1024;

/// Reads stderr to its end, so that a full pipe never blocks the agent, and keeps the last bytes.
#[derive(Clone, Default)]
pub(crate) struct StderrTail {
    tail: Arc<Mutex<VecDeque<u8>>>,
    closed: CancellationToken,
}

impl StderrTail {
    pub(crate) fn follow(mut stderr: impl AsyncRead + Send + Unpin + 'static) -> Self {
        let tail = Self::default();
        let kept = tail.clone();
        tokio::spawn(async move {
            let mut chunk = [0; 1024];
            while let Ok(read @ 1..) = stderr.read(&mut chunk).await {
                kept.append(&chunk[..read]);
            }
            kept.closed.cancel();
        });
        tail
    }

    fn append(&self, bytes: &[u8]) {
        let mut tail = self.tail.lock();
        tail.extend(bytes);
        let over = tail.len().saturating_sub(TAIL_BYTES);
        tail.drain(..over);
    }

    /// Waits until stderr is closed, that is until the process and everything it started have exited.
    pub(crate) async fn wait_closed(&self) {
        self.closed.cancelled().await;
    }

    /// The last bytes as text; `None` when nothing was written.
    pub(crate) fn text(&self) -> Option<String> {
        let bytes: Vec<u8> = self.tail.lock().iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes).trim().to_owned();
        (!text.is_empty()).then_some(text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_end_is_kept() {
        let tail = StderrTail::default();
        assert_eq!(tail.text(), None);
        tail.append(&[b'x'; 10_000]);
        tail.append(b"the reason\n");
        let text = tail.text().unwrap();
        assert!(
            text.ends_with("the reason") && text.len() <= TAIL_BYTES,
            "{}",
            text.len()
        );
    }
}
