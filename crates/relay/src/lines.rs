//! Splits a byte stream into lines of bounded length.

use oubliette_protocol::{ByteBudget, ByteCharge};
use tokio::io::{AsyncRead, AsyncReadExt};

use crate::CloseReason;

/// The size of one read, and the buffer that an idle connection keeps.
const READ_CHUNK_BYTES: usize = 8 * 1024;
/// The largest buffer that is not charged to the budget.
const UNCHARGED_BYTES: usize = 4 * READ_CHUNK_BYTES;

/// Splits a stream into lines. Memory follows what has arrived: the buffer doubles while a long line comes
/// in, never past the limit, and shrinks again after it. A large buffer is charged to the budget.
#[derive(Debug)]
pub struct LineSplitter<R> {
    io: R,
    buffer: Vec<u8>,
    /// Where the unread part begins.
    start: usize,
    /// How far the unread part has been searched for a newline.
    searched: usize,
    limit: usize,
    charge: ByteCharge,
}

impl<R: AsyncRead + Unpin> LineSplitter<R> {
    /// Splits `io` into lines of at most `limit` bytes, newline excluded.
    pub fn new(io: R, limit: usize, budget: &ByteBudget) -> Self {
        Self {
            io,
            buffer: Vec::new(),
            start: 0,
            searched: 0,
            limit,
            charge: budget.empty_charge(),
        }
    }

    /// The next line without its newline, valid until the next call. A last line without newline is
    /// dropped: it may be half a message. Cancel-safe: no byte is lost when the future is dropped.
    pub async fn next(&mut self) -> Result<&[u8], CloseReason> {
        let end = loop {
            if let Some(at) = memchr::memchr(b'\n', &self.buffer[self.searched..]) {
                break self.searched + at;
            }
            self.searched = self.buffer.len();
            if self.searched - self.start > self.limit {
                return Err(CloseReason::LineTooLong(self.limit));
            }
            self.make_room()?;
            match self.io.read_buf(&mut self.buffer).await {
                Ok(0) => return Err(CloseReason::ByPeer),
                Ok(_) => {}
                Err(why) if is_disconnect(why.kind()) => return Err(CloseReason::ByPeer),
                Err(why) => return Err(CloseReason::Broken(why.to_string())),
            }
        };
        let line = self.start..end;
        if line.len() > self.limit {
            return Err(CloseReason::LineTooLong(self.limit));
        }
        self.start = end + 1;
        self.searched = self.start;
        Ok(&self.buffer[line])
    }

    /// Drops what has been read and makes sure there is capacity to read into.
    fn make_room(&mut self) -> Result<(), CloseReason> {
        let unread = self.buffer.len() - self.start;
        if self.start > 0 {
            self.buffer.copy_within(self.start.., 0);
            self.buffer.truncate(unread);
            (self.start, self.searched) = (0, unread);
        }
        if unread < READ_CHUNK_BYTES && self.buffer.capacity() > UNCHARGED_BYTES {
            self.buffer.shrink_to(READ_CHUNK_BYTES);
        }
        let mut capacity = self.buffer.capacity();
        let mut more = 0;
        if capacity == unread {
            // One byte past the limit is enough to know that a line is too long.
            let most = (self.limit + 1).saturating_sub(unread).max(1);
            more = unread.max(READ_CHUNK_BYTES).min(most);
            capacity += more;
        }
        self.charge
            .resize(if capacity > UNCHARGED_BYTES { capacity } else { 0 })?;
        self.buffer.reserve_exact(more);
        Ok(())
    }
}

/// Whether an I/O error means that the other side closed the connection.
pub(crate) fn is_disconnect(kind: std::io::ErrorKind) -> bool {
    use std::io::ErrorKind::{BrokenPipe, ConnectionAborted, ConnectionReset, UnexpectedEof};
    matches!(
        kind,
        BrokenPipe | ConnectionAborted | ConnectionReset | UnexpectedEof
    )
}

#[cfg(test)]
mod tests {
    use std::{
        pin::Pin,
        task::{Context, Poll},
    };

    use super::*;
    use futures::FutureExt;
    use proptest::prelude::*;
    use tokio::io::ReadBuf;

    /// A reader that returns its bytes in chunks of the given sizes.
    struct ChunkedReader {
        bytes: Vec<u8>,
        at: usize,
        sizes: Vec<usize>,
        next: usize,
    }

