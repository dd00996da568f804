//! An entry of `tools.allowed`, `tools.denied` or `tools.ask`: a pattern of tool names, alone or with a condition on the
//! arguments of a call.

use std::sync::{Arc, OnceLock};

use serde::{
    Deserialize, Deserializer, Serialize, Serializer,
    de::{MapAccess, Visitor, value::MapAccessDeserializer},
};
use serde_json::Value;

use crate::{
    argument_schema::{ArgumentSchema, CHECK_STACK_BYTES, CheckEffort, CompileBudget},
    strict::FieldError,
};

/// Maximum number of entries with a `when` in one agent's rules.
const MAX_CONDITIONS: usize = 1_000;

/// An entry as it is written: `"pattern"` or `{"tool": "pattern", "when": SCHEMA}`.
#[derive(Debug, Clone, PartialEq)]
pub struct RuleEntry {
    /// The pattern of the tools it is about.
    pub tool: String,
    /// The condition on a call's arguments; `None`: it holds for every call.
    pub when: Option<RuleCondition>,
}

/// A JSON Schema that the arguments of a call fit or do not fit.
#[derive(Debug, Clone)]
pub struct RuleCondition {
    /// The schema as it is written.
    schema: Value,
    /// Set by [`compile_conditions`]; an error says why it cannot be compiled.
    compiled: OnceLock<Result<Arc<ArgumentSchema>, String>>,
}

impl PartialEq for RuleCondition {
    fn eq(&self, other: &Self) -> bool {
        self.schema == other.schema
    }
}

impl From<&str> for RuleEntry {
    fn from(pattern: &str) -> Self {
        Self {
            tool: pattern.to_owned(),
            when: None,
        }
    }
}

impl RuleEntry {
    /// Whether it holds for a call with these arguments, an object. `None`: not found out with this effort, or the
    /// condition is not compiled.
    pub fn holds(&self, arguments: &Value, effort: CheckEffort) -> Option<bool> {
        match &self.when {
            None => Some(true),
            Some(condition) => {
                let compiled = condition.compiled.get()?.as_ref().ok()?;
                compiled.fits(arguments, effort)
            }
        }
    }

    /// The entry in JSON, as it is written.
    pub fn to_json(&self) -> Value {
        match &self.when {
            None => Value::from(self.tool.as_str()),
            Some(condition) => serde_json::json!({ "tool": self.tool, "when": condition.schema }),
        }
    }
}

/// Compiles the conditions of entries that are not compiled yet, each named by its field. An error is the first
/// condition that is not a schema, or asks for too much.
///
/// Compiling calls itself for each level of a schema, so it has a thread with enough stack, for which this waits.
pub fn compile_conditions<'a>(
    entries: impl Iterator<Item = (String, &'a RuleEntry)>,
) -> Result<(), FieldError> {
    let conditions: Vec<(String, &RuleCondition)> = entries
        .filter_map(|(field, entry)| Some((field, entry.when.as_ref()?)))
        .collect();
    if conditions.is_empty() {
        return Ok(());
    }
    if let Some((field, _)) = conditions.get(MAX_CONDITIONS) {
        let reason =
            format!("more than {MAX_CONDITIONS} entries with a `when`; at most that many are allowed");
        return Err(FieldError::at(field, reason));
    }
    let compile_all = || {
        let mut budget = CompileBudget::default();
        conditions.iter().try_for_each(|(field, condition)| {
            let compile = || ArgumentSchema::compile_condition(&condition.schema, &mut budget).map(Arc::new);
            match condition.compiled.get_or_init(compile) {
                Ok(_) => Ok(()),
                Err(why) => Err(FieldError::at(format!("{field}.when"), why)),
            }
        })
    };
    let failed = |why: &str| FieldError::at("tools", format!("its conditions could not be compiled: {why}"));
    std::thread::scope(|scope| {
        let builder = std::thread::Builder::new().stack_size(CHECK_STACK_BYTES);
        let thread = builder
            .spawn_scoped(scope, compile_all)
            .map_err(|why| failed(&why.to_string()))?;
        thread.join().map_err(|_| failed("a schema broke the compiler"))?
    })
}

/// The second form of an entry.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ConditionalEntry {
    tool: String,
    when: Value,
}

impl Serialize for RuleEntry {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        self.to_json().serialize(serializer)
    }
}

impl<'de> Deserialize<'de> for RuleEntry {
    fn deserialize<D: Deserializer<'de>>(from: D) -> Result<Self, D::Error> {
        /// By hand, since an error of `serde(untagged)` names neither field nor reason.
        struct EntryVisitor;

        impl<'de> Visitor<'de> for EntryVisitor {
            type Value = RuleEntry;

            fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                f.write_str(r#"a pattern or {"tool": pattern, "when": schema}"#)
            }

            fn visit_str<E>(self, pattern: &str) -> Result<RuleEntry, E> {
                Ok(pattern.into())
            }

            fn visit_map<A: MapAccess<'de>>(self, from: A) -> Result<RuleEntry, A::Error> {
                let entry = ConditionalEntry::deserialize(MapAccessDeserializer::new(from))?;
                Ok(RuleEntry {
                    tool: entry.tool,
                    when: Some(RuleCondition {
                        schema: entry.when,
                        compiled: OnceLock::new(),
                    }),
                })
            }
        }

        from.deserialize_any(EntryVisitor)
    }
}

impl schemars::JsonSchema for RuleEntry {
    fn schema_name() -> std::borrow::Cow<'static, str> {
        "RuleEntry".into()
    }

    fn inline_schema() -> bool {
        true
    }

    fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
        schemars::json_schema!({ "anyOf": [
            { "type": "string", "description": "Pattern of tool names, 1 to 200 bytes." },
            {
                "type": "object",
                "properties": {
                    "tool": { "type": "string", "description": "Pattern of tool names, 1 to 200 bytes." },
                    "when": {
                        "type": ["object", "boolean"],
                        "description": "JSON Schema: the entry holds for a call whose arguments are valid against it. At most 64 KiB, with references into itself alone."
                    }
                },
                "required": ["tool", "when"],
                "additionalProperties": false
            }
        ] })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn compiled(schema: Value) -> Result<RuleEntry, FieldError> {
        let entry: RuleEntry = serde_json::from_value(json!({ "tool": "t", "when": schema })).unwrap();
        compile_conditions([("tools.ask[0]".to_owned(), &entry)].into_iter())?;
        Ok(entry)
    }

    #[test]
    fn an_entry_is_written_back_as_it_was_read() {
        for written in [
            json!("@files/*"),
            json!({ "tool": "x", "when": { "required": ["a"] } }),
        ] {
            let entry: RuleEntry = serde_json::from_value(written.clone()).unwrap();
            assert_eq!(serde_json::to_value(&entry).unwrap(), written);
        }
    }

    #[test]
    fn a_condition_need_not_say_that_arguments_are_an_object() {
        let holds = |schema: Value, arguments: Value| {
            compiled(schema)
                .unwrap()
                .holds(&arguments, CheckEffort::Small)
                .unwrap()
        };
        let path = json!({ "properties": { "path": { "pattern": "^/etc/" } }, "required": ["path"] });
        assert!(holds(path.clone(), json!({ "path": "/etc/passwd" })));
        assert!(!holds(path, json!({ "path": "notes" })));
        assert!(holds(json!(true), json!({})));
        assert!(!holds(json!(false), json!({})));
        assert!(holds(json!({ "type": ["object", "null"] }), json!({})));
    }

    #[test]
    fn what_is_no_schema_is_refused_with_field_and_reason() {
        let deep = (0..200).fold(json!({}), |inner, _| json!({ "properties": { "a": inner } }));
        let bomb: Vec<Value> = (0..40)
            .map(|i| json!({ "allOf": [{ "$ref": format!("#/$defs/{}", i + 1) }, { "$ref": format!("#/$defs/{}", i + 1) }] }))
            .collect();
        let defs: serde_json::Map<String, Value> = bomb
            .into_iter()
            .enumerate()
            .map(|(i, v)| (i.to_string(), v))
            .chain([("40".to_owned(), json!({}))])
            .collect();
        for (schema, reason) in [
            (json!(7), "JSON schema"),
            (json!("x"), "JSON schema"),
            (json!({ "type": "string" }), "object"),
            (json!({ "type": "object", "properties": 3 }), "schema"),
            (json!({ "$ref": "https://example.com/schema.json" }), "refer"),
            (deep, "deeper"),
            (json!({ "$ref": "#/$defs/0", "$defs": defs }), ""),
            (
                json!({ "properties": { "a": { "pattern": "x{1000}{1000}" } } }),
                "pattern",
            ),
            (json!({ "description": "x".repeat(70_000) }), "larger"),
        ] {
            let shown: String = schema.to_string().chars().take(80).collect();
            let error = compiled(schema).expect_err(&shown);
            assert_eq!(error.field, "tools.ask[0].when", "{shown}");
            assert!(error.reason.contains(reason), "{shown}: {}", error.reason);
        }
    }

    #[test]
    fn an_entry_without_a_compiled_condition_does_not_say_that_it_holds() {
        let entry: RuleEntry = serde_json::from_value(json!({ "tool": "t", "when": true })).unwrap();
        assert_eq!(entry.holds(&json!({}), CheckEffort::Small), None);
    }
}
