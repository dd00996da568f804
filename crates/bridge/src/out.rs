//! What goes to the agent: one buffer that everybody appends whole lines to, one task that writes it.
//!
//! The task runs after those that are ready have appended, so what is ready together goes out in one
//! write, and a line that is alone goes out at once.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::Notify,
};

/// How much may wait to be written before no more is read from the agent. Large: an agent may write many
/// calls before it reads the first answer.
const BACKLOG: usize = 64 * 1024 * 1024;
/// The memory an idle buffer keeps.
const KEPT: usize = 64 * 1024;

/// The way to the agent.
#[derive(Default)]
pub(crate) struct Out {
    state: Mutex<State>,
    more: Notify,
}

#[derive(Default)]
struct State {
    waiting: Vec<u8>,
    /// Counts of bytes, from the beginning.
    appended: u64,
    written: u64,
    /// Why nothing can be written any longer.
    broken: Option<io::ErrorKind>,
    /// To wake when something was taken or written.
    wakers: Vec<Waker>,
}

impl State {
    fn wake_me(&mut self, context: &Context<'_>) {
        if !self.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            self.wakers.push(context.waker().clone());
        }
    }
}

/// Everything appended before it was made.
#[derive(Clone, Copy)]
pub(crate) struct Mark(u64);

impl Out {
    /// Starts the task that writes.
    pub(crate) fn start(io: impl AsyncWrite + Send + Unpin + 'static) -> Arc<Self> {
        let out = Arc::new(Self::default());
        tokio::spawn(out.clone().run(io));
        out
    }

    /// Appends what `fill` writes, or nothing when it fails. It never waits: see [`Out::poll_room`].
    pub(crate) fn append<E>(&self, fill: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<Mark, E> {
        let mut state = self.state.lock();
        let before = state.waiting.len();
        if let Err(why) = fill(&mut state.waiting) {
            state.waiting.truncate(before);
            return Err(why);
        }
        state.appended += (state.waiting.len() - before) as u64;
        let mark = Mark(state.appended);
        match state.broken {
            Some(_) => state.waiting = Vec::new(),
            None => self.more.notify_one(),
        }
        Ok(mark)
    }

    /// Everything appended so far.
    pub(crate) fn mark(&self) -> Mark {
        Mark(self.state.lock().appended)
    }

    /// Waits until everything before the mark is written, or cannot be.
    pub(crate) async fn written(&self, mark: Mark) -> io::Result<()> {
        std::future::poll_fn(|context| self.poll_written(mark, context)).await
    }

    fn poll_written(&self, mark: Mark, context: &Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.state.lock();
        if state.written >= mark.0 {
            return Poll::Ready(Ok(()));
        }
        if let Some(kind) = state.broken {
            return Poll::Ready(Err(kind.into()));
        }
        state.wake_me(context);
        Poll::Pending
    }

    /// Ready unless the agent is far behind with reading: then it is not heard until it has caught up.
    pub(crate) fn poll_room(&self, context: &Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.waiting.len() < BACKLOG {
            return Poll::Ready(());
        }
        state.wake_me(context);
        Poll::Pending
    }

    async fn run(self: Arc<Self>, mut io: impl AsyncWrite + Unpin) {
        let mut batch = Vec::new();
        loop {
            self.more.notified().await;
            std::mem::swap(&mut batch, &mut self.state.lock().waiting);
            let writing = async {
                io.write_all(&batch).await?;
                io.flush().await
            };
            let broken = writing.await.err().map(|why| why.kind());
            let mut state = self.state.lock();
            match broken {
                None => state.written += batch.len() as u64,
                Some(_) => {
                    state.broken = broken;
                    state.waiting = Vec::new();
                }
            }
            let wakers = std::mem::take(&mut state.wakers);
            drop(state);
            wakers.into_iter().for_each(Waker::wake);
            batch.clear();
            batch.shrink_to(KEPT);
            if broken.is_some() {
                return;
            }
        }
    }
}

/// The same for one that writes a stream and flushes it after each line.
pub(crate) struct Writer(pub(crate) Arc<Out>);

impl AsyncWrite for Writer {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(kind) = self.0.state.lock().broken {
            return Poll::Ready(Err(kind.into()));
        }
        let appended = self.0.append(|waiting| {
            waiting.extend_from_slice(bytes);
            Ok(())
        });
        Poll::Ready(appended.map(|_| bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_written(self.0.mark(), context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    fn line(out: &Out, line: &str) -> Mark {
        out.append(|bytes| {
            bytes.extend_from_slice(line.as_bytes());
            Ok::<_, ()>(())
        })
        .unwrap()
    }

    #[tokio::test]
    async fn nothing_is_lost_and_what_is_ready_together_goes_together() {
        let (mut far, near) = tokio::io::duplex(1 << 20);
        let out = Out::start(near);
        let mut want = String::new();
        let mut read = vec![0; 1 << 20];
        for round in 0..20 {
            let mut lines = String::new();
            for n in 0..100 {
                lines += &format!("{round} {n}\n");
            }
            let tasks: Vec<_> = lines
                .lines()
                .map(|each| {
                    tokio::spawn({
                        let (out, each) = (out.clone(), format!("{each}\n"));
                        async move {
                            line(&out, &each);
                        }
                    })
                })
                .collect();
            for task in tasks {
                task.await.unwrap();
            }
            // One read shows one write.
            let got = far.read(&mut read).await.unwrap();
            assert_eq!(String::from_utf8_lossy(&read[..got]), lines);
            want += &lines;
        }
        assert_eq!(out.mark().0, want.len() as u64);
    }

    #[tokio::test]
    async fn written_means_written() {
        let (mut far, near) = tokio::io::duplex(4);
        let out = Out::start(near);
        let first = line(&out, "first\n");
        let mut writer = Writer(out.clone());
        writer.write_all(b"second\n").await.unwrap();
        let early = tokio::time::timeout(std::time::Duration::from_millis(50), out.written(first)).await;
        assert!(early.is_err(), "nobody has read it");
        let reading = tokio::spawn(async move {
            let mut read = [0; 13];
            far.read_exact(&mut read).await.unwrap();
            read
        });
        out.written(first).await.unwrap();
        writer.flush().await.unwrap();
        assert_eq!(&reading.await.unwrap(), b"first\nsecond\n");
    }

    #[tokio::test]
    async fn an_agent_far_behind_is_heard_again_once_it_has_read() {
        let (mut far, near) = tokio::io::duplex(1 << 20);
        let out = Out::start(near);
        let room = || std::future::poll_fn(|context| out.poll_room(context));
        room().await;
        let first = line(&out, &"x".repeat(2 << 20));
        tokio::task::yield_now().await;
        line(&out, &"y".repeat(BACKLOG));
        let early = tokio::time::timeout(std::time::Duration::from_millis(50), room()).await;
        assert!(early.is_err(), "too much waits");
        let reading = tokio::spawn(async move { tokio::io::copy(&mut far, &mut tokio::io::sink()).await });
        room().await;
        out.written(first).await.unwrap();
        reading.abort();
    }

    #[tokio::test]
    async fn a_stream_that_broke_keeps_nothing() {
        let (far, near) = tokio::io::duplex(4);
        drop(far);
        let out = Out::start(near);
        let mark = line(&out, "x\n");
        assert!(out.written(mark).await.is_err());
        line(&out, "y\n");
        assert!(out.state.lock().waiting.is_empty());
        assert!(Writer(out).write_all(b"z\n").await.is_err());
    }
}
