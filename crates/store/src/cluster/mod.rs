//! Several servers on one PostgreSQL database.
//!
//! - [`ClusterMember`]: this server as one of them: who the others are, and who runs a session.
//! - [`health`]: how the servers fare.
//! - [`member_state`]: whether this server may run sessions.
//! - [`ownership`]: which server runs a tree of sessions, and how one is claimed and released.
//!
//! A server writes while its row in `server_leases` is there, which every one of its transactions checks. All times that
//! decide anything are the database's.

mod health;
mod member_state;
pub(crate) mod ownership;

use std::{fmt, sync::Arc};

use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, ServerId, SessionId};
use tokio::sync::{Mutex, Notify, mpsc, watch};

use crate::{
    db::{
        DbPool,
        postgres::{membership::Membership, url::DatabaseUrl},
        query,
    },
    db_error::read_error,
};

pub use health::{ClusterHealth, ServerHealth};
pub use member_state::MemberState;
pub(crate) use member_state::OwnMemberState;

/// How a server takes part in a cluster.
#[derive(Debug, Clone)]
pub struct ClusterOptions {
    /// Where the other servers reach it.
    pub address: String,
    /// A code made with the cluster's key, by which a server with another key is recognised.
    pub key_fingerprint: String,
}

/// A server that runs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ServerRow {
    /// Its id.
    pub server_id: ServerId,
    /// Where the other servers reach it.
    pub address: String,
    /// Its version.
    pub version: String,
    /// How many sessions it runs or keeps: those of its trees that have not ended.
    pub sessions: u64,
    /// When it started, by the database's clock.
    pub since: Timestamp,
    /// When it was last heard of, by the database's clock.
    pub last_seen: Timestamp,
}

/// Another server of the cluster.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PeerServer {
    /// Its id.
    pub server_id: ServerId,
    /// Where this server reaches it.
    pub address: String,
}

/// Which server runs a session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum SessionOwner {
    /// This one.
    ThisServer,
    /// None: the first that needs it claims it.
    Unowned,
    /// Another one.
    Peer(PeerServer),
}

/// What a member is started with.
pub(crate) struct MemberParts {
    pub(crate) server: ServerId,
    pub(crate) address: String,
    pub(crate) url: DatabaseUrl,
    pub(crate) channel: String,
    pub(crate) readers: DbPool,
    pub(crate) servers_changed: Arc<Notify>,
    pub(crate) closed: watch::Receiver<bool>,
}

/// This server as a member of a cluster.
#[derive(Clone)]
pub struct ClusterMember {
    inner: Arc<MemberInner>,
}

struct MemberInner {
    server_id: ServerId,
    address: String,
    readers: DbPool,
    state: Arc<OwnMemberState>,
    /// Whether this server does what one does for all.
    duty: Arc<watch::Sender<bool>>,
    /// Trees whose server is gone.
    left_trees: Mutex<mpsc::UnboundedReceiver<Vec<SessionId>>>,
    left: watch::Receiver<bool>,
}

impl fmt::Debug for ClusterMember {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("ClusterMember")
            .field(&self.inner.server_id)
            .finish()
    }
}

impl ClusterMember {
    /// Begins to be a server of the cluster, until the store is closed.
    pub(crate) fn start(parts: MemberParts) -> Self {
        let state = Arc::new(OwnMemberState::new());
        let duty = Arc::new(watch::Sender::new(false));
        let (found, left_trees) = mpsc::unbounded_channel();
        let (leave, left) = watch::channel(false);
        let membership = Membership {
            url: parts.url,
            server: parts.server.clone(),
            channel: parts.channel,
            state: state.clone(),
            duty: duty.clone(),
            left_trees: found,
            look_now: parts.servers_changed,
        };
        tokio::spawn(async move {
            membership.run(parts.closed).await;
            leave.send_replace(true);
        });
        Self {
            inner: Arc::new(MemberInner {
                server_id: parts.server,
                address: parts.address,
                readers: parts.readers,
                state,
                duty,
                left_trees: Mutex::new(left_trees),
                left,
            }),
        }
    }

    /// Whether this server may run sessions.
    pub fn state(&self) -> MemberState {
        self.inner.state.current()
    }

    /// Waits until this server may no longer run sessions, and returns why; for ever if it is stopped before.
    pub async fn wait_until_inactive(&self) -> MemberState {
        self.wait_for(|state| state != MemberState::Active).await
    }

    /// Waits until this server has to start anew; for ever if it is stopped before.
    pub async fn wait_until_fenced(&self) {
        self.wait_for(|state| state == MemberState::Fenced).await;
    }

    async fn wait_for(&self, wanted: impl Fn(MemberState) -> bool) -> MemberState {
        let mut states = self.inner.state.subscribe();
        let found = states.wait_for(|state| wanted(*state)).await.map(|state| *state);
        match found {
            Ok(state) => state,
            Err(_) => std::future::pending().await,
        }
    }

