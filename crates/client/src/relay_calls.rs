//! One tool call over the relay socket: the request for its address, and what came of it.

use std::sync::Arc;

use oubliette_handoff::{
    fast_path::CallBackend,
    outcome::{CallAnswer, call_failed},
    progress::Heartbeat,
};
use oubliette_protocol::{
    CallerId, Error,
    relay::{ToolsListedParams, method},
    tool::{CallResult, ToolAddress},
};
use oubliette_relay::{CallOptions, ProgressCallback};
use rmcp::model::Tool;
use serde::Serialize;
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

use crate::{server_connection::ServerConnection, session_tools::SessionTools};

/// Makes calls over the relay socket. Arguments are passed on as the text they came as.
#[derive(Clone)]
pub(crate) struct RelayCalls {
    tools: Arc<SessionTools>,
    server: Arc<ServerConnection>,
    heartbeat: Heartbeat,
}

/// The params of a request. It has no `Debug`: it may carry the agent's key.
#[derive(Serialize)]
#[serde(untagged)]
enum CallParams<'a> {
    /// `caller_tool`.
    Caller {
        tool: &'a str,
        arguments: &'a RawValue,
        #[serde(skip_serializing_if = "Option::is_none")]
        caller_id: Option<&'a CallerId>,
    },
    /// `agent_call_tool`.
    Catalog { tool: &'a str, arguments: &'a RawValue },
    /// `oubliette_call_tool`.
    Oubliette {
        tool: &'a str,
        arguments: &'a RawValue,
        api_key: &'a str,
    },
    /// A base tool's own method.
    Base(&'a RawValue),
}

impl RelayCalls {
    pub(crate) fn new(tools: Arc<SessionTools>, server: Arc<ServerConnection>) -> Self {
        Self {
            tools,
            server,
            heartbeat: Heartbeat::default(),
        }
    }

    pub(crate) fn tools(&self) -> &SessionTools {
        &self.tools
    }

    /// Tells the server which tools the agent has just been shown: it prompts an agent only when the agent knows them.
    pub(crate) async fn report_listed(&self, tools: &[Tool]) {
        if let Some(peer) = self.server.peer() {
            let names = tools.iter().map(|tool| tool.name.to_string()).collect();
            let params = serde_json::json!(ToolsListedParams { tools: names });
            // Without a connection nobody waits for it; the next listing is reported again.
            let _ = peer.notify(method::TOOLS_LISTED, params).await;
        }
    }

    /// Starts a call. Name and arguments are serialized before it returns; dropping the future cancels the call and
    /// tells the server.
    pub(crate) fn start(
        &self,
        name: &str,
        arguments: &RawValue,
        options: CallOptions,
    ) -> impl Future<Output = CallAnswer> + Send + 'static + use<> {
        let address = self.tools.address(name, self.server.key().is_some());
        let prepared = match self.server.peer() {
            Some(peer) => {
                let (method, params) = self.request(&address, arguments);
                peer.prepare_call(method, &params, options).map_err(call_failed)
            }
            None => Err(server_unreachable(self.server.socket())),
        };
        let source = address.source();
        async move {
            match prepared {
                Ok(call) => match call.send_and_wait().await {
                    Ok(raw) => CallAnswer::Received(source, raw),
                    Err(why) => CallAnswer::Failed(call_failed(why)),
                },
                Err(refused) => CallAnswer::Failed(refused),
            }
        }
    }

    /// The method and params of a call to this address.
    fn request<'a>(&'a self, address: &'a ToolAddress, arguments: &'a RawValue) -> (&'a str, CallParams<'a>) {
        match address {
            ToolAddress::Caller { tool, caller_id } => {
                let params = CallParams::Caller {
                    tool,
                    arguments,
                    caller_id: caller_id.as_ref(),
                };
                (method::CALLER_TOOL, params)
            }
            ToolAddress::Catalog(tool) => (method::AGENT_CALL_TOOL, CallParams::Catalog { tool, arguments }),
            ToolAddress::Base(tool) => (tool, CallParams::Base(arguments)),
            ToolAddress::Oubliette(tool) => {
                let api_key = self.server.key().map(|key| key.expose()).unwrap_or_default();
                let params = CallParams::Oubliette {
                    tool,
                    arguments,
                    api_key,
                };
                (method::OUBLIETTE_CALL_TOOL, params)
            }
        }
    }
}

/// A call that was not sent because there is no connection.
fn server_unreachable(socket: std::path::Display<'_>) -> CallResult {
    let text =
        format!("the Oubliette server is not reachable at {socket}; nothing was run. Try again later.");
    CallResult::error(&Error::unavailable(text))
}

impl CallBackend for RelayCalls {
    /// The relay connection has a limit of its own, and its refusal says so.
    const MAX_OPEN_CALLS: usize = usize::MAX;

    fn call(
        &self,
        name: &str,
        arguments: &RawValue,
        cancel: CancellationToken,
        progress: Option<ProgressCallback>,
    ) -> Option<impl Future<Output = CallAnswer> + Send + 'static + use<>> {
        let mut options = CallOptions::default().cancel(cancel);
        if let Some(progress) = progress {
            options = options.on_progress(move |report| progress(report));
        }
        Some(self.start(name, arguments, options))
    }

    fn heartbeat(&self) -> &Heartbeat {
        &self.heartbeat
    }
}
