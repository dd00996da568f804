//! Relay sockets: what agents' clients ask. The socket is the session's identity; nothing said on it can
//! make it another.

use std::{
    collections::HashMap,
    sync::{Arc, Weak},
};

use async_trait::async_trait;
use oubliette_protocol::{
    CallerId, Error, Result, SessionId,
    caller::{Declaration, DeclaredTool, full_name},
    relay::{
        AgentCallParams, CallerToolParams, CallerToolsConfig, OwnCallParams, OwnToolsParams, RpcError, method,
    },
    strict,
    tool::arguments_object,
};
use oubliette_relay::{Handler, Limits, Peer, RequestContext};
use oubliette_session::CallerBook;
use oubliette_tools::{CallContext, Callers as _, Origin, Plane, Wanted};
use parking_lot::Mutex;
use serde::de::DeserializeOwned;
use serde_json::{
    Value, json,
    value::{RawValue, to_raw_value},
};
use tokio::net::UnixStream;

use crate::app::App;

/// Every connection to every relay socket.
pub struct Relay {
    app: Weak<App>,
    open: Arc<Mutex<HashMap<SessionId, Vec<Peer>>>>,
}

/// Connections of one session at once; a sandbox that opens more has them closed.
pub(super) const MOST_CONNECTIONS: usize = 64;

impl Relay {
    /// Of a server that is being made.
    pub fn new(app: Weak<App>) -> Self {
        Self {
            app,
            open: Arc::default(),
        }
    }

    /// Takes a connection over.
    pub fn accept(&self, session: SessionId, stream: UnixStream) {
        let mut open = self.open.lock();
        let peers = open.entry(session.clone()).or_default();
        peers.retain(|peer| !peer.is_closed());
        if peers.len() >= MOST_CONNECTIONS {
            tracing::warn!(%session, "too many connections to a relay socket; one was refused");
            return;
        }
        let handler = Arc::new(Connection {
            app: self.app.clone(),
            session: session.clone(),
        });
        let peer = match Peer::spawn_unix(stream, handler, Limits::default()) {
            Ok((peer, _)) => peer,
            Err(error) => {
                tracing::warn!(%session, %error, "a connection to a relay socket was refused");
                return;
            }
        };
        peers.push(peer.clone());
        drop(open);
        let open = self.open.clone();
        tokio::spawn(async move {
            peer.closed().await;
            let mut open = open.lock();
            if let Some(peers) = open.get_mut(&session) {
                peers.retain(|peer| !peer.is_closed());
                if peers.is_empty() {
                    open.remove(&session);
                }
            }
        });
    }

    /// Hangs up on every connection of a session.
    pub fn close(&self, session: &SessionId) {
        for peer in self.open.lock().remove(session).unwrap_or_default() {
            peer.close();
        }
    }
}

/// One connection.
struct Connection {
    app: Weak<App>,
    session: SessionId,
}

impl Connection {
    fn app(&self) -> Result<Arc<App>> {
        self.app
            .upgrade()
            .ok_or_else(|| Error::unavailable("the server is stopping"))
    }

    async fn plane(&self) -> Result<Arc<Plane>> {
        self.app()?.sessions.plane(&self.session).await
    }

    async fn answer(
        &self,
        method: &str,
        text: Option<Box<RawValue>>,
        context: RequestContext,
    ) -> Result<Box<RawValue>> {
        let params = text.as_deref();
        let (app, plane) = (self.app()?, self.plane().await?);
        let mut origin = Origin::Inside { api_key: None };
        let (wanted, arguments) = match method {
            method::OUBLIETTE_TOOLS => return Box::pin(own_tools(&plane, params)).await,
            method::AGENT_TOOLS => {
                return to_raw(&json!({ "tools": plane.agent_tools(), "base": plane.base_tools() }));
            }
            method::CALLER_TOOL => {
                let CallerToolParams {
                    tool,
                    arguments,
                    caller_id,
                } = read(params)?;
                (Wanted::Caller { tool, caller_id }, arguments)
            }
            method::OUBLIETTE_CALL_TOOL => {
                let OwnCallParams {
                    tool,
                    arguments,
                    api_key,
                } = read(params)?;
                if !plane.hides(&api_key) {
                    Box::pin(hide(&app, &plane, &api_key)).await;
                }
                origin = Origin::Inside {
                    api_key: Some(api_key),
                };
                (Wanted::Own(tool), arguments)
            }
            method::AGENT_CALL_TOOL => {
                let AgentCallParams { tool, arguments } = read(params)?;
                (Wanted::Catalog(tool), arguments)
            }
            base => (Wanted::Base(base.to_owned()), read(params)?),
        };
        let ctx = CallContext {
            cancel: context.cancel.clone(),
            turn: app.sessions.current_turn(&self.session),
            progress: Some(Arc::new(move |p: oubliette_tools::Progress| {
                context.progress(&oubliette_relay::Progress {
                    progress: p.progress,
                    total: p.total,
                    message: p.message,
                });
            })),
        };
        // A call may wait long.
        drop((app, text));
        plane
            .call_raw(wanted, arguments_object(arguments)?, origin, ctx)
            .await
    }
}

