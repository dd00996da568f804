//! Secret values, and masking them in everything that is logged or shown.

use parking_lot::RwLock;
use serde_json::Value;

/// The text that replaces a secret.
pub const MASK: &str = "•••";

/// Values shorter than this many bytes are masked only where they are a whole string: replaced inside longer
/// texts they would garble those, and could be guessed from them.
const MIN_SUBSTRING_LEN: usize = 6;

/// A set of secret values. It never prints them.
#[derive(Default)]
pub struct Secrets(RwLock<Vec<SecretValue>>);

#[derive(Clone, PartialEq, Eq)]
struct SecretValue {
    plain: String,
    /// The value escaped as in JSON text, when that differs.
    escaped: Option<String>,
}

impl Secrets {
    /// An empty set.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value to mask. Longer values are masked first, so that masking one never leaves a part of a longer
    /// one that contains it.
    pub fn add(&self, value: &str) {
        if value.is_empty() {
            return;
        }
        let quoted = Value::from(value).to_string();
        let inner = &quoted[1..quoted.len() - 1];
        let secret = SecretValue {
            plain: value.into(),
            escaped: (inner != value).then(|| inner.into()),
        };
        let mut all = self.0.write();
        if !all.contains(&secret) {
            let place = all.partition_point(|other| other.plain.len() >= value.len());
            all.insert(place, secret);
        }
    }

    /// Adds every value of another set.
    pub fn extend(&self, other: &Secrets) {
        let values: Vec<SecretValue> = other.0.read().clone();
        values.iter().for_each(|secret| self.add(&secret.plain));
    }

    /// Whether exactly this value is in the set.
    pub fn contains(&self, value: &str) -> bool {
        self.0.read().iter().any(|secret| secret.plain == value)
    }

    /// How many values are in the set.
    pub fn len(&self) -> usize {
        self.0.read().len()
    }

