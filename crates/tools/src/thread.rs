//! The threads that calls are made on.
//!
//! A session's lent streams, its calls and its tool servers' pipes live on one thread: a call that goes from one
//! pipe to the next is not handed between threads, each of which would have to be woken first. Sessions are spread
//! over the threads. Whatever is not a call stays with the rest of the server.

use std::{
    convert::Infallible,
    io,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering},
    },
    thread,
    time::{Duration, Instant},
};

use oubliette_sandbox::ask_slices;
use parking_lot::Mutex;
use tokio::{
    runtime::{Builder, Handle},
    sync::Notify,
};
use tokio_util::sync::{CancellationToken, DropGuard};

/// How long a thread stays awake after a call has come or gone: to be woken costs more than this on many a machine.
const WAKEFUL: Duration = Duration::from_micros(30);
/// And how long at most, where the next call has come soon again and again.
const MOST_WAKEFUL: Duration = Duration::from_micros(200);

/// How long a thread has the processor at once: a call takes a small part of it.
const SLICE: Duration = Duration::from_micros(100);

/// A few threads for calls, started as sessions need them and ended with this.
pub struct CallThreads {
    most: usize,
    started: Mutex<Vec<Arc<Inner>>>,
    ended: CancellationToken,
    _end: DropGuard,
}

/// One thread for calls. As long as it is held it counts as used.
#[derive(Clone)]
pub struct CallThread(Arc<Inner>);

struct Inner {
    runtime: Handle,
    vigil: Option<Arc<Vigil>>,
}

impl CallThreads {
    /// At most so many.
    pub fn new(most: usize) -> Self {
        let ended = CancellationToken::new();
        Self {
            most: most.max(1),
            started: Mutex::default(),
            _end: ended.clone().drop_guard(),
            ended,
        }
    }

    /// One that nobody else uses, or the one that the fewest use.
    pub fn assign(&self) -> CallThread {
        let mut started = self.started.lock();
        let least = started.iter().min_by_key(|inner| Arc::strong_count(inner));
        let least = least.filter(|inner| Arc::strong_count(inner) == 1 || started.len() >= self.most);
        if let Some(inner) = least {
            return CallThread(inner.clone());
        }
        match start(self.ended.clone()) {
            Ok(inner) => {
                let inner = Arc::new(inner);
                started.push(inner.clone());
                CallThread(inner)
            }
            Err(error) => {
                tracing::warn!(%error, "no thread of its own could be started for calls");
                CallThread::here()
            }
        }
    }

    /// How many tasks live on them.
    pub fn tasks(&self) -> usize {
        let started = self.started.lock();
        started
            .iter()
            .map(|inner| inner.runtime.metrics().num_alive_tasks())
            .sum()
    }
}

/// Starts a thread that ends with the token.
fn start(ended: CancellationToken) -> io::Result<Inner> {
    let runtime = Builder::new_current_thread()
        .max_blocking_threads(16)
        .thread_keep_alive(Duration::from_secs(5))
        .enable_all()
        .build()?;
    let vigil = Arc::<Vigil>::default();
    let inner = Inner {
        runtime: runtime.handle().clone(),
        vigil: Some(vigil.clone()),
    };
    thread::Builder::new().name("calls".into()).spawn(move || {
        if let Err(error) = ask_slices(SLICE) {
            tracing::debug!(%error, "the thread for calls has the processor as long at once as any other");
        }
        runtime.block_on(async {
            tokio::select! {
                () = ended.cancelled() => {}
                never = vigil.keep() => match never {},
            }
        });
        runtime.shutdown_background();
    })?;
    Ok(inner)
}

impl CallThread {
    /// The runtime this is called in: calls are made like everything else.
    pub fn here() -> Self {
        Self(Arc::new(Inner {
            runtime: Handle::current(),
            vigil: None,
        }))
    }

