//! JSON Schemas as Markdown tables: a row for each field, nested ones with their path.

use std::fmt::Write as _;

use serde_json::{Map, Value};

/// One field of an object.
struct FieldRow {
    path: String,
    kind: String,
    text: String,
}

/// The fields of an object schema as a table; a sentence if it has none.
pub(super) fn field_table(schema: &Value) -> String {
    field_table_without(schema, &[])
}

/// The fields of an object schema as a table, without some of the top-level ones.
pub(super) fn field_table_without(schema: &Value, left_out: &[&str]) -> String {
    let mut rows = Vec::new();
    collect(schema, "", None, &mut rows);
    rows.retain(|row| !left_out.contains(&row.path.as_str()));
    if rows.is_empty() {
        return "No fields.\n".to_owned();
    }
    let mut out = "| field | type | meaning |\n|---|---|---|\n".to_owned();
    for FieldRow { path, kind, text } in rows {
        let _ = writeln!(out, "| `{path}` | {kind} | {} |", cell(&text));
    }
    out
}

/// Text as a table cell or paragraph: on one line, `|` escaped, and `<name>` shown instead of read as a tag.
pub(super) fn cell(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut in_code = false;
    for c in text.trim().chars() {
        match c {
            '`' => {
                in_code = !in_code;
                out.push(c);
            }
            '\n' => out.push(' '),
            '|' => out.push_str("\\|"),
            '<' if !in_code => out.push_str("&lt;"),
            '*' if !in_code => out.push_str("\\*"),
            _ => out.push(c),
        }
    }
    out
}

/// The description of a schema, empty if it has none.
pub(super) fn description(schema: &Value) -> &str {
    schema["description"].as_str().unwrap_or_default()
}

/// The variants of a schema that are not `null`.
pub(super) fn variants(schema: &Value) -> Vec<&Value> {
    let listed = schema.get("oneOf").or_else(|| schema.get("anyOf"));
    let listed = listed.and_then(Value::as_array);
    let listed = listed.into_iter().flatten();
    listed.filter(|variant| variant["type"] != "null").collect()
}

/// The field that tells the variants of an object apart, and its value.
pub(super) fn tag(variant: &Value) -> Option<(&str, &str)> {
    let properties = variant["properties"].as_object()?;
    properties
        .iter()
        .find_map(|(name, property)| Some((name.as_str(), property["const"].as_str()?)))
}

fn collect(schema: &Value, prefix: &str, condition: Option<&str>, rows: &mut Vec<FieldRow>) {
    let empty = Map::new();
    let properties = schema["properties"].as_object().unwrap_or(&empty);
    let required = schema["required"].as_array();
    for (name, property) in properties
        .iter()
        .filter(|(_, property)| property.get("const").is_none())
    {
        let path = format!("{prefix}{name}");
        let mut kind = kind_of(property);
        if required.is_some_and(|required| required.iter().any(|one| one == name)) {
            kind.push_str(", required");
        }
        let mut text = full_description(property);
        if let Some(condition) = condition {
            text = format!("{condition}: {text}");
        }
        rows.push(FieldRow {
            path: path.clone(),
            kind,
            text,
        });
        descend(property, &path, rows);
    }
    let objects: Vec<_> = variants(schema)
        .into_iter()
        .filter(|variant| variant["properties"].is_object())
        .collect();
    let tags: Vec<_> = objects.iter().filter_map(|variant| tag(variant)).collect();
    if let (Some((name, _)), true) = (tags.first(), tags.len() == objects.len()) {
        let values: Vec<_> = tags.iter().map(|(_, value)| format!("`\"{value}\"`")).collect();
        let meanings = objects.iter().zip(&tags);
        let meanings = meanings.map(|(variant, (_, value))| format!("`{value}`: {}", description(variant)));
        rows.push(FieldRow {
            path: format!("{prefix}{name}"),
            kind: format!("{}, required", values.join(" or ")),
            text: meanings.collect::<Vec<_>>().join(" "),
        });
    }
    for variant in objects {
        let condition = tag(variant).map(|(name, value)| format!("With `{name}` `\"{value}\"`"));
        collect(variant, prefix, condition.as_deref(), rows);
    }
}

