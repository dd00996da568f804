//! A thread for what may block on a descriptor that somebody else made: closing it, and looking at it.
//!
//! `close` can sleep: a TCP socket with `SO_LINGER` and unsent data for as long as its owner chose, a file of a FUSE
//! mount until its server answers, a Unix socket whatever the descriptors queued in it take. None of that may happen on
//! a thread that serves others.

use std::{
    collections::VecDeque,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{
        Arc, Mutex, MutexGuard, PoisonError,
        atomic::{AtomicUsize, Ordering},
    },
};

use tokio::sync::{Notify, oneshot};

/// How many jobs may wait before nothing more is taken from whoever caused them.
const MAX_WAITING: usize = 256;

type WorkerJob = Box<dyn FnOnce() + Send>;

/// Runs jobs in order on a thread that exists only while there are any. One is made for each party that can pass
/// descriptors, so that a party whose descriptors block holds up nobody but itself. Clones share the thread.
#[derive(Clone, Default)]
pub struct DescriptorWorker(Arc<WorkerState>);

#[derive(Default)]
struct WorkerState {
    queue: Mutex<JobQueue>,
    /// Jobs that are queued or running.
    waiting: AtomicUsize,
    /// Notified when a job has ended.
    ended: Notify,
}

#[derive(Default)]
struct JobQueue {
    jobs: VecDeque<WorkerJob>,
    /// Whether the thread exists.
    running: bool,
}

impl std::fmt::Debug for DescriptorWorker {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DescriptorWorker")
            .field("waiting", &self.0.waiting.load(Ordering::Relaxed))
            .finish_non_exhaustive()
    }
}

impl DescriptorWorker {
    /// Closes descriptors, each after those before it.
    pub fn close(&self, descriptors: impl IntoIterator<Item = OwnedFd>) {
        for descriptor in descriptors {
            self.submit(Box::new(move || close_soon(descriptor)));
        }
    }

    /// Runs `job` on the thread. Its value, if nobody waits for it any more, is dropped there too.
    pub async fn run<T: Send + 'static>(
        &self,
        job: impl FnOnce() -> T + Send + 'static,
    ) -> std::io::Result<T> {
        let (answer, done) = oneshot::channel();
        self.submit(Box::new(move || drop(answer.send(job()))));
        done.await.map_err(std::io::Error::other)
    }

    /// Whether less waits than the maximum. While it does not, nothing more should be taken from the party.
    pub fn has_room(&self) -> bool {
        self.0.waiting.load(Ordering::Relaxed) < MAX_WAITING
    }

    /// Waits until there is room.
    pub async fn room(&self) {
        loop {
            let ended = self.0.ended.notified();
            if self.has_room() {
                return;
            }
            ended.await;
        }
    }

    /// Queues a job. It is in its place when this returns, whether or not anybody waits for it.
    pub(crate) fn submit(&self, job: WorkerJob) {
        self.0.waiting.fetch_add(1, Ordering::Relaxed);
        let mut queue = self.0.lock();
        queue.jobs.push_back(job);
        if !queue.running {
            let state = self.0.clone();
            let thread = std::thread::Builder::new()
                .name("descriptors".into())
                .stack_size(128 * 1024)
                .spawn(move || state.run_jobs());
            // Without a thread the jobs wait for the next one to be submitted.
            queue.running = thread.is_ok();
        }
    }
}

impl WorkerState {
    fn lock(&self) -> MutexGuard<'_, JobQueue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run_jobs(&self) {
        loop {
            let job = {
                let mut queue = self.lock();
                let job = queue.jobs.pop_front();
                queue.running = job.is_some();
                job
            };
            let Some(job) = job else { return };
            job();
            self.waiting.fetch_sub(1, Ordering::Relaxed);
            self.ended.notify_waiters();
        }
    }
}

/// Closes a descriptor. `SO_LINGER` is switched off first, which spares the thread the commonest wait; whoever shares
/// the socket may switch it on again in between.
fn close_soon(descriptor: OwnedFd) {
    let _ = rustix::net::sockopt::set_socket_linger(&descriptor, None);
    drop(descriptor);
}

/// A descriptor that somebody else made. Dropping it closes it on the worker's thread.
#[derive(Debug)]
pub struct UntrustedDescriptor {
    /// Some until it is dropped or taken out.
    descriptor: Option<OwnedFd>,
    worker: DescriptorWorker,
}

impl UntrustedDescriptor {
    /// A descriptor that is closed by `worker`.
    pub fn new(descriptor: OwnedFd, worker: DescriptorWorker) -> Self {
        Self {
            descriptor: Some(descriptor),
            worker,
        }
    }

    /// The thread that closes it.
    pub fn worker(&self) -> &DescriptorWorker {
        &self.worker
    }

    /// The descriptor itself, once it is known that closing it cannot block.
    #[allow(
        clippy::expect_used,
        reason = "only what consumes or drops it takes the descriptor out"
    )]
    pub fn into_trusted(mut self) -> OwnedFd {
        self.descriptor.take().expect("it is there until it is dropped")
    }
}

impl AsFd for UntrustedDescriptor {
    #[allow(
        clippy::expect_used,
        reason = "only what consumes or drops it takes the descriptor out"
    )]
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.descriptor
            .as_ref()
            .expect("it is there until it is dropped")
            .as_fd()
    }
}

impl std::os::fd::AsRawFd for UntrustedDescriptor {
    fn as_raw_fd(&self) -> std::os::fd::RawFd {
        std::os::fd::AsRawFd::as_raw_fd(&self.as_fd())
    }
}

impl Drop for UntrustedDescriptor {
    fn drop(&mut self) {
        self.worker.close(self.descriptor.take());
    }
}

#[cfg(test)]
mod tests {
    use std::{sync::mpsc, time::Duration};

    use super::*;

    #[tokio::test]
    async fn a_job_that_blocks_holds_up_only_its_own_worker() {
        let (stuck, other) = (DescriptorWorker::default(), DescriptorWorker::default());
        let (release, blocked) = mpsc::channel::<()>();
        stuck.submit(Box::new(move || {
            let _ = blocked.recv();
        }));
        let (out, waiting) = std::io::pipe().unwrap();
        stuck.close([OwnedFd::from(waiting)]);
        assert_eq!(other.run(|| 1).await.unwrap(), 1);
        // Its end is still open: reading would block.
        rustix::io::ioctl_fionbio(&out, true).unwrap();
        assert!(rustix::io::read(&out, &mut [0; 1]).is_err());
        drop(release);
        stuck.run(|| ()).await.unwrap();
        assert_eq!(rustix::io::read(&out, &mut [0; 1]), Ok(0));
    }

    #[tokio::test]
    async fn a_worker_with_too_many_jobs_has_no_room_until_some_have_ended() {
        let worker = DescriptorWorker::default();
        let (release, blocked) = mpsc::channel::<()>();
        worker.submit(Box::new(move || {
            let _ = blocked.recv();
        }));
        for _ in 1..MAX_WAITING {
            worker.submit(Box::new(|| {}));
        }
        assert!(!worker.has_room());
        let room = tokio::time::timeout(Duration::from_millis(20), worker.room());
        assert!(room.await.is_err());
        drop(release);
        worker.room().await;
    }
}
