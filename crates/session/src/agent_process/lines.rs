//! Splits an agent's stdout into lines of bounded length.

use tokio::io::{AsyncRead, AsyncReadExt};

/// Bytes reserved for one read; also the memory an idle agent's reader keeps.
const CHUNK: usize = 8 * 1024;

/// Why the next line could not be read.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum LineReadError {
    /// The stream was closed or failed.
    Closed,
    /// A line is longer than the limit.
    TooLong,
}

/// Reads lines up to a maximum length. The buffer grows with what has arrived and is freed after a long line.
pub(crate) struct BoundedLineReader<R> {
    io: R,
    buffer: Vec<u8>,
    searched: usize,
    limit: usize,
}

impl<R: AsyncRead + Unpin> BoundedLineReader<R> {
    pub(crate) fn new(io: R, limit: usize) -> Self {
        Self {
            io,
            buffer: Vec::new(),
            searched: 0,
            limit,
        }
    }

    /// The next line without its newline. Cancel-safe: bytes that were read stay in the buffer.
    pub(crate) async fn next(&mut self) -> Result<Vec<u8>, LineReadError> {
        loop {
            if let Some(at) = self.buffer[self.searched..].iter().position(|b| *b == b'\n') {
                let end = self.searched + at;
                let rest = self.buffer.split_off(end + 1);
                let mut line = std::mem::replace(&mut self.buffer, rest);
                line.pop();
                self.searched = 0;
                return if line.len() > self.limit {
                    Err(LineReadError::TooLong)
                } else {
                    Ok(line)
                };
            }
            self.searched = self.buffer.len();
            if self.searched > self.limit {
                return Err(LineReadError::TooLong);
            }
            self.buffer.reserve(CHUNK);
            match self.io.read_buf(&mut self.buffer).await {
                Ok(0) | Err(_) => return Err(LineReadError::Closed),
                Ok(_) => {}
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn complete_lines_are_returned_and_an_unfinished_one_is_not() {
        let mut lines = BoundedLineReader::new(&b"one\n\ntwo\nthr"[..], 100);
        assert_eq!(lines.next().await, Ok(b"one".to_vec()));
        assert_eq!(lines.next().await, Ok(Vec::new()));
        assert_eq!(lines.next().await, Ok(b"two".to_vec()));
        assert_eq!(lines.next().await, Err(LineReadError::Closed));
    }

    #[tokio::test]
    async fn an_endless_line_is_refused_at_the_limit() {
        let mut lines = BoundedLineReader::new(tokio::io::repeat(b'x'), 100_000);
        assert_eq!(lines.next().await, Err(LineReadError::TooLong));
        assert!(lines.buffer.capacity() < 300_000);
    }
}
