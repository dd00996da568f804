//! The end of what an agent writes to stderr, for the reason it failed.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncReadExt};
use tokio_util::sync::CancellationToken;

const KEPT: usize = 4 * 1024;

/// Keeps the tail and reads on, so that nothing blocks the agent.
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
                kept.keep(&chunk[..read]);
            }
            kept.closed.cancel();
        });
        tail
    }

    fn keep(&self, bytes: &[u8]) {
        let mut tail = self.tail.lock();
        tail.extend(bytes);
        let over = tail.len().saturating_sub(KEPT);
        tail.drain(..over);
    }

    /// Returns when all of it has been read: the process and whatever it started are gone.
    pub(crate) async fn closed(&self) {
        self.closed.cancelled().await;
    }

    /// What was written last, as text; `None` when nothing was.
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
        tail.keep(&[b'x'; 10_000]);
        tail.keep(b"the reason\n");
        let text = tail.text().unwrap();
        assert!(
            text.ends_with("the reason") && text.len() <= KEPT,
            "{}",
            text.len()
        );
    }
}
