//! An agent's stdout into lines, bounded, whatever it writes.

use tokio::io::{AsyncRead, AsyncReadExt};

/// What one read asks for, and what an idle agent costs.
const CHUNK: usize = 8 * 1024;

/// Why there is no next line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum NoLine {
    /// It closed its stdout.
    Closed,
    /// A line went past the limit.
    TooLong,
}

/// Splits a stream into lines. Memory follows what has arrived and is given back after a long line.
pub(crate) struct Lines<R> {
    io: R,
    buffer: Vec<u8>,
    searched: usize,
    limit: usize,
}

impl<R: AsyncRead + Unpin> Lines<R> {
    pub(crate) fn new(io: R, limit: usize) -> Self {
        Self {
            io,
            buffer: Vec::new(),
            searched: 0,
            limit,
        }
    }

    /// The next line without its newline. Dropping the future loses nothing: bytes that were read stay.
    pub(crate) async fn next(&mut self) -> Result<Vec<u8>, NoLine> {
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|b| *b == b'\n') {
                let end = self.searched + at;
                let rest = self.buffer.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                self.searched = 0;
                return if line.len() > self.limit {
                    Err(NoLine::TooLong)
                } else {
                    Ok(line)
                };
            }
            self.searched = self.buffer.len();
            if self.searched > self.limit {
                return Err(NoLine::TooLong);
            }
            self.buffer.reserve(CHUNK);
            match self.io.read_buf(&mut self.buffer).await {
                Ok(0) | Err(_) => return Err(NoLine::Closed),
                Ok(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_come_one_by_one_and_half_a_line_does_not() {
        let mut lines = Lines::new(&b"one\n\ntwo\nthr"[..], 100);
        assert_eq!(lines.next().await, Ok(b"one".to_vec()));
        assert_eq!(lines.next().await, Ok(Vec::new()));
        assert_eq!(lines.next().await, Ok(b"two".to_vec()));
        assert_eq!(lines.next().await, Err(NoLine::Closed));
    }

    #[tokio::test]
    async fn a_line_without_end_is_cut_off() {
        let mut lines = Lines::new(tokio::io::repeat(b'x'), 100_000);
        assert_eq!(lines.next().await, Err(NoLine::TooLong));
        assert!(lines.buffer.capacity() < 300_000);
    }
}
