//! The state of one end of a link. It does no I/O.
//!
//! *Nothing is lost.* Numbered frames are kept in [`LinkState::unacknowledged`] until the other end says that it has
//! them. After a cut each end says how many it has received, and the other sends what comes after.
//!
//! *Nothing grows.* A stream's sender may have as many bytes under way as its reader has granted, and no more are
//! granted than the reader has taken: that bounds what is received and not read, and what is sent and not acknowledged,
//! stream by stream. Streams and frames that wait for acknowledgement are counted.

use std::collections::{HashMap, VecDeque};

use bytes::{Bytes, BytesMut};

use super::frame::{Frame, HEADER_BYTES, LinkViolation, MAX_PAYLOAD};
use super::stream_id;

/// Bytes that may be under way on the stdin, stdout, stderr and control streams.
const STDIO_WINDOW: usize = 256 * 1024;
/// Bytes that may be under way on the stream of a connection.
const SOCKET_WINDOW: usize = 64 * 1024;
/// Maximum number of streams for connections at once.
pub(super) const MAX_SOCKET_STREAMS: usize = 256;
/// Maximum number of frames that wait for acknowledgement. Data alone cannot reach it; an end that sends and never
/// acknowledges the credit it is given does.
const MAX_UNACKNOWLEDGED: usize = 32 * 1024;
/// Maximum bytes of them: some times the windows of all streams, beyond which only an end comes that gives credit for what
/// it does not acknowledge.
const MAX_UNACKNOWLEDGED_BYTES: usize = 64 << 20;
/// So many bytes received make an acknowledgement urgent: until then the other end keeps them.
const URGENT_ACK_BYTES: usize = 64 * 1024;

/// Which end this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum LinkEnd {
    /// Opens streams for connections.
    Container,
    /// Accepts them.
    Server,
}

/// One end of a link.
#[derive(Debug)]
pub(super) struct LinkState {
    end: LinkEnd,
    /// Encoded numbered frames that the other end has not acknowledged, in order.
    unacknowledged: VecDeque<Bytes>,
    unacknowledged_bytes: usize,
    /// How many of them have been written to the current connection.
    written: usize,
    /// How many numbered frames the other end has acknowledged.
    acknowledged: u64,
    /// How many numbered frames have been received.
    received: u64,
    /// How many of those the other end was told.
    told: u64,
    /// Bytes received since the other end was told.
    untold_bytes: usize,
    streams: HashMap<u32, StreamState>,
    /// The number of the next stream that is opened, by whichever end opens them.
    next_stream: u32,
    /// Streams that the other end opened and nobody has accepted.
    opened: VecDeque<(u32, u16)>,
}

/// One stream, as this end sees it.
#[derive(Debug)]
struct StreamState {
    window: usize,
    /// Received and not read, in one piece: frames of a byte each would take a hundred times what they hold.
    incoming: BytesMut,
    /// Bytes that the other end may still send.
    granted: usize,
    /// Bytes that were read since the last credit.
    taken: usize,
    /// Bytes that this end may still send.
    credit: usize,
    read_end: ReadEnd,
    /// Whether this end has sent [`Frame::Finish`].
    finished: bool,
    /// Whether the other end has sent [`Frame::Reset`].
    reset: bool,
}

/// Whether more can come on a stream.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ReadEnd {
    Open,
    /// The other end has finished it.
    Finished,
}

/// What reading a stream gives.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StreamRead {
    Data(Bytes),
    /// Nothing yet.
    Pending,
    /// The other end has finished it.
    End,
    /// The other end has reset it, or it is closed.
    Reset,
}

/// What writing to a stream did.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum StreamWrite {
    /// So many bytes were taken.
    Taken(usize),
    /// There is no credit now.
    Pending,
    /// The other end has reset it, or it is closed.
    Reset,
}

impl StreamState {
    fn new(id: u32) -> Self {
        let window = match id {
            0..stream_id::FIRST_SOCKET => STDIO_WINDOW,
            _ => SOCKET_WINDOW,
        };
        Self {
            window,
            incoming: BytesMut::new(),
            granted: window,
            taken: 0,
            credit: window,
            read_end: ReadEnd::Open,
            finished: false,
            reset: false,
        }
    }
}

impl LinkState {
    pub(super) fn new(end: LinkEnd) -> Self {
        let standing = 0..stream_id::FIRST_SOCKET;
        Self {
            end,
            unacknowledged: VecDeque::new(),
            unacknowledged_bytes: 0,
            written: 0,
            acknowledged: 0,
            received: 0,
            told: 0,
            untold_bytes: 0,
            streams: standing.map(|id| (id, StreamState::new(id))).collect(),
            next_stream: stream_id::FIRST_SOCKET,
            opened: VecDeque::new(),
        }
    }