    /// Whether the set is empty.
    pub fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }

    /// Returns the text with every secret masked.
    pub fn mask_text(&self, text: &str) -> String {
        let mut out = text.to_owned();
        self.mask_in_place(&mut out);
        out
    }

    fn mask_in_place(&self, text: &mut String) {
        for secret in self.0.read().iter() {
            if *text == secret.plain {
                *text = MASK.into();
                return;
            }
            if secret.plain.len() < MIN_SUBSTRING_LEN {
                continue;
            }
            for form in std::iter::once(&secret.plain).chain(&secret.escaped) {
                if text.contains(form.as_str()) {
                    *text = text.replace(form.as_str(), MASK);
                }
            }
        }
    }

    /// Whether this JSON text certainly contains no secret. A text with any escape sequence may contain one.
    pub(crate) fn is_free_of_secrets(&self, text: &str) -> bool {
        let all = self.0.read();
        all.is_empty()
            || memchr::memchr(b'\\', text.as_bytes()).is_none()
                && !all.iter().any(|secret| text.contains(secret.plain.as_str()))
    }

    /// Masks every secret in a JSON value, in keys too.
    pub fn mask(&self, value: &mut Value) {
        if self.is_empty() {
            return;
        }
        self.mask_recursive(value);
    }

    fn mask_recursive(&self, value: &mut Value) {
        match value {
            Value::String(text) => self.mask_in_place(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.mask_recursive(item)),
            Value::Object(object) => {
                let masked = std::mem::take(object).into_iter().map(|(mut key, mut value)| {
                    self.mask_in_place(&mut key);
                    self.mask_recursive(&mut value);
                    (key, value)
                });
                *object = masked.collect();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// A git URL without user name and password, either of which may be a token. The user name of an `ssh://` URL, which
/// is no secret, stays. The text need not be a valid URL.
pub fn without_url_credentials(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let authority_end = rest.find(['/', '?', '#']).unwrap_or(rest.len());
    let authority = &rest[..authority_end];
    let at = authority.rfind('@').or_else(|| {
        // What follows the colon is no port: a password with a character that should have been written as %XX.
        let (_, port) = authority.rsplit_once(':')?;
        let no_port = !authority.ends_with(']') && !port.bytes().all(|b| b.is_ascii_digit());
        if no_port { rest.rfind('@') } else { None }
    });
    let Some(at) = at else {
        return url.to_owned();
    };
    let user = match scheme {
        "ssh" => rest[..at].split(':').next().map(|user| format!("{user}@")),
        _ => None,
    };
    format!("{scheme}://{}{}", user.unwrap_or_default(), &rest[at + 1..])
}

/// Masks the fields of Oubliette's own tools that are secret whatever their value: environments, headers, credentials
/// in git URLs, and a new token, which is shown once to the requester and not to readers of the debugger.
pub(crate) fn mask_own_tool_fields(value: &mut Value) {
    match value {
        Value::Object(object) => {
            for (key, inner) in object.iter_mut() {
                match (key.as_str(), inner) {
                    ("env" | "headers", Value::Object(map)) => {
                        map.values_mut().for_each(|value| *value = MASK.into());
                    }
                    ("token", inner @ Value::String(_)) => *inner = MASK.into(),
                    ("git", Value::String(url)) => *url = without_url_credentials(url),
                    (_, inner) => mask_own_tool_fields(inner),
                }
            }
        }
        // A result nested in a result, as JSON text.
        Value::String(text)
            if text.starts_with('{')
                && ["oub_", "\"env\"", "\"git\""]
                    .iter()
                    .any(|part| text.contains(part)) =>
        {
            if let Ok(mut inner @ Value::Object(_)) = serde_json::from_str::<Value>(text) {
                mask_own_tool_fields(&mut inner);
                *text = inner.to_string();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(mask_own_tool_fields),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
    }
}

impl std::fmt::Debug for Secrets {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Secrets({})", self.0.read().len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    #[test]
    fn a_secret_is_masked_wherever_it_occurs() {
        let secrets = Secrets::new();
        secrets.add("s3cr\"et-value");
        secrets.add("s3cr\"et-value-longer");
        secrets.add("ab");
        let mut value = json!({
            "plain": "x s3cr\"et-value y", "in json": r#"{"k":"s3cr\"et-value-longer"}"#,
            "s3cr\"et-value": ["ab", "cabbage", {"deep": "s3cr\"et-value"}],
        });
        secrets.mask(&mut value);
        let text = value.to_string();
        assert!(!text.contains("s3cr") && !text.contains("longer"), "{text}");
        assert!(text.contains("cabbage") && !text.contains(r#""ab""#), "{text}");
        assert!(!format!("{secrets:?}").contains("s3cr"));
    }

    #[test]
    fn a_git_url_is_shown_without_credentials() {
        for (url, shown) in [
            ("https://u:p@h:1/x", "https://h:1/x"),
            ("https://token@h/x@v1", "https://h/x@v1"),
            ("https://u:p@q@h/x", "https://h/x"),
            ("https://u:p/q@h/x", "https://h/x"),
            ("https://h:1/x@v1", "https://h:1/x@v1"),
            ("https://[::1]:1/x@v1", "https://[::1]:1/x@v1"),
            ("ssh://git:p@h/x", "ssh://git@h/x"),
            ("/srv/x@v1", "/srv/x@v1"),
        ] {
            assert_eq!(without_url_credentials(url), shown);
        }
    }

    #[test]
    fn secret_fields_of_own_tools_are_masked_whatever_their_value() {
        let mut value = json!({
            "source": {"git": "https://eight:nine@h/x", "ref": "main"},
            "name": "p", "env": {"A": "one"}, "definition": {"headers": {"x": "two"}, "runtime": {"env": {"B": "three"}}},
            "token": "oub_four", "token_id": "tok_5",
            "content": [{"type": "text", "text": "{\"token\":\"oub_six\",\"env\":{\"C\":\"seven\"}}"}],
        });
        mask_own_tool_fields(&mut value);
        let text = value.to_string();
        for secret in ["one", "two", "three", "oub_", "seven", "eight", "nine"] {
            assert!(!text.contains(secret), "{secret}: {text}");
        }
        assert!(text.contains("tok_5") && text.contains("\"A\""), "{text}");
    }

    proptest! {
        #[test]
        fn no_text_keeps_a_secret(secret in "[a-zA-Z0-9+/=_-]{6,40}", before in ".{0,20}", after in ".{0,20}") {
            let secrets = Secrets::new();
            secrets.add(&secret);
            let masked = secrets.mask_text(&format!("{before}{secret}{after}"));
            // The surrounding text may complete the secret again from its pieces.
            prop_assert!(!masked.contains(&secret) || masked.contains(MASK));
        }
    }
}
