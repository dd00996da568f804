//! One span. Its ids are derived from session, turn and event index, so that a call's span finds its turn's trace
//! without any table of ids. Arguments, results and messages are never part of a span.

use jiff::{SignedDuration, Timestamp};
use oubliette_protocol::{
    SessionId, Slug,
    debug::{DebugBody, DebugEvent},
};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// Maximum length of an error text, in characters.
const MAX_ERROR_CHARS: usize = 512;
/// The number of OTLP's `SPAN_KIND_INTERNAL`.
const SPAN_KIND_INTERNAL: u8 = 1;
/// The number of OTLP's `SPAN_KIND_CLIENT`.
const SPAN_KIND_CLIENT: u8 = 3;

/// A span as OTLP defines it: named, timed, part of a trace.
pub(super) struct OtlpSpan {
    trace: String,
    id: String,
    parent: Option<String>,
    name: String,
    kind: u8,
    started: Timestamp,
    ended: Timestamp,
    attributes: Vec<Value>,
    error: Option<String>,
}

/// Derives a trace's id and a span's id from a text.
fn derive_ids(seed: &str) -> (String, String) {
    let digest = Sha256::digest(seed);
    (hex::encode(&digest[..16]), hex::encode(&digest[16..24]))
}

/// The ids of a turn's trace and of its root span.
fn turn_ids(session: &SessionId, turn: u64) -> (String, String) {
    derive_ids(&format!("{session} turn {turn}"))
}

impl OtlpSpan {
    /// The span of a turn: the root of its trace.
    pub(super) fn for_turn(
        session: &SessionId,
        turn: u64,
        agent: Option<&Slug>,
        started: Timestamp,
        ended: Timestamp,
    ) -> Self {
        let name = format!("invoke_agent {}", agent.map_or("unknown", Slug::as_str));
        let (trace, id) = turn_ids(session, turn);
        let span = Self {
            trace,
            id,
            parent: None,
            name,
            kind: SPAN_KIND_INTERNAL,
            started,
            ended,
            attributes: Vec::new(),
            error: None,
        };
        span.with_attribute("gen_ai.operation.name", "invoke_agent")
            .with_session(session, agent, Some(turn))
    }

    /// The span of a debugger event, within its turn's trace or else in a trace of its own. `None` for kinds that are
    /// not exported.
    pub(super) fn from_debug_event(
        event: &DebugEvent,
        session: &SessionId,
        turn: Option<u64>,
    ) -> Option<Self> {
        let (trace, id) = derive_ids(&format!("{session} event {}", event.index));
        let (trace, parent) = match turn.map(|turn| turn_ids(session, turn)) {
            Some((trace, root)) => (trace, Some(root)),
            None => (trace, None),
        };
        // Events of older versions have no start.
        let began = |started: Option<Timestamp>, duration_ms: f64| {
            let duration = SignedDuration::try_from_secs_f64(duration_ms / 1e3).unwrap_or_default();
            started.or_else(|| event.ts.saturating_sub(duration).ok())
        };
        let span = |name: String, kind: u8, started: Option<Timestamp>| Self {
            trace,
            id,
            parent,
            name,
            kind,
            started: started.unwrap_or(event.ts),
            ended: event.ts,
            attributes: Vec::new(),
            error: None,
        };
        let span = match &event.body {
            DebugBody::ToolCall {
                tool,
                canonical,
                source,
                ok,
                duration_ms,
                started,
                server,
                error,
                ..
            } => {
                let span = span(
                    format!("execute_tool {tool}"),
                    SPAN_KIND_INTERNAL,
                    began(*started, *duration_ms),
                )
                .with_tool(tool, Some(canonical))
                .with_attribute("oubliette.source", json!(source))
                .with_attribute("oubliette.server", json!(server))
                .with_attribute("oubliette.ok", *ok);
                match ok {
                    true => span,
                    false => span.with_error(error.as_deref().unwrap_or("the tool reported an error")),
                }
            }
            DebugBody::ToolBlocked {
                tool,
                canonical,
                reason,
                started,
                ..
            } => span(format!("execute_tool {tool}"), SPAN_KIND_INTERNAL, *started)
                .with_tool(tool, canonical.as_deref())
                .with_attribute("oubliette.blocked", true)
                .with_attribute("oubliette.ok", false)
                .with_error(reason),
            DebugBody::HealthChanged {
                server,
                from,
                to,
                reason,
            } => span(format!("health_changed {server}"), SPAN_KIND_INTERNAL, None)
                .with_attribute("oubliette.server", server.as_str())
                .with_attribute("oubliette.from", json!(from))
                .with_attribute("oubliette.to", json!(to))
                .with_attribute("oubliette.reason", json!(reason.as_deref().map(truncate_error))),
            DebugBody::ModelRequest {
                provider,
                path,
                status,
                duration_ms,
                started,
                usage,
            } => {
                let mut span = span(
                    format!("model_request {provider}"),
                    SPAN_KIND_CLIENT,
                    began(*started, *duration_ms),
                )
                .with_attribute("gen_ai.provider.name", provider.as_str())
                .with_attribute("url.path", path.as_str())
                .with_attribute("http.response.status_code", *status);
                if let Some(usage) = usage {
                    span = span
                        .with_attribute("gen_ai.request.model", usage.model.as_str())
                        .with_attribute("gen_ai.usage.input_tokens", usage.input_tokens)
                        .with_attribute("gen_ai.usage.output_tokens", usage.output_tokens);
                }
                match status {
                    400.. => span.with_error(&format!("status {status}")),
                    _ => span,
                }
            }
            _ => return None,
        };
        Some(span.with_session(session, event.agent.as_ref(), turn))
    }

