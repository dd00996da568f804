//! Regular expressions in schemas, matched in time linear in the text.
//!
//! JSON Schema has patterns in the syntax of ECMAScript, whose engines go back and try again: a short pattern can take
//! hours. Here they are matched by an automaton. It has no look-around, but the one kind that is common in schemas,
//! look-aheads at the start (`^(?!\.)(?!.*\.\.)…`), is split off: each is a pattern of its own that must, or must not,
//! match.

use std::{collections::HashMap, sync::Arc};

use jsonschema::{Keyword, ValidationError, json::Node};
use regex_automata::{meta, nfa::thompson::WhichCaptures, util::syntax};

use super::metered::{MeteredJson, MeteredValue, spend};

/// Maximum length of a pattern, in bytes.
pub(super) const MAX_PATTERN_BYTES: usize = 8 * 1024;
/// Maximum number of different patterns in one declaration.
const MAX_PATTERNS: usize = 256;
/// Maximum number of look-aheads of one pattern.
const MAX_LOOK_AHEADS: usize = 16;
/// Maximum size of the automaton of one pattern, in bytes.
pub(super) const MAX_AUTOMATON_BYTES: usize = 1024 * 1024;
/// Maximum size of the automata of one declaration, in bytes.
const MAX_AUTOMATA_BYTES: usize = 8 * 1024 * 1024;
/// Maximum of the bytes read while patterns of one declaration are translated: the library reads a pattern once for
/// each escape such as `\d`.
const MAX_TRANSLATED_BYTES: usize = 4 * 1024 * 1024;
/// Bytes of an automaton per unit of work and byte of text, if every state of it has to be followed.
const BYTES_PER_UNIT: usize = 1024;

/// Compiled patterns by their text.
pub(super) type PatternSet = HashMap<String, Arc<CompiledPattern>>;

/// The patterns of one declaration, each compiled once.
#[derive(Debug, Default)]
pub(super) struct PatternCache {
    compiled: PatternSet,
    automata_bytes: usize,
    translated_bytes: usize,
}

impl PatternCache {
    /// Compiles a pattern, or finds it compiled.
    pub(super) fn add(&mut self, pattern: &str) -> Result<Arc<CompiledPattern>, String> {
        if let Some(compiled) = self.compiled.get(pattern) {
            return Ok(compiled.clone());
        }
        if pattern.len() > MAX_PATTERN_BYTES {
            return Err(format!("a pattern is longer than {MAX_PATTERN_BYTES} bytes"));
        }
        if self.compiled.len() == MAX_PATTERNS {
            return Err(format!("there are more than {MAX_PATTERNS} different patterns"));
        }
        let escapes = pattern.bytes().filter(|byte| *byte == b'\\').count();
        self.translated_bytes += (1 + escapes) * pattern.len();
        if self.translated_bytes > MAX_TRANSLATED_BYTES {
            return Err("its patterns have too many escapes".into());
        }
        let compiled = Arc::new(
            CompiledPattern::compile(pattern)
                .map_err(|why| format!("the pattern {} {why}", crate::id::quoted(pattern)))?,
        );
        self.automata_bytes += compiled.bytes();
        if self.automata_bytes > MAX_AUTOMATA_BYTES {
            return Err("its patterns together are too large".into());
        }
        self.compiled.insert(pattern.to_owned(), compiled.clone());
        Ok(compiled)
    }
}

/// A compiled pattern.
#[derive(Debug)]
pub(super) struct CompiledPattern {
    /// Look-aheads and, last, the pattern itself.
    parts: Vec<PatternPart>,
}

#[derive(Debug)]
struct PatternPart {
    regex: meta::Regex,
    expected: bool,
}

impl CompiledPattern {
    pub(super) fn compile(pattern: &str) -> Result<Self, String> {
        let (look_aheads, rest) = split_look_aheads(pattern);
        if look_aheads.len() > MAX_LOOK_AHEADS {
            return Err(format!("has more than {MAX_LOOK_AHEADS} look-aheads"));
        }
        let mut parts = Vec::with_capacity(look_aheads.len() + 1);
        for (text, expected) in look_aheads {
            let regex = build(&format!("^(?:{text})"))?;
            parts.push(PatternPart { regex, expected });
        }
        let (regex, expected) = (build(&rest)?, true);
        parts.push(PatternPart { regex, expected });
        Ok(Self { parts })
    }

    /// Whether it matches somewhere in the text; false if there is no work left to find out.
    fn is_match(&self, text: &str) -> bool {
        let cost = self.cost_per_byte().saturating_mul(1 + text.len() as i64);
        spend(cost)
            && self
                .parts
                .iter()
                .all(|part| part.regex.is_match(text) == part.expected)
    }

    /// Units of work for each byte of text.
    pub(super) fn cost_per_byte(&self) -> i64 {
        (self.parts.len() + self.bytes() / BYTES_PER_UNIT) as i64
    }

    fn bytes(&self) -> usize {
        self.parts.iter().map(|part| part.regex.memory_usage()).sum()
    }
}

