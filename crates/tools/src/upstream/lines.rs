//! Newline-delimited JSON-RPC messages, as stdio and tcp carry them.

use async_trait::async_trait;
use bytes::BytesMut;
use oubliette_protocol::{ByteBudget, ByteCharge};
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};

use super::{
    dropped_message::DroppedMessage,
    limits,
    wire::{FrameRead, FrameWrite, ReceivedFrame},
};

/// Reads lines from a byte stream. Cancel-safe: bytes of an incomplete line stay in the buffer. A line for which the
/// budget has no room is read to its end and dropped.
pub(super) struct LineReader<R> {
    io: R,
    buffer: BytesMut,
    /// Length of the buffer's beginning that is known to hold no line end.
    scanned: usize,
    ended: bool,
    charge: ByteCharge,
    /// The current line, if it is being dropped.
    dropping: Option<DroppedMessage>,
}

impl<R> LineReader<R> {
    /// Reads lines from `io`.
    pub(super) fn new(io: R, buffers: &ByteBudget) -> Self {
        Self {
            io,
            buffer: BytesMut::new(),
            scanned: 0,
            ended: false,
            charge: buffers.empty_charge(),
            dropping: None,
        }
    }

    /// Charges the buffer as it is now; from here on drops the current line if there is no room.
    fn charge_buffer(&mut self) {
        let capacity = self.buffer.capacity();
        let charged = match capacity > limits::UNCHARGED_BUFFER_BYTES && self.dropping.is_none() {
            true => self.charge.resize(capacity),
            false => self.charge.resize(0),
        };
        if let Err(why) = charged {
            self.dropping = Some(DroppedMessage::new(why));
            self.drop_piece(self.buffer.len());
            self.buffer = BytesMut::new();
            let _ = self.charge.resize(0);
        }
    }

    /// Drops the first bytes of the buffer, which belong to the line that is being dropped.
    fn drop_piece(&mut self, length: usize) {
        let piece = self.buffer.split_to(length);
        self.scanned = 0;
        if let Some(dropped) = &mut self.dropping {
            dropped.note(&piece);
        }
    }
}

#[async_trait]
impl<R: AsyncRead + Send + Unpin> FrameRead for LineReader<R> {
    async fn next(&mut self) -> Result<Option<ReceivedFrame>, String> {
        const CHUNK: usize = 16 * 1024;
        /// Grow the buffer when less room than this is left: smaller reads are not worth a system call.
        const LEAST: usize = 2 * 1024;
        loop {
            if let Some(at) = memchr::memchr(b'\n', &self.buffer[self.scanned..]) {
                if self.dropping.is_some() {
                    self.drop_piece(self.scanned + at + 1);
                }
                if let Some(dropped) = self.dropping.take() {
                    return Ok(Some(ReceivedFrame::Dropped(dropped)));
                }
                let line = self.buffer.split_to(self.scanned + at + 1).freeze();
                self.scanned = 0;
                let _ = self.charge.resize(0);
                let end = line.len() - 1;
                let end = if line[..end].ends_with(b"\r") {
                    end - 1
                } else {
                    end
                };
                return Ok(Some(ReceivedFrame::Message(line.slice(..end))));
            }
            self.scanned = self.buffer.len();
            if self.dropping.is_some() {
                self.drop_piece(self.scanned);
            }
            let dropped = self.dropping.as_ref().map_or(0, DroppedMessage::bytes);
            if self.scanned + dropped > limits::MAX_MESSAGE_BYTES {
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
                self.charge_buffer();
                if self.buffer.capacity() == 0 {
                    self.buffer.reserve(CHUNK);
                }
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
        let mut lines = LineReader::new(theirs, &ByteBudget::default());
        let mut got = Vec::new();
        while let Some(ReceivedFrame::Message(line)) = lines.next().await.unwrap() {
            got.push(String::from_utf8(line.to_vec()).unwrap());
        }
        assert_eq!(got, ["{\"a\":1}", "", "\"ü\""]);
    }

    #[tokio::test]
    async fn an_endless_line_fails_at_the_limit() {
        let mut lines = LineReader::new(tokio::io::repeat(b'x'), &ByteBudget::default());
        assert!(lines.next().await.err().unwrap().contains("16 MiB"));
        assert!(
            lines.buffer.capacity() < limits::MAX_MESSAGE_BYTES,
            "nothing of it is kept"
        );
    }

    #[tokio::test]
    async fn a_line_without_room_is_dropped_and_its_id_found() {
        let budget = ByteBudget::new("session_buffer_mb", 1_000_000);
        let text = "x".repeat(2_000_000);
        let first = format!("{{\"jsonrpc\":\"2.0\",\"id\":1073741824,\"result\":\"{text}\"}}\nshort\n");
        let last = format!("{{\"result\":{{\"id\": 7, \"a\":\"{text}\"}},\"id\" : \"1073741825\"}}\nshort\n");
        for (line, ids) in [(first, vec![1 << 30, 1 << 30]), (last, vec![7, (1 << 30) + 1])] {
            let mut lines = LineReader::new(line.as_bytes(), &budget);
            let Some(ReceivedFrame::Dropped(dropped)) = lines.next().await.unwrap() else {
                panic!("it was kept");
            };
            let found: Vec<i64> = dropped.ids().collect();
            assert!(
                found.iter().all(|id| ids.contains(id)) && found.contains(&ids[1]),
                "{found:?}"
            );
            assert!(matches!(lines.next().await, Ok(Some(ReceivedFrame::Message(line))) if line == "short"));
            drop(lines);
            assert_eq!(budget.used(), 0);
        }
    }
}
