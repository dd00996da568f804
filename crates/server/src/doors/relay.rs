//! The relay door: JSON-RPC requests of `oubliette-client` in a sandbox. The socket a connection came by identifies
//! its session; nothing in a message can change that.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use async_trait::async_trait;
use oubliette_os::{UntrustedSocket, UntrustedStream};
use oubliette_protocol::{
    ByteBudget, CallerId, Error, Result, SessionId,
    caller::{CallerDeclaration, full_name},
    relay::{
        AgentCallToolParams, CallerToolParams, CallerToolsConfig, OublietteCallToolParams,
        OublietteToolsParams, RpcError, ToolsListedParams, method,
    },
    strict,
    tool::{OWN_PREFIX, ToolAddress, arguments_object},
};
use oubliette_relay::{PeerHandler, PeerLimits, RequestContext, RpcPeer};
use oubliette_session::CallerRelay;
use oubliette_tools::{CallContext, CallOrigin, CallerTools as _, ToolPlane};
use serde::de::DeserializeOwned;
use serde_json::{
    Value, json,
    value::{RawValue, to_raw_value},
};

use super::connections::{ConnectionTable, TooManyConnections};
use crate::app::App;

/// The open connections to all relay sockets.
pub(crate) struct RelayConnections {
    app: Weak<App>,
    open: ConnectionTable<RpcPeer>,
}

impl RelayConnections {
    /// For a server that is still being constructed.
    pub(crate) fn new(app: Weak<App>) -> Self {
        Self {
            app,
            open: ConnectionTable::default(),
        }
    }

    /// Serves a new connection to a session's relay socket.
    pub(crate) fn accept(&self, session: SessionId, socket: UntrustedSocket, buffers: ByteBudget) {
        let handler = Arc::new(RelayConnection {
            app: self.app.clone(),
            session: session.clone(),
        });
        let spawn = || {
            let stream = UntrustedStream::new(socket)?;
            let limits = PeerLimits {
                budget: buffers,
                ..PeerLimits::default()
            };
            let (peer, _) = RpcPeer::spawn_unix(stream, handler, limits);
            Ok::<_, std::io::Error>(peer)
        };
        let peer = match self.open.add(&session, spawn) {
            Ok(Ok(peer)) => peer,
            Ok(Err(error)) => {
                tracing::warn!(%session, %error, "relay connection refused: the peer could not be started");
                return;
            }
            Err(TooManyConnections) => {
                tracing::warn!(%session, "relay connection refused: the session has too many");
                return;
            }
        };
        let open = self.open.clone();
        tokio::spawn(async move {
            peer.wait_closed().await;
            open.remove_closed(&session);
        });
    }

    /// Closes every connection of a session.
    pub(crate) fn close(&self, session: &SessionId) {
        self.open.close_all(session);
    }
}

/// Handles the requests of one connection.
struct RelayConnection {
    app: Weak<App>,
    session: SessionId,
}

impl RelayConnection {
    fn app(&self) -> Result<Arc<App>> {
        self.app
            .upgrade()
            .ok_or_else(|| Error::unavailable("the server is stopping"))
    }

    async fn plane(&self) -> Result<Arc<ToolPlane>> {
        self.app()?.sessions.plane(&self.session).await
    }

