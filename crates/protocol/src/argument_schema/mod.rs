//! A tool's argument schema, compiled once, and the check of arguments against it.
//!
//! Both the schema and the arguments come from programs that may mean harm, so both steps take bounded time, memory
//! and stack: what a schema stands for is counted before it is compiled ([`bounds`]), its patterns are matched in linear
//! time ([`pattern`]), and a check ends after a fixed amount of work ([`metered`]). Errors are described in a bounded
//! length, the first alone. [`meta`] checks in the same way that a value is a schema at all.

mod bounds;
mod meta;
mod metered;
mod pattern;

use std::{
    fmt::{self, Write as _},
    panic::{AssertUnwindSafe, catch_unwind},
    sync::Arc,
};

use jsonschema::{PatternOptions, ValidationError, Validator};
use serde_json::Value;

pub use self::meta::check_schema;
use self::{
    bounds::SchemaBounds,
    metered::{MeteredJson, WorkLimits, within},
    pattern::{CompiledPattern, MAX_AUTOMATON_BYTES, PatternCache, PatternKeyword},
};

/// Maximum size of an argument schema, in bytes of JSON.
pub const MAX_SCHEMA_BYTES: usize = 64 * 1024;

/// Maximum number of subschemas of all schemas of one declaration.
const MAX_SUBSCHEMAS: usize = 50_000;
/// Maximum of the bytes of the paths to all keywords of one declaration.
const MAX_PATH_BYTES: usize = 32 * 1024 * 1024;
/// Maximum length of the description of an error, in bytes.
const MAX_ERROR_BYTES: usize = 1024;
/// Work for the description of an error; where it is not enough there is none.
const DESCRIPTION_WORK: i64 = 20_000;
/// Maximum length of a string that is checked as a regular expression, for `"format": "regex"`.
const MAX_REGEX_ARGUMENT: usize = 4096;

/// What the schemas of one declaration may take together.
#[derive(Debug, Default)]
pub struct CompileBudget {
    patterns: PatternCache,
    subschemas: usize,
    path_bytes: usize,
}

impl CompileBudget {
    fn charge_subschema(&mut self) -> Result<(), String> {
        self.subschemas += 1;
        if self.subschemas > MAX_SUBSCHEMAS {
            return Err(format!(
                "makes more than {MAX_SUBSCHEMAS} subschemas, with the schemas before it"
            ));
        }
        Ok(())
    }

    fn charge_paths(&mut self, bytes: usize) -> Result<(), String> {
        self.path_bytes += bytes;
        if self.path_bytes > MAX_PATH_BYTES {
            return Err(
                "has long names in which too many others are nested, with the schemas before it".into(),
            );
        }
        Ok(())
    }
}

/// How much a check of arguments may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CheckEffort {
    /// Under a millisecond, on any thread. Enough for all but large or deeply nested arguments.
    Small,
    /// Up to about a second, on a thread with [`CHECK_STACK_BYTES`] of stack.
    Full,
}

/// The stack of a thread that compiles schemas or checks arguments with [`CheckEffort::Full`], in bytes.
pub const CHECK_STACK_BYTES: usize = 64 * 1024 * 1024;

impl CheckEffort {
    fn limits(self, bounds: &SchemaBounds) -> WorkLimits {
        let (work, levels) = match self {
            Self::Small => (100_000, 192),
            Self::Full => (40_000_000, 8192),
        };
        WorkLimits {
            work,
            depth: levels / bounds.chain.max(1),
            per_entry: 1 + bounds.unread,
            per_key_byte: bounds.per_key_byte,
        }
    }
}

/// Whether arguments fit a schema.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArgumentVerdict {
    /// They do.
    Fit,
    /// They do not, and why.
    Misfit(String),
    /// It was not found out with the effort allowed.
    Unknown,
}

/// A compiled argument schema.
pub struct ArgumentSchema {
    validator: Validator<MeteredJson>,
    bounds: SchemaBounds,
}

impl fmt::Debug for ArgumentSchema {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArgumentSchema")
            .field("bounds", &self.bounds)
            .finish_non_exhaustive()
    }
}

