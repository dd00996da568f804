//! Frames: one byte kind, four bytes stream, four bytes length, payload; numbers little-endian.

use bytes::{Buf, BufMut, Bytes, BytesMut};

/// Bytes of a frame before its payload.
pub(super) const HEADER_BYTES: usize = 9;
/// Maximum payload of a frame.
pub(super) const MAX_PAYLOAD: usize = 32 * 1024;

/// A frame. All but [`Frame::Ack`] are numbered, by their order, and sent again after a cut.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Frame {
    /// How many numbered frames have been received. Sent every few seconds even if nothing was, as a heartbeat.
    Ack { received: u64 },
    /// A connection was made to the socket with this number in the list of the handshake.
    Open { stream: u32, socket: u16 },
    /// Bytes of a stream.
    Data { stream: u32, bytes: Bytes },
    /// The reader of a stream has taken bytes: as many more may be sent.
    Credit { stream: u32, bytes: u32 },
    /// The sender writes nothing more to the stream.
    Finish { stream: u32 },
    /// The sender neither reads nor writes the stream any more.
    Reset { stream: u32 },
}

/// What is wrong with what the other end sent. The link ends for good.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct LinkViolation(pub(super) &'static str);

impl Frame {
    /// Whether it is numbered, kept until it is acknowledged, and sent again after a cut.
    pub(super) fn is_numbered(&self) -> bool {
        !matches!(self, Frame::Ack { .. })
    }

    /// The frame as bytes.
    pub(super) fn encode(&self) -> Bytes {
        let mut out = BytesMut::with_capacity(HEADER_BYTES + 8 + self.data_len());
        let mut head = |kind: u8, stream: u32, length: usize| {
            out.put_u8(kind);
            out.put_u32_le(stream);
            out.put_u32_le(u32::try_from(length).unwrap_or(u32::MAX));
        };
        match self {
            Frame::Ack { received } => {
                head(0, 0, 8);
                out.put_u64_le(*received);
            }
            Frame::Open { stream, socket } => {
                head(1, *stream, 2);
                out.put_u16_le(*socket);
            }
            Frame::Data { stream, bytes } => {
                head(2, *stream, bytes.len());
                out.put_slice(bytes);
            }
            Frame::Credit { stream, bytes } => {
                head(3, *stream, 4);
                out.put_u32_le(*bytes);
            }
            Frame::Finish { stream } => head(4, *stream, 0),
            Frame::Reset { stream } => head(5, *stream, 0),
        }
        out.freeze()
    }

    fn data_len(&self) -> usize {
        match self {
            Frame::Data { bytes, .. } => bytes.len(),
            Frame::Ack { .. }
            | Frame::Open { .. }
            | Frame::Credit { .. }
            | Frame::Finish { .. }
            | Frame::Reset { .. } => 0,
        }
    }

    /// Takes the next frame out of what was read; none until it is complete. A length beyond the maximum is refused
    /// before anything is kept for it.
    pub(super) fn decode(buffer: &mut BytesMut) -> Result<Option<Frame>, LinkViolation> {
        let Some(mut head) = buffer.get(..HEADER_BYTES) else {
            return Ok(None);
        };
        let (kind, stream, length) = (head.get_u8(), head.get_u32_le(), head.get_u32_le() as usize);
        let expected = match kind {
            0 => 8,
            1 => 2,
            2 if (1..=MAX_PAYLOAD).contains(&length) => length,
            2 => return Err(LinkViolation("a frame without data, or with too much")),
            3 => 4,
            4 | 5 => 0,
            _ => return Err(LinkViolation("a frame of an unknown kind")),
        };
        if length != expected {
            return Err(LinkViolation("a frame of the wrong length"));
        }
        if buffer.len() < HEADER_BYTES + length {
            return Ok(None);
        }
        buffer.advance(HEADER_BYTES);
        let mut payload = buffer.split_to(length).freeze();
        Ok(Some(match kind {
            0 => Frame::Ack {
                received: payload.get_u64_le(),
            },
            1 => Frame::Open {
                stream,
                socket: payload.get_u16_le(),
            },
            2 => Frame::Data {
                stream,
                // Part of the read buffer: whoever keeps it copies it.
                bytes: payload,
            },
            3 => Frame::Credit {
                stream,
                bytes: payload.get_u32_le(),
            },
            4 => Frame::Finish { stream },
            _ => Frame::Reset { stream },
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_survive_the_wire_in_any_pieces() {
        let frames = [
            Frame::Ack { received: u64::MAX },
            Frame::Open { stream: 4, socket: 2 },
            Frame::Data {
                stream: 1,
                bytes: Bytes::from(vec![7; MAX_PAYLOAD]),
            },
            Frame::Credit { stream: 1, bytes: 9 },
            Frame::Finish { stream: 1 },
            Frame::Reset { stream: 4 },
        ];
        let wire: Vec<u8> = frames.iter().flat_map(|frame| frame.encode().to_vec()).collect();
        let mut buffer = BytesMut::new();
        let mut seen = Vec::new();
        for piece in wire.chunks(7) {
            buffer.extend_from_slice(piece);
            while let Some(frame) = Frame::decode(&mut buffer).unwrap() {
                seen.push(frame);
            }
        }
        assert_eq!(seen, frames);
        assert!(buffer.is_empty());
    }

    #[test]
    fn wrong_kinds_and_lengths_are_refused_before_anything_is_read() {
        for head in [
            [9, 0, 0, 0, 0, 0, 0, 0, 0],
            [2, 1, 0, 0, 0, 0, 0, 0, 0],
            [2, 1, 0, 0, 0, 1, 0x80, 0, 0],
            [2, 1, 0, 0, 0, 0xff, 0xff, 0xff, 0xff],
            [0, 0, 0, 0, 0, 7, 0, 0, 0],
            [4, 1, 0, 0, 0, 1, 0, 0, 0],
        ] {
            assert!(Frame::decode(&mut BytesMut::from(&head[..])).is_err(), "{head:?}");
        }
    }
}