    async fn dispatch(
        &self,
        method: &str,
        text: Option<Box<RawValue>>,
        context: RequestContext,
    ) -> Result<Box<RawValue>> {
        let params = text.as_deref();
        let (app, plane) = (self.app()?, self.plane().await?);
        let mut origin = CallOrigin::Inside { api_key: None };
        let (tool, arguments) = match method {
            method::OUBLIETTE_TOOLS => return Box::pin(list_own_tools(&plane, params)).await,
            method::AGENT_TOOLS => {
                return to_raw(&json!({ "tools": plane.agent_tools(), "base": plane.base_tools() }));
            }
            method::CALLER_TOOL => {
                let CallerToolParams {
                    tool,
                    arguments,
                    caller_id,
                } = parse_params(params)?;
                (ToolAddress::Caller { tool, caller_id }, arguments)
            }
            method::OUBLIETTE_CALL_TOOL => {
                let OublietteCallToolParams {
                    tool,
                    arguments,
                    api_key,
                } = parse_params(params)?;
                if !plane.is_hidden(&api_key) {
                    Box::pin(hide_valid_key(&app, &plane, &api_key)).await;
                }
                origin = CallOrigin::Inside {
                    api_key: Some(api_key),
                };
                (ToolAddress::Oubliette(tool), arguments)
            }
            method::AGENT_CALL_TOOL => {
                let AgentCallToolParams { tool, arguments } = parse_params(params)?;
                (ToolAddress::Catalog(tool), arguments)
            }
            base => (ToolAddress::Base(base.to_owned()), parse_params(params)?),
        };
        let ctx = CallContext {
            cancel: context.cancel.clone(),
            turn: app.sessions.current_turn(&self.session),
            progress: Some(Arc::new(move |report| context.report_progress(&report))),
        };
        // A call may wait for minutes; it must not keep the server or the request's text alive.
        drop((app, text));
        let called = plane
            .call_raw(tool, arguments_object(arguments)?, origin, ctx)
            .await;
        let (_, answer) = called?;
        Ok(answer)
    }
}

/// Has the plane mask a valid key in records of calls, before the call that carries it is recorded. An invalid key is
/// no secret; the call is refused later.
pub(super) async fn hide_valid_key(app: &App, plane: &ToolPlane, api_key: &str) {
    if app.auth.authenticate_token(api_key).await.is_ok() {
        plane.hide_secret(api_key);
    }
}

async fn list_own_tools(plane: &ToolPlane, params: Option<&RawValue>) -> Result<Box<RawValue>> {
    let OublietteToolsParams { api_key } = parse_params(params)?;
    let rows = plane.list_own(&api_key).await?;
    // The listing succeeded, so the key is valid and has to be masked in records.
    plane.hide_secret(&api_key);
    let tools: Vec<_> = rows
        .into_iter()
        .filter(|row| row.allowed)
        .map(tool_without_prefix)
        .collect();
    to_raw(&json!({ "tools": tools }))
}

fn to_raw(value: &Value) -> Result<Box<RawValue>> {
    to_raw_value(value).map_err(Error::internal)
}

/// The methods served here, besides the base tools, which are methods too.
const METHODS: [&str; 5] = [
    method::CALLER_TOOL,
    method::OUBLIETTE_TOOLS,
    method::OUBLIETTE_CALL_TOOL,
    method::AGENT_TOOLS,
    method::AGENT_CALL_TOOL,
];

/// One of Oubliette's own tools as the client lists it: without the `oubliette_` prefix.
fn tool_without_prefix(row: oubliette_protocol::tool::ListedTool) -> Value {
    let name = row.name.strip_prefix(OWN_PREFIX).unwrap_or(&row.name).to_owned();
    json!({ "name": name, "description": row.description, "inputSchema": row.input_schema })
}

fn parse_params<T: DeserializeOwned>(params: Option<&RawValue>) -> Result<T> {
    let params = match params.map(RawValue::get) {
        None | Some("null") => "{}",
        Some(params) => params,
    };
    // Parsed again only after a failure: tracking the path to the offending field costs more than parsing itself.
    serde_json::from_str(params)
        .or_else(|_| strict::from_str(params).map_err(|refusal| Error::invalid(format!("params: {refusal}"))))
}

#[async_trait]
impl PeerHandler for RelayConnection {
    /// Sends every caller's tools before anything else, so that a client knows them before its agent lists tools.
    async fn connected(&self, peer: &RpcPeer) {
        let Ok(app) = self.app() else { return peer.close() };
        let (Ok(book), Ok(plane)) = (app.sessions.callers(&self.session).await, self.plane().await) else {
            return peer.close();
        };
        let (callers, tools) = (book.changes(), plane.changes());
        let mut known = HashMap::new();
        send_changed_declarations(peer, &book, &plane, &mut known).await;
        tokio::spawn(forward_changes(peer.clone(), book, plane, callers, tools, known));
    }

