//! The writer task. It owns the only connection that writes; it takes every queued write, commits them as
//! one group, publishes them to followers and answers the callers.
//!
//! - [`job`]: the kinds of write, and the transaction they run in.
//! - [`group`]: one group from `BEGIN` to `COMMIT`, and what happens when a part of it fails.
//! - [`slot`]: one write of a group, and its result.
//! - [`unwritten`]: events that could not be written, kept until they can be.
//! - [`batch`]: multi-row `INSERT` statements.

pub(crate) mod batch;
mod group;
mod job;
mod slot;
mod unwritten;

use std::{fs::File, sync::Arc, time::Duration};

use oubliette_protocol::{Error, Result};
use parking_lot::Mutex;
use sqlx::Connection;
use tokio::sync::{mpsc, oneshot, watch};

use job::PendingWrite;
pub(crate) use job::{
    EventJob, SequenceCounter, SessionRowChange, StoreWrite, Survives, WriteProbe, WriteTx, WriterTask,
};

use crate::{
    log::{debugger::DebugQueue, tail::SessionTails},
    open::OpenedDatabase,
    store::StoreCaches,
};
use group::DatabaseWriter;
use unwritten::UnwrittenEvents;

/// Maximum queued writes; beyond it, senders wait.
const QUEUE_CAPACITY: usize = 1024;
/// Maximum writes in one group.
const MAX_GROUP: usize = 512;
/// Maximum debugger events in one group.
const MAX_DEBUG_GROUP: usize = 1024;
/// How often events that could not be written are tried again while no other write is queued.
const UNWRITTEN_RETRY: Duration = Duration::from_millis(500);

/// A handle to the writer task.
#[derive(Clone)]
pub(crate) struct WriterHandle {
    tasks: mpsc::Sender<WriterTask>,
    ended: watch::Receiver<bool>,
    last_error: Arc<Mutex<Option<Error>>>,
    unwritten: Arc<UnwrittenEvents>,
    #[cfg(feature = "test-support")]
    pub(crate) write_fault: Arc<std::sync::atomic::AtomicBool>,
}

impl WriterHandle {
    /// Starts the writer task. Also returns the live ends of the logs it publishes to.
    pub(crate) fn start(
        opened: OpenedDatabase,
        caches: Arc<StoreCaches>,
    ) -> (Self, Arc<SessionTails>, Arc<DebugQueue>) {
        let (tasks, waiting) = mpsc::channel(QUEUE_CAPACITY);
        let (end, ended) = watch::channel(false);
        let last_error = Arc::new(Mutex::new(None));
        let unwritten = Arc::new(UnwrittenEvents::default());
        let (tails, debug_queue) = (Arc::new(SessionTails::default()), Arc::new(DebugQueue::default()));
        let OpenedDatabase {
            writer,
            connect_options,
            lock,
            ..
        } = opened;
        let writer = DatabaseWriter::new(
            writer,
            connect_options,
            tails.clone(),
            debug_queue.clone(),
            unwritten.clone(),
            caches,
            last_error.clone(),
        );
        #[cfg(feature = "test-support")]
        let write_fault = writer.write_fault.clone();
        tokio::spawn(run_writer(writer, waiting, lock, end));
        (
            Self {
                tasks,
                ended,
                last_error,
                unwritten,
                #[cfg(feature = "test-support")]
                write_fault,
            },
            tails,
            debug_queue,
        )
    }

    /// Sends a write and waits until it is durable.
    pub(crate) async fn run<W: StoreWrite>(&self, write: W) -> Result<W::Out> {
        let (reply, answer) = oneshot::channel();
        let pending = PendingWrite {
            write,
            output: None,
            reply,
        };
        self.send(WriterTask::Work(Box::new(pending))).await?;
        answer.await.map_err(|_| closed())?
    }

    /// Queues a task for the writer; waits while the queue is full.
    pub(crate) async fn send(&self, task: WriterTask) -> Result<()> {
        self.tasks.send(task).await.map_err(|_| closed())
    }

    /// Ends the writer after all queued writes; returns when the database is closed.
    pub(crate) async fn close(&self) {
        let _ = self.tasks.send(WriterTask::Close).await;
        let _ = self.ended.clone().wait_for(|ended| *ended).await;
    }

    /// The error of the last commit, if it failed.
    pub(crate) fn last_error(&self) -> Option<Error> {
        self.last_error.lock().clone()
    }

    /// Events that could not be written.
    pub(crate) fn unwritten(&self) -> &UnwrittenEvents {
        &self.unwritten
    }

    /// An error if the writer has been closed.
    pub(crate) fn check_open(&self) -> Result<()> {
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

/// The writer task's main loop, until [`WriterTask::Close`] or the last handle is dropped.
async fn run_writer(
    mut writer: DatabaseWriter,
    mut waiting: mpsc::Receiver<WriterTask>,
    lock: File,
    end: watch::Sender<bool>,
) {
    let (debug_queue, unwritten) = (writer.debug_queue.clone(), writer.unwritten.clone());
    let mut tasks = Vec::new();
    let mut open = true;
    while open {
        if writer.purging && waiting.is_empty() && debug_queue.is_empty() {
            // Only while no write is queued, so that purging delays none.
            writer.purge_chunk().await;
            continue;
        }
        tokio::select! {
            taken = waiting.recv_many(&mut tasks, MAX_GROUP) => open = taken > 0,
            () = debug_queue.wait_until_due() => while tasks.len() < MAX_GROUP
                && let Ok(task) = waiting.try_recv() { tasks.push(task) },
            () = tokio::time::sleep(UNWRITTEN_RETRY), if !unwritten.is_empty() => {}
        }
        if tasks.iter().any(|task| matches!(task, WriterTask::Close)) {
            open = false;
            waiting.close();
            while let Some(task) = waiting.recv().await {
                tasks.push(task);
            }
        }
        // Debugger events that nobody waits for are taken only when they are due, so that they do not make
        // every other commit larger.
        let debug = match debug_queue.is_due() {
            true => debug_queue.take_batch(MAX_DEBUG_GROUP),
            false => Vec::new(),
        };
        writer.commit_group(&mut tasks, debug).await;
    }
    debug_queue.close();
    while !debug_queue.is_empty() {
        let debug = debug_queue.take_batch(MAX_DEBUG_GROUP);
        writer.commit_group(&mut tasks, debug).await;
    }
    let lost = unwritten.begin_retry().len();
    if lost > 0 {
        tracing::error!(
            lost,
            "the database is closed; events that could not be written are lost"
        );
    }
    writer.tails.close();
    debug_queue.tail.close();
    let _ = sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)")
        .execute(&mut writer.tx.db)
        .await;
    if let Err(error) = writer.tx.db.close().await {
        tracing::warn!(%error, "the database did not close cleanly; nothing is lost");
    }
    // Last, because until here no other process may write.
    drop(lock);
    end.send_replace(true);
}
