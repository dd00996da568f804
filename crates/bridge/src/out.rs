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
    task::AbortHandle,
};

use crate::journal::{Journal, Note};

/// How much may wait to be written before no more is read from the agent. Large: an agent may write many
/// calls before it reads the first answer.
const BACKLOG: usize = 64 * 1024 * 1024;
/// What a pipe takes whole.
const PIPE_BUF: usize = 4096;
/// The memory an idle buffer keeps.
const KEPT: usize = 16 * 1024;

/// The way to the agent.
pub(crate) struct Out {
    state: Mutex<State>,
    more: Notify,
    backlog: usize,
    journal: Option<Arc<Journal>>,
}

/// A stream that may have another behind it.
pub(crate) trait Outlet: AsyncWrite + Send + Unpin + Sized + 'static {
    /// What to write to when this one has broken.
    fn spare(&self) -> Option<Spare<Self>> {
        None
    }

    /// How much of what was written here has reached the agent; none when writing is enough.
    fn arrived(&self) -> Option<u64> {
        None
    }
}

/// A stream behind another.
pub(crate) struct Spare<S> {
    pub(crate) stream: S,
    /// Whether the last line may have been cut off.
    pub(crate) cut: bool,
}

#[derive(Default)]
struct State {
    waiting: Vec<u8>,
    /// Counts of bytes, from the beginning.
    appended: u64,
    written: u64,
    /// Why nothing can be written any longer.
    broken: Option<io::ErrorKind>,
    /// The stream is to be left for its spare.
    left: bool,
    /// The task that writes.
    task: Option<AbortHandle>,
    /// Notes of calls whose answers are in `waiting`.
    notes: Vec<Note>,
    /// How many bytes of the client's were ever appended.
    passed: u64,
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
    pub(crate) fn start(io: impl Outlet) -> Arc<Self> {
        Self::noting(io, BACKLOG, None)
    }

    /// The same; notes of calls are taken back when their answers are written.
    pub(crate) fn noting(io: impl Outlet, backlog: usize, journal: Option<Arc<Journal>>) -> Arc<Self> {
        let out = Arc::new(Self {
            state: Mutex::default(),
            more: Notify::new(),
            backlog,
            journal,
        });
        let task = tokio::spawn(out.clone().run(io));
        out.state.lock().task = Some(task.abort_handle());
        out
    }

    /// Appends lines of the client's, which hears how many of them were written.
    pub(crate) fn pass(&self, lines: &[u8]) {
        let Ok(_) = self.put(|state| {
            state.passed += lines.len() as u64;
            state.waiting.extend_from_slice(lines);
            Ok::<_, std::convert::Infallible>(())
        });
    }

    /// Goes on with the stream's spare; what was being written is written again.
    pub(crate) fn fall_back(&self) {
        self.state.lock().left = true;
        self.more.notify_one();
    }

    /// Appends what `fill` writes, or nothing when it fails. It never waits: see [`Out::poll_room`].
    pub(crate) fn append<E>(&self, fill: impl FnOnce(&mut Vec<u8>) -> Result<(), E>) -> Result<Mark, E> {
        self.append_noted(None, fill)
    }

