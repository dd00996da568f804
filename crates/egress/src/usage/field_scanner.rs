//! Finds a few fields of a JSON text while its bytes pass, in bounded memory whatever the text's length.
//!
//! The text is not checked: what is no JSON yields fewer fields. The fields of an answer are those with which model APIs say
//! which model answered and what it used, at the places where they say it: at the top, in `response` or in `message`. Of a
//! request it is `model`, at the top alone: a request is written by an agent, which might name another model elsewhere.

use serde_json::Value;

/// Nesting beyond which the rest of a text is not looked at.
const MAX_DEPTH: usize = 512;
/// The longest value that is kept, in bytes of JSON.
const MAX_VALUE_BYTES: usize = 8 * 1024;
/// The longest key that is compared, in bytes of JSON.
const MAX_KEY_BYTES: usize = 96;

/// What was found in a text. Of a field that occurs twice the last one counts, as for most JSON parsers.
#[derive(Debug, Default, Clone, PartialEq)]
pub(super) struct ScannedFields {
    /// `usage` or `usageMetadata`.
    pub(super) usage: Option<Value>,
    /// `model` or `modelVersion`.
    pub(super) model: Option<String>,
    /// `type` at the top.
    pub(super) kind: Option<String>,
    /// Bytes of the strings that are a model's words, by the names of their fields.
    pub(super) text_bytes: u64,
    /// Whether there is a `finishReason` or `blockReason`, at whatever place.
    pub(super) has_finish_reason: bool,
    /// Bytes of the strings called `delta`, which in some streams are repeated as `text` at the end.
    pub(super) delta_bytes: u64,
}

/// Where fields are looked for.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
enum FieldPlaces {
    #[default]
    OfAnswer,
    OfRequest,
}

/// A key, as far as it matters here.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KnownKey {
    Usage,
    Model,
    ModelVersion,
    Kind,
    /// `response` or `message`, in which the answer of some events is.
    Envelope,
    Text,
    Delta,
    FinishReason,
    Other,
}

impl KnownKey {
    fn of(raw: &[u8]) -> Self {
        match raw {
            b"usage" | b"usageMetadata" => Self::Usage,
            b"model" => Self::Model,
            b"modelVersion" => Self::ModelVersion,
            b"type" => Self::Kind,
            b"response" | b"message" => Self::Envelope,
            b"content" | b"text" | b"arguments" | b"partial_json" | b"thinking" | b"reasoning_content"
            | b"reasoning" | b"refusal" => Self::Text,
            b"delta" => Self::Delta,
            // The second is that of a prompt that was not answered.
            b"finishReason" | b"blockReason" => Self::FinishReason,
            // Written with escapes it is the same key.
            raw if raw.contains(&b'\\') => {
                let quoted = [b"\"", raw, b"\""].concat();
                match serde_json::from_slice::<String>(&quoted) {
                    Ok(key) if !key.contains('\\') => Self::of(key.as_bytes()),
                    _ => Self::Other,
                }
            }
            _ => Self::Other,
        }
    }
}

/// An object or array that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum OpenContainer {
    /// With the key of the value that is being read.
    Object(KnownKey),
    Array,
}

/// What the next byte belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ScanState {
    /// A value is to begin, or an array to end.
    Value,
    /// A key is to begin, or an object to end.
    Key,
    Colon,
    /// A comma, or the end of a container.
    AfterValue,
    InString {
        purpose: StringPurpose,
        escaped: bool,
    },
    /// A number, `true`, `false` or `null`.
    InScalar,
    /// Nothing more is looked at until the scanner is reset.
    Stopped,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum StringPurpose {
    Key,
    Value(KnownKey),
}

/// A value being kept.
#[derive(Debug)]
struct KeptValue {
    key: KnownKey,
    /// How many containers were open when it began.
    depth: usize,
    bytes: Vec<u8>,
}

/// Scans one JSON text, or one after the other with [`FieldScanner::reset`] in between.
#[derive(Debug)]
pub(super) struct FieldScanner {
    places: FieldPlaces,
    open: Vec<OpenContainer>,
    state: ScanState,
    key: Vec<u8>,
    kept: Option<KeptValue>,
    found: ScannedFields,
    complete: bool,
}

impl Default for FieldScanner {
    fn default() -> Self {
        Self {
            places: FieldPlaces::OfAnswer,
            open: Vec::new(),
            state: ScanState::Value,
            key: Vec::new(),
            kept: None,
            found: ScannedFields::default(),
            complete: false,
        }
    }
}