    /// How many numbered frames have been received; said in the handshake of the next connection.
    pub(super) fn received(&self) -> u64 {
        self.received
    }

    /// A new connection: what the other end has not received is written again.
    pub(super) fn resume(&mut self, peer_received: u64) -> Result<(), LinkViolation> {
        self.acknowledge(peer_received)?;
        self.written = 0;
        self.told = self.received;
        self.untold_bytes = 0;
        Ok(())
    }

    /// Whether the other end has acknowledged everything.
    pub(super) fn is_flushed(&self) -> bool {
        self.unacknowledged.is_empty()
    }

    /// Whether something is to be written now.
    pub(super) fn has_output(&self) -> bool {
        self.written < self.unacknowledged.len() || self.untold_bytes >= URGENT_ACK_BYTES
    }

    /// Whether the other end has still to be told of received frames.
    pub(super) fn owes_ack(&self) -> bool {
        self.told < self.received
    }

    /// The next bytes to write to the connection, at most about `limit`; with an acknowledgement, which is also the
    /// heartbeat.
    pub(super) fn take_output(&mut self, limit: usize, out: &mut Vec<u8>) {
        self.told = self.received;
        self.untold_bytes = 0;
        let ack = Frame::Ack {
            received: self.received,
        };
        out.extend_from_slice(&ack.encode());
        while out.len() < limit
            && let Some(frame) = self.unacknowledged.get(self.written)
        {
            out.extend_from_slice(frame);
            self.written += 1;
        }
    }

    /// Takes a frame that was received.
    pub(super) fn receive(&mut self, frame: Frame) -> Result<(), LinkViolation> {
        if frame.is_numbered() {
            self.received += 1;
            self.untold_bytes += HEADER_BYTES;
        }
        match frame {
            Frame::Ack { received } => self.acknowledge(received),
            Frame::Open { stream, socket } => self.receive_open(stream, socket),
            Frame::Data { stream, bytes } => {
                self.untold_bytes += bytes.len();
                let Some(state) = self.known_stream(stream)? else {
                    return Ok(());
                };
                if state.read_end != ReadEnd::Open || bytes.len() > state.granted {
                    return Err(LinkViolation("data beyond the stream's credit or after its end"));
                }
                state.granted -= bytes.len();
                state.incoming.extend_from_slice(&bytes);
                Ok(())
            }
            Frame::Credit { stream, bytes } => {
                let Some(state) = self.known_stream(stream)? else {
                    return Ok(());
                };
                state.credit = state.credit.saturating_add(bytes as usize);
                if state.credit > state.window {
                    return Err(LinkViolation("more credit than the stream's window"));
                }
                Ok(())
            }
            Frame::Finish { stream } => {
                if let Some(state) = self.known_stream(stream)? {
                    state.read_end = ReadEnd::Finished;
                }
                Ok(())
            }
            Frame::Reset { stream } => {
                if let Some(state) = self.known_stream(stream)? {
                    state.reset = true;
                    state.read_end = ReadEnd::Finished;
                }
                Ok(())
            }
        }
    }

    fn acknowledge(&mut self, received: u64) -> Result<(), LinkViolation> {
        let newly = received.checked_sub(self.acknowledged);
        let newly = newly.and_then(|count| usize::try_from(count).ok());
        let Some(newly) = newly.filter(|count| *count <= self.unacknowledged.len()) else {
            return Err(LinkViolation("an acknowledgement of what was not sent"));
        };
        let freed: usize = self.unacknowledged.drain(..newly).map(|frame| frame.len()).sum();
        self.unacknowledged_bytes -= freed;
        self.written = self.written.saturating_sub(newly);
        self.acknowledged = received;
        Ok(())
    }

    fn receive_open(&mut self, stream: u32, socket: u16) -> Result<(), LinkViolation> {
        if self.end == LinkEnd::Container || stream != self.next_stream {
            return Err(LinkViolation("a stream that may not be opened"));
        }
        self.next_stream = stream.checked_add(1).ok_or(LinkViolation("too many streams"))?;
        if self.socket_streams() >= MAX_SOCKET_STREAMS {
            return self.queue(&Frame::Reset { stream });
        }
        self.streams.insert(stream, StreamState::new(stream));
        self.opened.push_back((stream, socket));
        Ok(())
    }

