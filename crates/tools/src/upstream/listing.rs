//! Reads a server's tool list page by page and checks every tool before it is shown to anyone.

use std::{
    collections::{HashMap, HashSet},
    sync::Arc,
};

use oubliette_protocol::{JsonObject, id::quoted};
use rmcp::{
    RoleClient,
    model::{ClientRequest, ListToolsRequest, ListToolsRequestMethod, PaginatedRequestParams, ServerResult},
    service::{Peer, ServiceError},
};
use serde::Deserialize;
use serde_json::{Value, json, value::RawValue};

use crate::registry::ToolInfo;

use super::{
    fault::UpstreamFault,
    limits,
    traffic::{HttpResultVisibility, ReceivedResult, RequestAttachment, ResultSlot},
};

/// Reads all pages of `tools/list`. Invalid tools are left out or corrected; a list that does not end is a fault.
pub(super) async fn list_tools(peer: &Peer<RoleClient>) -> Result<Vec<Arc<ToolInfo>>, UpstreamFault> {
    let mut tools = Vec::new();
    let mut cursors = HashSet::new();
    let mut cursor: Option<String> = None;
    for _ in 0..limits::MAX_PAGES {
        let page = request_page(peer, cursor.take()).await?;
        if tools.len() + page.tools.len() > limits::MAX_TOOLS {
            return Err(UpstreamFault::new(format!(
                "it lists more than {} tools",
                limits::MAX_TOOLS
            )));
        }
        tools.extend(parse_tools(page.tools).await?);
        match page.next_cursor {
            None => return Ok(tools),
            Some(next) if cursors.insert(next.clone()) => cursor = Some(next),
            Some(_) => {
                return Err(UpstreamFault::new(
                    "its tool list does not end: a page leads back to an earlier one",
                ));
            }
        }
    }
    Err(UpstreamFault::new(format!(
        "its tool list has more than {} pages",
        limits::MAX_PAGES
    )))
}

