//! Charges WebSocket messages to the session's budget before they are buffered.
//!
//! tungstenite keeps the frames of a message until it is complete, and makes room for a whole frame as soon as its
//! header tells the length. So each header is read here first. A frame whose message the budget has no room for is read to
//! its end and replaced by an empty one; the reader learns that the message it then gets was dropped.

use std::{
    collections::VecDeque,
    io::{self, Cursor},
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use bytes::{Buf, BytesMut};
use oubliette_protocol::{ByteBudget, ByteCharge};
use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio_tungstenite::tungstenite::protocol::frame::{
    FrameHeader,
    coding::{Data, OpCode},
};

use super::{dropped_message::DroppedMessage, limits, lines::message_too_large};

/// How much is read at once.
const CHUNK: usize = 16 * 1024;
/// The longest payload of a control frame (RFC 6455, 5.5).
const MAX_CONTROL_BYTES: u64 = 125;

/// What became of the messages that were read, in order. Kept ones are charged until they are taken.
#[derive(Clone, Default)]
pub(super) struct MessageVerdicts(Arc<Mutex<VecDeque<MessageVerdict>>>);

enum MessageVerdict {
    Kept(#[expect(dead_code, reason = "held until it is dropped")] ByteCharge),
    Dropped(DroppedMessage),
}

impl MessageVerdicts {
    /// Takes the verdict on the next message; returns what is left of it if it was dropped.
    pub(super) fn next_dropped(&self) -> Option<DroppedMessage> {
        match self.0.lock().pop_front()? {
            MessageVerdict::Kept(_) => None,
            MessageVerdict::Dropped(dropped) => Some(dropped),
        }
    }
}

/// A byte stream whose incoming WebSocket frames are charged.
pub(super) struct ChargedFrames<S> {
    io: S,
    budget: ByteBudget,
    verdicts: MessageVerdicts,
    /// Read, and not yet looked at.
    input: BytesMut,
    /// Headers to be given out next.
    output: BytesMut,
    frame: FrameState,
    message: MessageState,
}

/// What is being read.
enum FrameState {
    Header,
    /// A payload that is given out.
    Payload {
        left: u64,
        ends_message: bool,
    },
    /// A payload that is dropped; its header is given out afterwards, as that of an empty frame.
    Dropped {
        left: u64,
        header: FrameHeader,
    },
}

/// The message that is being read.
struct MessageState {
    bytes: u64,
    charge: ByteCharge,
    dropped: Option<DroppedMessage>,
}

impl MessageState {
    fn new(budget: &ByteBudget) -> Self {
        Self {
            bytes: 0,
            charge: budget.empty_charge(),
            dropped: None,
        }
    }
}

impl<S> ChargedFrames<S> {
    /// Charges what comes from `io` after `first`, which was read already, and that too.
    pub(super) fn new(io: S, first: Vec<u8>, budget: &ByteBudget) -> (Self, MessageVerdicts) {
        let verdicts = MessageVerdicts::default();
        let frames = Self {
            io,
            budget: budget.clone(),
            verdicts: verdicts.clone(),
            input: BytesMut::from_iter(first),
            output: BytesMut::new(),
            frame: FrameState::Header,
            message: MessageState::new(budget),
        };
        (frames, verdicts)
    }

    /// Goes on with what was read; returns whether there is something to give out, else more is to be read first.
    fn advance(&mut self) -> io::Result<bool> {
        loop {
            match &mut self.frame {
                FrameState::Payload { left: 0, .. } => self.frame = FrameState::Header,
                FrameState::Payload { .. } => return Ok(!self.input.is_empty()),
                FrameState::Dropped { left: 0, header } => {
                    write_header(header, 0, &mut self.output)?;
                    let ends_message = header.is_final;
                    self.frame = FrameState::Header;
                    if ends_message {
                        self.end_message();
                    }
                    return Ok(true);
                }
                FrameState::Dropped { left, .. } => {
                    let length = capped(*left, self.input.len());
                    if length == 0 {
                        return Ok(false);
                    }
                    *left -= length as u64;
                    let piece = self.input.split_to(length);
                    if let Some(dropped) = &mut self.message.dropped {
                        dropped.note(&piece);
                    }
                }
                FrameState::Header => {
                    let mut cursor = Cursor::new(&self.input);
                    let parsed = FrameHeader::parse(&mut cursor).map_err(io::Error::other)?;
                    let length = usize::try_from(cursor.position()).unwrap_or(usize::MAX);
                    let Some((header, payload)) = parsed else {
                        return Ok(false);
                    };
                    self.input.advance(length);
                    self.begin_frame(header, payload)?;
                    if !self.output.is_empty() {
                        return Ok(true);
                    }
                }
            }
        }
    }

    fn begin_frame(&mut self, mut header: FrameHeader, payload: u64) -> io::Result<()> {
        let OpCode::Data(data) = header.opcode else {
            if payload > MAX_CONTROL_BYTES {
                return Err(io::Error::other("it sent a control frame that is too long"));
            }
            write_header(&header, payload, &mut self.output)?;
            self.frame = FrameState::Payload {
                left: payload,
                ends_message: false,
            };
            return Ok(());
        };
        if data == Data::Text {
            // A message that is cut off within a character would be an error of the whole connection. As with every
            // other transport, the text is checked where it is parsed.
            header.opcode = OpCode::Data(Data::Binary);
        }
        self.message.bytes = self.message.bytes.saturating_add(payload);
        let bytes = usize::try_from(self.message.bytes).unwrap_or(usize::MAX);
        if bytes > limits::MAX_MESSAGE_BYTES {
            return Err(io::Error::new(io::ErrorKind::FileTooLarge, message_too_large()));
        }
        if bytes > limits::UNCHARGED_BUFFER_BYTES
            && self.message.dropped.is_none()
            && let Err(why) = self.message.charge.resize(bytes)
        {
            self.message.dropped = Some(DroppedMessage::new(why));
        }
        if self.message.dropped.is_some() {
            self.frame = FrameState::Dropped {
                left: payload,
                header,
            };
            return Ok(());
        }
        write_header(&header, payload, &mut self.output)?;
        self.frame = FrameState::Payload {
            left: payload,
            ends_message: header.is_final,
        };
        if payload == 0 && header.is_final {
            self.end_message();
        }
        Ok(())
    }

    /// Records what became of the message, before its last byte is given out.
    fn end_message(&mut self) {
        let message = std::mem::replace(&mut self.message, MessageState::new(&self.budget));
        let verdict = match message.dropped {
            Some(dropped) => MessageVerdict::Dropped(dropped),
            None => MessageVerdict::Kept(message.charge),
        };
        self.verdicts.0.lock().push_back(verdict);
    }

    /// Gives out headers, or what there is of a payload.
    fn give_out(&mut self, buf: &mut ReadBuf<'_>) {
        if !self.output.is_empty() {
            let length = buf.remaining().min(self.output.len());
            buf.put_slice(&self.output.split_to(length));
            return;
        }
        let mut ended = false;
        if let FrameState::Payload { left, ends_message } = &mut self.frame {
            let length = capped(*left, buf.remaining().min(self.input.len()));
            buf.put_slice(&self.input.split_to(length));
            *left -= length as u64;
            ended = *left == 0 && *ends_message;
        }
        if ended {
            self.end_message();
        }
    }
}

/// `length`, but not more than `left`.
fn capped(left: u64, length: usize) -> usize {
    usize::try_from(left).unwrap_or(usize::MAX).min(length)
}

fn write_header(header: &FrameHeader, payload: u64, output: &mut BytesMut) -> io::Result<()> {
    let mut text = Vec::new();
    header.format(payload, &mut text).map_err(io::Error::other)?;
    output.extend_from_slice(&text);
    Ok(())
}

impl<S: AsyncRead + Unpin> AsyncRead for ChargedFrames<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        if buf.remaining() == 0 {
            return Poll::Ready(Ok(()));
        }
        loop {
            if !this.output.is_empty() || this.advance()? {
                this.give_out(buf);
                return Poll::Ready(Ok(()));
            }
            this.input.reserve(CHUNK);
            let read = ready!(tokio_util::io::poll_read_buf(
                Pin::new(&mut this.io),
                cx,
                &mut this.input
            ))?;
            if read == 0 {
                return Poll::Ready(Ok(()));
            }
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ChargedFrames<S> {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.io).poll_write(cx, buf)
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.io).poll_shutdown(cx)
    }
}

