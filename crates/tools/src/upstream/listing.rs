//! The tools a server says it has, read page by page and checked before anyone is shown them.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use bytes::Bytes;
use oubliette_protocol::{Object, id::quoted};
use rmcp::{
    RoleClient,
    model::{ClientRequest, ListToolsRequest, ListToolsRequestMethod, PaginatedRequestParams, ServerResult},
    service::{Peer, ServiceError},
};
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};

use super::{
    fault::Fault,
    limits,
    traffic::{Answer, Attached, ForHttp},
};

/// A tool as its server describes it.
#[derive(Debug, Clone, PartialEq)]
pub struct UpstreamTool {
    /// The server's own name for it.
    pub name: Arc<str>,
    /// What it does.
    pub description: String,
    /// A JSON schema of type object.
    pub input_schema: Arc<Value>,
    /// A name for people.
    pub title: Option<String>,
    /// A JSON schema of its structured results.
    pub output_schema: Option<Arc<Value>>,
    /// MCP's hints (`readOnlyHint`, …), as the server gives them. Nothing here relies on them.
    pub annotations: Option<Value>,
    /// What was wrong with the description and how it was put right.
    pub note: Option<String>,
}

/// Asks for every tool.
pub(super) async fn list(peer: &Peer<RoleClient>) -> Result<Vec<UpstreamTool>, Fault> {
    let mut tools = Vec::new();
    let mut cursors = HashSet::new();
    let mut cursor: Option<String> = None;
    for _ in 0..limits::PAGES {
        let page = page(peer, cursor.take()).await?;
        for tool in page.tools {
            if tools.len() >= limits::TOOLS {
                return Err(Fault::new(format!("it lists more than {} tools", limits::TOOLS)));
            }
            match fields(&tool).and_then(|(fields, note)| read(fields, note)) {
                // A name listed twice, or too long, is the registry's to refuse: there it is seen.
                Ok(tool) => tools.push(tool),
                Err(why) => tracing::warn!("a listed tool is left out: {why}"),
            }
        }
        match page.next_cursor {
            None => return Ok(tools),
            Some(next) if cursors.insert(next.clone()) => cursor = Some(next),
            Some(_) => {
                return Err(Fault::new(
                    "its tool list does not end: a page leads back to an earlier one",
                ));
            }
        }
    }
    Err(Fault::new(format!(
        "its tool list has more than {} pages",
        limits::PAGES
    )))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Page {
    /// Read one by one: a tool that is no tool must not cost the others.
    tools: Vec<Box<RawValue>>,
    #[serde(default)]
    next_cursor: Option<String>,
}

/// One page. It is asked for directly rather than through the client's cache, which would answer for the
/// server, and read from what stood on the wire: one tool that is not as it should be must not cost the
/// others.
async fn page(peer: &Peer<RoleClient>, cursor: Option<String>) -> Result<Page, Fault> {
    let answer = Answer::default();
    let mut request = ListToolsRequest {
        method: ListToolsRequestMethod,
        params: cursor.map(|cursor| PaginatedRequestParams::default().with_cursor(Some(cursor))),
        extensions: Default::default(),
    };
    request.extensions.insert(Attached {
        answer: answer.clone(),
        progress: None,
        for_http: ForHttp::Shown,
    });
    let broken = |what: &str| Fault::new(format!("it answered tools/list with {what}"));
    let page = match peer.send_request(ClientRequest::ListToolsRequest(request)).await {
        Ok(ServerResult::EmptyResult(_)) => answer.lock().take(),
        Ok(other) => serde_json::to_vec(&other).ok().map(Bytes::from),
        Err(ServiceError::McpError(error)) if error.code == rmcp::model::ErrorCode::METHOD_NOT_FOUND => {
            return Ok(Page {
                tools: Vec::new(),
                next_cursor: None,
            });
        }
        Err(ServiceError::McpError(error)) => {
            return Err(broken(&format!(
                "the error {} {:?}",
                error.code.0,
                super::fault::bounded(&error.message)
            )));
        }
        Err(error) => return Err(broken(&super::fault::chain(&error))),
    };
    let page: Page = page
        .filter(|page| page.trim_ascii_start().starts_with(b"{"))
        .ok_or_else(|| broken("something else"))
        .and_then(|page| {
            serde_json::from_slice(&page).map_err(|error| broken(&format!("no list of tools: {error}")))
        })?;
    Ok(Page {
        next_cursor: page.next_cursor.filter(|cursor| !cursor.is_empty()),
        ..page
    })
}

/// The fields of one tool, and what was left out of them: what is nested too deep to be read.
fn fields(tool: &RawValue) -> Result<(Object, Option<String>), String> {
    let raw: HashMap<String, &RawValue> =
        serde_json::from_str(tool.get()).map_err(|_| "it is no object".to_owned())?;
    let mut note = None;
    let mut fields = Object::new();
    for (name, value) in raw {
        match serde_json::from_str(value.get()) {
            Ok(value) => drop(fields.insert(name, value)),
            Err(error) if name == "inputSchema" => {
                note = Some(format!(
                    "its schema is replaced by one that takes any object: {error}"
                ));
            }
            Err(_) => {}
        }
    }
    Ok((fields, note))
}

/// Reads one tool, putting right what can be.
fn read(mut tool: Object, note: Option<String>) -> Result<UpstreamTool, String> {
    let name = match tool.remove("name") {
        Some(Value::String(name)) if name.is_empty() => return Err("its name is empty".into()),
        Some(Value::String(name)) if name.chars().any(char::is_control) => {
            return Err(format!("its name has control characters: {}", quoted(&name)));
        }
        // Cut, it is still too long to be called, and no longer so long that it costs anything.
        Some(Value::String(name)) => match name.char_indices().nth(limits::NAME_CHARS) {
            Some((end, _)) => name[..end].to_owned(),
            None => name,
        },
        _ => return Err("it has no name".into()),
    };
    let mut notes: Vec<String> = note.into_iter().collect();
    let mut text = |key: &str| match tool.remove(key) {
        Some(Value::String(mut text)) => {
            if text.len() > limits::DESCRIPTION_BYTES {
                let end = (0..=limits::DESCRIPTION_BYTES)
                    .rev()
                    .find(|&i| text.is_char_boundary(i));
                text.truncate(end.unwrap_or_default());
                notes.push(format!(
                    "its {key} is cut at {} KiB",
                    limits::DESCRIPTION_BYTES / 1024
                ));
            }
            Some(text)
        }
        _ => None,
    };
    let (description, title) = (text("description").unwrap_or_default(), text("title"));
    let input_schema = match tool.remove("inputSchema") {
        None | Some(Value::Null) => json!({ "type": "object" }),
        Some(mut schema) => match check_schema(&schema) {
            Ok(()) => {
                if let Value::Object(object) = &mut schema {
                    object.entry("type").or_insert_with(|| "object".into());
                }
                schema
            }
            Err(why) => {
                notes.push(format!(
                    "its schema is replaced by one that takes any object: {why}"
                ));
                json!({ "type": "object" })
            }
        },
    };
    let output_schema = tool
        .remove("outputSchema")
        .filter(|schema| check_schema(schema).is_ok());
    let annotations = tool
        .remove("annotations")
        .filter(|hints| hints.is_object() && weigh(hints, 0).is_some());
    Ok(UpstreamTool {
        name: name.into(),
        description,
        input_schema: Arc::new(input_schema),
        title,
        output_schema: output_schema.map(Arc::new),
        annotations,
        note: (!notes.is_empty()).then(|| notes.join("; ")),
    })
}

/// Whether a schema is one, of type object, and no bomb.
fn check_schema(schema: &Value) -> Result<(), String> {
    let Value::Object(object) = schema else {
        return Err("it is no object".into());
    };
    if object.get("type").is_some_and(|kind| kind != "object") {
        return Err("its type is not \"object\"".into());
    }
    if weigh(schema, 0).is_none_or(|bytes| bytes > limits::SCHEMA_BYTES) {
        let (bytes, depth) = (limits::SCHEMA_BYTES / 1024, limits::SCHEMA_DEPTH);
        return Err(format!(
            "it is larger than {bytes} KiB or deeper than {depth} levels"
        ));
    }
    // A dialect nobody here knows is taken for the current one.
    let checked = match jsonschema::Draft::default().detect(schema) {
        jsonschema::Draft::Unknown => jsonschema::draft202012::meta::validate(schema),
        _ => jsonschema::meta::validate(schema),
    };
    checked.map_err(|error| {
        let at = error.instance_path().to_string();
        format!("{at}: {}", super::fault::bounded(&error.to_string()))
    })
}

/// The size of a value in bytes of JSON, roughly; `None` past the limits.
fn weigh(value: &Value, depth: usize) -> Option<usize> {
    if depth > limits::SCHEMA_DEPTH {
        return None;
    }
    let bytes = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
        Value::String(text) => text.len() + 2,
        Value::Array(items) => items
            .iter()
            .try_fold(2, |sum, item| Some(sum + 1 + weigh(item, depth + 1)?))?,
        Value::Object(object) => object.iter().try_fold(2, |sum, (key, item)| {
            Some(sum + key.len() + 4 + weigh(item, depth + 1)?)
        })?,
    };
    (bytes <= limits::SCHEMA_BYTES).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<UpstreamTool, String> {
        read_text(&value.to_string())
    }

    fn read_text(text: &str) -> Result<UpstreamTool, String> {
        let raw = RawValue::from_string(text.to_owned()).unwrap();
        fields(&raw).and_then(|(fields, note)| super::read(fields, note))
    }

    #[test]
    fn a_schema_too_deep_to_read_costs_its_tool_the_schema_alone() {
        let deep = format!("{}1{}", "{\"a\":".repeat(100_000), "}".repeat(100_000));
        let tool = read_text(&format!(
            r#"{{"name":"bomb","inputSchema":{deep},"annotations":{deep}}}"#
        ))
        .unwrap();
        assert_eq!(*tool.input_schema, json!({"type":"object"}));
        assert!(tool.note.unwrap().contains("recursion limit"));
    }

    fn schema_note(schema: Value) -> (Value, Option<String>) {
        let tool = read(json!({"name":"t","inputSchema":schema})).unwrap();
        ((*tool.input_schema).clone(), tool.note)
    }

    #[test]
    fn a_schema_that_lies_is_replaced_and_said_so() {
        let mut deep = json!({});
        for _ in 0..100 {
            deep = json!({ "properties": { "a": deep } });
        }
        let wide = json!({"type":"object","description":"x".repeat(limits::SCHEMA_BYTES)});
        for bad in [
            json!("no schema"),
            json!({"type":"string"}),
            json!({"type":"object","properties":7}),
            json!({"type":"object","required":"a"}),
            json!({"type":"object","properties":{"a":{"type":"wrong"}}}),
            deep,
            wide,
        ] {
            let (schema, note) = schema_note(bad);
            assert_eq!(schema, json!({"type":"object"}));
            assert!(note.unwrap().contains("schema is replaced"));
        }
    }

    #[test]
    fn a_good_schema_stays_as_it_is() {
        for good in [
            json!({"type":"object","properties":{"a":{"type":"string","minLength":1}},"required":["a"]}),
            json!({"$schema":"http://json-schema.org/draft-07/schema#","type":"object","additionalProperties":false}),
            json!({"$schema":"urn:nobody:knows","type":"object"}),
        ] {
            assert_eq!(schema_note(good.clone()), (good, None));
        }
        assert_eq!(
            schema_note(json!({"properties":{}})),
            (json!({"properties":{},"type":"object"}), None)
        );
    }

    #[test]
    fn names_nobody_could_call_are_left_out() {
        for bad in [json!(1), json!(""), json!("a\u{0}b"), Value::Null] {
            assert!(read(json!({ "name": bad })).is_err());
        }
        // Too long by far: shown, cut, and still too long to be called.
        let long = read(json!({ "name": "x".repeat(10_000) })).unwrap();
        assert!(long.name.len() == limits::NAME_CHARS && long.name.len() > crate::name::MAX_TOOL);
        assert!(read(json!([])).is_err());
        let tool = read(json!({"name":"a.b/c","description":"d".repeat(100_000)})).unwrap();
        assert_eq!(tool.description.len(), limits::DESCRIPTION_BYTES);
        assert!(tool.note.is_some());
    }
}
