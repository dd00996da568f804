//! What a command says, bounded: its beginning and its end are kept, the middle is counted.

use std::collections::VecDeque;

use tokio::io::{AsyncRead, AsyncReadExt};

/// Kept of the beginning, and as much of the end.
pub(super) const HALF: usize = 64 * 1024;
/// A command that says more than this is taken for a flood.
pub(super) const FLOOD: u64 = 64 * 1024 * 1024;

/// What one stream said.
#[derive(Debug, Default)]
pub(super) struct Capture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl Capture {
    fn take(&mut self, mut bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let fits = (HALF - self.head.len()).min(bytes.len());
        self.head.extend_from_slice(&bytes[..fits]);
        bytes = &bytes[fits..];
        if bytes.len() > HALF {
            bytes = &bytes[bytes.len() - HALF..];
        }
        let surplus = (self.tail.len() + bytes.len()).saturating_sub(HALF);
        self.tail.drain(..surplus);
        self.tail.extend(bytes);
    }

    /// How many bytes were left out.
    pub(super) fn left_out(&self) -> u64 {
        self.total - (self.head.len() + self.tail.len()) as u64
    }

    /// As text, with a mark where something is missing.
    pub(super) fn text(&self) -> String {
        let tail: Vec<u8> = self.tail.iter().copied().collect();
        match self.left_out() {
            0 => String::from_utf8_lossy(&[&self.head[..], &tail].concat()).into_owned(),
            n => format!(
                "{}\n[… {n} bytes left out …]\n{}",
                String::from_utf8_lossy(&self.head),
                String::from_utf8_lossy(&tail)
            ),
        }
    }

    /// The last `most` bytes, for an error message.
    pub(super) fn end(&self, most: usize) -> String {
        let text = self.text();
        let start = (text.len().saturating_sub(most)..=text.len()).find(|&i| text.is_char_boundary(i));
        text[start.unwrap_or(text.len())..].trim_end().to_owned()
    }
}

/// Why reading ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Ended {
    /// The stream did.
    Stream,
    /// It would not stop talking.
    Flood,
}

/// Reads a stream to its end. What is read is in `capture` even if this is dropped on the way.
pub(super) async fn drain(mut from: impl AsyncRead + Unpin, capture: &mut Capture) -> Ended {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        match from.read(&mut buffer).await {
            Ok(0) | Err(_) => return Ended::Stream,
            Ok(n) => capture.take(&buffer[..n]),
        }
        if capture.total > FLOOD {
            return Ended::Flood;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn beginning_and_end_are_kept(lengths in prop::collection::vec(0usize..60_000, 0..8)) {
            let mut next = 0u8;
            let mut piece = |length| -> Vec<u8> {
                std::iter::repeat_with(|| { next = next.wrapping_mul(5).wrapping_add(3); next }).take(length).collect()
            };
            let pieces: Vec<Vec<u8>> = lengths.into_iter().map(&mut piece).collect();
            let mut capture = Capture::default();
            pieces.iter().for_each(|piece| capture.take(piece));
            let all = pieces.concat();
            prop_assert_eq!(&capture.head[..], &all[..all.len().min(HALF)]);
            let tail: Vec<u8> = capture.tail.iter().copied().collect();
            prop_assert!(all.ends_with(&tail) && tail.len() <= HALF);
            prop_assert_eq!(capture.left_out() == 0, all.len() <= 2 * HALF);
        }
    }

    #[test]
    fn a_cut_is_marked() {
        let mut capture = Capture::default();
        capture.take(&vec![b'a'; 2 * HALF + 5]);
        assert!(capture.text().contains("[… 5 bytes left out …]"));
        assert_eq!(capture.end(3), "aaa");
    }
}
