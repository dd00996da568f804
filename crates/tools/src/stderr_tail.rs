//! Reads a process's stderr: all of it, so that the process never blocks on a full pipe. The tail is kept, to
//! explain a failure.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    task::AbortHandle,
};
use tokio_util::sync::CancellationToken;

use crate::Secrets;

/// How many bytes are kept.
const TAIL_BYTES: usize = 4 * 1024;
/// How many bytes are read at once.
const CHUNK_BYTES: usize = 512;

/// Reads a process's stderr in a task, until it ends or this is dropped, and keeps the tail.
#[derive(Debug)]
pub struct StderrTail {
    tail: Arc<Mutex<VecDeque<u8>>>,
    closed: CancellationToken,
    reader: AbortHandle,
}

impl StderrTail {
    /// Starts the reading task.
    pub fn follow(mut stderr: impl AsyncRead + Send + Unpin + 'static) -> Self {
        let tail = Arc::new(Mutex::new(VecDeque::new()));
        let closed = CancellationToken::new();
        let (kept, ended) = (tail.clone(), closed.clone().drop_guard());
        let reader = tokio::spawn(async move {
            let _ended = ended;
            // Small, and the tail grows as it is written: most processes never write anything there.
            let mut chunk = [0; CHUNK_BYTES];
            while let Ok(read @ 1..) = stderr.read(&mut chunk).await {
                append_to_tail(&mut kept.lock(), &chunk[..read]);
                // A flood on stderr must not monopolise a worker thread.
                tokio::task::yield_now().await;
            }
        });
        Self {
            tail,
            closed,
            reader: reader.abort_handle(),
        }
    }

    /// Waits until stderr is closed, that is until the process and everything it started have exited.
    pub async fn wait_closed(&self) {
        self.closed.cancelled().await;
    }

    /// The tail as text, not masked; `None` when nothing was written.
    pub fn text(&self) -> Option<String> {
        let bytes: Vec<u8> = self.tail.lock().iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        // The cut may have split a character: drop its remaining bytes.
        let text = text.trim_start_matches(char::REPLACEMENT_CHARACTER).trim();
        (!text.is_empty()).then(|| text.to_owned())
    }

    /// The tail as text with secrets masked; `None` when nothing was written.
    pub fn masked_text(&self, secrets: &Secrets) -> Option<String> {
        self.text().map(|text| secrets.mask_text(&text))
    }
}

impl Drop for StderrTail {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

/// Appends at most [`TAIL_BYTES`] bytes.
fn append_to_tail(tail: &mut VecDeque<u8>, new: &[u8]) {
    let over = (tail.len() + new.len()).saturating_sub(TAIL_BYTES);
    tail.drain(..over);
    tail.extend(new);
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn closed_tail(written: Vec<u8>) -> StderrTail {
        let stderr = StderrTail::follow(std::io::Cursor::new(written));
        stderr.wait_closed().await;
        stderr
    }

    #[tokio::test]
    async fn the_tail_of_a_flood_is_kept_with_secrets_masked() {
        let mut written = "ü".repeat(2 * TAIL_BYTES).into_bytes();
        written.extend_from_slice("…ü token=hunter22 the end\n".as_bytes());
        let stderr = closed_tail(written).await;
        let secrets = Secrets::new();
        secrets.add("hunter22");
        let tail = stderr.masked_text(&secrets).unwrap();
        assert!(tail.ends_with("the end") && !tail.contains("hunter22"), "{tail}");
        assert!(tail.starts_with('ü') && tail.len() <= TAIL_BYTES, "{tail}");
        assert!(stderr.text().unwrap().ends_with("token=hunter22 the end"));
    }

    #[tokio::test]
    async fn blank_output_has_no_tail() {
        assert_eq!(closed_tail(b" \n".to_vec()).await.text(), None);
    }
}
