//! Reads the agent's lines: those that a [`LineTaker`] takes are removed, the rest comes out byte for byte.

use std::{
    fmt, io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use oubliette_protocol::{
    ByteCharge, Error, OverBudget,
    relay::{MAX_LINE_BYTES, RpcError},
};
use tokio::io::{AsyncRead, ReadBuf};
use tokio_util::sync::CancellationToken;

use crate::{agent_output::AgentOutput, fast_path::Dispatch};

/// How much is read at once unless told otherwise, and what an idle buffer keeps, in bytes.
const CHUNK: usize = 32 * 1024;
/// How long open calls may take to end once the agent has closed its end.
pub const LAST_CALLS_TIMEOUT: Duration = Duration::from_secs(1);

/// Takes lines out of a stream.
pub trait LineTaker: Send + 'static {
    /// Takes a line, newline included, or leaves it in the stream.
    fn take(&mut self, line: &[u8]) -> Dispatch;

    /// Where the answers to lines taken go. Nothing more is read while it has no room.
    fn output(&self) -> &AgentOutput;

    /// Completes when every line taken has been answered and every answer written.
    fn finished(&self) -> impl Future<Output = ()> + Send + 'static;
}

/// A stream without the lines that were taken.
pub struct LineFilter<R, T> {
    inner: R,
    taker: T,
    chunk: Box<[u8]>,
    /// How much was read into the chunk.
    read: usize,
    /// How much of that has been handled.
    handled: usize,
    /// The beginning of a line whose end has not been read yet.
    partial: Vec<u8>,
    /// The current line is longer than the relay can carry: the rest of it passes as it is read.
    too_long: bool,
    /// What passes the filter.
    passing: Vec<u8>,
    /// How much of that has been handed to the reader.
    passed: usize,
    /// What the two buffers are charged while they are large.
    charge: ByteCharge,
    end: StreamEnd,
    input_ended: CancellationToken,
}

/// How far the end of the stream is. The reader sees it once the calls taken have been answered; the MCP library ends
/// its own calls in the same way.
enum StreamEnd {
    NotReached,
    WaitingForCalls(Pin<Box<dyn Future<Output = ()> + Send>>),
    Reached,
}

impl<R, T> fmt::Debug for LineFilter<R, T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LineFilter").finish_non_exhaustive()
    }
}

impl<R, T: LineTaker> LineFilter<R, T> {
    /// Filters what `inner` reads.
    pub fn new(inner: R, taker: T) -> Self {
        Self::with_chunk(inner, taker, CHUNK)
    }

    /// Filters what `inner` reads, `chunk` bytes at once.
    pub fn with_chunk(inner: R, taker: T, chunk: usize) -> Self {
        Self {
            charge: taker.output().budget().empty_charge(),
            inner,
            taker,
            chunk: vec![0; chunk].into(),
            read: 0,
            handled: 0,
            partial: Vec::new(),
            too_long: false,
            passing: Vec::new(),
            passed: 0,
            end: StreamEnd::NotReached,
            input_ended: CancellationToken::new(),
        }
    }

    /// Fires when the inner stream has ended; the filter itself ends later, when the open calls have been answered.
    pub fn input_ended(&self) -> CancellationToken {
        self.input_ended.clone()
    }

    /// Handles the lines that were read.
    fn handle_lines(&mut self) {
        while let Some(end) = memchr::memchr(b'\n', &self.chunk[self.handled..self.read]) {
            let piece = &self.chunk[self.handled..=self.handled + end];
            self.handled += piece.len();
            if std::mem::take(&mut self.too_long) {
                self.passing.extend_from_slice(piece);
                continue;
            }
            let line = match self.partial.is_empty() {
                true => piece,
                false => {
                    self.partial.extend_from_slice(piece);
                    &self.partial
                }
            };
            match self.taker.take(line) {
                Dispatch::FastPath => {}
                Dispatch::ViaLibrary => self.passing.extend_from_slice(line),
            }
            self.partial.clear();
            self.partial.shrink_to(CHUNK);
        }
        self.keep_partial_line();
    }

