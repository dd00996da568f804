//! Events of the debugger's log: context builds and teardowns, tool calls, blocked calls, health changes.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    SessionId, Slug,
    approval::{ApprovalDecision, ApprovalRequest},
    size::json_bytes,
    tool::{HealthStatus, ToolSource},
    usage::RequestUsage,
};

/// One event of the debugger's log.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct DebugEvent {
    /// Position in the log, which is one for the whole server.
    pub index: i64,
    /// When it happened (RFC 3339); for a call, when it ended.
    #[schemars(with = "String")]
    pub ts: jiff::Timestamp,
    /// The session it belongs to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// The agent it belongs to, if any.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<Slug>,
    /// The event's kind and fields.
    #[serde(flatten)]
    pub body: DebugBody,
}

/// Kind and fields of a debugger event.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[allow(
    missing_docs,
    reason = "the fields are the contract's, named after what they hold"
)]
pub enum DebugBody {
    /// An agent's context (tool servers, registry, memory) is being built.
    BuildStarted { servers: Vec<String> },
    /// A tool server is being started or connected to.
    ToolServerStarting {
        server: String,
        transport: String,
        attempt: u32,
    },
    /// A tool server's handshake is done and its tools are listed.
    ToolServerReady {
        server: String,
        tools: usize,
        took_ms: u64,
    },
    /// A tool server could not be started, or went down.
    ToolServerFailed {
        server: String,
        error: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stderr: Option<String>,
    },
    /// A tool server was stopped.
    ToolServerStopped { server: String, reason: String },
    /// A tool was added to the agent's registry.
    ToolRegistered {
        tool: String,
        canonical: String,
        server: String,
        allowed: bool,
        available: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The image of the session's sandboxes is being pulled.
    ImageProgress { image: String, status: String },
    /// The image of the session's sandboxes is there.
    ImageReady { image: String, digest: String },
    /// The agent's memory was opened.
    MemoryOpened { entries: u64 },
    /// The context is ready.
    BuildFinished { tools: usize, took_ms: u64 },
    /// `session_switch_agent` was called.
    SwitchRequested { from: Slug, to: Slug },
    /// A switch waits for the running turn and its calls to end.
    DrainStarted { in_flight: usize, timeout_ms: u64 },
    /// They did not end within the timeout; the rest is cancelled.
    DrainTimeout { cancelled: usize, waited_ms: u64 },
    /// No turn and no call is running any more.
    DrainFinished { drained: bool, took_ms: u64 },
    /// The old context is being torn down.
    TeardownStarted {},
    /// The old context's tools were removed from the registry.
    RegistryCleared { tools: usize },
    /// The teardown is complete.
    TeardownFinished { took_ms: u64 },
    /// A call was let through by the tool plane and ended.
    ToolCall {
        tool: String,
        canonical: String,
        source: ToolSource,
        arguments: Value,
        ok: bool,
        duration_ms: f64,
        /// When the call began. Absent in events of older versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<String>")]
        started: Option<jiff::Timestamp>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        server: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        turn: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        result: Option<Value>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// A call was refused by the tool plane.
    ToolBlocked {
        tool: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        canonical: Option<String>,
        reason: String,
        /// When the call came in. Absent in events of older versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<String>")]
        started: Option<jiff::Timestamp>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        turn: Option<u64>,
    },
    /// A call waits for a person to allow it.
    ApprovalRequested(ApprovalRequest),
    /// An approval was decided, or ended undecided.
    ApprovalDecided(ApprovalDecision),
    /// A tool server's health status changed.
    HealthChanged {
        server: String,
        from: HealthStatus,
        to: HealthStatus,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// An answer to a caller tool request was refused.
    AnswerRefused { request_id: String, reason: String },
    /// An agent asked for permission over ACP, and was answered. `gated`: the request is about a tool of the tool
    /// plane, which checks the call itself. `answer`: `allow`, `deny` or `cancelled`.
    Permission {
        tool: String,
        gated: bool,
        answer: String,
    },
    /// An agent has not connected to its tools after its start.
    AgentWithoutTools { reason: String },
    /// A session exceeded a limit, `disk` or `debugger`: everything of it was stopped, or its tool calls are refused.
    LimitExceeded { limit: String, reason: String },
    /// The model forwarder made a request to a model provider.
    ModelRequest {
        provider: String,
        path: String,
        status: u16,
        duration_ms: f64,
        /// When the request began. Absent in events of older versions.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        #[schemars(with = "Option<String>")]
        started: Option<jiff::Timestamp>,
        /// What it used. Absent if it asked no model for an answer, and in events of older versions.
        #[serde(flatten)]
        usage: Option<RequestUsage>,
    },
    /// A sandbox connected to a host through the proxy, made a request to a service of `[upstreams]`, or was refused it.
    Egress {
        host: String,
        port: u16,
        /// Whether the rules let it through; it may have failed all the same.
        allowed: bool,
        /// The entry that allowed it: of `egress`, or a path of the service's `allow`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        rule: Option<String>,
        /// From the host into the sandbox.
        bytes_in: u64,
        /// From the sandbox to the host.
        bytes_out: u64,
        duration_ms: f64,
        /// When it began.
        #[schemars(with = "String")]
        started: jiff::Timestamp,
        /// The tool server that made it; absent: the agent itself.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        server: Option<String>,
        /// Why it was refused or failed.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
        /// The service's request, for services of `[upstreams]`.
        #[serde(default, skip_serializing_if = "Option::is_none", flatten)]
        request: Option<ServiceRequest>,
    },
    /// More connections than the debugger records one by one: these were only counted.
    EgressOmitted {
        connections: u64,
        bytes_in: u64,
        bytes_out: u64,
    },
}

/// A request to a service of `[upstreams]`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub struct ServiceRequest {
    /// The service's name.
    pub upstream: String,
    /// The HTTP method.
    pub method: String,
    /// The path, relative to the service's `base_url` and without a query.
    pub path: String,
    /// The HTTP status that the sandbox got.
    pub status: u16,
}

impl DebugBody {
    /// The event's `kind` on the wire.
    pub fn kind(&self) -> &'static str {
        match self {
            DebugBody::BuildStarted { .. } => "build_started",
            DebugBody::ToolServerStarting { .. } => "tool_server_starting",
            DebugBody::ToolServerReady { .. } => "tool_server_ready",
            DebugBody::ToolServerFailed { .. } => "tool_server_failed",
            DebugBody::ToolServerStopped { .. } => "tool_server_stopped",
            DebugBody::ToolRegistered { .. } => "tool_registered",
            DebugBody::MemoryOpened { .. } => "memory_opened",
            DebugBody::BuildFinished { .. } => "build_finished",
            DebugBody::SwitchRequested { .. } => "switch_requested",
            DebugBody::DrainStarted { .. } => "drain_started",
            DebugBody::DrainTimeout { .. } => "drain_timeout",
            DebugBody::DrainFinished { .. } => "drain_finished",
            DebugBody::ImageProgress { .. } => "image_progress",
            DebugBody::ImageReady { .. } => "image_ready",
            DebugBody::TeardownStarted {} => "teardown_started",
            DebugBody::RegistryCleared { .. } => "registry_cleared",
            DebugBody::TeardownFinished { .. } => "teardown_finished",
            DebugBody::ToolCall { .. } => "tool_call",
            DebugBody::ToolBlocked { .. } => "tool_blocked",
            DebugBody::ApprovalRequested(_) => "approval_requested",
            DebugBody::ApprovalDecided(_) => "approval_decided",
            DebugBody::HealthChanged { .. } => "health_changed",
            DebugBody::AnswerRefused { .. } => "answer_refused",
            DebugBody::Permission { .. } => "permission",
            DebugBody::AgentWithoutTools { .. } => "agent_without_tools",
            DebugBody::LimitExceeded { .. } => "limit_exceeded",
            DebugBody::ModelRequest { .. } => "model_request",
            DebugBody::Egress { .. } => "egress",
            DebugBody::EgressOmitted { .. } => "egress_omitted",
        }
    }
}

/// Maximum size of the arguments or the result in one event, in bytes of JSON.
pub const MAX_RECORDED_BYTES: usize = 64 * 1024;

/// Returns `value`, or, if it is larger than [`MAX_RECORDED_BYTES`], an object with its size and its beginning.
pub fn truncate_recorded(value: Value) -> Value {
    if json_bytes(&value) <= MAX_RECORDED_BYTES {
        return value;
    }
    let text = value.to_string();
    let end = (0..=MAX_RECORDED_BYTES)
        .rev()
        .find(|&i| text.is_char_boundary(i))
        .unwrap_or(0);
    serde_json::json!({ "truncated": true, "bytes": text.len(), "start": &text[..end] })
}

/// A text longer than this is cut by [`shorten_texts`], in bytes.
const LONG_TEXT_BYTES: usize = 2 * 1024;
/// What is kept of it, in bytes.
const TEXT_START_BYTES: usize = 1024;

/// Returns `value`, or, if it is larger than [`MAX_RECORDED_BYTES`], the same with its long texts cut one by one, so that no
/// field is hidden behind a long one. What is too large even then is cut as a whole, as by [`truncate_recorded`].
pub fn shorten_texts(mut value: Value) -> Value {
    if json_bytes(&value) > MAX_RECORDED_BYTES {
        cut_texts(&mut value);
    }
    truncate_recorded(value)
}

fn cut_texts(value: &mut Value) {
    match value {
        Value::String(text) if text.len() > LONG_TEXT_BYTES => {
            let bytes = text.len();
            text.truncate(text.floor_char_boundary(TEXT_START_BYTES));
            text.push_str(&format!("… ({bytes} bytes in all)"));
        }
        Value::Array(items) => items.iter_mut().for_each(cut_texts),
        Value::Object(fields) => fields.values_mut().for_each(cut_texts),
        _ => {}
    }
}
