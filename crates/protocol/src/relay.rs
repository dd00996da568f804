//! The relay socket's protocol: JSON-RPC 2.0, one message a line. Methods, their parameters and error codes.

use std::sync::Arc;

use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use crate::{CallerId, Error, ErrorCode, caller::DeclaredTool};

/// Path of the relay socket in the sandbox.
pub const SOCKET_PATH: &str = "/mcp/relay.sock";
/// Path, in the sandbox, of the socket over which a client hands its stdin and stdout to the server.
pub const HANDOFF_SOCKET_PATH: &str = "/mcp/stdio.sock";
/// File name of [`HANDOFF_SOCKET_PATH`].
pub const HANDOFF_SOCKET_NAME: &str = "stdio.sock";
/// Environment variable with the path of the relay socket.
pub const SOCKET_ENV: &str = "OUBLIETTE_SOCKET";
/// Environment variable with the path of the hand-off socket. A client hands its stdin and stdout off only where it is
/// set: in a local sandbox, where no agent outlives the server.
pub const HANDOFF_SOCKET_ENV: &str = "OUBLIETTE_HANDOFF_SOCKET";
/// Environment variable with the agent's API key.
pub const KEY_ENV: &str = "OUBLIETTE_API_KEY";
/// Environment variable with the bearer token that an `oubliette-client` which serves HTTP asks for.
pub const HTTP_TOKEN_ENV: &str = "OUBLIETTE_MCP_TOKEN";
/// Maximum length of a line in bytes, without its newline.
pub const MAX_LINE_BYTES: usize = 16 * 1024 * 1024;

/// Method names of requests and notifications, from the client unless noted.
pub mod method {
    /// Calls a tool that a caller lent.
    pub const CALLER_TOOL: &str = "caller_tool";
    /// Lists Oubliette's own tools that an API key may call.
    pub const OUBLIETTE_TOOLS: &str = "oubliette_tools";
    /// Calls one of Oubliette's own tools under an API key.
    pub const OUBLIETTE_CALL_TOOL: &str = "oubliette_call_tool";
    /// Lists the tools of the session's agent.
    pub const AGENT_TOOLS: &str = "agent_tools";
    /// Calls one of the agent's tools.
    pub const AGENT_CALL_TOOL: &str = "agent_call_tool";
    /// Base tool: starts or messages a child session.
    pub const SESSION_MESSAGE: &str = "session_message";
    /// Base tool: reads a session's events.
    pub const SESSION_EVENTS: &str = "session_events";
    /// Base tool: lists projects.
    pub const PROJECT_LIST: &str = "project_list";
    /// Notification: the client has listed tools to its agent.
    pub const TOOLS_LISTED: &str = "tools_listed";
    /// Notification: cancels a request.
    pub const CANCEL: &str = "cancel";
    /// Notification, server → client: the tools a caller lends now.
    pub const CALLER_TOOLS_CONFIG: &str = "caller_tools_config";
    /// Notification, server → client: the agent's tools changed.
    pub const AGENT_TOOLS_CHANGED: &str = "agent_tools_changed";
    /// Notification, server → client: a request is still being worked on.
    pub const PROGRESS: &str = "progress";
    /// The base tools, which every agent has.
    pub const BASE_TOOLS: [&str; 3] = [SESSION_MESSAGE, SESSION_EVENTS, PROJECT_LIST];
}

/// JSON-RPC: the line is not JSON.
pub const PARSE_ERROR: i64 = -32700;
/// JSON-RPC: not a valid request object.
pub const INVALID_REQUEST: i64 = -32600;
/// JSON-RPC: unknown method.
pub const METHOD_NOT_FOUND: i64 = -32601;
/// JSON-RPC: invalid parameters.
pub const INVALID_PARAMS: i64 = -32602;

/// Parameters of `caller_tool`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallerToolParams {
    /// Name of the tool, without the caller id.
    pub tool: String,
    /// Its arguments, an object; absent: none.
    #[serde(default)]
    pub arguments: Option<Value>,
    /// The caller that lent it; needed only if two callers lent a tool of this name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub caller_id: Option<CallerId>,
}

/// Parameters of `oubliette_tools`. No `Debug`: it holds a key.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OublietteToolsParams {
    /// The agent's API key.
    pub api_key: String,
}

/// Parameters of `oubliette_call_tool`. No `Debug`: it holds a key.
#[derive(Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OublietteCallToolParams {
    /// Name of the tool, without the prefix `oubliette_`.
    pub tool: String,
    /// Its arguments, an object; absent: none.
    #[serde(default)]
    pub arguments: Option<Value>,
    /// The agent's API key.
    pub api_key: String,
}

/// Parameters of `agent_call_tool`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct AgentCallToolParams {
    /// Any name of the tool: listed name, alias or canonical name.
    pub tool: String,
    /// Its arguments, an object; absent: none.
    #[serde(default)]
    pub arguments: Option<Value>,
}

/// Parameters of `tools_listed`.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ToolsListedParams {
    /// The names as the agent was shown them.
    pub tools: Vec<String>,
}

/// Parameters of `caller_tools_config`.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct CallerToolsConfig {
    /// The caller.
    pub caller_id: CallerId,
    /// All tools it lends; empty when it withdrew them.
    pub tools: Vec<DeclaredTool>,
}

impl CallerToolsConfig {
    /// The whole JSON-RPC notification. It has `type` as well as `method`, for clients that read either.
    pub fn notification(&self) -> Value {
        json!({
            "jsonrpc": "2.0",
            "method": method::CALLER_TOOLS_CONFIG,
            "type": method::CALLER_TOOLS_CONFIG,
            "params": self,
        })
    }
}

/// Progress of a request or tool call, with the fields of MCP's `notifications/progress`.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
pub struct ProgressReport {
    /// How much is done; grows with every report.
    pub progress: f64,
    /// The value of `progress` at the end, if known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<f64>,
    /// A text for people.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub message: Option<String>,
}

/// Receives the progress of one request or call. Called on the task that reads the connection: it must not block.
pub type ProgressCallback = Arc<dyn Fn(ProgressReport) + Send + Sync>;

/// A JSON-RPC error object.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RpcError {
    /// JSON-RPC error code.
    pub code: i64,
    /// Text for people.
    pub message: String,
    /// `{"code": <ErrorCode>}`, possibly with more fields.
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
