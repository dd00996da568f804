//! A parser for server-sent events.

/// The maximum size of one event, in bytes; the server sends no larger ones.
const MAX_EVENT_BYTES: usize = 32 * 1024 * 1024;

/// Collects bytes and returns the data of each complete event.
#[derive(Default)]
pub(crate) struct SseParser {
    line: Vec<u8>,
    data: Vec<u8>,
    has_data: bool,
    after_cr: bool,
}

/// An event exceeded [`MAX_EVENT_BYTES`].
#[derive(Debug, PartialEq)]
pub(crate) struct EventTooLong;

impl SseParser {
    /// Returns the data of each event that these bytes complete. Comments, ids and event names are skipped:
    /// the data contains the event's index and type.
    pub(crate) fn push(&mut self, bytes: &[u8]) -> Result<Vec<String>, EventTooLong> {
        let mut events = Vec::new();
        for &byte in bytes {
            match byte {
                b'\n' if self.after_cr => {}
                b'\n' | b'\r' => events.extend(self.end_of_line()),
                _ => self.line.push(byte),
            }
            self.after_cr = byte == b'\r';
            if self.line.len() + self.data.len() > MAX_EVENT_BYTES {
                return Err(EventTooLong);
            }
        }
        Ok(events)
    }

    fn end_of_line(&mut self) -> Option<String> {
        let line = std::mem::take(&mut self.line);
        if line.is_empty() {
            let data = std::mem::take(&mut self.data);
            return std::mem::take(&mut self.has_data).then(|| String::from_utf8_lossy(&data).into_owned());
        }
        let (field, value) = match line.iter().position(|b| *b == b':') {
            Some(at) => (&line[..at], &line[at + 1..]),
            None => (&line[..], &[][..]),
        };
        if field == b"data" {
            if self.has_data {
                self.data.push(b'\n');
            }
            self.data
                .extend_from_slice(value.strip_prefix(b" ").unwrap_or(value));
            self.has_data = true;
        }
        None
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunk_boundaries_do_not_change_the_events() {
        let stream = b": hello\n\nid: 1\nevent: message\ndata: {\"a\":1}\n\ndata:x\r\ndata: y\r\n\r\n\
            data\n\nretry: 5\n\nid: 2\ndata: \xc3\xa9\n\ndata: unfinished";
        let want = ["{\"a\":1}", "x\ny", "", "\u{e9}"];
        for size in 1..stream.len() {
            let mut parser = SseParser::default();
            let found: Vec<_> = stream
                .chunks(size)
                .flat_map(|c| parser.push(c).unwrap())
                .collect();
            assert_eq!(found, want, "in pieces of {size}");
        }
    }

    #[test]
    fn an_event_over_the_limit_is_an_error() {
        let mut parser = SseParser::default();
        let piece = vec![b'x'; MAX_EVENT_BYTES / 2 + 1];
        assert_eq!(parser.push(&piece), Ok(vec![]));
        assert_eq!(parser.push(&piece), Err(EventTooLong));
    }
}