#[cfg(test)]
mod tests {
    use futures::StreamExt;
    use tokio::io::AsyncWriteExt;
    use tokio_tungstenite::{
        WebSocketStream,
        tungstenite::{Message, protocol::Role},
    };

    use super::*;

    fn frame(is_final: bool, opcode: Data, payload: &[u8]) -> Vec<u8> {
        let header = FrameHeader {
            is_final,
            opcode: OpCode::Data(opcode),
            ..FrameHeader::default()
        };
        let mut text = Vec::new();
        header.format(payload.len() as u64, &mut text).unwrap();
        text.extend_from_slice(payload);
        text
    }

    /// The messages tungstenite makes of these bytes, each with whether it was dropped.
    async fn read(bytes: Vec<u8>, pipe: usize, budget: &ByteBudget) -> Vec<(usize, Option<Vec<i64>>)> {
        let (mut theirs, ours) = tokio::io::duplex(pipe);
        tokio::spawn(async move {
            theirs.write_all(&bytes).await.unwrap();
        });
        let (frames, verdicts) = ChargedFrames::new(ours, Vec::new(), budget);
        let mut socket = WebSocketStream::from_raw_socket(frames, Role::Client, None).await;
        let mut read = Vec::new();
        while let Some(Ok(message)) = socket.next().await {
            let Message::Binary(bytes) = message else { panic!() };
            let dropped = verdicts.next_dropped();
            read.push((bytes.len(), dropped.map(|dropped| dropped.ids().collect())));
        }
        read
    }