    fn notification(&self, method: &str, params: Value, _: &RpcPeer) {
        if method == method::TOOLS_LISTED
            && let Ok(listed) = serde_json::from_value::<ToolsListedParams>(params)
            && let Ok(app) = self.app()
        {
            app.sessions.tools_listed(&self.session, listed.tools);
        }
    }

    async fn request_raw(
        &self,
        method: &str,
        params: Option<Box<RawValue>>,
        context: RequestContext,
    ) -> Result<Box<RawValue>, RpcError> {
        if !METHODS.contains(&method) && !method::BASE_TOOLS.contains(&method) {
            return Err(oubliette_relay::error::method_not_found(method));
        }
        let answer = self.dispatch(method, params, context).await;
        answer.map_err(|error| {
            if error.has_cause() {
                tracing::error!(session = %self.session, method, error = %error.for_log(), "relay request failed");
            }
            RpcError::from(&error)
        })
    }
}

/// Hashes of the tools last sent to a client, by caller. The tools themselves would be kept once for each connection.
type SentDeclarations = HashMap<CallerId, u64>;

/// Sends the declarations that changed since they were last sent; an empty one for a caller that withdrew. Tools the
/// agent's rules deny are left out.
async fn send_changed_declarations(
    peer: &RpcPeer,
    book: &CallerRelay,
    plane: &ToolPlane,
    known: &mut SentDeclarations,
) {
    let shown = |lender: &CallerDeclaration| {
        let undenied = lender
            .tools
            .iter()
            .filter(|tool| !plane.denies(&full_name(&lender.caller_id, &tool.name)));
        undenied.map(|tool| tool.declared()).collect::<Vec<_>>()
    };
    let mut now = SentDeclarations::new();
    let mut configs = Vec::new();
    for declaration in book.declarations() {
        let config = CallerToolsConfig {
            caller_id: declaration.caller_id.clone(),
            tools: shown(&declaration),
        };
        let hash = oubliette_os::fnv1a(config.notification().to_string().as_bytes());
        now.insert(config.caller_id.clone(), hash);
        if known.get(&config.caller_id) != Some(&hash) {
            configs.push(config);
        }
    }
    for id in known.keys().filter(|id| !now.contains_key(*id)) {
        configs.push(CallerToolsConfig {
            caller_id: id.clone(),
            tools: Vec::new(),
        });
    }
    *known = now;
    for config in configs {
        let _ = peer.send_raw(&config.notification()).await;
    }
}

/// Sends a client every change of callers' and agent's tools, until it disconnects.
async fn forward_changes(
    peer: RpcPeer,
    book: Arc<CallerRelay>,
    plane: Arc<ToolPlane>,
    mut callers: tokio::sync::watch::Receiver<u64>,
    mut tools: tokio::sync::watch::Receiver<u64>,
    mut known: SentDeclarations,
) {
    loop {
        tokio::select! {
            _ = peer.wait_closed() => return,
            changed = callers.changed() => match changed {
                Ok(()) => send_changed_declarations(&peer, &book, &plane, &mut known).await,
                Err(_) => return,
            },
            changed = tools.changed() => match changed {
                Ok(()) => {
                    let message = json!({
                        "jsonrpc": "2.0",
                        "method": method::AGENT_TOOLS_CHANGED,
                        "type": method::AGENT_TOOLS_CHANGED,
                        "params": {},
                    });
                    let _ = peer.send_raw(&message).await;
                    // The agent's deny rules may have changed too.
                    send_changed_declarations(&peer, &book, &plane, &mut known).await;
                }
                Err(_) => return,
            },
        }
    }
}
