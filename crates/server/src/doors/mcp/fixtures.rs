//! Tools that the MCP conformance suite calls, which answer with content, progress, logs and errors that our own tools
//! never produce. They exist only in a server started with `serve --test-fixtures`.

#![allow(deprecated, reason = "older revisions have what newer ones deprecate")]

use rmcp::{
    ErrorData, RoleServer,
    model::{
        CallToolRequestParams, CallToolResponse, CallToolResult, ClientCapabilities, ContentBlock,
        InputRequiredResult, InputResponses, LoggingLevel, LoggingMessageNotificationParam,
        ProgressNotificationParam, ResourceContents, Tool,
    },
    service::RequestContext,
};
use serde_json::{Value, json};

use super::handler::{is_legacy, wants_events};

/// The environment variable that must be set besides the flag, so that fixtures are not served by mistake.
pub(crate) const ENABLE_VARIABLE: &str = "OUBLIETTE_TEST_FIXTURES";

/// A PNG of one red pixel.
const PNG: &str =
    "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mP8z8DwHwAFBQIAX8jx0gAAAABJRU5ErkJggg==";
/// A WAV without samples.
const WAV: &str = "UklGRiQAAABXQVZFZm10IBAAAAABAAEAQB8AAEAfAAABAAgAZGF0YQAAAAA=";

const NAMES: &[&str] = &[
    "test_simple_text",
    "test_image_content",
    "test_audio_content",
    "test_embedded_resource",
    "test_multiple_content_types",
    "test_error_handling",
    "test_tool_with_progress",
    "test_tool_with_logging",
    "test_logging_tool",
    "test_missing_capability",
    "test_streaming_elicitation",
    "test_input_required_result_elicitation",
    "test_custom_header",
    "json_schema_2020_12_tool",
];

/// All fixture tools.
pub(crate) fn tools() -> impl Iterator<Item = Tool> {
    NAMES.iter().copied().map(tool)
}

/// Finds a fixture tool.
pub(crate) fn find(name: &str) -> Option<Tool> {
    NAMES.iter().copied().find(|n| *n == name).map(tool)
}

fn tool(name: &'static str) -> Tool {
    let schema = match schema(name) {
        Value::Object(schema) => schema,
        _ => serde_json::Map::new(),
    };
    Tool::new(name, "A fixture of the MCP conformance suite.", schema)
}

fn schema(name: &str) -> Value {
    match name {
        "test_custom_header" => json!({
            "type": "object",
            "properties": { "region": { "type": "string", "x-mcp-header": "Region" } },
        }),
        "json_schema_2020_12_tool" => json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "type": "object",
            "$defs": { "address": {
                "$anchor": "addressDef",
                "type": "object",
                "properties": { "street": { "type": "string" }, "city": { "type": "string" } },
            } },
            "properties": {
                "name": { "type": "string" },
                "address": { "$ref": "#/$defs/address" },
                "contactMethod": { "type": "string", "enum": ["phone", "email"] },
                "phone": { "type": "string" },
                "email": { "type": "string" },
            },
            "allOf": [{ "anyOf": [{ "required": ["phone"] }, { "required": ["email"] }] }],
            "if": { "properties": { "contactMethod": { "const": "phone" } }, "required": ["contactMethod"] },
            "then": { "required": ["phone"] },
            "else": { "required": ["email"] },
            "additionalProperties": false,
        }),
        _ => json!({ "type": "object" }),
    }
}

/// Calls a fixture tool.
pub(crate) async fn call(
    request: CallToolRequestParams,
    context: RequestContext<RoleServer>,
) -> Result<CallToolResponse, ErrorData> {
    let content = match request.name.as_ref() {
        "test_image_content" => vec![ContentBlock::image(PNG, "image/png")],
        "test_audio_content" => vec![ContentBlock::audio(WAV, "audio/wav")],
        "test_embedded_resource" => vec![embedded(
            "test://embedded-resource",
            "text/plain",
            "An embedded resource.",
        )],
        "test_multiple_content_types" => vec![
            ContentBlock::text("Three of a kind:"),
            ContentBlock::image(PNG, "image/png"),
            embedded(
                "test://mixed-content-resource",
                "application/json",
                r#"{"test":"data","value":123}"#,
            ),
        ],
        "test_error_handling" => {
            return Ok(CallToolResult::error(vec![ContentBlock::text("It fails by design.")]).into());
        }
        "test_tool_with_progress" => {
            send_progress(&context).await;
            done()
        }
        "test_tool_with_logging" | "test_logging_tool" => {
            send_log_lines(&context).await;
            done()
        }
        "test_missing_capability" => {
            require_sampling(&context)?;
            done()
        }
        "test_streaming_elicitation" | "test_input_required_result_elicitation" => {
            return elicit_name(request.input_responses.as_ref());
        }
        _ => done(),
    };
    Ok(CallToolResult::success(content).into())
}

fn done() -> Vec<ContentBlock> {
    vec![ContentBlock::text("Done.")]
}

fn embedded(uri: &str, mime: &str, text: &str) -> ContentBlock {
    ContentBlock::resource(ResourceContents::text(text, uri).with_mime_type(mime))
}

async fn send_progress(context: &RequestContext<RoleServer>) {
    let Some(token) = context.meta.get_progress_token() else {
        return;
    };
    for progress in [0.0, 50.0, 100.0] {
        let progress = ProgressNotificationParam::new(token.clone(), progress).with_total(100.0);
        let _ = context.peer.notify_progress(progress).await;
    }
}

async fn send_log_lines(context: &RequestContext<RoleServer>) {
    if !is_legacy(context) && !wants_events(context) {
        return;
    }
    for line in ["started", "at work", "done"] {
        let line = LoggingMessageNotificationParam::new(LoggingLevel::Info, json!(line));
        let _ = context.peer.notify_logging_message(line).await;
    }
}

fn require_sampling(context: &RequestContext<RoleServer>) -> Result<(), ErrorData> {
    match context
        .client_capabilities()
        .is_some_and(|c| c.sampling.is_some())
    {
        true => Ok(()),
        false => Err(ErrorData::missing_required_client_capability(
            ClientCapabilities::builder().enable_sampling().build(),
        )),
    }
}

/// Greets the user by name, or asks for the name if the request holds none.
fn elicit_name(responses: Option<&InputResponses>) -> Result<CallToolResponse, ErrorData> {
    let given = responses
        .and_then(|r| r.get("user_name"))
        .and_then(|r| r["content"]["name"].as_str());
    if let Some(name) = given {
        return Ok(CallToolResult::success(vec![ContentBlock::text(format!("Hello, {name}!"))]).into());
    }
    let schema =
        json!({ "type": "object", "properties": { "name": { "type": "string" } }, "required": ["name"] });
    let params = json!({ "message": "What is your name?", "requestedSchema": schema });
    let wanted = json!({ "user_name": { "method": "elicitation/create", "params": params } });
    let wanted =
        serde_json::from_value(wanted).map_err(|e| ErrorData::internal_error(e.to_string(), None))?;
    Ok(InputRequiredResult::from_input_requests(wanted).into())
}
