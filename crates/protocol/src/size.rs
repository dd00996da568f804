//! How large a value is on the wire, without writing it anywhere.

use std::io;

use serde::Serialize;

/// How many bytes of JSON a value is; the most there can be when it is none.
pub fn json_bytes(value: &impl Serialize) -> usize {
    let mut count = Count(0);
    match serde_json::to_writer(&mut count, value) {
        Ok(()) => count.0,
        Err(_) => usize::MAX,
    }
}

struct Count(usize);

impl io::Write for Count {
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
    fn it_is_the_length_of_the_text() {
        let value = serde_json::json!({"a": ["é\n", 1.5, null]});
        assert_eq!(json_bytes(&value), value.to_string().len());
    }
}
