//! The signature of Standard Webhooks: HMAC-SHA256 over id, time and body.

use base64::{Engine as _, engine::general_purpose::STANDARD};
use hmac::{Hmac, KeyInit, Mac};
use secrecy::{ExposeSecret, SecretSlice};
use sha2::Sha256;

/// The key that events are signed with.
#[derive(Debug, Clone)]
pub(crate) struct WebhookSecret(SecretSlice<u8>);

impl WebhookSecret {
    /// Reads a secret: base64 with or without the prefix `whsec_`, as Standard Webhooks writes them. Without the prefix a text
    /// that is no base64 is taken as it is.
    pub(crate) fn parse(text: &str) -> Result<Self, &'static str> {
        let key = match text.strip_prefix("whsec_") {
            Some(encoded) => STANDARD
                .decode(encoded)
                .map_err(|_| "holds no base64 after whsec_")?,
            None => STANDARD.decode(text).unwrap_or_else(|_| text.as_bytes().to_vec()),
        };
        match key.is_empty() {
            true => Err("holds an empty secret"),
            false => Ok(Self(key.into())),
        }
    }

    /// The value of the header `webhook-signature`.
    pub(super) fn sign(&self, id: &str, timestamp: i64, body: &str) -> Option<String> {
        let mut mac = Hmac::<Sha256>::new_from_slice(self.0.expose_secret()).ok()?;
        mac.update(format!("{id}.{timestamp}.").as_bytes());
        mac.update(body.as_bytes());
        Some(format!("v1,{}", STANDARD.encode(mac.finalize().into_bytes())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signatures_are_those_of_standard_webhooks() {
        // The example of its specification.
        let secret = WebhookSecret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        let signature = secret.sign(
            "msg_p5jXN8AQM9LWM0D4loKWxJek",
            1_614_265_330,
            "{\"test\": 2432232314}",
        );
        assert_eq!(
            signature.as_deref(),
            Some("v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=")
        );
        assert!(!format!("{secret:?}").contains("MfKQ"));
        let bare = WebhookSecret::parse("MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
        assert_eq!(bare.sign("a", 1, "b"), secret.sign("a", 1, "b"));
        assert!(WebhookSecret::parse("whsec_???").is_err() && WebhookSecret::parse("whsec_").is_err());
        assert!(WebhookSecret::parse("plain-text").is_ok());
    }
}