    /// Keeps what is left in the chunk, which has no newline.
    fn keep_partial_line(&mut self) {
        let chunk = &self.chunk[self.handled..self.read];
        match self.too_long {
            true => self.passing.extend_from_slice(chunk),
            false => self.partial.extend_from_slice(chunk),
        }
        self.handled = self.read;
        if self.partial.len() > MAX_LINE_BYTES {
            self.passing.append(&mut self.partial);
            self.too_long = true;
        }
    }

    /// Charges the buffers.
    fn charge_buffers(&mut self) -> Result<(), OverBudget> {
        let bytes = self.partial.capacity() + self.passing.capacity();
        self.charge.resize(if bytes > 2 * CHUNK { bytes } else { 0 })
    }

    /// Drops what is buffered and ends the stream, with an error to the agent.
    fn give_up(&mut self, over: OverBudget) {
        (self.read, self.handled) = (0, 0);
        (self.partial, self.passing, self.passed) = (Vec::new(), Vec::new(), 0);
        let _ = self.charge.resize(0);
        let error = RpcError::from(&Error::from(over));
        let line = serde_json::json!({ "jsonrpc": "2.0", "id": null, "error": error });
        self.taker
            .output()
            .append_lines(format!("{line}\n").as_bytes(), None);
        self.end_input();
    }

    /// Begins to wait for the calls that were taken.
    fn end_input(&mut self) {
        self.input_ended.cancel();
        self.end = StreamEnd::WaitingForCalls(Box::pin(self.taker.finished()));
    }

    /// Hands the reader what passes; false when there is nothing.
    fn pass(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let rest = &self.passing[self.passed..];
        let now = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..now]);
        self.passed += now;
        if self.passed == self.passing.len() {
            self.passed = 0;
            self.passing.clear();
            self.passing.shrink_to(CHUNK);
        }
        now > 0
    }
}

impl<R: AsyncRead + Unpin, T: LineTaker + Unpin> AsyncRead for LineFilter<R, T> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if buf.remaining() == 0 || this.pass(buf) {
                return Poll::Ready(Ok(()));
            }
            match &mut this.end {
                StreamEnd::NotReached => {}
                StreamEnd::WaitingForCalls(finished) => {
                    ready!(finished.as_mut().poll(context));
                    this.end = StreamEnd::Reached;
                    return Poll::Ready(Ok(()));
                }
                StreamEnd::Reached => return Poll::Ready(Ok(())),
            }
            if this.handled < this.read {
                this.handle_lines();
                if let Err(over) = this.charge_buffers() {
                    this.give_up(over);
                }
                continue;
            }
            ready!(this.taker.output().poll_room(context));
            let mut chunk = ReadBuf::new(&mut this.chunk);
            let polled = ready!(Pin::new(&mut this.inner).poll_read(context, &mut chunk));
            let read = chunk.filled().len();
            if polled.is_err() || read == 0 {
                this.passing.append(&mut this.partial);
                this.end_input();
                continue;
            }
            (this.read, this.handled) = (read, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::fast_path::tests::unconnected_fast_path;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn lines_that_are_not_taken_arrive_byte_for_byte() {
        let long = format!("{}\nafter\n", "x".repeat(MAX_LINE_BYTES + CHUNK));
        for (piece, long) in [(3, ""), (CHUNK / 2, &*long), (2 * CHUNK, &*long)] {
            let text = format!("\n{{}}\r\n[1]\n\n{long}no end");
            let (near, mut far) = tokio::io::duplex(piece);
            let writing = tokio::spawn({
                let text = text.clone();
                async move { far.write_all(text.as_bytes()).await.unwrap() }
            });
            let mut read = String::new();
            let mut filter = LineFilter::new(near, unconnected_fast_path().0);
            filter.read_to_string(&mut read).await.unwrap();
            writing.await.unwrap();
            assert!(read == text, "in pieces of {piece}");
            assert_eq!(filter.read(&mut [0; 8]).await.unwrap(), 0);
        }
    }
}
