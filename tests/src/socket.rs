//! A session's relay socket, line by line: what is sent is what was written, what comes is all kept.

use std::{
    collections::HashMap,
    path::Path,
    sync::{Arc, Mutex, PoisonError},
};

use anyhow::{Context as _, Result};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader},
    net::{UnixStream, unix::OwnedWriteHalf},
    sync::{mpsc, oneshot},
    task::JoinHandle,
};

/// An answer line.
pub type Answer = Value;

#[derive(Default)]
struct Waiting {
    open: HashMap<u64, oneshot::Sender<Answer>>,
    /// Answers that nobody waited for: none may ever be here.
    stray: Vec<Answer>,
}

/// One connection.
pub struct Socket {
    write: tokio::sync::Mutex<OwnedWriteHalf>,
    waiting: Arc<Mutex<Waiting>>,
    notices: tokio::sync::Mutex<mpsc::UnboundedReceiver<Value>>,
    reading: JoinHandle<()>,
    next: std::sync::atomic::AtomicU64,
}

impl Socket {
    /// Connects.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        let (read, write) = UnixStream::connect(path).await?.into_split();
        let waiting = Arc::new(Mutex::new(Waiting::default()));
        let (notice, notices) = mpsc::unbounded_channel();
        let known = waiting.clone();
        let reading = tokio::spawn(async move {
            let mut lines = BufReader::new(read).lines();
            while let Ok(Some(line)) = lines.next_line().await {
                let Ok(line) = serde_json::from_str::<Value>(&line) else {
                    break;
                };
                if line.get("method").is_some() {
                    let _ = notice.send(line);
                    continue;
                }
                let mut known = known.lock().unwrap_or_else(PoisonError::into_inner);
                match line["id"].as_u64().and_then(|id| known.open.remove(&id)) {
                    Some(waiter) => drop(waiter.send(line)),
                    None => known.stray.push(line),
                }
            }
            // Whoever still waits learns that no answer comes.
            known.lock().unwrap_or_else(PoisonError::into_inner).open.clear();
        });
        Ok(Self {
            write: tokio::sync::Mutex::new(write),
            waiting,
            notices: tokio::sync::Mutex::new(notices),
            reading,
            next: 1.into(),
        })
    }

    /// Sends a line as it is.
    pub async fn send(&self, line: &str) -> Result<()> {
        let mut write = self.write.lock().await;
        write.write_all(format!("{line}\n").as_bytes()).await?;
        Ok(())
    }

    /// Sends a request; gives its id and its answer to come.
    pub async fn request(&self, method: &str, params: Value) -> Result<(u64, oneshot::Receiver<Answer>)> {
        let id = self.next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (tell, answer) = oneshot::channel();
        self.locked().open.insert(id, tell);
        let line = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
        self.send(&line.to_string()).await?;
        Ok((id, answer))
    }

    /// Sends a request and waits for its answer line.
    pub async fn call(&self, method: &str, params: Value) -> Result<Answer> {
        let (_, answer) = self.request(method, params).await?;
        answer.await.context("the connection ended before the answer")
    }

    /// Gives up on a request.
    pub async fn cancel(&self, id: u64) -> Result<()> {
        let line = json!({ "jsonrpc": "2.0", "method": "cancel", "params": { "id": id } });
        self.send(&line.to_string()).await
    }

    /// The next notification.
    pub async fn notice(&self) -> Option<Value> {
        self.notices.lock().await.recv().await
    }

    /// Answers that came twice, or to nothing.
    pub fn stray(&self) -> Vec<Answer> {
        self.locked().stray.clone()
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Waiting> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.reading.abort();
    }
}