    impl AsyncRead for ChunkedReader {
        fn poll_read(
            mut self: Pin<&mut Self>,
            _: &mut Context<'_>,
            buf: &mut ReadBuf<'_>,
        ) -> Poll<std::io::Result<()>> {
            let size = self.sizes[self.next % self.sizes.len()].max(1);
            self.next += 1;
            let end = (self.at + size.min(buf.remaining())).min(self.bytes.len());
            buf.put_slice(&self.bytes[self.at..end]);
            self.at = end;
            Poll::Ready(Ok(()))
        }
    }

    fn split(bytes: Vec<u8>, sizes: Vec<usize>, limit: usize) -> (Vec<Vec<u8>>, CloseReason) {
        let mut lines = LineSplitter::new(
            ChunkedReader {
                bytes,
                at: 0,
                sizes,
                next: 0,
            },
            limit,
            &ByteBudget::default(),
        );
        let mut found = Vec::new();
        loop {
            match lines.next().now_or_never().unwrap() {
                Ok(line) => found.push(line.to_vec()),
                Err(why) => return (found, why),
            }
            assert!(
                lines.buffer.capacity() <= limit + 1 + 2 * READ_CHUNK_BYTES,
                "the buffer outgrew the limit"
            );
        }
    }

    proptest! {
        #[test]
        fn lines_are_the_same_however_they_arrive(
            lines in prop::collection::vec(prop::collection::vec(any::<u8>().prop_filter("", |b| *b != b'\n'), 0..60), 0..20),
            sizes in prop::collection::vec(1_usize..50, 1..8),
        ) {
            let mut bytes = lines.join(&b'\n');
            bytes.push(b'\n');
            let want = if lines.is_empty() { vec![vec![]] } else { lines };
            let (found, why) = split(bytes, sizes, 60);
            prop_assert_eq!(found, want);
            prop_assert_eq!(why, CloseReason::ByPeer);
        }
    }

    #[test]
    fn a_line_as_long_as_the_limit_passes_and_one_byte_more_does_not() {
        for sizes in [vec![1_000_000], vec![7], vec![READ_CHUNK_BYTES]] {
            let fits = [vec![b'x'; 50_000], vec![b'\n']].concat();
            assert_eq!(
                split(fits.clone(), sizes.clone(), 50_000).0,
                vec![vec![b'x'; 50_000]]
            );
            assert_eq!(
                split(fits, sizes, 49_999),
                (vec![], CloseReason::LineTooLong(49_999))
            );
        }
    }

    #[test]
    fn a_line_without_end_is_cut_off_at_the_limit() {
        let mut lines = LineSplitter::new(tokio::io::repeat(b'x'), 100_000, &ByteBudget::default());
        let why = lines.next().now_or_never().unwrap().map(<[u8]>::to_vec);
        assert_eq!(why, Err(CloseReason::LineTooLong(100_000)));
        assert!(lines.buffer.capacity() <= 100_001);
    }

    #[test]
    fn memory_of_a_long_line_is_given_back() {
        let long = [vec![b'x'; 1_000_000], b"\nshort\n".to_vec()].concat();
        let budget = ByteBudget::new("session_buffer_mb", 4_000_000);
        let mut lines = LineSplitter::new(
            ChunkedReader {
                bytes: long,
                at: 0,
                sizes: vec![4096],
                next: 0,
            },
            2_000_000,
            &budget,
        );
        let take =
            |lines: &mut LineSplitter<ChunkedReader>| lines.next().now_or_never().unwrap().map(<[u8]>::len);
        assert_eq!(take(&mut lines), Ok(1_000_000));
        assert!(budget.used() >= 1_000_000);
        assert_eq!(take(&mut lines), Ok(5));
        assert_eq!(take(&mut lines), Err(CloseReason::ByPeer));
        assert!(
            lines.buffer.capacity() <= 4 * READ_CHUNK_BYTES,
            "{}",
            lines.buffer.capacity()
        );
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn a_line_that_does_not_fit_into_the_budget_is_refused() {
        let budget = ByteBudget::new("session_buffer_mb", 1_000_000);
        let other = budget.charge(500_000).unwrap();
        let mut lines = LineSplitter::new(tokio::io::repeat(b'x'), 2_000_000, &budget);
        let why = lines.next().now_or_never().unwrap().map(<[u8]>::to_vec);
        assert!(matches!(why, Err(CloseReason::OverBudget(_))), "{why:?}");
        assert!(lines.buffer.capacity() < 500_000);
        drop((lines, other));
        assert_eq!(budget.used(), 0);
    }

    #[test]
    fn half_a_line_at_the_end_is_dropped() {
        assert_eq!(
            split(b"one\ntwo".to_vec(), vec![2], 10),
            (vec![b"one".to_vec()], CloseReason::ByPeer)
        );
    }
}