fn build(pattern: &str) -> Result<meta::Regex, String> {
    let translated =
        jsonschema_regex::to_rust_regex(pattern).map_err(|()| "is not a regular expression".to_owned())?;
    let config = meta::Config::new()
        .nfa_size_limit(Some(MAX_AUTOMATON_BYTES))
        .onepass_size_limit(Some(MAX_AUTOMATON_BYTES))
        // Of each there is one per thread that matches.
        .hybrid_cache_capacity(64 * 1024)
        .which_captures(WhichCaptures::None);
    let built = meta::Builder::new()
        .configure(config)
        .syntax(syntax::Config::new().nest_limit(50))
        .build(&translated);
    built.map_err(|error| match error.size_limit() {
        Some(_) => format!("needs more than {MAX_AUTOMATON_BYTES} bytes"),
        None => {
            "is not supported: look-around is, at its start alone, and back-references are not".to_owned()
        }
    })
}

/// The look-aheads that follow the `^` at the start of a pattern, with whether each must match, and the pattern
/// without them.
fn split_look_aheads(pattern: &str) -> (Vec<(&str, bool)>, String) {
    let mut found = Vec::new();
    let Some(mut rest) = pattern.strip_prefix('^') else {
        return (found, pattern.to_owned());
    };
    while let Some(opened) = rest.strip_prefix("(?") {
        let expected = match opened.as_bytes().first() {
            Some(b'=') => true,
            Some(b'!') => false,
            _ => break,
        };
        let Some(end) = group_end(&opened[1..]) else { break };
        found.push((&opened[1..=end], expected));
        rest = &opened[end + 2..];
        if rest.starts_with(['*', '+', '?', '{']) {
            // A repeated look-ahead means something else.
            return (Vec::new(), pattern.to_owned());
        }
    }
    // With an alternative, look-aheads and `^` hold for the first one alone.
    if found.is_empty() || has_alternative(rest) {
        return (Vec::new(), pattern.to_owned());
    }
    (found, format!("^{rest}"))
}

/// Where the parenthesis is that closes a group which is open at the start of the text.
fn group_end(text: &str) -> Option<usize> {
    find_at_depth(text, |depth, byte| depth == 0 && byte == b')')
}

/// Whether there is a `|` outside of all groups.
fn has_alternative(text: &str) -> bool {
    find_at_depth(text, |depth, byte| depth == 0 && byte == b'|').is_some()
}

/// The first byte outside of escapes and character classes that is looked for, given how many groups it is in.
fn find_at_depth(text: &str, wanted: impl Fn(i32, u8) -> bool) -> Option<usize> {
    let (mut depth, mut in_class, mut escaped) = (0, false, false);
    for (index, byte) in text.bytes().enumerate() {
        if escaped {
            escaped = false;
        } else if byte == b'\\' {
            escaped = true;
        } else if in_class {
            in_class = byte != b']';
        } else if wanted(depth, byte) {
            return Some(index);
        } else {
            match byte {
                b'[' => in_class = true,
                b'(' => depth += 1,
                b')' => depth -= 1,
                _ => {}
            }
        }
    }
    None
}

/// `pattern` in a schema.
pub(super) struct PatternKeyword(pub(super) Arc<CompiledPattern>);

impl<'i> Keyword<'i, MeteredJson> for PatternKeyword {
    fn validate(&self, value: MeteredValue<'i>) -> Result<(), ValidationError<'i>> {
        if Keyword::<MeteredJson>::is_valid(self, value) {
            Ok(())
        } else {
            Err(ValidationError::custom("it does not match the pattern"))
        }
    }

    fn is_valid(&self, value: MeteredValue<'i>) -> bool {
        value.as_string().is_none_or(|text| self.0.is_match(&text))
    }
}

#[cfg(test)]
mod tests {
    use super::{super::metered::*, *};

    fn matches(pattern: &str, text: &str) -> bool {
        let pattern = PatternCache::default().add(pattern).unwrap();
        let limits = WorkLimits {
            work: 1_000_000,
            depth: 1,
            per_entry: 1,
            per_key_byte: 0,
        };
        within(limits, &serde_json::Value::Null, |_| pattern.is_match(text)).unwrap()
    }

    #[test]
    fn look_aheads_at_the_start_are_matched() {
        let email = r"^(?!\.)(?!.*\.\.)([A-Za-z0-9_'+\-\.]*)[A-Za-z0-9_+-]@([A-Za-z0-9][A-Za-z0-9\-]*\.)+[A-Za-z]{2,}$";
        assert!(matches(email, "first.last@example.org"));
        assert!(!matches(email, ".last@example.org"));
        assert!(!matches(email, "first..last@example.org"));
        let password = r"^(?=.*[A-Z])(?=.*\d)(?=[^|)]*$).{8,}$";
        assert!(matches(password, "Passw0rdPassw0rd"));
        assert!(!matches(password, "passw0rd") && !matches(password, "Pa55"));
        assert!(matches(r"b\d+$", "ab12") && !matches(r"^b\d+$", "ab12"));
    }

    #[test]
    fn patterns_that_cannot_be_matched_in_linear_time_are_refused() {
        for bad in [
            r"(a)\1",
            r"a(?=b)",
            r"(?<=a)b",
            r"^(?!a)b|c",
            r"^(?=a)*b",
            r"((a{1000}){1000}){1000}",
            "(",
            r"\p{L}{1000}",
        ] {
            assert!(PatternCache::default().add(bad).is_err(), "{bad}");
        }
        let nested = format!("{}a{}", "(".repeat(1000), ")".repeat(1000));
        assert!(PatternCache::default().add(&nested).is_err());
        assert!(PatternCache::default().add(&r"\d".repeat(4000)).is_err());
        let mut patterns = PatternCache::default();
        assert!((0..1000).any(|n| patterns.add(&format!("a{n}")).is_err()));
    }
}
