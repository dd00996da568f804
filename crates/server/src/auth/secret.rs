//! Tokens and login cookies: random text, stored only as a hash.

use base64::{Engine as _, engine::general_purpose::URL_SAFE_NO_PAD};
use rand::RngExt as _;
use secrecy::SecretString;
use sha2::{Digest as _, Sha256};

/// The prefix of every token.
pub(crate) const TOKEN_PREFIX: &str = "oub_";
const SECRET_BYTES: usize = 32;

/// The SHA-256 hash of a secret: all that is stored of it.
pub(crate) type SecretHash = [u8; 32];

/// 256 random bits as text, and their hash.
fn random_secret(prefix: &str) -> (SecretString, SecretHash) {
    let mut bytes = [0u8; SECRET_BYTES];
    rand::rng().fill(&mut bytes[..]);
    let text = format!("{prefix}{}", URL_SAFE_NO_PAD.encode(bytes));
    let hash = hash(&text);
    (SecretString::from(text), hash)
}

/// A new token and its hash.
pub(crate) fn new_token() -> (SecretString, SecretHash) {
    random_secret(TOKEN_PREFIX)
}

/// A new login cookie and its hash.
pub(crate) fn new_cookie() -> (SecretString, SecretHash) {
    random_secret("")
}

/// Hashes a token or cookie. No salt or slow hash is needed: the text holds 256 random bits.
pub(crate) fn hash(text: &str) -> SecretHash {
    Sha256::digest(text.as_bytes()).into()
}

/// Whether a text has the form of a token.
pub(crate) fn looks_like_token(text: &str) -> bool {
    let Some(rest) = text.strip_prefix(TOKEN_PREFIX) else {
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
    fn a_token_holds_256_bits_and_its_debug_text_hides_it() {
        let (token, hashed) = new_token();
        let text = token.expose_secret();
        assert!(looks_like_token(text), "{text}");
        assert_eq!(
            URL_SAFE_NO_PAD.decode(&text[TOKEN_PREFIX.len()..]).unwrap().len(),
            32
        );
        assert_eq!(hash(text), hashed);
        assert!(!format!("{token:?}").contains(&text[TOKEN_PREFIX.len()..]));
        assert!(!looks_like_token("oub_short") && !looks_like_token("x"));
    }
}
