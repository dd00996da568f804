//! The one writer. A task owns the only connection that writes; it takes all that waits, commits it as
//! one group, shows it to followers and answers.
//!
//! - [`job`]: what a write is.
//! - [`group`]: one group from begin to commit, and what happens when a part of it fails.
//! - [`slot`]: one task of a group.
//! - [`batch`]: many rows in few statements.

pub(crate) mod batch;
mod group;
mod job;
mod slot;

use std::{fs::File, sync::Arc};

use oubliette_protocol::{Error, Result};
use parking_lot::Mutex;
use sqlx::Connection;
use tokio::sync::{mpsc, oneshot, watch};

use job::Pending;
pub(crate) use job::{Counter, EventJob, Probe, Survives, Task, Tx, Write};

use crate::{
    log::{debugger::Queue, tail::Hub},
    open::Opened,
    store::Remembered,
};
use group::Writer;

/// Writes that may wait; past it, asking waits.
const WAITING: usize = 1024;
/// Most writes in one group.
const GROUP: usize = 512;
/// Most debugger events in one group.
const DEBUG_GROUP: usize = 1024;

/// How the rest of the crate reaches the writer.
#[derive(Clone)]
pub(crate) struct WriterHandle {
    tasks: mpsc::Sender<Task>,
    ended: watch::Receiver<bool>,
    fault: Arc<Mutex<Option<Error>>>,
}

impl WriterHandle {
    /// Starts the writer's task.
    pub(crate) fn start(opened: Opened, remembered: Arc<Remembered>) -> (Self, Arc<Hub>, Arc<Queue>) {
        let (tasks, waiting) = mpsc::channel(WAITING);
        let (end, ended) = watch::channel(false);
        let fault = Arc::new(Mutex::new(None));
        let (hub, queue) = (Arc::new(Hub::default()), Arc::new(Queue::default()));
        let Opened {
            writer, again, lock, ..
        } = opened;
        let writer = Writer::new(
            writer,
            again,
            hub.clone(),
            queue.clone(),
            remembered,
            fault.clone(),
        );
        tokio::spawn(work(writer, waiting, lock, end));
        (Self { tasks, ended, fault }, hub, queue)
    }

    /// Has something written and waits until it is durable.
    pub(crate) async fn run<W: Write>(&self, write: W) -> Result<W::Out> {
        let (reply, answer) = oneshot::channel();
        let pending = Pending {
            write,
            done: None,
            reply,
        };
        self.send(Task::Work(Box::new(pending))).await?;
        answer.await.map_err(|_| closed())?
    }

    /// Hands something to the writer, waiting while too much waits already.
    pub(crate) async fn send(&self, task: Task) -> Result<()> {
        self.tasks.send(task).await.map_err(|_| closed())
    }

    /// Ends the writer when all that waits is written.
    pub(crate) async fn close(&self) {
        let _ = self.tasks.send(Task::Close).await;
        let _ = self.ended.clone().wait_for(|ended| *ended).await;
    }

    /// The last commit's error, if it failed.
    pub(crate) fn last_fault(&self) -> Option<Error> {
        self.fault.lock().clone()
    }

    /// Whether the writer still takes writes.
    pub(crate) fn alive(&self) -> Result<()> {
        if self.tasks.is_closed() {
            Err(closed())
        } else {
            Ok(())
        }
    }
}

fn closed() -> Error {
    Error::unavailable("the database is closed: the server is stopping")
}

/// The writer's task.
async fn work(mut writer: Writer, mut waiting: mpsc::Receiver<Task>, lock: File, end: watch::Sender<bool>) {
    let queue = writer.queue.clone();
    let mut tasks = Vec::new();
    let mut open = true;
    while open {
        if writer.purging && waiting.is_empty() && queue.is_empty() {
            // Nobody waits, so nobody is kept waiting by this.
            writer.purge_some().await;
            continue;
        }
        tokio::select! {
            taken = waiting.recv_many(&mut tasks, GROUP) => open = taken > 0,
            () = queue.due() => while tasks.len() < GROUP
                && let Ok(task) = waiting.try_recv() { tasks.push(task) },
        }
        if tasks.iter().any(|task| matches!(task, Task::Close)) {
            open = false;
            waiting.close();
            while let Some(task) = waiting.recv().await {
                tasks.push(task);
            }
        }
        // Debugger events that nobody waits for come in a group of their own time: they must not make every
        // other commit larger.
        let debug = match queue.is_due() {
            true => queue.take(DEBUG_GROUP),
            false => Vec::new(),
        };
        let recorded = debug.len();
        writer.commit(tasks.drain(..), debug).await;
        queue.done(recorded);
    }
    queue.close();
    while !queue.is_empty() {
        let debug = queue.take(DEBUG_GROUP);
        let recorded = debug.len();
        writer.commit(std::iter::empty(), debug).await;
        queue.done(recorded);
    }
    writer.hub.close();
    queue.tail.close();
    let _ = sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)")
        .execute(&mut writer.tx.db)
        .await;
    if let Err(error) = writer.tx.db.close().await {
        tracing::warn!(%error, "the database did not close cleanly; nothing is lost");
    }
    // Last: until here another process must not write.
    drop(lock);
    end.send_replace(true);
}