    fn socket_streams(&self) -> usize {
        self.streams
            .len()
            .saturating_sub(stream_id::FIRST_SOCKET as usize)
    }

    /// The stream, or none if it is closed here already: frames may be under way.
    fn known_stream(&mut self, stream: u32) -> Result<Option<&mut StreamState>, LinkViolation> {
        if stream >= self.next_stream {
            return Err(LinkViolation("a stream that was never opened"));
        }
        Ok(self.streams.get_mut(&stream))
    }

    /// Puts a numbered frame into the queue.
    fn queue(&mut self, frame: &Frame) -> Result<(), LinkViolation> {
        let frame = frame.encode();
        let bytes = self.unacknowledged_bytes + frame.len();
        if self.unacknowledged.len() >= MAX_UNACKNOWLEDGED || bytes > MAX_UNACKNOWLEDGED_BYTES {
            return Err(LinkViolation("nothing is acknowledged"));
        }
        self.unacknowledged_bytes = bytes;
        self.unacknowledged.push_back(frame);
        Ok(())
    }

    /// The next stream that the other end has opened, with the number of its socket.
    pub(super) fn accept(&mut self) -> Option<(u32, u16)> {
        self.opened.pop_front()
    }

    /// Opens a stream for a connection to a socket; none if there are too many.
    pub(super) fn open(&mut self, socket: u16) -> Result<Option<u32>, LinkViolation> {
        if self.end == LinkEnd::Server || self.socket_streams() >= MAX_SOCKET_STREAMS {
            return Ok(None);
        }
        let stream = self.next_stream;
        self.next_stream = stream.checked_add(1).ok_or(LinkViolation("too many streams"))?;
        self.streams.insert(stream, StreamState::new(stream));
        self.queue(&Frame::Open { stream, socket })?;
        Ok(Some(stream))
    }

    /// Reads from a stream. What is read may be sent again: credit is given in halves of the window.
    pub(super) fn read(&mut self, stream: u32) -> Result<StreamRead, LinkViolation> {
        let Some(state) = self.streams.get_mut(&stream) else {
            return Ok(StreamRead::Reset);
        };
        if state.incoming.is_empty() {
            return Ok(match (state.reset, state.read_end) {
                (true, _) => StreamRead::Reset,
                (false, ReadEnd::Finished) => StreamRead::End,
                (false, ReadEnd::Open) => StreamRead::Pending,
            });
        }
        // The whole of it: what a part would leave behind keeps all of the memory.
        let bytes = std::mem::take(&mut state.incoming).freeze();
        state.taken += bytes.len();
        if state.taken >= state.window / 2 && state.read_end == ReadEnd::Open {
            let credit = u32::try_from(state.taken).unwrap_or(u32::MAX);
            state.granted += state.taken;
            state.taken = 0;
            self.queue(&Frame::Credit {
                stream,
                bytes: credit,
            })?;
        }
        Ok(StreamRead::Data(bytes))
    }

    /// Writes to a stream as much as its credit and one frame allow.
    pub(super) fn write(&mut self, stream: u32, bytes: &[u8]) -> Result<StreamWrite, LinkViolation> {
        let Some(state) = self.streams.get_mut(&stream) else {
            return Ok(StreamWrite::Reset);
        };
        if state.reset || state.finished {
            return Ok(StreamWrite::Reset);
        }
        let taken = bytes.len().min(state.credit).min(MAX_PAYLOAD);
        if taken == 0 {
            return Ok(StreamWrite::Pending);
        }
        state.credit -= taken;
        self.queue(&Frame::Data {
            stream,
            bytes: Bytes::copy_from_slice(&bytes[..taken]),
        })?;
        Ok(StreamWrite::Taken(taken))
    }

    /// Says that nothing more is written to a stream.
    pub(super) fn finish(&mut self, stream: u32) -> Result<(), LinkViolation> {
        match self.streams.get_mut(&stream) {
            Some(state) if !state.finished && !state.reset => {
                state.finished = true;
                self.queue(&Frame::Finish { stream })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Forgets a stream; the other end is told unless it knows already.
    pub(super) fn close(&mut self, stream: u32) -> Result<(), LinkViolation> {
        let Some(state) = self.streams.remove(&stream) else {
            return Ok(());
        };
        let known = state.reset || (state.finished && state.read_end == ReadEnd::Finished);
        match known {
            true => Ok(()),
            false => self.queue(&Frame::Reset { stream }),
        }
    }
}

#[cfg(test)]
mod tests;
