//! Bytes into lines, bounded.

use tokio::io::{AsyncRead, AsyncReadExt};

use crate::Closed;

/// What one read asks for, and what an idle connection keeps.
const CHUNK: usize = 8 * 1024;

/// Splits a stream into lines. Memory follows what has arrived: the buffer doubles as a long line comes
/// in, never past the limit, and is given back after it.
pub(crate) struct Lines<R> {
    io: R,
    buffer: Vec<u8>,
    /// Where the unread part begins.
    start: usize,
    /// How far the unread part has been searched for a newline.
    searched: usize,
    limit: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(crate) fn new(io: R, limit: usize) -> Self {
        Self {
            io,
            buffer: Vec::new(),
            start: 0,
            searched: 0,
            limit,
        }
    }

    /// The next line without its newline, valid until the next call. A last line without newline is
    /// dropped: it may be half a message. Safe to drop between reads: no byte is lost.
    pub(crate) async fn next(&mut self) -> Result<&[u8], Closed> {
        let end = loop {
            if let Some(at) = memchr::memchr(b'\n', &self.buffer[self.searched..]) {
                break self.searched + at;
            }
            self.searched = self.buffer.len();
            if self.searched - self.start > self.limit {
                return Err(Closed::LineTooLong(self.limit));
            }
            self.make_room();
            match self.io.read_buf(&mut self.buffer).await {
                Ok(0) => return Err(Closed::ByPeer),
                Ok(_) => {}
                Err(why) if gone(why.kind()) => return Err(Closed::ByPeer),
                Err(why) => return Err(Closed::Broken(why.to_string())),
            }
        };
        let line = self.start..end;
        if line.len() > self.limit {
            return Err(Closed::LineTooLong(self.limit));
        }
        self.start = end + 1;
        self.searched = self.start;
        Ok(&self.buffer[line])
    }

    /// Drops what has been read and makes sure there is capacity to read into.
    fn make_room(&mut self) {
        let unread = self.buffer.len() - self.start;
        if self.start > 0 {
            self.buffer.copy_within(self.start.., 0);
            self.buffer.truncate(unread);
            (self.start, self.searched) = (0, unread);
        }
        if unread < CHUNK && self.buffer.capacity() > 4 * CHUNK {
            self.buffer.shrink_to(CHUNK);
        }
        if self.buffer.capacity() == unread {
            // One byte past the limit is enough to know that a line is too long.
            let most = (self.limit + 1).saturating_sub(unread).max(1);
            self.buffer.reserve_exact(unread.max(CHUNK).min(most));
        }
    }
}

pub(crate) fn gone(kind: std::io::ErrorKind) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(
        kind,
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof
    )
}