    /// The same for the answer to a call that is noted.
    pub(crate) fn append_noted<E>(
        &self,
        note: Option<Note>,
        fill: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<Mark, E> {
        self.put(|state| {
            state.notes.extend(note);
            fill(&mut state.waiting)
        })
    }

    fn put<E>(&self, fill: impl FnOnce(&mut State) -> Result<(), E>) -> Result<Mark, E> {
        let mut state = self.state.lock();
        let before = state.waiting.len();
        if let Err(why) = fill(&mut state) {
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

    /// Nothing more is written; the stream is let go of.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.broken = Some(io::ErrorKind::NotConnected);
        state.waiting = Vec::new();
        if let Some(task) = state.task.take() {
            task.abort();
        }
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
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
        if state.waiting.len() < self.backlog || state.broken.is_some() {
            return Poll::Ready(());
        }
        state.wake_me(context);
        Poll::Pending
    }

    async fn run(self: Arc<Self>, mut io: impl Outlet) {
        let (mut batch, mut notes) = (Vec::new(), Vec::new());
        let mut kept = Kept::default();
        loop {
            self.more.notified().await;
            let (left, passed) = {
                let mut state = self.state.lock();
                std::mem::swap(&mut batch, &mut state.waiting);
                std::mem::swap(&mut notes, &mut state.notes);
                (std::mem::take(&mut state.left), state.passed)
            };
            // Less than this a pipe takes whole or not at all.
            let large = batch.len() > PIPE_BUF;
            if large && let Some(journal) = &self.journal {
                journal.writing(true);
            }
            let mut spare = if left { io.spare() } else { None };
            let mut written = Ok(());
            if spare.is_none() {
                written = write(&mut io, &batch).await;
                // Whoever reads may notice first that the stream has broken, or this does.
                spare = written.as_ref().err().and_then(|_| io.spare());
            }
            if let Some(Spare { stream, cut }) = spare {
                let mut again = kept.rest(io.arrived());
                if cut {
                    again.insert(0, b'\n');
                }
                again.extend_from_slice(&batch);
                io = stream;
                written = write(&mut io, &again).await;
            } else if let Some(arrived) = io.arrived() {
                kept.add(&batch, arrived);
            }
            if let Some(journal) = &self.journal {
                if large {
                    journal.writing(false);
                }
                journal.strike(notes.drain(..));
                if passed > 0 && written.is_ok() {
                    journal.passed(passed);
                }
                journal.save();
            }
            let broken = written.err().map(|why| why.kind());
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

/// What was written and may not have arrived.
#[derive(Default)]
struct Kept {
    bytes: Vec<u8>,
    /// How much had arrived before these.
    before: u64,
}

impl Kept {
    fn add(&mut self, bytes: &[u8], arrived: u64) {
        self.bytes.extend_from_slice(bytes);
        self.forget(arrived);
    }

    /// What did not arrive.
    fn rest(&mut self, arrived: Option<u64>) -> Vec<u8> {
        self.forget(arrived.unwrap_or_default());
        std::mem::take(&mut self.bytes)
    }

    fn forget(&mut self, arrived: u64) {
        let gone = usize::try_from(arrived.saturating_sub(self.before)).unwrap_or(usize::MAX);
        let gone = gone.min(self.bytes.len());
        self.bytes.drain(..gone);
        self.before += gone as u64;
        self.bytes.shrink_to(KEPT);
    }
}

async fn write(io: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    io.write_all(bytes).await?;
    io.flush().await
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
    use tokio::io::{AsyncReadExt, DuplexStream};

    impl Outlet for DuplexStream {}

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

    /// The first breaks, the second is behind it.
    enum Two {
        First(
            tokio::io::DuplexStream,
            Arc<Mutex<Option<tokio::io::DuplexStream>>>,
        ),
        Second(tokio::io::DuplexStream),
    }

    impl AsyncWrite for Two {
        fn poll_write(
            self: Pin<&mut Self>,
            context: &mut Context<'_>,
            bytes: &[u8],
        ) -> Poll<io::Result<usize>> {
            let (Two::First(io, _) | Two::Second(io)) = self.get_mut();
            Pin::new(io).poll_write(context, bytes)
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }
    }

    impl Outlet for Two {
        fn spare(&self) -> Option<Spare<Self>> {
            let Two::First(_, second) = self else { return None };
            let stream = Two::Second(second.lock().take().unwrap());
            Some(Spare { stream, cut: false })
        }
    }

    #[tokio::test]
    async fn a_stream_that_broke_is_left_for_its_spare_whoever_notices_first() {
        for reader_first in [false, true] {
            let (first, gone) = tokio::io::duplex(64);
            let (second, mut agent) = tokio::io::duplex(64);
            let out = Out::start(Two::First(first, Arc::new(Mutex::new(Some(second)))));
            let say = async |text: &'static [u8]| {
                let appended = out.append(|bytes| {
                    bytes.extend_from_slice(text);
                    Ok::<_, io::Error>(())
                });
                out.written(appended.unwrap()).await.unwrap();
            };
            drop(gone);
            if reader_first {
                out.fall_back();
            }
            say(b"one\n").await;
            // Told late, or twice, it changes nothing.
            out.fall_back();
            say(b"two\n").await;
            let mut heard = [0; 8];
            agent.read_exact(&mut heard).await.unwrap();
            assert_eq!(&heard, b"one\ntwo\n");
        }
    }

    #[tokio::test]
    async fn closing_keeps_nothing_and_lets_nobody_wait() {
        let (near, _far) = tokio::io::duplex(1);
        let out = Out::noting(near, 8, None);
        line(&out, "a line that nobody reads\n");
        tokio::task::yield_now().await;
        let mark = line(&out, "another\n");
        let room = tokio::spawn({
            let out = out.clone();
            async move { std::future::poll_fn(|context| out.poll_room(context)).await }
        });
        let written = tokio::spawn({
            let out = out.clone();
            async move { out.written(mark).await }
        });
        tokio::task::yield_now().await;
        out.close();
        room.await.unwrap();
        assert!(written.await.unwrap().is_err());
        assert!(out.state.lock().waiting.is_empty());
    }
}
