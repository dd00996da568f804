//! The hop between servers on one database: any of them takes any request of any client.
//!
//! A session runs on one server. What only that one can do is passed on to it over HTTP, under `/internal`, and its answer
//! passed back; everything else is answered from the database. Nothing is passed on twice.
//!
//! - [`signature`]: how servers know each other: a code made with the cluster key. [`wire`]: what they send.
//! - [`client`]: requests to other servers. [`door`]: requests of other servers.
//! - [`probe`]: whether another server is reached and has the same key.
//! - [`pass_on`]: actions. [`proxy`]: event streams and stateful MCP sessions, passed on whole.
//! - [`presence`]: callers that are connected to one server while their session runs on another.
//!
//! Without `[cluster]` none of this exists: [`App::hop`](crate::app::App) is `None`.

pub(crate) mod client;
pub(crate) mod door;
pub(crate) mod pass_on;
pub(crate) mod presence;
pub(crate) mod probe;
pub(crate) mod proxy;
mod signature;
mod wire;

use std::{
    collections::HashMap,
    net::IpAddr,
    sync::{Arc, Weak},
    time::{Duration, Instant},
};

use oubliette_protocol::{ApprovalId, Error, Result, ServerId, SessionId, event::SessionStatus};
use oubliette_store::{ClusterMember, PeerServer, SessionOwner};
use parking_lot::Mutex;
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use crate::{
    app::App,
    auth::{Grant, rate_limit::RateLimiter},
    config::ClusterConfig,
};
use client::PeerClient;
use signature::{Challenges, ClusterKey};

/// How often the list of servers is read.
const SERVERS_INTERVAL: Duration = Duration::from_secs(1);

/// The servers that run, with their addresses.
type PeerAddresses = Arc<HashMap<ServerId, String>>;

/// This server as one of a cluster.
pub(crate) struct ClusterHop {
    member: ClusterMember,
    key: ClusterKey,
    challenges: Challenges,
    peers: PeerClient,
    servers: watch::Sender<PeerAddresses>,
    /// Refused requests of each address.
    failed_keys: RateLimiter<IpAddr>,
    open_calls: OpenCalls,
}

/// What an action acts on, if that is on one server at a time.
#[derive(Debug, Clone, Copy)]
pub(crate) enum OwnedTarget<'a> {
    /// A session.
    Session(&'a SessionId),
    /// An approval, which is on its session's server.
    Approval(&'a ApprovalId),
}

/// What becomes of a session that no server runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IfUnowned {
    /// This server runs it from now on, unless it has ended.
    Claim,
    /// It stays as it is; the database has the answer.
    Leave,
}

/// Where a session is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SessionPlace {
    /// Here, or nowhere: this server answers.
    Here,
    /// On another server.
    Peer(PeerServer),
}

impl ClusterHop {
    pub(crate) fn new(config: &ClusterConfig, member: ClusterMember) -> Result<Arc<Self>> {
        let key = ClusterKey::new(config.key.clone());
        let (servers, known) = watch::channel(PeerAddresses::default());
        Ok(Arc::new(Self {
            peers: PeerClient::new(config, key.clone(), member.server_id().clone(), known)?,
            challenges: Challenges::new(Instant::now()),
            // Twenty at once, then one a second: a server with another key tries for ever, and its log says why.
            failed_keys: RateLimiter::new(1.0, 20.0),
            open_calls: OpenCalls::default(),
            servers,
            key,
            member,
        }))
    }

    /// This server's id.
    pub(crate) fn server_id(&self) -> &ServerId {
        self.member.server_id()
    }

    /// Keeps the list of servers current until the server stops.
    pub(crate) async fn follow_servers(self: Arc<Self>, stopping: CancellationToken) {
        while !stopping.is_cancelled() {
            if let Err(error) = self.read_servers().await {
                tracing::debug!(error = %error.for_log(), "the list of servers could not be read");
            }
            tokio::select! {
                () = stopping.cancelled() => {}
                () = tokio::time::sleep(SERVERS_INTERVAL) => {}
            }
        }
    }