/// Good keys are hidden before a call is recorded; a bad one is none, and is refused later.
pub(super) async fn hide(app: &App, plane: &Plane, api_key: &str) {
    if app.auth.token(api_key).await.is_ok() {
        plane.hide(api_key);
    }
}

async fn own_tools(plane: &Plane, params: Option<&RawValue>) -> Result<Box<RawValue>> {
    let OwnToolsParams { api_key } = read(params)?;
    let rows = plane.list_own(&api_key).await?;
    // It is good, so it is worth hiding.
    plane.hide(&api_key);
    let tools: Vec<_> = rows
        .into_iter()
        .filter(|row| row.allowed)
        .map(unprefixed)
        .collect();
    to_raw(&json!({ "tools": tools }))
}

fn to_raw(value: &Value) -> Result<Box<RawValue>> {
    to_raw_value(value).map_err(Error::internal)
}

const METHODS: [&str; 5] = [
    method::CALLER_TOOL,
    method::OUBLIETTE_TOOLS,
    method::OUBLIETTE_CALL_TOOL,
    method::AGENT_TOOLS,
    method::AGENT_CALL_TOOL,
];

fn unprefixed(row: oubliette_protocol::tool::ToolRow) -> Value {
    let name = row
        .name
        .strip_prefix("oubliette_")
        .unwrap_or(&row.name)
        .to_owned();
    json!({ "name": name, "description": row.description, "inputSchema": row.input_schema })
}

fn read<T: DeserializeOwned>(params: Option<&RawValue>) -> Result<T> {
    let params = match params.map(RawValue::get) {
        None | Some("null") => "{}",
        Some(params) => params,
    };
    // Where it was wrong is found out when it was: looking out for it all the time costs more than reading.
    serde_json::from_str(params)
        .or_else(|_| strict::from_str(params).map_err(|refusal| Error::invalid(format!("params: {refusal}"))))
}

#[async_trait]
impl Handler for Connection {
    /// Every caller's tools come before anything else, so that a client knows them before it is asked.
    async fn connected(&self, peer: &Peer) {
        let Ok(app) = self.app() else { return peer.close() };
        let (Ok(book), Ok(plane)) = (app.sessions.callers(&self.session).await, self.plane().await) else {
            return peer.close();
        };
        let (callers, tools) = (book.changes(), plane.changes());
        let mut known = HashMap::new();
        announce(peer, &book, &plane, &mut known).await;
        tokio::spawn(follow(peer.clone(), book, plane, callers, tools, known));
    }

    async fn request_raw(
        &self,
        method: &str,
        params: Option<Box<RawValue>>,
        context: RequestContext,
    ) -> Result<Box<RawValue>, RpcError> {
        if !METHODS.contains(&method) && !method::BASE.contains(&method) {
            return Err(oubliette_relay::error::method_not_found(method));
        }
        let answer = self.answer(method, params, context).await;
        answer.map_err(|error| {
            if error.log.is_some() {
                tracing::error!(session = %self.session, method, error = %error.for_log(), "relay");
            }
            RpcError::from(&error)
        })
    }
}

/// Declarations as they were last sent.
type Known = HashMap<CallerId, Vec<DeclaredTool>>;

/// Sends what changed: a new or other declaration, or an empty one for a caller that withdrew. What the
/// agent's rules deny is not shown.
async fn announce(peer: &Peer, book: &CallerBook, plane: &Plane, known: &mut Known) {
    let shown = |lender: &Declaration| {
        let undenied = lender
            .tools
            .iter()
            .filter(|tool| !plane.denies(&full_name(&lender.caller_id, &tool.name)));
        undenied.map(|tool| tool.declared()).collect::<Vec<_>>()
    };
    let now: Known = book
        .declarations()
        .into_iter()
        .map(|d| (d.caller_id.clone(), shown(&d)))
        .collect();
    let mut configs = Vec::new();
    for (id, tools) in &now {
        if known.get(id) != Some(tools) {
            configs.push(CallerToolsConfig {
                caller_id: id.clone(),
                tools: tools.clone(),
            });
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
        let _ = peer.notify_raw(&config.notification()).await;
    }
}

/// Tells a client of every change, until it goes.
async fn follow(
    peer: Peer,
    book: Arc<CallerBook>,
    plane: Arc<Plane>,
    mut callers: tokio::sync::watch::Receiver<u64>,
    mut tools: tokio::sync::watch::Receiver<u64>,
    mut known: Known,
) {
    loop {
        tokio::select! {
            _ = peer.closed() => return,
            changed = callers.changed() => match changed {
                Ok(()) => announce(&peer, &book, &plane, &mut known).await,
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
                    let _ = peer.notify_raw(&message).await;
                    // The agent's rules may be others.
                    announce(&peer, &book, &plane, &mut known).await;
                }
                Err(_) => return,
            },
        }
    }
}