impl FieldScanner {
    /// A scanner of requests.
    pub(super) fn of_request() -> Self {
        Self {
            places: FieldPlaces::OfRequest,
            ..Self::default()
        }
    }

    /// Whether it looks at nothing more although the text is not over: it is no JSON, or nested too deeply.
    pub(super) fn has_given_up(&self) -> bool {
        self.state == ScanState::Stopped && !self.complete
    }

    /// What has been found so far.
    pub(super) fn found(&self) -> &ScannedFields {
        &self.found
    }

    /// Whether the outermost object or array has been closed.
    pub(super) fn is_complete(&self) -> bool {
        self.complete
    }

    /// Returns what was found, and begins a new text.
    pub(super) fn reset(&mut self) -> ScannedFields {
        self.open.clear();
        (self.state, self.kept, self.complete) = (ScanState::Value, None, false);
        std::mem::take(&mut self.found)
    }

    pub(super) fn feed(&mut self, bytes: &[u8]) {
        let mut rest = bytes;
        while !rest.is_empty() {
            let used = match self.state {
                ScanState::Stopped => return,
                ScanState::InString { purpose, escaped } => self.read_string(rest, purpose, escaped),
                ScanState::InScalar => {
                    let end = rest
                        .iter()
                        .position(|b| matches!(b, b',' | b']' | b'}' | b' ' | b'\t' | b'\n' | b'\r'));
                    self.keep(&rest[..end.unwrap_or(rest.len())]);
                    if end.is_some() {
                        self.end_value();
                    }
                    end.unwrap_or(rest.len())
                }
                ScanState::Value | ScanState::Key | ScanState::Colon | ScanState::AfterValue => {
                    self.read_structure(rest[0]);
                    1
                }
            };
            rest = &rest[used..];
        }
    }

    /// Reads one byte outside strings and scalars, except that it leaves the first byte of a scalar to be kept.
    fn read_structure(&mut self, byte: u8) {
        match (self.state, byte) {
            (_, b' ' | b'\t' | b'\n' | b'\r') => self.keep(&[byte]),
            (ScanState::Value, b'{' | b'[') => {
                self.begin_value(byte);
                match self.open.len() < MAX_DEPTH {
                    true => self.open_container(byte),
                    false => self.state = ScanState::Stopped,
                }
            }
            (ScanState::Value, b'"') => {
                let key = self.current_key();
                self.begin_value(byte);
                self.state = ScanState::InString {
                    purpose: StringPurpose::Value(key),
                    escaped: false,
                };
            }
            (ScanState::Value | ScanState::AfterValue, b']')
            | (ScanState::Key | ScanState::AfterValue, b'}') => {
                self.keep(&[byte]);
                let matches = match self.open.pop() {
                    Some(OpenContainer::Array) => byte == b']',
                    Some(OpenContainer::Object(_)) => byte == b'}',
                    None => false,
                };
                match matches {
                    true => self.end_value(),
                    false => self.state = ScanState::Stopped,
                }
            }
            (ScanState::Key, b'"') => {
                self.keep(&[byte]);
                self.key.clear();
                self.state = ScanState::InString {
                    purpose: StringPurpose::Key,
                    escaped: false,
                };
            }
            (ScanState::Colon, b':') => {
                self.keep(&[byte]);
                self.state = ScanState::Value;
            }
            (ScanState::AfterValue, b',') => {
                self.keep(&[byte]);
                self.state = match self.open.last() {
                    Some(OpenContainer::Object(_)) => ScanState::Key,
                    Some(OpenContainer::Array) => ScanState::Value,
                    None => ScanState::Stopped,
                };
            }
            (ScanState::Value, _) if !self.open.is_empty() => {
                self.begin_value(byte);
                self.state = ScanState::InScalar;
            }
            _ => self.state = ScanState::Stopped,
        }
    }