    async fn read_servers(&self) -> Result<PeerAddresses> {
        let rows = self.member.running_servers().await?;
        let servers: PeerAddresses =
            Arc::new(rows.into_iter().map(|row| (row.server_id, row.address)).collect());
        // Also if nothing changed: who waits for a server to go has to know that this list is new.
        self.servers.send_replace(servers.clone());
        Ok(servers)
    }

    /// Another server of the cluster that runs; `None` if it does not, or is this one.
    pub(crate) async fn running_peer(&self, id: &ServerId) -> Result<Option<PeerServer>> {
        if id == self.server_id() {
            return Ok(None);
        }
        let known = self.servers.borrow().get(id).cloned();
        let address = match known {
            Some(address) => Some(address),
            // It may have started since the list was read.
            None => self.read_servers().await?.get(id).cloned(),
        };
        Ok(address.map(|address| PeerServer {
            server_id: id.clone(),
            address,
        }))
    }

    /// Where a session is, or is from now on. One that the grant cannot see is not claimed: whatever is asked of it here is
    /// answered with `not_found`.
    pub(crate) async fn place(
        &self,
        app: &App,
        grant: &Grant,
        target: OwnedTarget<'_>,
        unowned: IfUnowned,
    ) -> Result<SessionPlace> {
        let approval;
        let session = match target {
            OwnedTarget::Session(session) => session,
            OwnedTarget::Approval(id) => match app.store.approval_get(id).await? {
                Some(row) => {
                    approval = row.session_id;
                    &approval
                }
                None => return Ok(SessionPlace::Here),
            },
        };
        // Only the server that runs a session has it in memory.
        if app.sessions.current_turn(session).is_some() {
            return Ok(SessionPlace::Here);
        }
        let owner = match app.store.session_owner(session).await? {
            Some(SessionOwner::Unowned) if unowned == IfUnowned::Claim => {
                let row = app.store.session_get(session).await?;
                let row = row.filter(|row| grant.principal().sees(&row.project_id));
                match row.filter(|row| row.status != SessionStatus::Ended) {
                    Some(row) => app.sessions.claim_tree(&row.root_id).await?,
                    None => SessionOwner::Unowned,
                }
            }
            Some(owner) => owner,
            None => SessionOwner::Unowned,
        };
        Ok(match owner {
            SessionOwner::ThisServer | SessionOwner::Unowned => SessionPlace::Here,
            SessionOwner::Peer(peer) => SessionPlace::Peer(peer),
        })
    }
}

/// The open requests of other servers that can be told something while they are open.
#[derive(Debug, Clone, Default)]
struct OpenCalls(Arc<Mutex<HashMap<String, CancellationToken>>>);

/// An entry of [`OpenCalls`]; dropped, it is removed.
struct PassedOnCallGuard {
    calls: Weak<Mutex<HashMap<String, CancellationToken>>>,
    id: String,
}

impl OpenCalls {
    /// Adds a call; the token is cancelled when the other server signals it.
    fn add(&self, id: String) -> (PassedOnCallGuard, CancellationToken) {
        let signalled = CancellationToken::new();
        self.0.lock().insert(id.clone(), signalled.clone());
        let calls = Arc::downgrade(&self.0);
        (PassedOnCallGuard { calls, id }, signalled)
    }

    fn signal(&self, id: &str) {
        if let Some(signalled) = self.0.lock().get(id) {
            signalled.cancel();
        }
    }
}

impl Drop for PassedOnCallGuard {
    fn drop(&mut self) {
        if let Some(calls) = self.calls.upgrade() {
            calls.lock().remove(&self.id);
        }
    }
}

/// A new id of a call.
fn new_call_id() -> String {
    uuid::Uuid::new_v4().simple().to_string()
}

/// The error of a session whose server cannot be reached, and whose request was not done.
fn owner_unreachable(peer: &PeerServer) -> Error {
    Error::unavailable(format!(
        "the server that runs this session ({}) cannot be reached, and no other has taken it over yet; try again in a few seconds",
        peer.server_id
    ))
}
