//! The lines to the agent: one buffer that many tasks append whole lines to, one task that writes it.
//!
//! The writing task runs after the tasks that are ready have appended, so lines that are ready together go out in
//! one write, and a line that is alone goes out at once.

use std::{
    convert::Infallible,
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use oubliette_protocol::{ByteBudget, ByteCharge};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncWrite, AsyncWriteExt},
    sync::Notify,
    task::AbortHandle,
};

/// Memory that the buffer keeps while it is empty, in bytes.
const IDLE_CAPACITY: usize = 16 * 1024;

/// The buffer and its writing task.
#[derive(Debug)]
pub struct AgentOutput {
    state: Mutex<OutputState>,
    more: Notify,
    backlog: usize,
    budget: ByteBudget,
}

#[derive(Debug, Default)]
struct OutputState {
    waiting: Vec<u8>,
    /// What the waiting lines are charged.
    charges: Vec<ByteCharge>,
    /// Count of bytes, from the beginning.
    appended: u64,
    /// Count of bytes, from the beginning.
    written: u64,
    /// Why nothing can be written any longer.
    broken: Option<io::ErrorKind>,
    /// The writing task; set once it is spawned.
    task: Option<AbortHandle>,
    /// Tasks to wake when bytes were written or the stream broke.
    wakers: Vec<Waker>,
}

impl OutputState {
    fn wake_later(&mut self, context: &Context<'_>) {
        if !self.wakers.iter().any(|waker| waker.will_wake(context.waker())) {
            self.wakers.push(context.waker().clone());
        }
    }
}

/// A position in the output: everything appended before it was made.
#[derive(Debug, Clone, Copy)]
pub struct OutputPosition(u64);

impl AgentOutput {
    /// Starts the writing task. [`AgentOutput::poll_room`] waits while `backlog` bytes or more are unwritten. `budget` is
    /// what calls, and lines on their way to and from the agent, are charged to.
    pub fn start(
        io: impl AsyncWrite + Send + Unpin + 'static,
        backlog: usize,
        budget: ByteBudget,
    ) -> Arc<Self> {
        let output = Arc::new(Self {
            state: Mutex::default(),
            more: Notify::new(),
            backlog,
            budget,
        });
        let task = tokio::spawn(output.clone().run(io));
        output.state.lock().task = Some(task.abort_handle());
        output
    }

    /// What calls and lines are charged to.
    pub(crate) fn budget(&self) -> &ByteBudget {
        &self.budget
    }

    /// Appends whole lines. It never waits: see [`AgentOutput::poll_room`]. The charge is given back when they are
    /// written.
    pub(crate) fn append_lines(&self, lines: &[u8], charge: Option<ByteCharge>) {
        let Ok(_) = self.append(charge, |waiting| {
            waiting.extend_from_slice(lines);
            Ok::<_, Infallible>(())
        });
    }

    /// Appends what `fill` writes, or nothing when it fails. It never waits: see [`AgentOutput::poll_room`].
    pub(crate) fn append<E>(
        &self,
        charge: Option<ByteCharge>,
        fill: impl FnOnce(&mut Vec<u8>) -> Result<(), E>,
    ) -> Result<OutputPosition, E> {
        let mut state = self.state.lock();
        let before = state.waiting.len();
        if let Err(why) = fill(&mut state.waiting) {
            state.waiting.truncate(before);
            return Err(why);
        }
        state.appended += (state.waiting.len() - before) as u64;
        let end = OutputPosition(state.appended);
        match state.broken {
            Some(_) => state.waiting = Vec::new(),
            None => {
                state.charges.extend(charge);
                self.more.notify_one();
            }
        }
        Ok(end)
    }

    /// Stops writing and drops the stream, with what is unwritten.
    pub(crate) fn close(&self) {
        let mut state = self.state.lock();
        state.broken = Some(io::ErrorKind::NotConnected);
        state.waiting = Vec::new();
        state.charges = Vec::new();
        if let Some(task) = state.task.take() {
            task.abort();
        }
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        wakers.into_iter().for_each(Waker::wake);
    }

    /// The end of everything appended so far.
    pub(crate) fn end(&self) -> OutputPosition {
        OutputPosition(self.state.lock().appended)
    }

    /// Waits until everything before the position is written; an error when it cannot be.
    pub(crate) async fn written(&self, position: OutputPosition) -> io::Result<()> {
        std::future::poll_fn(|context| self.poll_written(position, context)).await
    }