    /// Reads a string up to its end; returns how many bytes belong to it.
    fn read_string(&mut self, rest: &[u8], purpose: StringPurpose, escaped: bool) -> usize {
        let used = match escaped {
            true => 1,
            false => memchr::memchr2(b'"', b'\\', rest).map_or(rest.len(), |at| at + 1),
        };
        let (piece, last) = (&rest[..used], rest[used - 1]);
        let (ends, escapes) = (!escaped && last == b'"', !escaped && last == b'\\');
        let text = if ends { &piece[..used - 1] } else { piece };
        self.keep(piece);
        match purpose {
            StringPurpose::Key => {
                let room = MAX_KEY_BYTES.saturating_sub(self.key.len());
                self.key.extend_from_slice(&text[..text.len().min(room)]);
            }
            StringPurpose::Value(KnownKey::Text) => self.found.text_bytes += text.len() as u64,
            StringPurpose::Value(KnownKey::Delta) => self.found.delta_bytes += text.len() as u64,
            StringPurpose::Value(KnownKey::FinishReason) => self.found.has_finish_reason = true,
            StringPurpose::Value(_) => {}
        }
        self.state = ScanState::InString {
            purpose,
            escaped: escapes,
        };
        match (ends, purpose) {
            (false, _) => {}
            (true, StringPurpose::Key) => {
                let key = KnownKey::of(&self.key);
                if let Some(OpenContainer::Object(current)) = self.open.last_mut() {
                    *current = key;
                }
                self.state = ScanState::Colon;
            }
            (true, StringPurpose::Value(_)) => self.end_value(),
        }
        used
    }

    fn open_container(&mut self, byte: u8) {
        let (container, state) = match byte {
            b'{' => (OpenContainer::Object(KnownKey::Other), ScanState::Key),
            _ => (OpenContainer::Array, ScanState::Value),
        };
        self.open.push(container);
        self.state = state;
    }

    /// The key of the value that is to begin; `Other` in an array.
    fn current_key(&self) -> KnownKey {
        match self.open.last() {
            Some(OpenContainer::Object(key)) => *key,
            Some(OpenContainer::Array) | None => KnownKey::Other,
        }
    }

    /// Begins a value with its first byte, and to keep it if it is one of the fields.
    fn begin_value(&mut self, first: u8) {
        if self.kept.is_none() {
            use KnownKey::{Envelope, Kind, Model, ModelVersion, Usage};
            let path = match (self.places, self.open.as_slice()) {
                // A stream of answers may be one array.
                (FieldPlaces::OfAnswer, [OpenContainer::Array, path @ ..]) => path,
                (_, path) => path,
            };
            let (key, is_field) = match (self.places, path) {
                (FieldPlaces::OfRequest, [OpenContainer::Object(key)]) => (*key, *key == Model),
                (FieldPlaces::OfAnswer, [OpenContainer::Object(key)]) => {
                    (*key, matches!(key, Usage | Model | ModelVersion | Kind))
                }
                (FieldPlaces::OfAnswer, [OpenContainer::Object(Envelope), OpenContainer::Object(key)]) => {
                    (*key, matches!(key, Usage | Model | ModelVersion))
                }
                _ => (KnownKey::Other, false),
            };
            if is_field {
                self.kept = Some(KeptValue {
                    key,
                    depth: self.open.len(),
                    bytes: Vec::new(),
                });
            }
        }
        self.keep(&[first]);
    }

    fn keep(&mut self, piece: &[u8]) {
        if let Some(kept) = &mut self.kept
            && kept.bytes.len() <= MAX_VALUE_BYTES
        {
            let room = MAX_VALUE_BYTES + 1 - kept.bytes.len();
            kept.bytes.extend_from_slice(&piece[..piece.len().min(room)]);
        }
    }