    /// Runs a task on it.
    pub fn spawn(&self, task: impl Future<Output = ()> + Send + 'static) {
        drop(self.0.runtime.spawn(task));
    }

    /// A call has come or gone: others may follow.
    pub fn stir(&self) {
        if let Some(vigil) = &self.0.vigil {
            vigil.stir();
        }
    }
}

/// Keeps a thread awake between calls that follow each other closely.
#[derive(Default)]
struct Vigil {
    stirs: AtomicU64,
    awake: AtomicBool,
    wake: Notify,
}

impl Vigil {
    fn stir(&self) {
        self.stirs.fetch_add(1, Ordering::Relaxed);
        if !self.awake.load(Ordering::Relaxed) {
            self.wake.notify_one();
        }
    }

    async fn keep(&self) -> Infallible {
        let mut wakeful = WAKEFUL;
        loop {
            let asleep = Instant::now();
            self.awake.store(false, Ordering::Relaxed);
            self.wake.notified().await;
            self.awake.store(true, Ordering::Relaxed);
            let (mut seen, mut since) = (self.stirs.load(Ordering::Relaxed), Instant::now());
            // Whether it would have been worth it to stay awake.
            wakeful = match since - asleep < MOST_WAKEFUL {
                true => MOST_WAKEFUL.min(wakeful * 2),
                false => WAKEFUL,
            };
            while since.elapsed() < wakeful {
                // First who waits for the processor, then whatever has come in.
                thread::yield_now();
                tokio::task::yield_now().await;
                let stirs = self.stirs.load(Ordering::Relaxed);
                if stirs != seen {
                    (seen, since) = (stirs, Instant::now());
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::sync::oneshot;

    use super::*;

    async fn name_of(thread: &CallThread) -> (Option<String>, thread::ThreadId) {
        let (say, heard) = oneshot::channel();
        thread.spawn(async move {
            let here = thread::current();
            let _ = say.send((here.name().map(str::to_owned), here.id()));
        });
        heard.await.unwrap()
    }

    #[tokio::test]
    async fn sessions_are_spread_and_one_stays_where_it_is() {
        let threads = CallThreads::new(2);
        let (one, two) = (threads.assign(), threads.assign());
        let (name, first) = name_of(&one).await;
        assert_eq!(name.as_deref(), Some("calls"));
        let second = name_of(&two).await.1;
        assert_ne!(second, first);
        assert_eq!(name_of(&one.clone()).await.1, first);
        // There are no more than two, and the next joins the one that fewer use.
        let (_also_one, _again_one) = (one.clone(), one.clone());
        let third = threads.assign();
        assert_eq!(name_of(&third).await.1, second);
        // One that nobody uses any more is used again.
        drop((two, third));
        assert_eq!(name_of(&threads.assign()).await.1, second);
    }

    #[tokio::test]
    async fn nothing_runs_once_they_are_dropped() {
        let threads = CallThreads::new(1);
        let thread = threads.assign();
        let (held, dropped) = oneshot::channel::<()>();
        thread.spawn(async move {
            std::future::pending::<()>().await;
            drop(held);
        });
        drop(threads);
        assert!(dropped.await.is_err());
        let (late, never) = oneshot::channel::<()>();
        thread.spawn(async move {
            let _ = late.send(());
        });
        assert!(never.await.is_err());
    }

    #[tokio::test]
    async fn a_thread_that_was_kept_awake_sleeps_again() {
        let threads = CallThreads::new(1);
        let thread = threads.assign();
        let vigil = thread.0.vigil.clone().unwrap();
        for _ in 0..100 {
            thread.stir();
            name_of(&thread).await;
        }
        while vigil.awake.load(Ordering::Relaxed) {
            tokio::task::yield_now().await;
        }
        // And is woken by the next call.
        thread.stir();
        while vigil.stirs.load(Ordering::Relaxed) != 101 {
            tokio::task::yield_now().await;
        }
        name_of(&thread).await;
    }
}
