//! Hides a credential in what a service answers: one that sends back what it was sent must not bring it into a sandbox.

use bytes::Bytes;
use memchr::memmem;

/// Secrets shorter than this are not searched for: they would be found in ordinary text.
const MIN_SECRET_BYTES: usize = 8;

/// Replaces each occurrence of some secrets in a stream by as many asterisks, so that its length stays the same. Holds
/// back no more than the beginning of a secret at the end of what came.
pub(crate) struct SecretMasker {
    secrets: Vec<Vec<u8>>,
    held: Vec<u8>,
}

impl SecretMasker {
    pub(crate) fn new(mut secrets: Vec<Vec<u8>>) -> Self {
        secrets.retain(|secret| secret.len() >= MIN_SECRET_BYTES);
        // A longer one first: it may contain a shorter one.
        secrets.sort_by_key(|secret| std::cmp::Reverse(secret.len()));
        Self {
            secrets,
            held: Vec::new(),
        }
    }

    /// The next part of the stream, masked. May be empty.
    pub(crate) fn push(&mut self, data: Bytes) -> Bytes {
        if self.secrets.is_empty() {
            return data;
        }
        let found = self
            .secrets
            .iter()
            .any(|secret| memmem::find(&data, secret).is_some());
        if self.held.is_empty() && !found && self.partial_end(&data) == 0 {
            return data;
        }
        let mut bytes = std::mem::take(&mut self.held);
        bytes.extend_from_slice(&data);
        self.mask(&mut bytes);
        self.held = bytes.split_off(bytes.len() - self.partial_end(&bytes));
        bytes.into()
    }

    /// What was held back, at the end of the stream.
    pub(crate) fn finish(&mut self) -> Bytes {
        std::mem::take(&mut self.held).into()
    }

    /// Masks secrets in a whole text.
    pub(crate) fn mask(&self, bytes: &mut [u8]) {
        for secret in &self.secrets {
            let mut from = 0;
            while let Some(at) = bytes.get(from..).and_then(|rest| memmem::find(rest, secret)) {
                let (start, end) = (from + at, from + at + secret.len());
                bytes[start..end].fill(b'*');
                from = end;
            }
        }
    }

    /// The length of the longest end of `bytes` that is the beginning of a secret.
    fn partial_end(&self, bytes: &[u8]) -> usize {
        let partial = |secret: &Vec<u8>| {
            let most = (secret.len() - 1).min(bytes.len());
            (1..=most)
                .rev()
                .find(|length| bytes.ends_with(&secret[..*length]))
                .unwrap_or(0)
        };
        self.secrets.iter().map(partial).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECRET: &str = "abcabcabd-secret";

    fn masked(parts: &[&[u8]]) -> Vec<u8> {
        let mut masker = SecretMasker::new(vec![SECRET.into(), b"short".to_vec()]);
        let mut out = Vec::new();
        for part in parts {
            out.extend_from_slice(&masker.push(Bytes::copy_from_slice(part)));
        }
        out.extend_from_slice(&masker.finish());
        out
    }

    #[test]
    fn a_secret_is_masked_wherever_the_stream_is_cut() {
        let text = format!("x{SECRET}abcabc{SECRET}{SECRET} short");
        let stars = "*".repeat(SECRET.len());
        let expected = format!("x{stars}abcabc{stars}{stars} short");
        for cut in 0..text.len() {
            let (one, two) = text.as_bytes().split_at(cut);
            assert_eq!(masked(&[one, two]), expected.as_bytes(), "cut at {cut}");
        }
        let single: Vec<&[u8]> = text.as_bytes().chunks(1).collect();
        assert_eq!(masked(&single), expected.as_bytes());
    }

    proptest! {
        #[test]
        fn what_holds_no_secret_passes_unchanged(parts in prop::collection::vec("[abcd-]{0,20}", 0..6)) {
            let whole = parts.concat();
            prop_assume!(!whole.contains(SECRET));
            let slices: Vec<&[u8]> = parts.iter().map(|part| part.as_bytes()).collect();
            prop_assert_eq!(masked(&slices), whole.as_bytes());
        }
    }
}