/// Adds the fields of nested objects.
fn descend(property: &Value, path: &str, rows: &mut Vec<FieldRow>) {
    let inner = match variants(property).as_slice() {
        [only] if property["properties"].is_null() => only,
        _ => property,
    };
    if inner["properties"].is_object() || variants(inner).iter().any(|v| v["properties"].is_object()) {
        collect(inner, &format!("{path}."), None, rows);
    } else if has_fields(&inner["items"]) {
        collect(&inner["items"], &format!("{path}[]."), None, rows);
    } else if has_fields(&inner["additionalProperties"]) {
        collect(
            &inner["additionalProperties"],
            &format!("{path}.NAME."),
            None,
            rows,
        );
    }
}

fn has_fields(schema: &Value) -> bool {
    schema["properties"].is_object() || variants(schema).iter().any(|v| v["properties"].is_object())
}

/// A field's description, with what each of its values means.
fn full_description(property: &Value) -> String {
    let mut text = description(property).to_owned();
    let inner = match variants(property).as_slice() {
        [only] => only,
        _ => property,
    };
    if text.is_empty() {
        text = description(inner).to_owned();
    }
    for variant in variants(inner) {
        if let (Some(value), false) = (variant["const"].as_str(), description(variant).is_empty()) {
            let _ = write!(text, " `{value}`: {}", description(variant));
        }
    }
    text
}

/// What values a field takes, in words.
pub(super) fn kind_of(schema: &Value) -> String {
    if let Some(value) = schema["const"].as_str() {
        return format!("`\"{value}\"`");
    }
    if let Some(values) = schema["enum"].as_array() {
        let values = values.iter().filter(|value| !value.is_null());
        return values
            .map(|value| format!("`{value}`"))
            .collect::<Vec<_>>()
            .join(" or ");
    }
    let variants = variants(schema);
    if !variants.is_empty() && schema["properties"].is_null() {
        let mut kinds: Vec<String> = variants.into_iter().map(kind_of).collect();
        kinds.dedup();
        return kinds.join(" or ");
    }
    let types: Vec<&str> = match &schema["type"] {
        Value::String(one) => vec![one],
        Value::Array(several) => several.iter().filter_map(Value::as_str).collect(),
        _ => Vec::new(),
    };
    let kinds = types
        .into_iter()
        .filter(|kind| *kind != "null")
        .map(|kind| match kind {
            "string"
                if schema["pattern"]
                    .as_str()
                    .is_some_and(|p| p.contains("(ms|s|m|h|d)")) =>
            {
                "duration".to_owned()
            }
            "array" => format!("list of {}", kind_of(&schema["items"])),
            "object" if schema["additionalProperties"].is_object() => {
                format!("map to {}", kind_of(&schema["additionalProperties"]))
            }
            other => other.to_owned(),
        });
    let kinds: Vec<String> = kinds.collect();
    match kinds.is_empty() {
        true => "any".to_owned(),
        false => kinds.join(" or "),
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn nested_fields_variants_and_lists_have_rows_of_their_own() {
        let schema = json!({
            "properties": {
                "name": {"type": "string", "description": "A <name> with a | in it."},
                "limits": {"type": ["object", "null"], "properties": {"time": {"type": "string", "pattern": "^[0-9]+(ms|s|m|h|d)$"}}},
                "rules": {"type": "array", "items": {"properties": {"path": {"type": "string"}}, "type": "object"}},
                "runtime": {"oneOf": [
                    {"properties": {"kind": {"const": "own"}}, "description": "Ours."},
                    {"properties": {"kind": {"const": "other"}, "command": {"type": "array", "items": {"type": "string"}, "description": "Its program."}}, "description": "Theirs."},
                ]},
            },
            "required": ["name"],
        });
        let table = field_table(&schema);
        for row in [
            "| `name` | string, required | A &lt;name> with a \\| in it. |",
            "| `limits.time` | duration |  |",
            "| `rules[].path` | string |  |",
            "| `runtime.kind` | `\"own\"` or `\"other\"`, required | `own`: Ours. `other`: Theirs. |",
            "| `runtime.command` | list of string | With `kind` `\"other\"`: Its program. |",
        ] {
            assert!(table.contains(row), "{row} is not in\n{table}");
        }
    }
}
