//! The server's parts, put together once and shared by every door.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use oubliette_egress::{EgressProxy, GatewayLimits, ModelGateway, ProxyLimits};
use oubliette_home::{Home, Library};
use oubliette_protocol::{Error, Result, TokenId};
use oubliette_sandbox::{Host, Local, LocalConfig, Sandbox};
use oubliette_session::{Deps, Programs, Sessions};
use oubliette_store::{AuditEntry, Store};
use oubliette_tools::{CallThreads, ProcessEnvironment};
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    auth::{Auth, limit::Buckets},
    config::Config,
    doors::mcp::listeners::Listeners,
    links::Links,
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
    /// Every session.
    pub sessions: Arc<Sessions>,
    /// Counters.
    pub metrics: Metrics,
    /// Requests of each token.
    pub rate: Buckets<TokenId>,
    /// When the server started.
    pub started: Instant,
    /// Stateful MCP sessions.
    pub listeners: Listeners,
    /// Cancelled when the server stops: what is only held open ends, what is being done is finished.
    pub stopping: CancellationToken,
    /// Cancelled when that is done, or took too long.
    pub stopped: CancellationToken,
    /// Where calls are made.
    pub threads: Arc<CallThreads>,
    audit: AuditQueue,
}

impl App {
    /// Opens a home that is there.
    pub async fn open(home: Home, config: Config) -> Result<Arc<Self>> {
        let store = Store::open(&home.database_path()).await?;
        let library = Library::open(&home)?;
        let home = Arc::new(home);
        let programs = programs();
        let sandbox = Local::new(LocalConfig {
            client: programs.client.clone(),
            minimum: config.sandbox.minimum,
            bwrap: None,
            run_dir: home.run_dir(),
        });
        let sandbox: Arc<dyn Sandbox> =
            Arc::new(sandbox.await.map_err(|e| Error::unavailable(e.to_string()))?);
        let gateway = ModelGateway::new(config.providers.clone(), GatewayLimits::default())?;
        let proxy = EgressProxy::new(config.egress_allow.clone(), ProxyLimits::default())?;
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = Arc::new(CallThreads::new(cores.min(4)));
        Ok(Arc::new_cyclic(|app| {
            let links = Links::new(app.clone());
            let sessions = Sessions::new(Deps {
                store: store.clone(),
                home: home.clone(),
                library: library.clone(),
                sandbox: sandbox.clone(),
                host: Arc::new(Host::new(programs.client.clone())),
                gateway,
                proxy,
                trust: Arc::new(config.trust.resolve(&home)),
                env: Arc::new(ProcessEnvironment),
                threads: threads.clone(),
                config: config.sessions(),
                door: links.clone(),
                keys: links.clone(),
                workspaces: links.clone(),
                programs,
            });
            sessions.set_own(links);
            Self {
                auth: Auth::new(store.clone()),
                library,
                sandbox: Walls::new(sandbox),
                sessions,
                metrics: Metrics::default(),
                rate: Buckets::new(config.rate.per_second.into(), config.rate.burst.into()),
                started: Instant::now(),
                listeners: Listeners::default(),
                stopping: CancellationToken::new(),
                stopped: CancellationToken::new(),
                threads,
                audit: AuditQueue::start(store.clone()),
                home,
                config,
                store,
            }
        }))
    }

    /// Ends a token: its requests, its streams, what it lends.
    pub async fn revoke_token(&self, token: &TokenId) -> Result<()> {
        self.auth.revoke(token).await?;
        self.sessions.token_gone(token);
        Ok(())
    }

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
        self.stopped.cancel();
        self.audit_settled().await;
        self.store.close().await;
    }
}

/// Our own programs: beside this one, where a build and a package put them.
pub(crate) fn programs() -> Programs {
    let own = std::env::current_exe().ok();
    let beside = own.as_deref().and_then(Path::parent);
    let places: Vec<_> = beside
        .into_iter()
        .flat_map(|dir| [Some(dir), dir.parent()])
        .flatten()
        .collect();
    let find = |name: &str| {
        let found = places
            .iter()
            .map(|dir| dir.join(name))
            .find(|path| path.is_file());
        found.unwrap_or_else(|| beside.unwrap_or(Path::new("/usr/local/bin")).join(name))
    };
    Programs {
        client: find("oubliette-client"),
        agent: find("oubliette-agent"),
    }
}

/// Audit entries of actions that come by the thousand. They are gathered for a moment and written
/// together, so that the disk is not synchronised for each.
struct AuditQueue {
    sender: mpsc::Sender<AuditEntry>,
    given: AtomicU64,
    written: watch::Receiver<u64>,
    hurry: Arc<Notify>,
}

/// Entries waiting at most; more make their actions wait.
const QUEUE: usize = 10_000;
/// Entries written together at most.
const TOGETHER: usize = 1000;
/// How long they are gathered.
const GATHER: Duration = Duration::from_millis(200);

impl AuditQueue {
    fn start(store: Store) -> Self {
        let (sender, mut receiver) = mpsc::channel::<AuditEntry>(QUEUE);
        let (done, written) = watch::channel(0);
        let hurry = Arc::new(Notify::new());
        let told = hurry.clone();
        tokio::spawn(async move {
            while let Some(first) = receiver.recv().await {
                let mut entries = vec![first];
                let enough = async {
                    while entries.len() < TOGETHER
                        && let Some(entry) = receiver.recv().await
                    {
                        entries.push(entry);
                    }
                };
                tokio::select! {
                    () = enough => {}
                    () = told.notified() => {}
                    () = tokio::time::sleep(GATHER) => {}
                }
                while entries.len() < TOGETHER
                    && let Ok(entry) = receiver.try_recv()
                {
                    entries.push(entry);
                }
                let count = entries.len() as u64;
                if let Err(error) = store.audit_append_all(entries).await {
                    tracing::error!(count, error = %error.for_log(), "audit entries not written");
                }
                done.send_modify(|n| *n += count);
            }
        });
        Self {
            sender,
            given: AtomicU64::new(0),
            written,
            hurry,
        }
    }

    async fn push(&self, entry: AuditEntry) {
        // Counted first: whoever asks whether all is written must not miss one on its way.
        self.given.fetch_add(1, Ordering::AcqRel);
        let _ = self.sender.send(entry).await;
    }

    async fn settled(&self) {
        let target = self.given.load(Ordering::Acquire);
        let mut written = self.written.clone();
        while *written.borrow_and_update() < target {
            self.hurry.notify_one();
            if written.changed().await.is_err() {
                return;
            }
        }
    }
}
