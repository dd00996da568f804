//! Newline-delimited JSON-RPC messages, as stdio and tcp carry them.

use async_trait::async_trait;
use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{
    limits,
    wire::{FrameRead, FrameWrite},
};

/// Reads lines from a byte stream. Cancel-safe: bytes of an incomplete line stay in the buffer.
pub(super) struct LineReader<R> {
    io: R,
    buffer: BytesMut,
    /// Length of the buffer's beginning that is known to hold no line end.
    scanned: usize,
    ended: bool,
}

impl<R> LineReader<R> {
    /// Reads lines from `io`.
    pub(super) fn new(io: R) -> Self {
        Self {
            io,
            buffer: BytesMut::new(),
            scanned: 0,
            ended: false,
        }
    }
}

#[async_trait]
impl<R: AsyncRead + Send + Unpin> FrameRead for LineReader<R> {
    async fn next(&mut self) -> Result<Option<Bytes>, String> {
        const CHUNK: usize = 16 * 1024;
        /// Grow the buffer when less room than this is left: smaller reads are not worth a system call.
        const LEAST: usize = 2 * 1024;
        loop {
            if let Some(at) = memchr::memchr(b'\n', &self.buffer[self.scanned..]) {
                let line = self.buffer.split_to(self.scanned + at + 1).freeze();
                self.scanned = 0;
                let end = line.len() - 1;
                let end = if line[..end].ends_with(b"\r") {
                    end - 1
                } else {
                    end
                };
                return Ok(Some(line.slice(..end)));
            }
            self.scanned = self.buffer.len();
            if self.scanned > limits::MAX_MESSAGE_BYTES {
                self.buffer = BytesMut::new();
                self.ended = true;
                return Err(message_too_large());
            }
            if self.ended {
                // A last line without a line end is incomplete and dropped.
                return Ok(None);
            }
            if self.buffer.capacity() - self.buffer.len() < LEAST {
                self.buffer.reserve(CHUNK);
            }
            match self.io.read_buf(&mut self.buffer).await {
                Ok(0) => self.ended = true,
                Ok(_) => {}
                Err(error) => {
                    self.ended = true;
                    return Err(format!("its output could not be read: {error}"));
                }
            }
        }
    }
}

/// Writes lines to a byte stream; messages of one call go into one write.
pub(super) struct LineWriter<W>(pub(super) W);

#[async_trait]
impl<W: AsyncWrite + Send + Unpin> FrameWrite for LineWriter<W> {
    async fn write(&mut self, messages: Vec<Vec<u8>>) -> Result<(), String> {
        let mut lines = Vec::new();
        for message in messages {
            match lines.is_empty() {
                true => lines = message,
                false => lines.extend_from_slice(&message),
            }
            lines.push(b'\n');
        }
        let written = async {
            self.0.write_all(&lines).await?;
            self.0.flush().await
        };
        written
            .await
            .map_err(|error| format!("its input could not be written: {error}"))
    }

    async fn close(&mut self) {
        let _ = self.0.shutdown().await;
    }
}

/// The error for a message larger than [`limits::MAX_MESSAGE_BYTES`].
pub(super) fn message_too_large() -> String {
    format!(
        "it sent a message larger than {} MiB",
        limits::MAX_MESSAGE_BYTES / 1024 / 1024
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn lines_are_reassembled_from_partial_reads() {
        let (mut ours, theirs) = tokio::io::duplex(3);
        tokio::spawn(async move {
            ours.write_all("{\"a\":1}\r\n\n\"ü\"\nrest".as_bytes())
                .await
                .unwrap();
        });
        let mut lines = LineReader::new(theirs);
        let mut got = Vec::new();
        while let Some(line) = lines.next().await.unwrap() {
            got.push(String::from_utf8(line.to_vec()).unwrap());
        }
        assert_eq!(got, ["{\"a\":1}", "", "\"ü\""]);
    }

    #[tokio::test]
    async fn an_endless_line_fails_at_the_limit() {
        let mut lines = LineReader::new(tokio::io::repeat(b'x'));
        assert!(lines.next().await.unwrap_err().contains("16 MiB"));
        assert!(
            lines.buffer.capacity() < limits::MAX_MESSAGE_BYTES,
            "nothing of it is kept"
        );
    }
}