    fn poll_written(&self, position: OutputPosition, context: &Context<'_>) -> Poll<io::Result<()>> {
        let mut state = self.state.lock();
        if state.written >= position.0 {
            return Poll::Ready(Ok(()));
        }
        if let Some(kind) = state.broken {
            return Poll::Ready(Err(kind.into()));
        }
        state.wake_later(context);
        Poll::Pending
    }

    /// Ready unless the agent is far behind with reading. Then nothing more is read from it until it has caught up.
    pub(crate) fn poll_room(&self, context: &Context<'_>) -> Poll<()> {
        let mut state = self.state.lock();
        if state.waiting.len() < self.backlog || state.broken.is_some() {
            return Poll::Ready(());
        }
        state.wake_later(context);
        Poll::Pending
    }

    async fn run(self: Arc<Self>, mut io: impl AsyncWrite + Send + Unpin) {
        let (mut batch, mut charges) = (Vec::new(), Vec::new());
        loop {
            self.more.notified().await;
            {
                let mut state = self.state.lock();
                std::mem::swap(&mut batch, &mut state.waiting);
                std::mem::swap(&mut charges, &mut state.charges);
            }
            let broken = write(&mut io, &batch).await.err().map(|why| why.kind());
            let mut state = self.state.lock();
            match broken {
                None => state.written += batch.len() as u64,
                Some(_) => {
                    state.broken = broken;
                    state.waiting = Vec::new();
                    state.charges = Vec::new();
                }
            }
            let wakers = std::mem::take(&mut state.wakers);
            drop(state);
            wakers.into_iter().for_each(Waker::wake);
            batch.clear();
            batch.shrink_to(IDLE_CAPACITY);
            charges.clear();
            if broken.is_some() {
                return;
            }
        }
    }
}

async fn write(io: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) -> io::Result<()> {
    io.write_all(bytes).await?;
    io.flush().await
}

/// An [`AgentOutput`] as a stream, for the MCP library, which flushes after each line.
#[derive(Debug)]
pub struct AgentOutputWriter(pub Arc<AgentOutput>);

impl AsyncWrite for AgentOutputWriter {
    fn poll_write(self: Pin<&mut Self>, _: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        if let Some(kind) = self.0.state.lock().broken {
            return Poll::Ready(Err(kind.into()));
        }
        self.0.append_lines(bytes, None);
        Poll::Ready(Ok(bytes.len()))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.0.poll_written(self.0.end(), context)
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.poll_flush(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tokio::io::AsyncReadExt;

    const BACKLOG: usize = 64 * 1024 * 1024;

    fn line(out: &AgentOutput, line: &str) -> OutputPosition {
        let charge = out.budget().charge(line.len()).unwrap();
        out.append_lines(line.as_bytes(), Some(charge));
        out.end()
    }

    #[tokio::test]
    async fn no_line_is_lost_and_lines_ready_together_share_one_write() {
        let (mut far, near) = tokio::io::duplex(1 << 20);
        let out = AgentOutput::start(near, BACKLOG, ByteBudget::default());
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
        assert_eq!(out.end().0, want.len() as u64);
    }

    #[tokio::test]
    async fn written_returns_only_after_the_bytes_are_written() {
        let (mut far, near) = tokio::io::duplex(4);
        let out = AgentOutput::start(near, BACKLOG, ByteBudget::default());
        let first = line(&out, "first\n");
        let mut writer = AgentOutputWriter(out.clone());
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
        tokio::task::yield_now().await;
        assert_eq!(out.budget().used(), 0);
    }

    #[tokio::test]
    async fn there_is_room_again_once_an_agent_far_behind_has_read() {
        let (mut far, near) = tokio::io::duplex(1 << 20);
        let out = AgentOutput::start(near, BACKLOG, ByteBudget::default());
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
    async fn a_broken_stream_keeps_no_bytes() {
        let (far, near) = tokio::io::duplex(4);
        drop(far);
        let out = AgentOutput::start(near, BACKLOG, ByteBudget::default());
        let mark = line(&out, "x\n");
        assert!(out.written(mark).await.is_err());
        line(&out, "y\n");
        assert!(out.state.lock().waiting.is_empty());
        assert!(AgentOutputWriter(out).write_all(b"z\n").await.is_err());
    }

    #[tokio::test]
    async fn closing_drops_the_buffer_and_wakes_every_waiter() {
        let (near, _far) = tokio::io::duplex(1);
        let out = AgentOutput::start(near, 8, ByteBudget::default());
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
        tokio::task::yield_now().await;
        assert_eq!(out.budget().used(), 0);
    }
}