    #[tokio::test]
    async fn messages_pass_whole_or_in_fragments() {
        let budget = ByteBudget::new("session_buffer_mb", 10 << 20);
        let mut bytes = frame(true, Data::Text, "\u{fc}".as_bytes());
        bytes.extend(frame(true, Data::Text, b""));
        bytes.extend(frame(false, Data::Text, &[b'x'; 100_000]));
        bytes.extend(frame(false, Data::Continue, b""));
        bytes.extend(frame(true, Data::Continue, &[b'x'; 200_000]));
        bytes.extend(frame(true, Data::Text, b"last"));
        for pipe in [7, 70_000] {
            let read = read(bytes.clone(), pipe, &budget).await;
            assert_eq!(read, [(2, None), (0, None), (300_000, None), (4, None)]);
        }
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn a_message_without_room_is_dropped_and_its_id_found() {
        let budget = ByteBudget::new("session_buffer_mb", 1_000_000);
        let text = format!(
            "{{\"id\":1073741824,\"result\":\"{}\"}}",
            "\u{fc}".repeat(1_000_000)
        );
        let (begin, end) = text.as_bytes().split_at(100_001);
        let mut bytes = frame(true, Data::Text, text.as_bytes());
        bytes.extend(frame(true, Data::Text, b"next"));
        bytes.extend(frame(false, Data::Text, begin));
        bytes.extend(frame(true, Data::Continue, end));
        bytes.extend(frame(true, Data::Text, b"last"));
        let read = read(bytes, 70_000, &budget).await;
        assert_eq!(read[0], (0, Some(vec![1 << 30])));
        assert_eq!(read[1], (4, None));
        assert!(read[2].1.is_some(), "the second half had no room");
        assert_eq!(read[3], (4, None));
        assert_eq!(budget.used(), 0);
    }

    #[tokio::test]
    async fn what_is_announced_is_charged_before_it_comes() {
        let budget = ByteBudget::new("session_buffer_mb", 64 << 20);
        let announced = frame(true, Data::Text, &vec![0; 8 << 20]);
        let (mut frames, _) = ChargedFrames::new(tokio::io::empty(), announced[..20].to_vec(), &budget);
        assert!(frames.advance().unwrap());
        assert_eq!(budget.used(), 8 << 20);
        drop(frames);
        assert_eq!(budget.used(), 0);
    }
}
