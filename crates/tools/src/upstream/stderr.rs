//! Reads a server's stderr: all of it, so that the server never blocks on a full pipe; the tail is kept, to
//! explain a failure.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    task::JoinHandle,
};

use super::limits;
use crate::Secrets;

/// Reads a process's stderr in a task, until it ends or this is dropped, and keeps the tail.
pub(super) struct ServerStderr {
    tail: Arc<Mutex<VecDeque<u8>>>,
    reader: JoinHandle<()>,
}

impl ServerStderr {
    /// Starts the reading task.
    pub(super) fn follow(mut stderr: impl AsyncRead + Send + Unpin + 'static) -> Self {
        let tail = Arc::new(Mutex::new(VecDeque::with_capacity(limits::STDERR_TAIL_BYTES)));
        let kept = tail.clone();
        let reader = tokio::spawn(async move {
            let mut chunk = vec![0; limits::STDERR_TAIL_BYTES];
            loop {
                match stderr.read(&mut chunk).await {
                    Ok(0) | Err(_) => return,
                    Ok(n) => append_to_tail(&mut kept.lock(), &chunk[..n]),
                }
                // A flood on stderr must not monopolise a worker thread.
                tokio::task::yield_now().await;
            }
        });
        Self { tail, reader }
    }

    /// Waits, within a limit, until stderr ends, which it does shortly after the process.
    pub(super) async fn finish(&mut self) {
        let _ = tokio::time::timeout(limits::EXIT_TIMEOUT, &mut self.reader).await;
    }

    /// The tail, secrets masked; `None` when nothing was written.
    pub(super) fn tail(&self, secrets: &Secrets) -> Option<String> {
        let bytes: Vec<u8> = self.tail.lock().iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        // The cut may have split a character: drop its remaining bytes.
        let text = text.trim_start_matches(char::REPLACEMENT_CHARACTER).trim();
        (!text.is_empty()).then(|| secrets.mask_text(text))
    }
}

impl Drop for ServerStderr {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

fn append_to_tail(tail: &mut VecDeque<u8>, new: &[u8]) {
    let new = &new[new.len().saturating_sub(limits::STDERR_TAIL_BYTES)..];
    let over = (tail.len() + new.len()).saturating_sub(limits::STDERR_TAIL_BYTES);
    tail.drain(..over);
    tail.extend(new);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_tail_of_a_flood_is_kept_with_secrets_masked() {
        let mut said = vec![b'x'; 3 * limits::STDERR_TAIL_BYTES];
        said.extend_from_slice("…ü token=hunter22 the end\n".as_bytes());
        let mut stderr = ServerStderr::follow(std::io::Cursor::new(said));
        stderr.finish().await;
        let secrets = Secrets::new();
        secrets.add("hunter22");
        let tail = stderr.tail(&secrets).unwrap();
        assert!(tail.ends_with("the end") && !tail.contains("hunter22"), "{tail}");
        assert!(tail.len() <= limits::STDERR_TAIL_BYTES);
    }

    #[tokio::test]
    async fn blank_output_has_no_tail() {
        let mut stderr = ServerStderr::follow(std::io::Cursor::new(b" \n".to_vec()));
        stderr.finish().await;
        assert_eq!(stderr.tail(&Secrets::new()), None);
    }
}
