//! A client of a session's relay socket. It sends lines unchanged and keeps everything it receives.

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

/// A JSON-RPC response line.
pub type RelayAnswer = Value;

#[derive(Default)]
struct PendingAnswers {
    open: HashMap<u64, oneshot::Sender<RelayAnswer>>,
    /// Responses without a pending request. A correct server sends none.
    stray: Vec<RelayAnswer>,
}

/// One connection to a relay socket.
pub struct RelaySocketClient {
    write: tokio::sync::Mutex<OwnedWriteHalf>,
    waiting: Arc<Mutex<PendingAnswers>>,
    notices: tokio::sync::Mutex<mpsc::UnboundedReceiver<Value>>,
    reading: JoinHandle<()>,
    next_id: std::sync::atomic::AtomicU64,
}

impl RelaySocketClient {
    /// Connects.
    pub async fn open(path: impl AsRef<Path>) -> Result<Self> {
        let (read, write) = UnixStream::connect(path).await?.into_split();
        let waiting = Arc::new(Mutex::new(PendingAnswers::default()));
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
            // Dropping the senders tells pending requests that no answer will come.
            known.lock().unwrap_or_else(PoisonError::into_inner).open.clear();
        });
        Ok(Self {
            write: tokio::sync::Mutex::new(write),
            waiting,
            notices: tokio::sync::Mutex::new(notices),
            reading,
            next_id: 1.into(),
        })
    }

    /// Sends a line unchanged.
    pub async fn send(&self, line: &str) -> Result<()> {
        let mut write = self.write.lock().await;
        write.write_all(format!("{line}\n").as_bytes()).await?;
        Ok(())
    }

    /// Sends a request; returns its id and a receiver for its response.
    pub async fn request(
        &self,
        method: &str,
        params: Value,
    ) -> Result<(u64, oneshot::Receiver<RelayAnswer>)> {
        let id = self.next_id.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let (tell, answer) = oneshot::channel();
        self.lock_pending().open.insert(id, tell);
        let line = json!({ "jsonrpc": "2.0", "id": id, "method": method, "params": params });
        self.send(&line.to_string()).await?;
        Ok((id, answer))
    }

    /// Sends a request and waits for its response.
    pub async fn call(&self, method: &str, params: Value) -> Result<RelayAnswer> {
        let (_, answer) = self.request(method, params).await?;
        answer.await.context("the connection ended before the answer")
    }

    /// Sends a `cancel` for a request.
    pub async fn cancel(&self, id: u64) -> Result<()> {
        let line = json!({ "jsonrpc": "2.0", "method": "cancel", "params": { "id": id } });
        self.send(&line.to_string()).await
    }

    /// The next notification.
    pub async fn next_notification(&self) -> Option<Value> {
        self.notices.lock().await.recv().await
    }

    /// Responses that came twice, or to no request.
    pub fn stray_answers(&self) -> Vec<RelayAnswer> {
        self.lock_pending().stray.clone()
    }

    fn lock_pending(&self) -> std::sync::MutexGuard<'_, PendingAnswers> {
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for RelaySocketClient {
    fn drop(&mut self) {
        self.reading.abort();
    }
}
