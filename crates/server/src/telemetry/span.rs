//! One span. Its ids follow from what it tells of, so spans join without anybody remembering them; no
//! argument, result or message is a part of it.

use jiff::{SignedDuration, Timestamp};
use oubliette_protocol::{
    SessionId, Slug,
    debug::{DebugBody, DebugEvent},
};
use serde_json::{Value, json};
use sha2::{Digest as _, Sha256};

/// The longest error text, in characters.
const LONGEST: usize = 512;
/// `SPAN_KIND_INTERNAL` and `SPAN_KIND_CLIENT`.
const INTERNAL: u8 = 1;
const CLIENT: u8 = 3;

/// See the module.
pub(super) struct Span {
    trace: String,
    id: String,
    parent: Option<String>,
    name: String,
    kind: u8,
    began: Timestamp,
    ended: Timestamp,
    attributes: Vec<Value>,
    error: Option<String>,
}

/// A trace's id and its root span's.
fn ids(seed: &str) -> (String, String) {
    let digest = Sha256::digest(seed);
    (hex::encode(&digest[..16]), hex::encode(&digest[16..24]))
}

fn turn_ids(session: &SessionId, turn: u64) -> (String, String) {
    ids(&format!("{session} turn {turn}"))
}

impl Span {
    /// A turn: the root of its trace.
    pub(super) fn turn(
        session: &SessionId,
        turn: u64,
        agent: Option<&Slug>,
        began: Timestamp,
        ended: Timestamp,
    ) -> Self {
        let name = format!("invoke_agent {}", agent.map_or("unknown", Slug::as_str));
        let (trace, id) = turn_ids(session, turn);
        let span = Self {
            trace,
            id,
            parent: None,
            name,
            kind: INTERNAL,
            began,
            ended,
            attributes: Vec::new(),
            error: None,
        };
        span.with("gen_ai.operation.name", "invoke_agent")
            .of_session(session, agent, Some(turn))
    }

    /// What the debugger recorded, if it is something to tell: within its turn, or a trace of its own.
    pub(super) fn of(event: &DebugEvent, session: &SessionId, turn: Option<u64>) -> Option<Self> {
        let (trace, id) = ids(&format!("{session} event {}", event.index));
        let (trace, parent) = match turn.map(|turn| turn_ids(session, turn)) {
            Some((trace, root)) => (trace, Some(root)),
            None => (trace, None),
        };
        let span = |name: String, kind: u8, duration_ms: f64| Self {
            trace,
            id,
            parent,
            name,
            kind,
            began: event
                .ts
                .saturating_sub(SignedDuration::try_from_secs_f64(duration_ms / 1e3).unwrap_or_default())
                .unwrap_or(event.ts),
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
                server,
                error,
                ..
            } => {
                let span = span(format!("execute_tool {tool}"), INTERNAL, *duration_ms)
                    .of_tool(tool, Some(canonical))
                    .with("oubliette.source", json!(source))
                    .with("oubliette.server", json!(server))
                    .with("oubliette.ok", *ok);
                match ok {
                    true => span,
                    false => span.failed(error.as_deref().unwrap_or("the tool reported an error")),
                }
            }
            DebugBody::ToolBlocked {
                tool,
                canonical,
                reason,
                ..
            } => span(format!("execute_tool {tool}"), INTERNAL, 0.0)
                .of_tool(tool, canonical.as_deref())
                .with("oubliette.blocked", true)
                .with("oubliette.ok", false)
                .failed(reason),
            DebugBody::HealthChanged {
                server,
                from,
                to,
                reason,
            } => span(format!("health_changed {server}"), INTERNAL, 0.0)
                .with("oubliette.server", server.as_str())
                .with("oubliette.from", json!(from))
                .with("oubliette.to", json!(to))
                .with("oubliette.reason", json!(reason.as_deref().map(cut))),
            DebugBody::ModelRequest {
                provider,
                path,
                status,
                duration_ms,
            } => {
                let span = span(format!("model_request {provider}"), CLIENT, *duration_ms)
                    .with("gen_ai.provider.name", provider.as_str())
                    .with("url.path", path.as_str())
                    .with("http.response.status_code", *status);
                match status {
                    400.. => span.failed(&format!("status {status}")),
                    _ => span,
                }
            }
            _ => return None,
        };
        Some(span.of_session(session, event.agent.as_ref(), turn))
    }

    fn of_session(self, session: &SessionId, agent: Option<&Slug>, turn: Option<u64>) -> Self {
        self.with("oubliette.session_id", session.as_str())
            .with("gen_ai.agent.name", json!(agent))
            .with("oubliette.agent", json!(agent))
            .with("oubliette.turn", json!(turn))
    }

    fn of_tool(self, tool: &str, canonical: Option<&str>) -> Self {
        self.with("gen_ai.operation.name", "execute_tool")
            .with("gen_ai.tool.name", tool)
            .with("oubliette.tool", tool)
            .with("oubliette.canonical", json!(canonical))
    }

    /// With an attribute, unless it is null.
    pub(super) fn with(mut self, key: &str, value: impl Into<Value>) -> Self {
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

    /// That it went wrong.
    pub(super) fn failed(mut self, why: &str) -> Self {
        self.error = Some(cut(why));
        self.with("oubliette.error", cut(why))
    }

    /// In the JSON form of OTLP: ids in hex, enums as numbers, 64-bit integers as text.
    pub(super) fn json(self) -> Value {
        let mut span = json!({
            "traceId": self.trace,
            "spanId": self.id,
            "name": self.name,
            "kind": self.kind,
            "startTimeUnixNano": self.began.as_nanosecond().to_string(),
            "endTimeUnixNano": self.ended.max(self.began).as_nanosecond().to_string(),
            "attributes": self.attributes,
            "status": self.error.map_or(json!({}), |why| json!({ "code": 2, "message": why })),
        });
        if let Some(parent) = self.parent {
            span["parentSpanId"] = parent.into();
        }
        span
    }
}

fn cut(text: &str) -> String {
    text.chars().take(LONGEST).collect()
}
