//! A link as tasks see it: streams to read and write, run over one connection after another.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::sync::{Notify, watch};
use tokio::time::Instant;

use super::frame::{Frame, LinkViolation};
use super::link_state::{LinkEnd, LinkState, StreamRead, StreamWrite};

/// How often something is sent, even if there is nothing to say.
const HEARTBEAT: Duration = Duration::from_secs(3);
/// A connection on which nothing was received for this long is given up.
const SILENCE: Duration = Duration::from_secs(10);
/// A write that makes no progress for this long: the other end has stopped reading.
const WRITE_TIMEOUT: Duration = Duration::from_secs(10);
/// How long an acknowledgement waits for data that it could be sent with.
const ACK_DELAY: Duration = Duration::from_millis(20);
/// Bytes that are written at once.
const BATCH_BYTES: usize = 128 * 1024;
/// Bytes that are read at once.
const READ_BYTES: usize = 64 * 1024;

/// Why a link has ended for good.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum LinkClosed {
    /// This end ended it.
    Done,
    /// The connection was not made again within the grace time.
    Lost,
    /// The other end broke the protocol, or refused to go on.
    Refused(String),
}

/// One end of a link. Clones are the same end.
#[derive(Clone)]
pub(crate) struct Link {
    shared: Arc<LinkShared>,
}

struct LinkShared {
    state: Mutex<LinkState>,
    /// There may be something to write.
    output: Notify,
    /// A stream may have something to read, room to write, or have been opened; the number only changes.
    changed: watch::Sender<u64>,
    closed: watch::Sender<Option<LinkClosed>>,
}

impl Link {
    pub(super) fn new(end: LinkEnd) -> Self {
        Self {
            shared: Arc::new(LinkShared {
                state: Mutex::new(LinkState::new(end)),
                output: Notify::new(),
                changed: watch::Sender::new(0),
                closed: watch::Sender::new(None),
            }),
        }
    }

    fn state(&self) -> MutexGuard<'_, LinkState> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Ends the link for good. The first reason is kept.
    pub(super) fn close(&self, why: LinkClosed) {
        self.shared.closed.send_if_modified(|closed| {
            let first = closed.is_none();
            if first {
                *closed = Some(why);
            }
            first
        });
        self.wake();
    }

    /// Waits until the link has ended for good.
    pub(super) async fn closed(&self) -> LinkClosed {
        let mut closed = self.shared.closed.subscribe();
        let why = closed.wait_for(Option::is_some).await;
        why.ok().and_then(|why| why.clone()).unwrap_or(LinkClosed::Done)
    }

    /// Why the link has ended; none while it has not.
    pub(super) fn why_closed(&self) -> Option<LinkClosed> {
        self.shared.closed.borrow().clone()
    }

    fn wake(&self) {
        self.shared.output.notify_one();
        self.shared
            .changed
            .send_modify(|count| *count = count.wrapping_add(1));
    }

    /// Does something with the state. A violation ends the link.
    fn with<T>(&self, act: impl FnOnce(&mut LinkState) -> Result<T, LinkViolation>) -> io::Result<T> {
        let (done, output) = {
            let mut state = self.state();
            (act(&mut state), state.has_output())
        };
        if output {
            self.shared.output.notify_one();
        }
        done.map_err(|violation| {
            self.close(LinkClosed::Refused(violation.to_string()));
            io::Error::new(io::ErrorKind::InvalidData, violation)
        })
    }

    /// How many numbered frames have been received.
    pub(super) fn received(&self) -> u64 {
        self.state().received()
    }

    /// Prepares for a new connection, whose other end has received so many numbered frames.
    pub(super) fn resume(&self, peer_received: u64) -> io::Result<()> {
        self.with(|state| state.resume(peer_received))
    }

    /// One of the streams that the link has from its beginning. To be taken once.
    pub(super) fn stream(&self, id: u32) -> LinkStream {
        LinkStream {
            link: self.clone(),
            id,
        }
    }

    /// Opens a stream for a connection to a socket; none if there are too many.
    pub(super) fn open(&self, socket: u16) -> io::Result<Option<LinkStream>> {
        Ok(self.with(|state| state.open(socket))?.map(|id| self.stream(id)))
    }

    /// The next stream that the other end opens, with the number of its socket; none when the link has ended.
    pub(super) async fn accept(&self) -> Option<(LinkStream, u16)> {
        let (id, socket) = self.when(|state| Ok(state.accept())).await.ok()?;
        Some((self.stream(id), socket))
    }

    /// Waits until the other end has everything.
    pub(super) async fn flushed(&self) {
        let _ = self.when(|state| Ok(state.is_flushed().then_some(()))).await;
    }