impl ArgumentSchema {
    /// Compiles a schema, which must be of type object and at most [`MAX_SCHEMA_BYTES`] long. Takes up to some tens of
    /// milliseconds, and up to [`CHECK_STACK_BYTES`] of stack.
    pub fn compile(schema: &Value, budget: &mut CompileBudget) -> Result<Self, String> {
        if schema.get("type").and_then(Value::as_str) != Some("object") {
            return Err("must be a JSON schema with \"type\": \"object\"".into());
        }
        if crate::size::json_bytes(schema) > MAX_SCHEMA_BYTES {
            return Err(format!("is larger than {MAX_SCHEMA_BYTES} bytes"));
        }
        let (bounds, patterns) = SchemaBounds::of(schema, budget)?;
        let options = jsonschema::options_for::<MeteredJson>()
            .with_pattern_options(PatternOptions::regex().size_limit(MAX_AUTOMATON_BYTES))
            .with_keyword("pattern", move |_, pattern, _| {
                let text = pattern.as_str().unwrap_or_default();
                let compiled = match patterns.get(text) {
                    Some(compiled) => Ok(compiled.clone()),
                    // One of the schemas of JSON Schema itself.
                    None => CompiledPattern::compile(text).map(Arc::new),
                };
                match compiled {
                    Ok(compiled) => Ok(Box::new(PatternKeyword(compiled))),
                    Err(why) => Err(ValidationError::custom(why)),
                }
            })
            // Reads the string as JSON or as base64, whatever its size, for drafts up to 7.
            .without_content_media_type_support("application/json")
            .without_content_encoding_support("base64")
            .with_format("regex", |text: &str| {
                text.len() <= MAX_REGEX_ARGUMENT && jsonschema_regex::is_valid_ecma_regex(text)
            });
        // The library has places where it panics rather than reporting an error.
        let built = catch_unwind(AssertUnwindSafe(|| {
            let built = options.build(schema);
            built.map_err(|error| format!("is not a valid JSON schema: {}", describe(&error)))
        }));
        let validator = built.map_err(|_| "is not a JSON schema that can be used".to_owned())??;
        Ok(Self { validator, bounds })
    }

    /// Compiles a condition on arguments: any JSON schema, which need not say that arguments are an object. Takes as
    /// much time and stack as [`compile`](Self::compile).
    pub fn compile_condition(schema: &Value, budget: &mut CompileBudget) -> Result<Self, String> {
        let mut members = match schema {
            Value::Object(members) => members.clone(),
            Value::Bool(true) => serde_json::Map::new(),
            Value::Bool(false) => serde_json::Map::from_iter([("not".to_owned(), serde_json::json!({}))]),
            _ => return Err("must be a JSON schema: an object, true or false".into()),
        };
        let may_be_object = match members.get("type") {
            None => true,
            Some(Value::Array(types)) => types.iter().any(|one| one == "object"),
            Some(one) => one == "object",
        };
        if !may_be_object {
            return Err("can never hold: arguments are an object, and its type is another".into());
        }
        members.insert("type".into(), "object".into());
        Self::compile(&Value::Object(members), budget)
    }

    /// Whether arguments fit; `None` if it was not found out with the effort allowed.
    pub fn fits(&self, arguments: &Value, effort: CheckEffort) -> Option<bool> {
        let limits = effort.limits(&self.bounds);
        let checked = catch_unwind(AssertUnwindSafe(|| {
            within(limits, arguments, |arguments| self.validator.is_valid(arguments))
        }));
        checked.ok().flatten()
    }

    /// Checks arguments.
    pub fn check(&self, arguments: &Value, effort: CheckEffort) -> ArgumentVerdict {
        let limits = effort.limits(&self.bounds);
        let checked = catch_unwind(AssertUnwindSafe(|| {
            match within(limits, arguments, |arguments| self.validator.is_valid(arguments)) {
                Some(true) => ArgumentVerdict::Fit,
                Some(false) => ArgumentVerdict::Misfit(self.description(arguments, limits)),
                None => ArgumentVerdict::Unknown,
            }
        }));
        checked.unwrap_or(ArgumentVerdict::Unknown)
    }

    /// Where arguments do not fit, and why. The library collects what is wrong in every branch of an `anyOf`, so this
    /// has a smaller limit than the check.
    fn description(&self, arguments: &Value, limits: WorkLimits) -> String {
        let limits = WorkLimits {
            work: DESCRIPTION_WORK,
            ..limits
        };
        let found = within(limits, arguments, |arguments| {
            let error = self.validator.validate(arguments).err()?;
            let path = BoundedText::of(&error.instance_path());
            let at = if path.is_empty() { "" } else { " at " };
            Some(format!("{at}{path}: {}", describe(&error)))
        });
        found.flatten().unwrap_or_default()
    }
}

/// The text of an error, cut: it has the whole value that is wrong in it.
fn describe(error: &ValidationError<'_>) -> String {
    BoundedText::of(error)
}

/// Text of at most [`MAX_ERROR_BYTES`].
struct BoundedText(String);

impl BoundedText {
    fn of(shown: &impl fmt::Display) -> String {
        let mut text = Self(String::new());
        // Fails when the text is full, which ends the formatting.
        let _ = write!(text, "{shown}");
        text.0
    }
}

impl fmt::Write for BoundedText {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        let left = MAX_ERROR_BYTES - self.0.len().min(MAX_ERROR_BYTES);
        if text.len() <= left {
            self.0.push_str(text);
            return Ok(());
        }
        self.0.push_str(&text[..text.floor_char_boundary(left)]);
        self.0.push('…');
        Err(fmt::Error)
    }
}

#[cfg(test)]
mod tests;
