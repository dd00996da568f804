//! The agent's lines: those the express lane takes, and the rest as the MCP library reads it.

use std::{
    io,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use oubliette_protocol::relay::MAX_LINE;
use tokio::io::{AsyncRead, ReadBuf};
use tokio_util::sync::CancellationToken;

use crate::express::{Lane, Reach, Way};

/// How much is read at once.
const CHUNK: usize = 32 * 1024;
/// How many lines are taken in one go.
const TURN: usize = 4;

/// A stream without the lines that went by the lane.
pub(crate) struct Intake<R, C> {
    inner: R,
    lane: Arc<Lane<C>>,
    chunk: Box<[u8]>,
    /// The beginning of a line whose end is not here yet.
    line: Vec<u8>,
    /// The rest of this line goes the long way: it is more than the relay can carry.
    long: bool,
    /// What goes the long way, and how much of it has gone.
    rest: Vec<u8>,
    gone: usize,
    /// How much was read into the chunk, and how much of that is sorted.
    read: usize,
    sorted: usize,
    end: End,
    ended: CancellationToken,
}

/// How the stream ends. The end is told once the lane's calls have been answered, as the library's own
/// calls are.
enum End {
    NotYet,
    LastCalls(Pin<Box<dyn Future<Output = ()> + Send>>),
    Told,
}

impl<R, C: Reach> Intake<R, C> {
    pub(crate) fn new(inner: R, lane: Arc<Lane<C>>) -> Self {
        Self::with_chunk(inner, lane, CHUNK)
    }

    /// The same, reading so much at once.
    pub(crate) fn with_chunk(inner: R, lane: Arc<Lane<C>>, chunk: usize) -> Self {
        Self {
            inner,
            lane,
            chunk: vec![0; chunk].into(),
            line: Vec::new(),
            long: false,
            rest: Vec::new(),
            gone: 0,
            read: 0,
            sorted: 0,
            end: End::NotYet,
            ended: CancellationToken::new(),
        }
    }

    /// Fires when the stream has ended; its end is told later.
    pub(crate) fn ended(&self) -> CancellationToken {
        self.ended.clone()
    }

    /// Sorts what was read, some of it at a time; whether that was the rest.
    fn sort(&mut self) -> bool {
        for _ in 0..TURN {
            let Some(end) = memchr::memchr(b'\n', &self.chunk[self.sorted..self.read]) else {
                self.keep_beginning();
                return true;
            };
            let piece = &self.chunk[self.sorted..=self.sorted + end];
            self.sorted += piece.len();
            if std::mem::take(&mut self.long) {
                self.rest.extend_from_slice(piece);
                continue;
            }
            let line = match self.line.is_empty() {
                true => piece,
                false => {
                    self.line.extend_from_slice(piece);
                    &self.line
                }
            };
            match self.lane.take(line) {
                Way::Lane => {}
                Way::Long => self.rest.extend_from_slice(line),
            }
            self.line.clear();
            self.line.shrink_to(CHUNK);
        }
        self.lane.taken();
        self.sorted == self.read
    }

    /// What is left is the beginning of a line.
    fn keep_beginning(&mut self) {
        let chunk = &self.chunk[self.sorted..self.read];
        match self.long {
            true => self.rest.extend_from_slice(chunk),
            false => self.line.extend_from_slice(chunk),
        }
        self.sorted = self.read;
        self.lane.taken();
        if self.line.len() > MAX_LINE {
            self.rest.append(&mut self.line);
            self.long = true;
        }
    }

    /// Hands over what goes the long way; false when there is nothing.
    fn hand_over(&mut self, buf: &mut ReadBuf<'_>) -> bool {
        let rest = &self.rest[self.gone..];
        let now = rest.len().min(buf.remaining());
        buf.put_slice(&rest[..now]);
        self.gone += now;
        if self.gone == self.rest.len() {
            self.gone = 0;
            self.rest.clear();
            self.rest.shrink_to(CHUNK);
        }
        now > 0
    }
}

impl<R: AsyncRead + Unpin, C: Reach> AsyncRead for Intake<R, C> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            if buf.remaining() == 0 || this.hand_over(buf) {
                return Poll::Ready(Ok(()));
            }
            match &mut this.end {
                End::NotYet => {}
                End::LastCalls(finished) => {
                    ready!(finished.as_mut().poll(context));
                    this.end = End::Told;
                    return Poll::Ready(Ok(()));
                }
                End::Told => return Poll::Ready(Ok(())),
            }
            if this.sorted < this.read {
                if !this.sort() {
                    // What was taken goes on its way before more is: others work on it meanwhile.
                    context.waker().wake_by_ref();
                    return Poll::Pending;
                }
                continue;
            }
            ready!(this.lane.out().poll_room(context));
            let mut chunk = ReadBuf::new(&mut this.chunk);
            let polled = ready!(Pin::new(&mut this.inner).poll_read(context, &mut chunk));
            let read = chunk.filled().len();
            if polled.is_err() || read == 0 {
                this.ended.cancel();
                let lane = this.lane.clone();
                this.rest.append(&mut this.line);
                this.end = End::LastCalls(Box::pin(async move { lane.finished().await }));
                continue;
            }
            (this.read, this.sorted) = (read, 0);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::express::tests::lane;
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    #[tokio::test]
    async fn what_goes_the_long_way_arrives_byte_for_byte() {
        let long = format!("{}\nafter\n", "x".repeat(MAX_LINE + CHUNK));
        for (piece, long) in [(3, ""), (CHUNK / 2, &*long), (2 * CHUNK, &*long)] {
            let text = format!("\n{{}}\r\n[1]\n\n{long}no end");
            let (near, mut far) = tokio::io::duplex(piece);
            let writing = tokio::spawn({
                let text = text.clone();
                async move { far.write_all(text.as_bytes()).await.unwrap() }
            });
            let mut read = String::new();
            let mut intake = Intake::new(near, lane().0);
            intake.read_to_string(&mut read).await.unwrap();
            writing.await.unwrap();
            assert!(read == text, "in pieces of {piece}");
            assert_eq!(intake.read(&mut [0; 8]).await.unwrap(), 0);
        }
    }
}
