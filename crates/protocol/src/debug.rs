//! What the debugger records: context builds, teardowns, tool calls, blocks and health changes.

use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{
    SessionId, Slug,
    size::json_bytes,
    tool::{Light, Source},
};

/// One entry of the debugger's log. `index` is server-wide.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct DebugEvent {
    /// Its place in the log.
    pub index: i64,
    /// When it was written.
    pub ts: jiff::Timestamp,
    /// Which session.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub session_id: Option<SessionId>,
    /// Which agent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub agent: Option<Slug>,
    /// What happened.
    #[serde(flatten)]
    pub body: DebugBody,
}

/// What happened.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[allow(
    missing_docs,
    reason = "the fields are the contract's, named after what they hold"
)]
pub enum DebugBody {
    /// A context is being built.
    BuildStarted { servers: Vec<String> },
    /// A tool server is being started or connected to.
    ToolServerStarting {
        server: String,
        transport: String,
        attempt: u32,
    },
    /// Its handshake is done and its tools are listed.
    ToolServerReady {
        server: String,
        tools: usize,
        took_ms: u64,
    },
    /// It could not be started, or went down.
    ToolServerFailed {
        server: String,
        error: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        stderr: Option<String>,
    },
    /// It was stopped.
    ToolServerStopped { server: String, reason: String },
    /// A tool was taken into the registry.
    ToolRegistered {
        tool: String,
        canonical: String,
        server: String,
        allowed: bool,
        available: bool,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// The agent's memory was opened.
    MemoryOpened { entries: u64 },
    /// The context is ready.
    BuildFinished { tools: usize, took_ms: u64 },
    /// Somebody asked for another agent.
    SwitchRequested { from: Slug, to: Slug },
    /// Waiting for what is in flight.
    DrainStarted { in_flight: usize, timeout_ms: u64 },
    /// It took too long; what is left is cancelled.
    DrainTimeout { cancelled: usize, waited_ms: u64 },
    /// Nothing is in flight any more.
    DrainFinished { drained: bool, took_ms: u64 },
    /// The old context is being taken down.
    TeardownStarted {},
    /// Its tools are gone.
    RegistryCleared { tools: usize },
    /// Nothing of it is left.
    TeardownFinished { took_ms: u64 },
    /// A call passed the gate.
    ToolCall {
        tool: String,
        canonical: String,
        source: Source,
        arguments: Value,
        ok: bool,
        duration_ms: f64,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        server: Option<String>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        turn: Option<u64>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        result: Option<Value>,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        error: Option<String>,
    },
    /// A call was stopped at the gate.
    ToolBlocked {
        tool: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        canonical: Option<String>,
        reason: String,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        turn: Option<u64>,
    },
    /// A tool server's light changed.
    HealthChanged {
        server: String,
        from: Light,
        to: Light,
        #[serde(default, skip_serializing_if = "Option::is_none")]
        reason: Option<String>,
    },
    /// An answer to a caller tool request was refused.
    AnswerRefused { request_id: String, reason: String },
    /// A model was asked through the server.
    ModelRequest {
        provider: String,
        path: String,
        status: u16,
        duration_ms: f64,
    },
}

impl DebugBody {
    /// The `kind` on the wire.
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
            DebugBody::TeardownStarted {} => "teardown_started",
            DebugBody::RegistryCleared { .. } => "registry_cleared",
            DebugBody::TeardownFinished { .. } => "teardown_finished",
            DebugBody::ToolCall { .. } => "tool_call",
            DebugBody::ToolBlocked { .. } => "tool_blocked",
            DebugBody::HealthChanged { .. } => "health_changed",
            DebugBody::AnswerRefused { .. } => "answer_refused",
            DebugBody::ModelRequest { .. } => "model_request",
        }
    }
}

/// The most of one argument or result object the debugger keeps, in bytes of JSON.
pub const KEEP_BYTES: usize = 64 * 1024;

/// `value`, or a note of its size with its beginning when it is larger than the debugger keeps.
pub fn kept(value: Value) -> Value {
    if json_bytes(&value) <= KEEP_BYTES {
        return value;
    }
    let text = value.to_string();
    let end = (0..=KEEP_BYTES)
        .rev()
        .find(|&i| text.is_char_boundary(i))
        .unwrap_or(0);
    serde_json::json!({ "truncated": true, "bytes": text.len(), "start": &text[..end] })
}