    /// Waits until a look at the state gives something; an error when the link has ended. What was received before the
    /// end is still found.
    async fn when<T>(
        &self,
        look: impl Fn(&mut LinkState) -> Result<Option<T>, LinkViolation>,
    ) -> io::Result<T> {
        let mut changed = self.shared.changed.subscribe();
        loop {
            changed.borrow_and_update();
            if let Some(found) = self.with(&look)? {
                return Ok(found);
            }
            if self.why_closed().is_some() {
                return Err(io::ErrorKind::BrokenPipe.into());
            }
            // The sender lives as long as `self`.
            let _ = changed.changed().await;
        }
    }

    /// Runs the link over a connection until that breaks, or until the link has ended.
    pub(super) async fn run(&self, connection: impl AsyncRead + AsyncWrite) -> io::Error {
        let (reader, writer) = tokio::io::split(connection);
        tokio::select! {
            error = self.read_frames(reader) => error,
            error = self.write_frames(writer) => error,
            _ = self.closed() => io::ErrorKind::BrokenPipe.into(),
        }
    }

    async fn read_frames(&self, mut reader: impl AsyncRead + Unpin) -> io::Error {
        let mut buffer = BytesMut::with_capacity(READ_BYTES);
        loop {
            buffer.reserve(READ_BYTES);
            match tokio::time::timeout(SILENCE, reader.read_buf(&mut buffer)).await {
                Ok(Ok(0)) => return io::ErrorKind::UnexpectedEof.into(),
                Ok(Ok(_)) => {}
                Ok(Err(error)) => return error,
                Err(_) => return io::ErrorKind::TimedOut.into(),
            }
            let received = self.with(|state| {
                while let Some(frame) = Frame::decode(&mut buffer)? {
                    state.receive(frame)?;
                }
                Ok(())
            });
            if let Err(error) = received {
                return error;
            }
            self.wake();
        }
    }

    async fn write_frames(&self, mut writer: impl AsyncWrite + Unpin) -> io::Error {
        let mut batch = Vec::new();
        let mut next_heartbeat = Instant::now();
        loop {
            let (output, owes_ack) = {
                let state = self.state();
                (state.has_output(), state.owes_ack())
            };
            if !output {
                let by = match owes_ack {
                    true => next_heartbeat.min(Instant::now() + ACK_DELAY),
                    false => next_heartbeat,
                };
                let woken = tokio::time::timeout_at(by, self.shared.output.notified()).await;
                let due = woken.is_err();
                let state = self.state();
                if !due && !state.has_output() {
                    continue;
                }
            }
            batch.clear();
            self.state().take_output(BATCH_BYTES, &mut batch);
            next_heartbeat = Instant::now() + HEARTBEAT;
            let written = async {
                writer.write_all(&batch).await?;
                writer.flush().await
            };
            match tokio::time::timeout(WRITE_TIMEOUT, written).await {
                Ok(Ok(())) => {}
                Ok(Err(error)) => return error,
                Err(_) => return io::ErrorKind::TimedOut.into(),
            }
        }
    }
}

/// A stream of a link. Dropping it closes it in both directions.
pub(crate) struct LinkStream {
    link: Link,
    id: u32,
}

impl LinkStream {
    /// The next bytes; none at the end of the stream.
    pub(super) async fn read(&self) -> io::Result<Option<Bytes>> {
        let look = |state: &mut LinkState| {
            Ok(match state.read(self.id)? {
                StreamRead::Data(bytes) => Some(Ok(Some(bytes))),
                StreamRead::End => Some(Ok(None)),
                StreamRead::Reset => Some(Err(io::Error::from(io::ErrorKind::ConnectionReset))),
                StreamRead::Pending => None,
            })
        };
        self.link.when(look).await?
    }

    /// Writes all bytes, as the other end takes them.
    pub(super) async fn write_all(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            let look = |state: &mut LinkState| {
                Ok(match state.write(self.id, bytes)? {
                    StreamWrite::Taken(taken) => Some(Ok(taken)),
                    StreamWrite::Reset => Some(Err(io::Error::from(io::ErrorKind::ConnectionReset))),
                    StreamWrite::Pending => None,
                })
            };
            let taken = self.link.when(look).await??;
            bytes = &bytes[taken..];
        }
        Ok(())
    }

    /// Says that nothing more is written.
    pub(super) fn finish(&self) {
        // Fails when the link has ended, which says so too.
        let _ = self.link.with(|state| state.finish(self.id));
    }

    /// Copies the stream to a writer until its end.
    pub(super) async fn copy_to(&self, writer: &mut (impl AsyncWrite + Unpin)) -> io::Result<()> {
        while let Some(bytes) = self.read().await? {
            writer.write_all(&bytes).await?;
            writer.flush().await?;
        }
        Ok(())
    }

    /// Copies a reader to the stream until its end, and finishes the stream.
    pub(super) async fn copy_from(&self, reader: &mut (impl AsyncRead + Unpin)) -> io::Result<()> {
        let mut buffer = vec![0; READ_BYTES];
        loop {
            match reader.read(&mut buffer).await {
                Ok(0) => break,
                Ok(read) => self.write_all(&buffer[..read]).await?,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
        }
        self.finish();
        Ok(())
    }

    /// Copies both ways between the stream and a connection, until both directions have ended or one fails.
    pub(super) async fn join(self, connection: tokio::net::UnixStream) {
        let (mut reader, mut writer) = connection.into_split();
        let inward = async {
            let copied = self.copy_to(&mut writer).await;
            let _ = writer.shutdown().await;
            copied
        };
        let _ = tokio::try_join!(inward, self.copy_from(&mut reader));
    }
}

