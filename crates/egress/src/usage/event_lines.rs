//! The data of server-sent events, piece by piece as its bytes arrive.

/// A piece of an event stream.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum EventPiece<'a> {
    /// Bytes of the current event's data.
    Data(&'a [u8]),
    /// The current event is complete.
    End,
}

/// Where in a line the stream is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LinePosition {
    /// In the field's name, which so far is the beginning of `data:`.
    Name(usize),
    /// After `data:`, where one space is skipped.
    BeforeData,
    /// In the data.
    Data,
    /// In a line that is no data.
    Skipped,
}

/// Splits a byte stream into the data of its events. Keeps nothing of it.
#[derive(Debug)]
pub(super) struct EventLines {
    position: LinePosition,
    /// Whether the last byte was a carriage return, after which a line feed belongs to the same line end.
    after_return: bool,
}

const DATA_FIELD: &[u8] = b"data:";

impl Default for EventLines {
    fn default() -> Self {
        Self {
            position: LinePosition::Name(0),
            after_return: false,
        }
    }
}

impl EventLines {
    pub(super) fn feed(&mut self, bytes: &[u8], mut each: impl FnMut(EventPiece<'_>)) {
        let mut rest = bytes;
        while let Some(&byte) = rest.first() {
            if std::mem::take(&mut self.after_return) && byte == b'\n' {
                rest = &rest[1..];
                continue;
            }
            if matches!(byte, b'\n' | b'\r') {
                self.after_return = byte == b'\r';
                match self.position {
                    LinePosition::Name(0) => each(EventPiece::End),
                    // Data of several lines is one text with line breaks.
                    LinePosition::Data | LinePosition::BeforeData => each(EventPiece::Data(b"\n")),
                    LinePosition::Name(_) | LinePosition::Skipped => {}
                }
                self.position = LinePosition::Name(0);
                rest = &rest[1..];
                continue;
            }
            match self.position {
                LinePosition::Name(read) => {
                    self.position = match byte == DATA_FIELD[read] {
                        true if read + 1 == DATA_FIELD.len() => LinePosition::BeforeData,
                        true => LinePosition::Name(read + 1),
                        false => LinePosition::Skipped,
                    };
                    rest = &rest[1..];
                }
                LinePosition::BeforeData => {
                    self.position = LinePosition::Data;
                    if byte == b' ' {
                        rest = &rest[1..];
                    }
                }
                LinePosition::Data | LinePosition::Skipped => {
                    let end = memchr::memchr2(b'\n', b'\r', rest).unwrap_or(rest.len());
                    if self.position == LinePosition::Data {
                        each(EventPiece::Data(&rest[..end]));
                    }
                    rest = &rest[end..];
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn events(pieces: &[&[u8]]) -> Vec<String> {
        let (mut lines, mut whole, mut data) = (EventLines::default(), Vec::new(), Vec::new());
        for piece in pieces {
            lines.feed(piece, |piece| match piece {
                EventPiece::Data(bytes) => data.extend_from_slice(bytes),
                EventPiece::End => whole.push(String::from_utf8(std::mem::take(&mut data)).unwrap()),
            });
        }
        whole
    }

    proptest! {
        #[test]
        fn events_are_the_same_however_the_stream_is_cut(cuts in prop::collection::vec(0_usize..80, 0..12)) {
            let stream = b"event: a\ndata: {\"x\":1}\n\n: comment\r\ndata:two\r\ndata: lines\r\n\r\ndatum: no\rdata: [DONE]\r\r";
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(stream.len())).collect();
            cuts.extend([0, stream.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&[u8]> = cuts.windows(2).map(|cut| &stream[cut[0]..cut[1]]).collect();
            prop_assert_eq!(events(&pieces), ["{\"x\":1}\n", "two\nlines\n", "[DONE]\n"]);
        }
    }
}
