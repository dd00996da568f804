//! Tokens and cookies: random text, kept only as a hash.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use rand::RngExt as _;
use secrecy::SecretString;
use sha2::{Digest as _, Sha256};

/// What a token starts with.
pub const PREFIX: &str = "oub_";
const BYTES: usize = 32;

/// What is kept of a secret.
pub type Hash = [u8; 32];

/// 256 random bits as text, and their hash.
fn random(prefix: &str) -> (SecretString, Hash) {
    let mut bytes = [0u8; BYTES];
    rand::rng().fill(&mut bytes[..]);
    let text = format!("{prefix}{}", URL_SAFE_NO_PAD.encode(bytes));
    let hash = hash(&text);
    (SecretString::from(text), hash)
}

/// A new token.
pub fn token() -> (SecretString, Hash) {
    random(PREFIX)
}

/// A new cookie.
pub fn cookie() -> (SecretString, Hash) {
    random("")
}

/// What is kept of a text.
pub fn hash(text: &str) -> Hash {
    Sha256::digest(text.as_bytes()).into()
}

/// Whether a text could be a token at all.
pub fn looks_like_token(text: &str) -> bool {
    let Some(rest) = text.strip_prefix(PREFIX) else {
        return false;
    };
    (43..=128).contains(&rest.len())
        && rest
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
}

#[cfg(test)]
mod tests {
    use secrecy::ExposeSecret as _;

    use super::*;

    #[test]
    fn a_token_holds_256_bits_and_prints_as_nothing() {
        let (token, hashed) = token();
        let text = token.expose_secret();
        assert!(looks_like_token(text), "{text}");
        assert_eq!(URL_SAFE_NO_PAD.decode(&text[PREFIX.len()..]).unwrap().len(), 32);
        assert_eq!(hash(text), hashed);
        assert!(!format!("{token:?}").contains(&text[PREFIX.len()..]));
        assert!(!looks_like_token("oub_short") && !looks_like_token("x"));
    }
}