    fn with_session(self, session: &SessionId, agent: Option<&Slug>, turn: Option<u64>) -> Self {
        self.with_attribute("oubliette.session_id", session.as_str())
            .with_attribute("gen_ai.agent.name", json!(agent))
            .with_attribute("oubliette.agent", json!(agent))
            .with_attribute("oubliette.turn", json!(turn))
    }

    fn with_tool(self, tool: &str, canonical: Option<&str>) -> Self {
        self.with_attribute("gen_ai.operation.name", "execute_tool")
            .with_attribute("gen_ai.tool.name", tool)
            .with_attribute("oubliette.tool", tool)
            .with_attribute("oubliette.canonical", json!(canonical))
    }

    /// Adds an attribute, unless its value is null.
    pub(super) fn with_attribute(mut self, key: &str, value: impl Into<Value>) -> Self {
        let value = match value.into() {
            Value::Null => return self,
            Value::Bool(value) => json!({ "boolValue": value }),
            Value::Number(value) => json!({ "intValue": value.to_string() }),
            Value::String(value) => json!({ "stringValue": value }),
            value => json!({ "stringValue": value.to_string() }),
        };
        self.attributes.push(json!({ "key": key, "value": value }));
        self
    }

    /// Marks the span as failed, with the (shortened) error text.
    pub(super) fn with_error(mut self, why: &str) -> Self {
        self.error = Some(truncate_error(why));
        self.with_attribute("oubliette.error", truncate_error(why))
    }

    /// The span in OTLP's JSON form: ids in hex, enums as numbers, 64-bit integers as text.
    pub(super) fn into_json(self) -> Value {
        let mut span = json!({
            "traceId": self.trace,
            "spanId": self.id,
            "name": self.name,
            "kind": self.kind,
            "startTimeUnixNano": self.started.as_nanosecond().to_string(),
            "endTimeUnixNano": self.ended.max(self.started).as_nanosecond().to_string(),
            "attributes": self.attributes,
            "status": self.error.map_or(json!({}), |why| json!({ "code": 2, "message": why })),
        });
        if let Some(parent) = self.parent {
            span["parentSpanId"] = parent.into();
        }
        span
    }
}

fn truncate_error(text: &str) -> String {
    text.chars().take(MAX_ERROR_CHARS).collect()
}
