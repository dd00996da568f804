//! The length of a value's JSON, measured without storing the text.

use std::io;

use serde::Serialize;

/// Length of a value's JSON in bytes; `usize::MAX` if it cannot be written as JSON.
pub fn json_bytes(value: &impl Serialize) -> usize {
    let mut count = ByteCounter(0);
    match serde_json::to_writer(&mut count, value) {
        Ok(()) => count.0,
        Err(_) => usize::MAX,
    }
}

/// A writer that counts bytes and discards them.
struct ByteCounter(usize);

impl io::Write for ByteCounter {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0 += bytes.len();
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn json_bytes_is_the_length_of_the_json_text() {
        let value = serde_json::json!({"a": ["é\n", 1.5, null]});
        assert_eq!(json_bytes(&value), value.to_string().len());
    }
}
