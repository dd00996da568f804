//! The relay socket's words: JSON-RPC 2.0, one message a line.

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{CallerId, Error, ErrorCode, caller::DeclaredTool};

/// Where the socket is in the sandbox.
pub const SOCKET_PATH: &str = "/mcp/relay.sock";
/// The socket beside it that a client lends its stdin and stdout over.
pub const STDIO_SOCKET_PATH: &str = "/mcp/stdio.sock";
/// The same without its directory.
pub const STDIO_SOCKET_NAME: &str = "stdio.sock";
/// The environment variable that says where the socket is.
pub const SOCKET_ENV: &str = "OUBLIETTE_SOCKET";
/// The environment variable that holds the agent's key.
pub const KEY_ENV: &str = "OUBLIETTE_API_KEY";
/// Longest line, newline excluded.
pub const MAX_LINE: usize = 16 * 1024 * 1024;
/// Longest path of a Unix socket.
pub const MAX_SOCKET_PATH: usize = 107;

/// Methods the client calls.
pub mod method {
    /// Calls a tool of a caller.
    pub const CALLER_TOOL: &str = "caller_tool";
    /// Lists Oubliette's own tools for a key.
    pub const OUBLIETTE_TOOLS: &str = "oubliette_tools";
    /// Calls one of them.
    pub const OUBLIETTE_CALL_TOOL: &str = "oubliette_call_tool";
    /// Lists the catalog tools of the session's agent.
    pub const AGENT_TOOLS: &str = "agent_tools";
    /// Calls one of them.
    pub const AGENT_CALL_TOOL: &str = "agent_call_tool";
    /// Base tool: starts or messages a child session.
    pub const SESSION_MESSAGE: &str = "session_message";
    /// Base tool: reads a session's events.
    pub const SESSION_EVENTS: &str = "session_events";
    /// Base tool: lists projects.
    pub const PROJECT_LIST: &str = "project_list";
    /// Notification: gives up on a request.
    pub const CANCEL: &str = "cancel";
    /// Notification, server → client: a caller's tools.
    pub const CALLER_TOOLS_CONFIG: &str = "caller_tools_config";
    /// Notification, server → client: the agent's tools changed.
    pub const AGENT_TOOLS_CHANGED: &str = "agent_tools_changed";
    /// Notification, server → client: a request is still being worked on.
    pub const PROGRESS: &str = "progress";
    /// The base tools.
    pub const BASE: [&str; 3] = [SESSION_MESSAGE, SESSION_EVENTS, PROJECT_LIST];
}

/// Not JSON.
pub const PARSE_ERROR: i64 = -32700;
/// Not a request.
pub const INVALID_REQUEST: i64 = -32600;
/// No such method.
pub const METHOD_NOT_FOUND: i64 = -32601;
/// Wrong params.
pub const INVALID_PARAMS: i64 = -32602;

/// `caller_tool`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallerToolParams {
    /// The tool, unprefixed.
    pub tool: String,
    /// Its arguments.
    #[serde(default)]
    pub arguments: Option<Value>,
    /// Whose, when two callers declare the name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caller_id: Option<CallerId>,
}

/// `oubliette_tools`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnToolsParams {
    /// The agent's key.
    pub api_key: String,
}

/// `oubliette_call_tool`.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OwnCallParams {
    /// The tool, unprefixed.
    pub tool: String,
    /// Its arguments.
    #[serde(default)]
    pub arguments: Option<Value>,
    /// The agent's key.
    pub api_key: String,
}

/// `agent_call_tool`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentCallParams {
    /// Any of the tool's names.
    pub tool: String,
    /// Its arguments.
    #[serde(default)]
    pub arguments: Option<Value>,
}

/// `caller_tools_config`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CallerToolsConfig {
    /// Whose.
    pub caller_id: CallerId,
    /// Its tools; empty when withdrawn.
    pub tools: Vec<DeclaredTool>,
}

impl CallerToolsConfig {
    /// The notification as it goes on the wire: `type` beside `method`, for clients that read either.
    pub fn notification(&self) -> Value {
        json!({
            "jsonrpc": "2.0",
            "method": method::CALLER_TOOLS_CONFIG,
            "type": method::CALLER_TOOLS_CONFIG,
            "params": self,
        })
    }
}

/// An error object of JSON-RPC.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RpcError {
    /// Its code.
    pub code: i64,
    /// For people.
    pub message: String,
    /// `{"code": <section 4 code>}` and more.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub data: Option<Value>,
}

impl From<&Error> for RpcError {
    fn from(error: &Error) -> Self {
        Self {
            code: error.code.rpc_code(),
            message: error.message.clone(),
            data: Some(json!({ "code": error.code })),
        }
    }
}

impl From<RpcError> for Error {
    fn from(error: RpcError) -> Self {
        let named = error.data.as_ref().and_then(|d| d.get("code"));
        let code = named.and_then(|c| serde_json::from_value::<ErrorCode>(c.clone()).ok());
        let code = code.unwrap_or(match error.code {
            INVALID_PARAMS | INVALID_REQUEST | PARSE_ERROR => ErrorCode::InvalidArgument,
            METHOD_NOT_FOUND => ErrorCode::NotFound,
            -32001 => ErrorCode::Unauthenticated,
            -32002 => ErrorCode::PermissionDenied,
            -32003 => ErrorCode::NotAllowed,
            -32004 => ErrorCode::Timeout,
            -32005 => ErrorCode::CallerDisconnected,
            _ => ErrorCode::ToolError,
        });
        Error::new(code, error.message)
    }
}
