//! The end of what a process says on stderr: all of it is read, so that it never blocks, the last of it is
//! kept, so that a failure can be explained.

use std::{collections::VecDeque, sync::Arc};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncReadExt},
    task::JoinHandle,
};

use super::limits;
use crate::Secrets;

/// Reads a process's stderr until it ends or this is dropped.
pub(super) struct Stderr {
    tail: Arc<Mutex<VecDeque<u8>>>,
    reader: JoinHandle<()>,
}

impl Stderr {
    /// Starts reading.
    pub(super) fn follow(mut stderr: impl AsyncRead + Send + Unpin + 'static) -> Self {
        let tail = Arc::new(Mutex::new(VecDeque::with_capacity(limits::STDERR_BYTES)));
        let kept = tail.clone();
        let reader = tokio::spawn(async move {
            let mut chunk = vec![0; limits::STDERR_BYTES];
            loop {
                match stderr.read(&mut chunk).await {
                    Ok(0) | Err(_) => return,
                    Ok(n) => keep(&mut kept.lock(), &chunk[..n]),
                }
                // A flood on stderr must not keep a worker to itself.
                tokio::task::yield_now().await;
            }
        });
        Self { tail, reader }
    }

    /// Waits for the end of it, which comes soon after the process's.
    pub(super) async fn finish(&mut self) {
        let _ = tokio::time::timeout(limits::EXIT, &mut self.reader).await;
    }

    /// The last of it, secrets taken out; `None` when nothing was said.
    pub(super) fn tail(&self, secrets: &Secrets) -> Option<String> {
        let bytes: Vec<u8> = self.tail.lock().iter().copied().collect();
        let text = String::from_utf8_lossy(&bytes);
        // Cut in the middle of a character, the rest of it says nothing.
        let text = text.trim_start_matches(char::REPLACEMENT_CHARACTER).trim();
        (!text.is_empty()).then(|| secrets.mask_text(text))
    }
}

impl Drop for Stderr {
    fn drop(&mut self) {
        self.reader.abort();
    }
}

fn keep(tail: &mut VecDeque<u8>, new: &[u8]) {
    let new = &new[new.len().saturating_sub(limits::STDERR_BYTES)..];
    let over = (tail.len() + new.len()).saturating_sub(limits::STDERR_BYTES);
    tail.drain(..over);
    tail.extend(new);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn the_last_of_a_flood_is_kept_without_secrets() {
        let mut said = vec![b'x'; 3 * limits::STDERR_BYTES];
        said.extend_from_slice("…ü token=hunter22 the end\n".as_bytes());
        let mut stderr = Stderr::follow(std::io::Cursor::new(said));
        stderr.finish().await;
        let secrets = Secrets::new();
        secrets.hide("hunter22");
        let tail = stderr.tail(&secrets).unwrap();
        assert!(tail.ends_with("the end") && !tail.contains("hunter22"), "{tail}");
        assert!(tail.len() <= limits::STDERR_BYTES);
    }

    #[tokio::test]
    async fn silence_has_no_tail() {
        let mut stderr = Stderr::follow(std::io::Cursor::new(b" \n".to_vec()));
        stderr.finish().await;
        assert_eq!(stderr.tail(&Secrets::new()), None);
    }
}
