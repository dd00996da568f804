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
use serde_json::{Value, json};
use tokio::net::UnixStream;

use crate::app::App;

/// Every connection to every relay socket.
pub struct Relay {
    app: Weak<App>,
    open: Arc<Mutex<HashMap<SessionId, Vec<Peer>>>>,
}

/// Connections of one session at once; a sandbox that opens more has them closed.
const MOST_CONNECTIONS: usize = 64;

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
        let (peer, _) = Peer::spawn(stream, handler, Limits::default());
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
        // Boxed: thousands of calls may wait at once, and none needs this room by then.
        Box::pin(self.app()?.sessions.plane(&self.session)).await
    }

    async fn answer(&self, method: &str, params: Value, context: &RequestContext) -> Result<Value> {
        let app = self.app()?;
        let plane = self.plane().await?;
        let reports = context.clone();
        let ctx = CallContext {
            cancel: context.cancel.clone(),
            progress: Some(Arc::new(move |p: oubliette_tools::Progress| {
                reports.progress(&oubliette_relay::Progress {
                    progress: p.progress,
                    total: p.total,
                    message: p.message,
                });
            })),
            turn: app.sessions.current_turn(&self.session),
        };
        let keyless = Origin::Inside { api_key: None };
        match method {
            method::CALLER_TOOL => {
                let CallerToolParams {
                    tool,
                    arguments,
                    caller_id,
                } = read(params)?;
                let wanted = Wanted::Caller { tool, caller_id };
                plane
                    .call_value(wanted, arguments_object(arguments)?, keyless, ctx)
                    .await
            }
            method::OUBLIETTE_TOOLS => {
                let OwnToolsParams { api_key } = read(params)?;
                let rows = Box::pin(plane.list_own(&api_key)).await?;
                // It is good, so it is worth hiding.
                plane.hide(&api_key);
                let tools: Vec<_> = rows
                    .into_iter()
                    .filter(|row| row.allowed)
                    .map(unprefixed)
                    .collect();
                Ok(json!({ "tools": tools }))
            }
            method::OUBLIETTE_CALL_TOOL => {
                let OwnCallParams {
                    tool,
                    arguments,
                    api_key,
                } = read(params)?;
                // Good keys are hidden before the call is recorded; a bad one is none, and is refused below.
                if !plane.hides(&api_key) && Box::pin(app.auth.token(&api_key)).await.is_ok() {
                    plane.hide(&api_key);
                }
                let origin = Origin::Inside {
                    api_key: Some(api_key),
                };
                plane
                    .call_value(Wanted::Own(tool), arguments_object(arguments)?, origin, ctx)
                    .await
            }
            method::AGENT_TOOLS => Ok(json!({ "tools": plane.agent_tools(), "base": plane.base_tools() })),
            method::AGENT_CALL_TOOL => {
                let AgentCallParams { tool, arguments } = read(params)?;
                let result = plane
                    .call(Wanted::Catalog(tool), arguments_object(arguments)?, keyless, ctx)
                    .await?;
                serde_json::to_value(result).map_err(Error::internal)
            }
            base => {
                let arguments = arguments_object(Some(params))?;
                plane
                    .call_value(Wanted::Base(base.to_owned()), arguments, keyless, ctx)
                    .await
            }
        }
    }
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

fn read<T: DeserializeOwned>(params: Value) -> Result<T> {
    let params = if params.is_null() { json!({}) } else { params };
    strict::from_value(params).map_err(|refusal| Error::invalid(format!("params: {refusal}")))
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

    async fn request(&self, method: &str, params: Value, context: RequestContext) -> Result<Value, RpcError> {
        if !METHODS.contains(&method) && !method::BASE.contains(&method) {
            return Err(oubliette_relay::error::method_not_found(method));
        }
        self.answer(method, params, &context).await.map_err(|error| {
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