    fn end_value(&mut self) {
        self.state = ScanState::AfterValue;
        if self.open.is_empty() {
            self.complete = true;
            self.state = ScanState::Stopped;
        }
        let Some(kept) = self.kept.take_if(|kept| kept.depth == self.open.len()) else {
            return;
        };
        // One that is too long is no JSON once it is cut, so it is not found.
        let value: Option<Value> = serde_json::from_slice(&kept.bytes).ok();
        match (kept.key, value) {
            (KnownKey::Usage, Some(Value::Object(usage))) => self.found.usage = Some(usage.into()),
            (KnownKey::Model | KnownKey::ModelVersion, Some(Value::String(model))) => {
                self.found.model = Some(model)
            }
            (KnownKey::Kind, Some(Value::String(kind))) => self.found.kind = Some(kind),
            _ => {}
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    fn scan(text: &str) -> (ScannedFields, bool) {
        let mut scanner = FieldScanner::default();
        scanner.feed(text.as_bytes());
        (scanner.found().clone(), scanner.is_complete())
    }

    #[test]
    fn fields_are_found_at_their_places_only() {
        let (found, complete) = scan(
            r#"{"id":"x","choices":[{"message":{"content":"a\"b","usage":1},"usage":{"n":9}}],"usage": {"n": 1, "deep":{"usage":[2]}} ,"model":"m","type":"t"}"#,
        );
        assert!(complete);
        assert_eq!(found.usage, Some(json!({"n": 1, "deep": {"usage": [2]}})));
        assert_eq!(
            (found.model.as_deref(), found.kind.as_deref()),
            (Some("m"), Some("t"))
        );
        assert_eq!(found.text_bytes, 4);
        let (found, _) = scan(r#"{"type":"message_start","message":{"usage":{"n":2},"model":"c"}}"#);
        assert_eq!(
            (found.usage, found.model.as_deref()),
            (Some(json!({"n": 2})), Some("c"))
        );
        let (found, complete) =
            scan(r#"[{"usageMetadata":{"n":3},"modelVersion":"g"}, {"usageMetadata":{"n":4}}]"#);
        assert_eq!(
            (found.usage, found.model.as_deref(), complete),
            (Some(json!({"n": 4})), Some("g"), true)
        );
    }

    #[test]
    fn a_key_written_with_escapes_is_the_same_key_and_the_last_one_counts() {
        let (found, _) = scan(r#"{"model":"cheap","mod\u0065l":"dear"}"#);
        assert_eq!(found.model.as_deref(), Some("dear"));
    }

    #[test]
    fn the_model_of_a_request_stands_at_its_top_alone() {
        let request = |text: &str| {
            let mut scanner = FieldScanner::of_request();
            scanner.feed(text.as_bytes());
            (scanner.found().model.clone(), scanner.has_given_up())
        };
        let dear = Some("dear".to_owned());
        for elsewhere in [
            r#"{"model":"dear","message":{"model":"cheap"}}"#,
            r#"{"model":"dear","response":{"model":"cheap"},"modelVersion":"cheap"}"#,
            r#"{"model":"dear","metadata":{"model":"cheap"},"messages":[{"model":"cheap"}]}"#,
        ] {
            assert_eq!(request(elsewhere), (dear.clone(), false), "{elsewhere}");
        }
        assert_eq!(request(r#"[{"model":"cheap"}]"#).0, None);
        // What comes after text that is not looked at may be another model.
        let deep = format!(
            r#"{{"model":"cheap","x":{}{},"model":"dear"}}"#,
            "[".repeat(MAX_DEPTH),
            "]".repeat(MAX_DEPTH)
        );
        assert!(request(&deep).1);
        assert!(!request(r#"{"model":"begun","#).1);
    }

    #[test]
    fn what_is_no_json_or_too_much_is_passed_over() {
        for text in [
            "",
            "}",
            "{]",
            "{\"usage\":{\"n\":1}",
            "nonsense",
            "{\"usage\":}",
            "{\"a\" 1}",
        ] {
            let (found, complete) = scan(text);
            assert_eq!((found.model, complete), (None, false), "{text}");
        }
        let deep = format!("{}{}", "[".repeat(100_000), "{\"usage\":{}}");
        assert_eq!(scan(&deep).0, ScannedFields::default());
        let long = format!(
            "{{\"usage\":{{\"x\":\"{}\"}},\"model\":\"m\"}}",
            "y".repeat(MAX_VALUE_BYTES)
        );
        let (found, _) = scan(&long);
        assert_eq!((found.usage, found.model.as_deref()), (None, Some("m")));
    }

    proptest! {
        #[test]
        fn no_bytes_panic(bytes in prop::collection::vec(any::<u8>(), 0..200)) {
            FieldScanner::default().feed(&bytes);
        }

        #[test]
        fn the_result_is_the_same_however_the_text_is_cut(cuts in prop::collection::vec(0_usize..200, 0..20)) {
            let text = r#"{"a":[1,{"text":"w\\o\"rds"},null],"response":{"model":"m\u00fc","usage":{"input_tokens":12,"x":{"y":[true]}}},"delta":"ab","n":-1.5e3}"#;
            let mut cuts: Vec<usize> = cuts.into_iter().map(|cut| cut.min(text.len())).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let mut scanner = FieldScanner::default();
            for cut in cuts.windows(2) {
                scanner.feed(&text.as_bytes()[cut[0]..cut[1]]);
            }
            prop_assert!(scanner.is_complete());
            let found = scanner.reset();
            prop_assert_eq!(found.usage, Some(json!({"input_tokens": 12, "x": {"y": [true]}})));
            prop_assert_eq!((found.model.as_deref(), found.text_bytes, found.delta_bytes), (Some("mü"), 9, 2));
        }
    }
}
