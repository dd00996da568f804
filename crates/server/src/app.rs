//! The server's parts, put together once and shared by every door.

use std::{sync::{Arc, atomic::{AtomicU64, Ordering}}, time::Instant};

use futures::{StreamExt as _, stream::FuturesUnordered};
use oubliette_home::{Home, Library};
use oubliette_protocol::{Result, TokenId};
use oubliette_store::{AuditEntry, Store};
use tokio::sync::{mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    auth::{Auth, limit::Buckets},
    config::Config,
    doors::mcp::listeners::Listeners,
    metrics::Metrics,
    walls::Walls,
};

/// Everything a door or an action may need.
pub struct App {
    /// The home directory.
    pub home: Arc<Home>,
    /// The configuration.
    pub config: Config,
    /// The durable truth.
    pub store: Store,
    /// Makes grants.
    pub auth: Arc<Auth>,
    /// Agents and catalog.
    pub library: Arc<Library>,
    /// Where sessions run.
    pub sandbox: Walls,
    /// Counters.
    pub metrics: Metrics,
    /// Requests of each token.
    pub rate: Buckets<TokenId>,
    /// When the server started.
    pub started: Instant,
    /// Stateful MCP sessions.
    pub listeners: Listeners,
    /// Cancelled when the server stops: whatever is held open ends.
    pub stopping: CancellationToken,
    audit: AuditQueue,
}

impl App {
    /// Opens a home that is there.
    pub async fn open(home: Home, config: Config) -> Result<Arc<Self>> {
        let store = Store::open(&home.database_path()).await?;
        let library = Library::open(&home)?;
        let home = Arc::new(home);
        Ok(Arc::new(Self {
            auth: Auth::new(store.clone()),
            library,
            sandbox: Walls::default(),
            metrics: Metrics::default(),
            rate: Buckets::new(config.rate.per_second.into(), config.rate.burst.into()),
            started: Instant::now(),
            listeners: Listeners::default(),
            stopping: CancellationToken::new(),
            audit: AuditQueue::start(store.clone()),
            home,
            config,
            store,
        }))
    }

    /// How many sessions are active.
    pub async fn active_sessions(&self) -> u64 {
        0
    }

    /// Looks at what the sandbox driver can do here.
    pub async fn look_at_sandbox(&self) {}

    /// Ends every session's turn and agent.
    pub async fn finish_sessions(&self) {}

    /// Writes an audit entry behind the answer it belongs to.
    pub async fn audit_soon(&self, entry: AuditEntry) {
        self.audit.push(entry).await;
    }

    /// Waits until every entry handed over so far is written.
    pub async fn audit_settled(&self) {
        self.audit.settled().await;
    }

    /// Finishes what is in flight and lets go of the home.
    pub async fn close(&self) {
        self.stopping.cancel();
        self.audit_settled().await;
        self.store.close().await;
    }
}

/// Audit entries of actions that come by the thousand, written as fast as the store takes them.
struct AuditQueue {
    sender: mpsc::Sender<AuditEntry>,
    given: AtomicU64,
    written: watch::Receiver<u64>,
}

/// Entries waiting at most; more make their actions wait.
const QUEUE: usize = 10_000;
/// Entries handed to the store at once: it commits what comes together as one group.
const TOGETHER: usize = 256;

impl AuditQueue {
    fn start(store: Store) -> Self {
        let (sender, mut receiver) = mpsc::channel::<AuditEntry>(QUEUE);
        let (done, written) = watch::channel(0);
        tokio::spawn(async move {
            let mut open = FuturesUnordered::new();
            loop {
                tokio::select! {
                    entry = receiver.recv(), if open.len() < TOGETHER => match entry {
                        Some(entry) => open.push(store.audit_append(entry)),
                        None => break,
                    },
                    Some(result) = open.next() => {
                        if let Err(error) = result {
                            tracing::error!(error = %error.for_log(), "audit entry not written");
                        }
                        done.send_modify(|n| *n += 1);
                    }
                }
            }
        });
        Self { sender, given: AtomicU64::new(0), written }
    }

    async fn push(&self, entry: AuditEntry) {
        if self.sender.send(entry).await.is_ok() {
            self.given.fetch_add(1, Ordering::AcqRel);
        }
    }

    async fn settled(&self) {
        let target = self.given.load(Ordering::Acquire);
        let _ = self.written.clone().wait_for(|n| *n >= target).await;
    }
}
