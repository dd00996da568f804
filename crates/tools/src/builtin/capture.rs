//! Bounded capture of a command's output: its beginning and end are kept, the bytes between are only counted.

use std::collections::VecDeque;

use tokio::io::{AsyncRead, AsyncReadExt};

/// How many bytes are kept of the beginning, and as many of the end.
pub(super) const KEPT_HALF_BYTES: usize = 64 * 1024;
/// A command that writes more than this to one stream is killed.
pub(super) const MAX_OUTPUT_BYTES: u64 = 64 * 1024 * 1024;

/// The captured output of one stream.
#[derive(Debug, Default)]
pub(super) struct OutputCapture {
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl OutputCapture {
    fn push(&mut self, mut bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let fits = (KEPT_HALF_BYTES - self.head.len()).min(bytes.len());
        self.head.extend_from_slice(&bytes[..fits]);
        bytes = &bytes[fits..];
        if bytes.len() > KEPT_HALF_BYTES {
            bytes = &bytes[bytes.len() - KEPT_HALF_BYTES..];
        }
        let surplus = (self.tail.len() + bytes.len()).saturating_sub(KEPT_HALF_BYTES);
        self.tail.drain(..surplus);
        self.tail.extend(bytes);
    }

    /// How many bytes were read but not kept.
    pub(super) fn omitted_bytes(&self) -> u64 {
        self.total - (self.head.len() + self.tail.len()) as u64
    }

    /// The kept output as text, with a mark where bytes are missing.
    pub(super) fn text(&self) -> String {
        let tail: Vec<u8> = self.tail.iter().copied().collect();
        match self.omitted_bytes() {
            0 => String::from_utf8_lossy(&[&self.head[..], &tail].concat()).into_owned(),
            n => format!(
                "{}\n[… {n} bytes left out …]\n{}",
                String::from_utf8_lossy(&self.head),
                String::from_utf8_lossy(&tail)
            ),
        }
    }

    /// The last `most` bytes as text, for an error message.
    pub(super) fn tail_text(&self, most: usize) -> String {
        let text = self.text();
        let start = (text.len().saturating_sub(most)..=text.len()).find(|&i| text.is_char_boundary(i));
        text[start.unwrap_or(text.len())..].trim_end().to_owned()
    }
}

/// Why reading a stream ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum DrainEnd {
    /// The stream ended.
    Stream,
    /// More than [`MAX_OUTPUT_BYTES`] were read.
    LimitExceeded,
}

/// Reads a stream to its end. What was read is in `capture` even if the future is dropped.
pub(super) async fn drain(mut from: impl AsyncRead + Unpin, capture: &mut OutputCapture) -> DrainEnd {
    let mut buffer = vec![0; 16 * 1024];
    loop {
        match from.read(&mut buffer).await {
            Ok(0) | Err(_) => return DrainEnd::Stream,
            Ok(n) => capture.push(&buffer[..n]),
        }
        if capture.total > MAX_OUTPUT_BYTES {
            return DrainEnd::LimitExceeded;
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
            let mut capture = OutputCapture::default();
            pieces.iter().for_each(|piece| capture.push(piece));
            let all = pieces.concat();
            prop_assert_eq!(&capture.head[..], &all[..all.len().min(KEPT_HALF_BYTES)]);
            let tail: Vec<u8> = capture.tail.iter().copied().collect();
            prop_assert!(all.ends_with(&tail) && tail.len() <= KEPT_HALF_BYTES);
            prop_assert_eq!(capture.omitted_bytes() == 0, all.len() <= 2 * KEPT_HALF_BYTES);
        }
    }

    #[test]
    fn a_cut_is_marked() {
        let mut capture = OutputCapture::default();
        capture.push(&vec![b'a'; 2 * KEPT_HALF_BYTES + 5]);
        assert!(capture.text().contains("[… 5 bytes left out …]"));
        assert_eq!(capture.tail_text(3), "aaa");
    }
}