impl Drop for LinkStream {
    fn drop(&mut self) {
        let _ = self.link.with(|state| state.close(self.id));
    }
}

#[cfg(test)]
mod tests {
    use super::super::stream_id;
    use super::*;

    /// Runs both ends over a pair of sockets, cut again and again, until told to stop.
    async fn run_with_cuts(one: Link, other: Link, every: Duration) {
        loop {
            let (a, b) = tokio::net::UnixStream::pair().unwrap();
            let (of_one, of_other) = (one.received(), other.received());
            one.resume(of_other).unwrap();
            other.resume(of_one).unwrap();
            let both = async { tokio::join!(one.run(a), other.run(b)) };
            let _ = tokio::time::timeout(every, both).await;
        }
    }

    #[tokio::test]
    async fn megabytes_in_both_directions_survive_cuts() {
        let (container, server) = (Link::new(LinkEnd::Container), Link::new(LinkEnd::Server));
        let running = tokio::spawn(run_with_cuts(
            container.clone(),
            server.clone(),
            Duration::from_millis(3),
        ));
        let sent: Vec<u8> = (0..3_000_000_u32).map(|n| (n % 249) as u8).collect();
        let through = |from: Link, to: Link, stream: u32, sent: Vec<u8>| async move {
            let (writer, reader) = (from.stream(stream), to.stream(stream));
            let write = async {
                writer.write_all(&sent).await.unwrap();
                writer.finish();
            };
            let read = async {
                let mut got = Vec::new();
                reader.copy_to(&mut got).await.unwrap();
                got
            };
            let ((), got) = tokio::join!(write, read);
            assert!(got == sent, "{} of {} bytes", got.len(), sent.len());
        };
        tokio::join!(
            through(container.clone(), server.clone(), stream_id::STDOUT, sent.clone()),
            through(server.clone(), container.clone(), stream_id::STDIN, sent.clone()),
        );
        running.abort();
    }

    #[tokio::test]
    async fn connections_are_carried_both_ways() {
        let (container, server) = (Link::new(LinkEnd::Container), Link::new(LinkEnd::Server));
        let running = tokio::spawn(run_with_cuts(
            container.clone(),
            server.clone(),
            Duration::from_millis(50),
        ));
        let (inside, program) = tokio::net::UnixStream::pair().unwrap();
        let (outside, service) = tokio::net::UnixStream::pair().unwrap();
        tokio::spawn(container.open(7).unwrap().unwrap().join(inside));
        let (accepted, socket) = server.accept().await.unwrap();
        assert_eq!(socket, 7);
        tokio::spawn(accepted.join(outside));
        let (mut program_read, mut program_write) = program.into_split();
        let (mut service_read, mut service_write) = service.into_split();
        program_write.write_all(b"question").await.unwrap();
        let mut text = [0; 8];
        service_read.read_exact(&mut text).await.unwrap();
        assert_eq!(&text, b"question");
        service_write.write_all(b"answer").await.unwrap();
        drop((service_write, service_read));
        let mut answer = Vec::new();
        program_read.read_to_end(&mut answer).await.unwrap();
        assert_eq!(answer, b"answer");
        running.abort();
    }

    #[tokio::test]
    async fn a_stream_nobody_reads_holds_up_no_other() {
        let (container, server) = (Link::new(LinkEnd::Container), Link::new(LinkEnd::Server));
        let running = tokio::spawn(run_with_cuts(
            container.clone(),
            server.clone(),
            Duration::from_secs(60),
        ));
        let flood = container.stream(stream_id::STDOUT);
        let flooding = tokio::spawn(async move { flood.write_all(&vec![1; 10_000_000]).await });
        let (out, read) = (
            container.stream(stream_id::STDERR),
            server.stream(stream_id::STDERR),
        );
        for _ in 0..100 {
            out.write_all(b"line\n").await.unwrap();
            assert_eq!(read.read().await.unwrap().as_deref(), Some(&b"line\n"[..]));
        }
        assert!(!flooding.is_finished());
        running.abort();
    }
}