/// Parses the tools of a page, a large one where nobody has to wait for it.
async fn parse_tools(tools: Vec<Box<RawValue>>) -> Result<Vec<Arc<ToolInfo>>, UpstreamFault> {
    let bytes: usize = tools.iter().map(|tool| tool.get().len()).sum();
    let parse = move || {
        let parse = |tool: &RawValue| parse_fields(tool).and_then(|(fields, note)| parse_tool(fields, note));
        let mut parsed = Vec::with_capacity(tools.len());
        for tool in &tools {
            match parse(tool) {
                // A repeated or over-long name is kept: the registry refuses it, where users see the reason.
                Ok(tool) => parsed.push(Arc::new(tool)),
                Err(why) => tracing::warn!("tools/list: an invalid tool is left out: {why}"),
            }
        }
        parsed
    };
    if bytes <= limits::MAX_PARSED_INLINE {
        return Ok(parse());
    }
    let parsed = tokio::task::spawn_blocking(parse).await;
    parsed.map_err(|_| UpstreamFault::new("its tool list could not be parsed"))
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct ToolPage {
    /// Unparsed, so that one invalid tool does not fail the page.
    tools: Vec<Box<RawValue>>,
    #[serde(default)]
    next_cursor: Option<String>,
}

/// Requests one page. Not through the library's list methods: their cache may answer in the server's place, and
/// their types reject a page with one invalid tool, so the page is parsed from its text on the wire.
async fn request_page(peer: &Peer<RoleClient>, cursor: Option<String>) -> Result<ToolPage, UpstreamFault> {
    let result_slot = ResultSlot::default();
    let mut request = ListToolsRequest {
        method: ListToolsRequestMethod,
        params: cursor.map(|cursor| PaginatedRequestParams::default().with_cursor(Some(cursor))),
        extensions: Default::default(),
    };
    request.extensions.insert(RequestAttachment {
        result_slot: result_slot.clone(),
        progress: None,
        http_visibility: HttpResultVisibility::Shown,
    });
    let broken = |what: &str| UpstreamFault::new(format!("it answered tools/list with {what}"));
    let page = match peer.send_request(ClientRequest::ListToolsRequest(request)).await {
        Ok(ServerResult::EmptyResult(_)) => {
            let received = result_slot.lock().take();
            let received = received.transpose();
            received.map_err(|over| UpstreamFault::new(format!("its list of tools was not kept: {over}")))?
        }
        Ok(other) => serde_json::to_vec(&other).ok().map(|text| ReceivedResult {
            text: text.into(),
            charge: None,
        }),
        Err(ServiceError::McpError(error)) if error.code == rmcp::model::ErrorCode::METHOD_NOT_FOUND => {
            return Ok(ToolPage {
                tools: Vec::new(),
                next_cursor: None,
            });
        }
        Err(ServiceError::McpError(error)) => {
            return Err(broken(&format!(
                "the error {} {:?}",
                error.code.0,
                super::fault::truncate_error(&error.message)
            )));
        }
        Err(error) => return Err(broken(&super::fault::error_chain(&error))),
    };
    let page: ToolPage = page
        .filter(|page| page.text.trim_ascii_start().starts_with(b"{"))
        .ok_or_else(|| broken("something else"))
        .and_then(|page| {
            serde_json::from_slice(&page.text).map_err(|error| broken(&format!("no list of tools: {error}")))
        })?;
    Ok(ToolPage {
        next_cursor: page.next_cursor.filter(|cursor| !cursor.is_empty()),
        ..page
    })
}

/// The valid tools of a page; none if it is no page.
pub(super) fn parse_page(page: &[u8]) -> Option<Vec<ToolInfo>> {
    let page: ToolPage = serde_json::from_slice(page).ok()?;
    let tools = page.tools.iter();
    let valid = tools.filter_map(|tool| {
        let (fields, note) = parse_fields(tool).ok()?;
        parse_tool(fields, note).ok()
    });
    Some(valid.collect())
}

/// Parses the fields of one tool. A field nested too deep to parse is left out; for the input schema a note says
/// so.
fn parse_fields(tool: &RawValue) -> Result<(JsonObject, Option<String>), String> {
    let raw: HashMap<String, &RawValue> =
        serde_json::from_str(tool.get()).map_err(|_| "it is no object".to_owned())?;
    let mut note = None;
    let mut fields = JsonObject::new();
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

/// Checks one tool and corrects what can be corrected; the corrections are in its note.
fn parse_tool(mut tool: JsonObject, note: Option<String>) -> Result<ToolInfo, String> {
    let name = match tool.remove("name") {
        Some(Value::String(name)) if name.is_empty() => return Err("its name is empty".into()),
        Some(Value::String(name)) if name.chars().any(char::is_control) => {
            return Err(format!("its name has control characters: {}", quoted(&name)));
        }
        // The cut name is still too long to be registered, so the registry reports it, and costs little memory.
        Some(Value::String(name)) => match name.char_indices().nth(limits::MAX_NAME_CHARS) {
            Some((end, _)) => name[..end].to_owned(),
            None => name,
        },
        _ => return Err("it has no name".into()),
    };
    let mut notes: Vec<String> = note.into_iter().collect();
    let mut text = |key: &str| match tool.remove(key) {
        Some(Value::String(mut text)) => {
            if text.len() > limits::MAX_DESCRIPTION_BYTES {
                let end = (0..=limits::MAX_DESCRIPTION_BYTES)
                    .rev()
                    .find(|&i| text.is_char_boundary(i));
                text.truncate(end.unwrap_or_default());
                notes.push(format!(
                    "its {key} is cut at {} KiB",
                    limits::MAX_DESCRIPTION_BYTES / 1024
                ));
            }
            Some(text)
        }
        _ => None,
    };
    let description = text("description").unwrap_or_default();
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
    Ok(ToolInfo {
        name: name.into(),
        description,
        input_schema: Arc::new(input_schema),
        note: (!notes.is_empty()).then(|| notes.join("; ")),
    })
}

/// Checks that a schema is a valid JSON schema of type object, within the limits on size and depth.
fn check_schema(schema: &Value) -> Result<(), String> {
    let Value::Object(object) = schema else {
        return Err("it is no object".into());
    };
    if object.get("type").is_some_and(|kind| kind != "object") {
        return Err("its type is not \"object\"".into());
    }
    if json_size(schema, 0).is_none_or(|bytes| bytes > limits::MAX_SCHEMA_BYTES) {
        let (bytes, depth) = (limits::MAX_SCHEMA_BYTES / 1024, limits::MAX_SCHEMA_DEPTH);
        return Err(format!(
            "it is larger than {bytes} KiB or deeper than {depth} levels"
        ));
    }
    oubliette_protocol::argument_schema::check_schema(schema)
}

/// The approximate size of a value in bytes of JSON; `None` beyond the schema limits on size or depth.
fn json_size(value: &Value, depth: usize) -> Option<usize> {
    if depth > limits::MAX_SCHEMA_DEPTH {
        return None;
    }
    let bytes = match value {
        Value::Null | Value::Bool(_) | Value::Number(_) => 8,
        Value::String(text) => text.len() + 2,
        Value::Array(items) => items
            .iter()
            .try_fold(2, |sum, item| Some(sum + 1 + json_size(item, depth + 1)?))?,
        Value::Object(object) => object.iter().try_fold(2, |sum, (key, item)| {
            Some(sum + key.len() + 4 + json_size(item, depth + 1)?)
        })?,
    };
    (bytes <= limits::MAX_SCHEMA_BYTES).then_some(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: Value) -> Result<ToolInfo, String> {
        read_text(&value.to_string())
    }

    fn read_text(text: &str) -> Result<ToolInfo, String> {
        let raw = RawValue::from_string(text.to_owned()).unwrap();
        parse_fields(&raw).and_then(|(fields, note)| super::parse_tool(fields, note))
    }

    #[test]
    fn a_schema_too_deep_to_parse_is_replaced_and_the_tool_kept() {
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
    fn an_invalid_schema_is_replaced_with_a_note() {
        let mut deep = json!({});
        for _ in 0..100 {
            deep = json!({ "properties": { "a": deep } });
        }
        let wide = json!({"type":"object","description":"x".repeat(limits::MAX_SCHEMA_BYTES)});
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
    fn a_valid_schema_is_kept_unchanged() {
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
    fn tools_with_invalid_names_are_left_out() {
        for bad in [json!(1), json!(""), json!("a\u{0}b"), Value::Null] {
            assert!(read(json!({ "name": bad })).is_err());
        }
        // An over-long name is cut, but stays too long to be registered.
        let long = read(json!({ "name": "x".repeat(10_000) })).unwrap();
        assert!(long.name.len() == limits::MAX_NAME_CHARS && long.name.len() > crate::name::MAX_TOOL_NAME);
        assert!(read(json!([])).is_err());
        let tool = read(json!({"name":"a.b/c","description":"d".repeat(100_000)})).unwrap();
        assert_eq!(tool.description.len(), limits::MAX_DESCRIPTION_BYTES);
        assert!(tool.note.is_some());
    }
}
