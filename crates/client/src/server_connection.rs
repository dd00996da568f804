//! The connection to the server over the relay socket: connecting, loading the session's tools, reconnecting.

use std::{path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use oubliette_os::{DescriptorWorker, UntrustedStream};
use oubliette_protocol::{
    ErrorCode,
    relay::{CallerToolsConfig, OublietteToolsParams, method},
    tool::ToolSpec,
};
use oubliette_relay::{CallError, CallOptions, PeerHandler, PeerLimits, RpcPeer};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{net::UnixStream, sync::Notify};

use crate::session_tools::{AgentTools, SessionTools};

/// The first wait before connecting again; each further one is twice as long.
const MIN_BACKOFF: Duration = Duration::from_millis(10);
/// The longest wait before connecting again.
const MAX_BACKOFF: Duration = Duration::from_millis(500);
/// How long the server may take to list tools.
const LIST_TIMEOUT: Duration = Duration::from_secs(30);

/// The agent's API key. It has no `Debug`: it is sent to the server and written nowhere else.
#[derive(Clone)]
pub(crate) struct AgentKey(Arc<str>);

impl AgentKey {
    pub(crate) fn new(key: String) -> Self {
        Self(key.into())
    }

    /// The key itself, for the params of relay requests only.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

/// The connection to the server; a task of its own keeps it up.
pub(crate) struct ServerConnection {
    socket: PathBuf,
    key: Option<AgentKey>,
    tools: Arc<SessionTools>,
    peer: ArcSwapOption<RpcPeer>,
}

/// How far a connection came.
enum ConnectionOutcome {
    /// It ended before the tools were loaded.
    NothingLoaded,
    /// The tools were loaded.
    ToolsLoaded,
}

/// Whether `oubliette_tools` has been answered. It is asked once; a lost connection is no answer.
enum OublietteToolsRequest {
    Unanswered,
    /// Answered, or not needed because there is no key.
    Done,
}

impl ServerConnection {
    /// Connects, and keeps connecting, in a task of its own.
    pub(crate) fn start(socket: PathBuf, key: Option<AgentKey>, tools: Arc<SessionTools>) -> Arc<Self> {
        let connection = Arc::new(Self {
            socket,
            key,
            tools,
            peer: ArcSwapOption::empty(),
        });
        tokio::spawn(connection.clone().run());
        connection
    }

    /// The peer to call; none while there is no connection.
    pub(crate) fn peer(&self) -> Option<Arc<RpcPeer>> {
        self.peer.load_full().filter(|peer| !peer.is_closed())
    }

    pub(crate) fn key(&self) -> Option<&AgentKey> {
        self.key.as_ref()
    }

    pub(crate) fn socket(&self) -> std::path::Display<'_> {
        self.socket.display()
    }

    async fn run(self: Arc<Self>) {
        let mut own = match self.key {
            Some(_) => OublietteToolsRequest::Unanswered,
            None => OublietteToolsRequest::Done,
        };
        let mut wait = MIN_BACKOFF;
        // One line on stderr for each time the server goes away, not one for each attempt.
        let mut logged = false;
        loop {
            let why = match UnixStream::connect(&self.socket).await {
                Ok(stream) => match self.connected(stream, &mut own).await {
                    ConnectionOutcome::ToolsLoaded => {
                        (wait, logged) = (MIN_BACKOFF, false);
                        "the server has gone".to_owned()
                    }
                    // The wait keeps growing, so that a server that hangs up at once is not flooded.
                    ConnectionOutcome::NothingLoaded => "the server hung up".to_owned(),
                },
                Err(why) => format!("cannot connect to {}: {why}", self.socket()),
            };
            if !std::mem::replace(&mut logged, true) {
                eprintln!("oubliette-client: {why}; trying again");
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(MAX_BACKOFF);
        }
    }

    /// Uses one connection until it ends.
    async fn connected(&self, stream: UnixStream, own: &mut OublietteToolsRequest) -> ConnectionOutcome {
        self.tools.begin_loading();
        let refresh = Arc::new(Notify::new());
        let notifications = Arc::new(ServerNotifications {
            tools: self.tools.clone(),
            refresh: refresh.clone(),
        });
        let stream = match UntrustedStream::from_connected(stream, DescriptorWorker::default()) {
            Ok(stream) => stream,
            Err(why) => {
                eprintln!("oubliette-client: the connection cannot be used: {why}");
                return ConnectionOutcome::NothingLoaded;
            }
        };
        let (peer, ended) = RpcPeer::spawn_unix(stream, notifications, PeerLimits::default());
        self.peer.store(Some(Arc::new(peer.clone())));
        let mut outcome = ConnectionOutcome::NothingLoaded;
        let loading = async {
            outcome = self.load(&peer, own).await;
            loop {
                refresh.notified().await;
                if let Some(agent) = agent_tools(&peer).await {
                    self.tools.set_agent_tools(agent);
                }
            }
        };
        tokio::select! {
            _ = ended => {}
            () = loading => {}
        }
        self.peer.store(None);
        outcome
    }

    /// Loads all tools. The server sends the callers' declarations before any answer, so the list is complete when
    /// these answers have come.
    async fn load(&self, peer: &RpcPeer, own: &mut OublietteToolsRequest) -> ConnectionOutcome {
        let (agent, oubliette) = tokio::join!(agent_tools(peer), self.oubliette_tools(peer, own));
        if peer.is_closed() {
            return ConnectionOutcome::NothingLoaded;
        }
        self.tools.finish_loading(agent.unwrap_or_default(), oubliette);
        ConnectionOutcome::ToolsLoaded
    }

    async fn oubliette_tools(
        &self,
        peer: &RpcPeer,
        own: &mut OublietteToolsRequest,
    ) -> Option<Vec<ToolSpec>> {
        let (OublietteToolsRequest::Unanswered, Some(key)) = (&own, &self.key) else {
            return None;
        };
        let params = json!(OublietteToolsParams {
            api_key: key.expose().to_owned()
        });
        let answer = ask::<ToolsAnswer>(peer, method::OUBLIETTE_TOOLS, params).await;
        if let Err(CallError::Closed(_)) = &answer {
            return None;
        }
        *own = OublietteToolsRequest::Done;
        match answer {
            Ok(tools) => Some(tools.tools),
            Err(why) => {
                let error = oubliette_protocol::Error::from(why);
                let what = match error.code {
                    ErrorCode::Unauthenticated => "OUBLIETTE_API_KEY was refused",
                    _ => "Oubliette's own tools could not be listed",
                };
                eprintln!(
                    "oubliette-client: warning: {what} ({}); going on without",
                    error.message
                );
                None
            }
        }
    }
}

/// The answer to `agent_tools` and `oubliette_tools`.
#[derive(Deserialize)]
struct ToolsAnswer {
    tools: Vec<ToolSpec>,
    #[serde(default)]
    base: Vec<ToolSpec>,
}

async fn agent_tools(peer: &RpcPeer) -> Option<AgentTools> {
    match ask::<ToolsAnswer>(peer, method::AGENT_TOOLS, json!({})).await {
        Ok(ToolsAnswer { tools, base }) => Some(AgentTools { tools, base }),
        Err(CallError::Closed(_)) => None,
        Err(why) => {
            eprintln!("oubliette-client: warning: the agent's tools could not be listed: {why}");
            None
        }
    }
}

async fn ask<T: for<'de> Deserialize<'de>>(
    peer: &RpcPeer,
    method: &str,
    params: Value,
) -> Result<T, CallError> {
    let answer = peer
        .call_with(method, params, CallOptions::default().timeout(LIST_TIMEOUT))
        .await?;
    T::deserialize(answer).map_err(|why| CallError::BadAnswer(why.to_string()))
}

/// Handles what the server sends without being asked.
struct ServerNotifications {
    tools: Arc<SessionTools>,
    refresh: Arc<Notify>,
}

impl PeerHandler for ServerNotifications {
    fn notification(&self, name: &str, params: Value, _: &RpcPeer) {
        match name {
            method::CALLER_TOOLS_CONFIG => match CallerToolsConfig::deserialize(params) {
                Ok(config) => self.tools.set_caller_tools(config),
                Err(why) => eprintln!("oubliette-client: a caller's tools could not be read: {why}"),
            },
            method::AGENT_TOOLS_CHANGED => self.refresh.notify_one(),
            _ => {}
        }
    }
}