    pub(crate) fn has_duty(&self) -> bool {
        *self.inner.duty.borrow() && self.inner.state.is_active()
    }

    pub(crate) async fn wait_for_duty(&self) {
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.inner.duty.subscribe().wait_for(|duty| *duty).await;
    }

    /// Records that this server is fenced when its writer finds that it is.
    pub(crate) async fn follow_writer(self, mut superseded: watch::Receiver<bool>) {
        if superseded.wait_for(|lost| *lost).await.is_ok() {
            self.inner.state.fence();
        }
    }

    /// Waits for trees of sessions whose server is gone and in which something may be left to do. Each is to be claimed before
    /// anything is done with it; a tree may come more than once. None when the store is closed.
    pub async fn next_left_trees(&self) -> Option<Vec<SessionId>> {
        self.inner.left_trees.lock().await.recv().await
    }

    /// Waits until this server has left the cluster, after the store was closed.
    pub(crate) async fn wait_until_left(&self) {
        let _ = self.inner.left.clone().wait_for(|left| *left).await;
    }

    /// This server's id.
    pub fn server_id(&self) -> &ServerId {
        &self.inner.server_id
    }

    /// Where the other servers reach this one.
    pub fn address(&self) -> &str {
        &self.inner.address
    }

    /// The database's time.
    pub(crate) async fn database_now(&self) -> Result<Timestamp> {
        let row = query("SELECT (EXTRACT(EPOCH FROM clock_timestamp()) * 1000)::bigint")
            .fetch_one(&self.inner.readers)
            .await
            .map_err(read_error)?;
        let millis: i64 = row.try_get(0).map_err(read_error)?;
        Timestamp::from_millisecond(millis).map_err(Error::internal)
    }

    /// The servers that run, the oldest first, with their sessions: of a project, or all.
    pub async fn servers(&self, project: Option<&ProjectId>) -> Result<Vec<ServerRow>> {
        let rows = query(
            "SELECT server_id, address, version, started_at, last_seen,
                    (SELECT COUNT(*) FROM session_owners o JOIN sessions s ON s.root_id = o.root_id
                     WHERE o.server_id = servers.server_id AND s.status <> 'ended'
                       AND ($1::text IS NULL OR s.project_id = $1))
             FROM servers ORDER BY server_id",
        )
        .bind(project.map(ProjectId::as_str))
        .fetch_all(&self.inner.readers)
        .await
        .map_err(read_error)?;
        let time = |millis: i64| Timestamp::from_millisecond(millis).map_err(Error::internal);
        let mut servers = Vec::with_capacity(rows.len());
        for row in rows {
            servers.push(ServerRow {
                server_id: row.text(0).map_err(read_error)?.parse()?,
                address: row.try_get(1).map_err(read_error)?,
                version: row.try_get(2).map_err(read_error)?,
                since: time(row.try_get(3).map_err(read_error)?)?,
                last_seen: time(row.try_get(4).map_err(read_error)?)?,
                sessions: row.try_get::<i64>(5).map_err(read_error)?.unsigned_abs(),
            });
        }
        Ok(servers)
    }

    /// The servers that run, this one too, and where they are reached: read often, so nothing is counted.
    pub async fn running_servers(&self) -> Result<Vec<PeerServer>> {
        let rows = query("SELECT server_id, address FROM servers ORDER BY server_id")
            .fetch_all(&self.inner.readers)
            .await
            .map_err(read_error)?;
        let peer = |row: &crate::db::DbRow| -> Result<PeerServer> {
            Ok(PeerServer {
                server_id: row.text(0).map_err(read_error)?.parse()?,
                address: row.try_get(1).map_err(read_error)?,
            })
        };
        rows.iter().map(peer).collect()
    }

    /// Which server runs a session; none if there is no such session.
    pub async fn session_owner(&self, session: &SessionId) -> Result<Option<SessionOwner>> {
        let row = query(
            "SELECT servers.server_id, servers.address FROM sessions
             LEFT JOIN session_owners ON session_owners.root_id = sessions.root_id
             LEFT JOIN servers ON servers.server_id = session_owners.server_id
             WHERE sessions.session_id = $1",
        )
        .bind(session.as_str())
        .fetch_optional(&self.inner.readers)
        .await
        .map_err(read_error)?;
        let Some(row) = row else { return Ok(None) };
        let owner: Option<String> = row.try_get(0).map_err(read_error)?;
        let Some(owner) = owner else {
            return Ok(Some(SessionOwner::Unowned));
        };
        Ok(Some(match owner == self.inner.server_id.as_str() {
            true => SessionOwner::ThisServer,
            false => SessionOwner::Peer(PeerServer {
                server_id: owner.parse()?,
                address: row.try_get(1).map_err(read_error)?,
            }),
        }))
    }
}
