//! Values that may never be shown, and how they are taken out of what is.

use parking_lot::RwLock;
use serde_json::Value;

/// What stands in a secret's place.
pub const MASK: &str = "•••";

/// Shorter values are masked only where they are the whole of a string: taken out of the middle of any
/// text they would garble it and still be guessed.
const LEAST_INSIDE: usize = 6;

/// A set of secret values. It never prints them.
#[derive(Default)]
pub struct Secrets(RwLock<Vec<Secret>>);

#[derive(Clone, PartialEq, Eq)]
struct Secret {
    plain: String,
    /// As it stands inside JSON text, when that is different.
    escaped: Option<String>,
}

impl Secrets {
    /// None yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds a value to hide. Longer ones are hidden first, so that one inside another leaves no rest.
    pub fn hide(&self, value: &str) {
        if value.is_empty() {
            return;
        }
        let quoted = Value::from(value).to_string();
        let inner = &quoted[1..quoted.len() - 1];
        let secret = Secret {
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
        let values: Vec<Secret> = other.0.read().clone();
        values.iter().for_each(|secret| self.hide(&secret.plain));
    }

    /// Whether this very value is hidden.
    pub fn has(&self, value: &str) -> bool {
        self.0.read().iter().any(|secret| secret.plain == value)
    }

    /// How many values are hidden.
    pub fn len(&self) -> usize {
        self.0.read().len()
    }

    /// Whether there is nothing to hide.
    pub fn is_empty(&self) -> bool {
        self.0.read().is_empty()
    }

    /// Takes every secret out of a text.
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
            if secret.plain.len() < LEAST_INSIDE {
                continue;
            }
            for form in std::iter::once(&secret.plain).chain(&secret.escaped) {
                if text.contains(form.as_str()) {
                    *text = text.replace(form.as_str(), MASK);
                }
            }
        }
    }

    /// Whether there is surely no secret in this JSON text. Where anything is escaped, a secret may be.
    pub(crate) fn spare(&self, text: &str) -> bool {
        let all = self.0.read();
        all.is_empty()
            || memchr::memchr(b'\\', text.as_bytes()).is_none()
                && !all.iter().any(|secret| text.contains(secret.plain.as_str()))
    }

    /// Takes every secret out of a JSON value, keys too.
    pub fn mask(&self, value: &mut Value) {
        if self.is_empty() {
            return;
        }
        self.walk(value);
    }

    fn walk(&self, value: &mut Value) {
        match value {
            Value::String(text) => self.mask_in_place(text),
            Value::Array(items) => items.iter_mut().for_each(|item| self.walk(item)),
            Value::Object(object) => {
                let masked = std::mem::take(object).into_iter().map(|(mut key, mut value)| {
                    self.mask_in_place(&mut key);
                    self.walk(&mut value);
                    (key, value)
                });
                *object = masked.collect();
            }
            Value::Null | Value::Bool(_) | Value::Number(_) => {}
        }
    }
}

/// Takes out what Oubliette's own tools are given and give that is secret whatever its value: environments,
/// headers, and a new token, which is shown once and not to whoever may read the debugger.
pub(crate) fn mask_own(value: &mut Value) {
    match value {
        Value::Object(object) => {
            for (key, inner) in object.iter_mut() {
                match (key.as_str(), inner) {
                    ("env" | "headers", Value::Object(map)) => {
                        map.values_mut().for_each(|value| *value = MASK.into());
                    }
                    ("token", inner @ Value::String(_)) => *inner = MASK.into(),
                    (_, inner) => mask_own(inner),
                }
            }
        }
        // A result in a result, as JSON text.
        Value::String(text)
            if text.starts_with('{') && (text.contains("oub_") || text.contains("\"env\"")) =>
        {
            if let Ok(mut inner @ Value::Object(_)) = serde_json::from_str::<Value>(text) {
                mask_own(&mut inner);
                *text = inner.to_string();
            }
        }
        Value::Array(items) => items.iter_mut().for_each(mask_own),
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
    fn a_secret_is_taken_out_wherever_it_stands() {
        let secrets = Secrets::new();
        secrets.hide("s3cr\"et-value");
        secrets.hide("s3cr\"et-value-longer");
        secrets.hide("ab");
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
    fn what_own_tools_carry_is_taken_out_whatever_its_value() {
        let mut value = json!({
            "name": "p", "env": {"A": "one"}, "definition": {"headers": {"x": "two"}, "runtime": {"env": {"B": "three"}}},
            "token": "oub_four", "token_id": "tok_5",
            "content": [{"type": "text", "text": "{\"token\":\"oub_six\",\"env\":{\"C\":\"seven\"}}"}],
        });
        mask_own(&mut value);
        let text = value.to_string();
        for secret in ["one", "two", "three", "oub_", "seven"] {
            assert!(!text.contains(secret), "{secret}: {text}");
        }
        assert!(text.contains("tok_5") && text.contains("\"A\""), "{text}");
    }

    proptest! {
        #[test]
        fn no_text_keeps_a_secret(secret in "[a-zA-Z0-9+/=_-]{6,40}", before in ".{0,20}", after in ".{0,20}") {
            let secrets = Secrets::new();
            secrets.hide(&secret);
            let masked = secrets.mask_text(&format!("{before}{secret}{after}"));
            // What is around it may itself hold the secret only in pieces.
            prop_assert!(!masked.contains(&secret) || masked.contains(MASK));
        }
    }
}
