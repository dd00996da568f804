//! The check that a value is a JSON schema at all, for schemas that are passed on and never compiled.

use jsonschema::{Draft, meta};
use serde_json::Value;

use super::{
    BoundedText, DESCRIPTION_WORK, describe,
    metered::{MeteredJson, WorkLimits, within},
    pattern::MAX_PATTERN_BYTES,
};

/// Work for a schema of some hundred kilobytes. Each subschema is read by about ten others of the schema of schemas.
const LIMITS: WorkLimits = WorkLimits {
    work: 20_000_000,
    depth: 80,
    per_entry: 4,
    per_key_byte: 1,
};

/// Checks that a value is a valid JSON schema of the draft it names, or of the newest, in bounded time.
pub fn check_schema(schema: &Value) -> Result<(), String> {
    check_patterns(schema)?;
    // One of a dialect nobody knows is checked as the newest.
    let mut known = None;
    if Draft::default().detect(schema) == Draft::Unknown
        && let Value::Object(keywords) = schema
    {
        let mut keywords = keywords.clone();
        keywords.remove("$schema");
        known = Some(Value::Object(keywords));
    }
    let schema = known.as_ref().unwrap_or(schema);
    match within(LIMITS, schema, |schema| meta::is_valid_for::<MeteredJson>(schema)) {
        Some(Ok(true)) => Ok(()),
        Some(Err(error)) => Err(describe(&error)),
        Some(Ok(false)) => Err(description(schema)),
        None => Err("it is too large to be checked".into()),
    }
}

/// What is wrong with a schema.
fn description(schema: &Value) -> String {
    let limits = WorkLimits {
        work: DESCRIPTION_WORK,
        ..LIMITS
    };
    let found = within(limits, schema, |schema| {
        let error = meta::validate_for::<MeteredJson>(schema).err()?;
        let path = BoundedText::of(&error.instance_path());
        Some(format!("{path}: {}", describe(&error)))
    });
    found
        .flatten()
        .unwrap_or_else(|| "it is not a JSON schema".to_owned())
}

/// Refuses long patterns, whose syntax takes time quadratic in their length to check. Calls itself as deep as JSON is
/// nested.
fn check_patterns(schema: &Value) -> Result<(), String> {
    match schema {
        Value::Array(items) => items.iter().try_for_each(check_patterns),
        Value::Object(keywords) => {
            for (keyword, value) in keywords {
                let longest = match (keyword.as_str(), value) {
                    ("pattern", Value::String(pattern)) => pattern.len(),
                    ("patternProperties", Value::Object(patterns)) => {
                        patterns.keys().map(String::len).max().unwrap_or(0)
                    }
                    _ => 0,
                };
                if longest > MAX_PATTERN_BYTES {
                    return Err(format!("a pattern is longer than {MAX_PATTERN_BYTES} bytes"));
                }
                check_patterns(value)?;
            }
            Ok(())
        }
        _ => Ok(()),
    }
}
