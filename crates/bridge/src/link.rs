//! The server's end: connecting, learning the tools, coming back after a loss.

use std::{path::PathBuf, sync::Arc, time::Duration};

use arc_swap::ArcSwapOption;
use oubliette_protocol::{
    ErrorCode,
    relay::{CallerToolsConfig, OwnToolsParams, method},
    tool::ToolSpec,
};
use oubliette_relay::{CallError, CallOptions, Handler, Limits, Peer};
use serde::Deserialize;
use serde_json::{Value, json};
use tokio::{net::UnixStream, sync::Notify};

use crate::registry::{AgentTools, Registry};

/// The first wait before connecting again, and the longest.
const BACKOFF: (Duration, Duration) = (Duration::from_millis(10), Duration::from_millis(500));
/// How long the server may take to say which tools there are.
const LEARN: Duration = Duration::from_secs(30);

/// The agent's key. It has no `Debug`: it goes to the server and nowhere else.
#[derive(Clone)]
pub(crate) struct Key(Arc<str>);

impl Key {
    pub(crate) fn new(key: String) -> Self {
        Self(key.into())
    }

    /// For the relay's params alone.
    pub(crate) fn expose(&self) -> &str {
        &self.0
    }
}

/// The connection to the server, if there is one now.
pub(crate) struct Link {
    socket: PathBuf,
    key: Option<Key>,
    registry: Arc<Registry>,
    peer: ArcSwapOption<Peer>,
}

/// How far a connection came.
enum Told {
    /// It ended before the server had said which tools there are.
    Nothing,
    /// The tools were learnt.
    All,
}

/// What `oubliette_tools` came to. It is asked once; a lost connection is no answer.
enum Own {
    NotAsked,
    Settled,
}

impl Link {
    /// Connects, and keeps connecting, in a task of its own.
    pub(crate) fn start(socket: PathBuf, key: Option<Key>, registry: Arc<Registry>) -> Arc<Self> {
        let link = Arc::new(Self {
            socket,
            key,
            registry,
            peer: ArcSwapOption::empty(),
        });
        tokio::spawn(link.clone().run());
        link
    }

    /// The connection to call on; none while the server is away.
    pub(crate) fn peer(&self) -> Option<Arc<Peer>> {
        self.peer.load_full().filter(|peer| !peer.is_closed())
    }

    pub(crate) fn key(&self) -> Option<&Key> {
        self.key.as_ref()
    }

    pub(crate) fn socket(&self) -> std::path::Display<'_> {
        self.socket.display()
    }

    async fn run(self: Arc<Self>) {
        let mut own = match self.key {
            Some(_) => Own::NotAsked,
            None => Own::Settled,
        };
        let mut wait = BACKOFF.0;
        // One line for each time the server goes away, not one for each attempt.
        let mut said = false;
        loop {
            let why = match UnixStream::connect(&self.socket).await {
                Ok(stream) => match self.connected(stream, &mut own).await {
                    Told::All => {
                        (wait, said) = (BACKOFF.0, false);
                        "the server has gone".to_owned()
                    }
                    // A server that hangs up at once must not be hammered: the wait goes on growing.
                    Told::Nothing => "the server hung up".to_owned(),
                },
                Err(why) => format!("cannot connect to {}: {why}", self.socket()),
            };
            if !std::mem::replace(&mut said, true) {
                eprintln!("oubliette-client: {why}; trying again");
            }
            tokio::time::sleep(wait).await;
            wait = (wait * 2).min(BACKOFF.1);
        }
    }

    /// One connection from beginning to end.
    async fn connected(&self, stream: UnixStream, own: &mut Own) -> Told {
        self.registry.begin();
        let refresh = Arc::new(Notify::new());
        let ears = Arc::new(Ears {
            registry: self.registry.clone(),
            refresh: refresh.clone(),
        });
        let (peer, ended) = match Peer::spawn_unix(stream, ears, Limits::default()) {
            Ok(spawned) => spawned,
            Err(why) => {
                eprintln!("oubliette-client: the connection cannot be used: {why}");
                return Told::Nothing;
            }
        };
        self.peer.store(Some(Arc::new(peer.clone())));
        let mut told = Told::Nothing;
        let learning = async {
            told = self.learn(&peer, own).await;
            loop {
                refresh.notified().await;
                if let Some(agent) = agent_tools(&peer).await {
                    self.registry.agent(agent);
                }
            }
        };
        tokio::select! {
            _ = ended => {}
            () = learning => {}
        }
        self.peer.store(None);
        told
    }

    /// Asks for everything at once. The server sends its callers before any answer, so when these answers
    /// are in, the list is whole.
    async fn learn(&self, peer: &Peer, own: &mut Own) -> Told {
        let (agent, mine) = tokio::join!(agent_tools(peer), self.own_tools(peer, own));
        if peer.is_closed() {
            return Told::Nothing;
        }
        self.registry.commit(agent.unwrap_or_default(), mine);
        Told::All
    }

    async fn own_tools(&self, peer: &Peer, own: &mut Own) -> Option<Vec<ToolSpec>> {
        let (Own::NotAsked, Some(key)) = (&own, &self.key) else {
            return None;
        };
        let params = json!(OwnToolsParams {
            api_key: key.expose().to_owned()
        });
        let answer = ask::<Tools>(peer, method::OUBLIETTE_TOOLS, params).await;
        if let Err(CallError::Closed(_)) = &answer {
            return None;
        }
        *own = Own::Settled;
        match answer {
            Ok(tools) => Some(tools.tools),
            Err(why) => {
                let error = oubliette_protocol::Error::from(why);
                let whose = match error.code {
                    ErrorCode::Unauthenticated => "OUBLIETTE_API_KEY was refused",
                    _ => "Oubliette's own tools could not be listed",
                };
                eprintln!(
                    "oubliette-client: warning: {whose} ({}); going on without",
                    error.message
                );
                None
            }
        }
    }
}

#[derive(Deserialize)]
struct Tools {
    tools: Vec<ToolSpec>,
    #[serde(default)]
    base: Vec<ToolSpec>,
}

async fn agent_tools(peer: &Peer) -> Option<AgentTools> {
    match ask::<Tools>(peer, method::AGENT_TOOLS, json!({})).await {
        Ok(Tools { tools, base }) => Some(AgentTools { tools, base }),
        Err(CallError::Closed(_)) => None,
        Err(why) => {
            eprintln!("oubliette-client: warning: the agent's tools could not be listed: {why}");
            None
        }
    }
}

async fn ask<T: for<'de> Deserialize<'de>>(peer: &Peer, method: &str, params: Value) -> Result<T, CallError> {
    let answer = peer
        .call_with(method, params, CallOptions::default().timeout(LEARN))
        .await?;
    T::deserialize(answer).map_err(|why| CallError::BadAnswer(why.to_string()))
}

/// What the server tells unasked.
struct Ears {
    registry: Arc<Registry>,
    refresh: Arc<Notify>,
}

impl Handler for Ears {
    fn notification(&self, name: &str, params: Value, _: &Peer) {
        match name {
            method::CALLER_TOOLS_CONFIG => match CallerToolsConfig::deserialize(params) {
                Ok(config) => self.registry.caller(config),
                Err(why) => eprintln!("oubliette-client: a caller's tools could not be read: {why}"),
            },
            method::AGENT_TOOLS_CHANGED => self.refresh.notify_one(),
            _ => {}
        }
    }
}
