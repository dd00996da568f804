//! The server's parts, built once at start and shared by every door.

use std::{
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant},
};

use oubliette_egress::{EgressProxy, GatewayLimits, ModelGateway, ProxyLimits};
use oubliette_home::{DefinitionLibrary, HomeDir};
use oubliette_protocol::{Error, Result, TokenId};
use oubliette_sandbox::{HostDriver, LocalDriver, LocalDriverConfig, SandboxDriver};
use oubliette_session::{ProgramPaths, SessionDeps, Sessions};
use oubliette_store::{AuditEntry, Store};
use oubliette_tools::{CallThreads, ProcessEnvironment};
use tokio::sync::{Notify, mpsc, watch};
use tokio_util::sync::CancellationToken;

use crate::{
    auth::{Authenticator, rate_limit::RateLimiter},
    config::ServerConfig,
    doors::mcp::mcp_sessions::McpSessions,
    metrics::Metrics,
    sandbox_status::SandboxStatus,
    session_services::SessionServices,
};

/// Everything a door or an action may need.
pub struct App {
    /// The home directory.
    pub home: Arc<HomeDir>,
    /// The configuration, validated.
    pub(crate) config: ServerConfig,
    /// The database.
    pub store: Store,
    /// Authenticates requests and makes their grants.
    pub auth: Arc<Authenticator>,
    /// Agent definitions and the tool catalog, as files in the home.
    pub library: Arc<DefinitionLibrary>,
    /// The sandbox driver and its probe report.
    pub sandbox: SandboxStatus,
    /// Starts, finds and ends sessions.
    pub sessions: Arc<Sessions>,
    /// Counters of requests and actions since the start.
    pub(crate) metrics: Metrics,
    /// Limits the request rate of each token.
    pub(crate) rate_limit: RateLimiter<TokenId>,
    /// When the server started.
    pub(crate) started: Instant,
    /// Stateful MCP sessions.
    pub mcp_sessions: McpSessions,
    /// Cancelled when the server begins to stop: open streams end, requests in progress are finished.
    pub(crate) stopping: CancellationToken,
    /// Cancelled when all requests are finished, or when finishing them took too long.
    pub(crate) stopped: CancellationToken,
    /// The threads on which sessions' tool calls run.
    pub(crate) call_threads: Arc<CallThreads>,
    audit: AuditQueue,
}

impl App {
    /// Builds the server on an existing home directory: opens its database and library and finds the sandbox driver.
    pub async fn open(home: HomeDir, config: ServerConfig) -> Result<Arc<Self>> {
        let store = Store::open(&home.database_path()).await?;
        let library = DefinitionLibrary::open(&home)?;
        let home = Arc::new(home);
        let programs = find_programs();
        let sandbox = LocalDriver::new(LocalDriverConfig {
            client: programs.client.clone(),
            minimum: config.sandbox.minimum,
            bwrap: None,
            run_dir: home.run_dir(),
        });
        let sandbox: Arc<dyn SandboxDriver> =
            Arc::new(sandbox.await.map_err(|e| Error::unavailable(e.to_string()))?);
        let gateway = ModelGateway::new(config.providers.clone(), GatewayLimits::default())?;
        let proxy = EgressProxy::new(config.egress_allow.clone(), ProxyLimits::default())?;
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = Arc::new(CallThreads::new(cores.min(4)));
        Ok(Arc::new_cyclic(|app| {
            let services = SessionServices::new(app.clone());
            let sessions = Sessions::new(SessionDeps {
                store: store.clone(),
                home: home.clone(),
                library: library.clone(),
                sandbox: sandbox.clone(),
                host: Arc::new(HostDriver::new(programs.client.clone())),
                gateway,
                proxy,
                trust: Arc::new(config.trust.resolve(&home)),
                env: Arc::new(ProcessEnvironment),
                threads: threads.clone(),
                config: config.session_config(),
                door: services.clone(),
                keys: services.clone(),
                workspaces: services.clone(),
                programs,
            });
            sessions.set_own_tools(services);
            Self {
                auth: Authenticator::new(store.clone()),
                library,
                sandbox: SandboxStatus::new(sandbox),
                sessions,
                metrics: Metrics::default(),
                rate_limit: RateLimiter::new(config.rate.per_second.into(), config.rate.burst.into()),
                started: Instant::now(),
                mcp_sessions: McpSessions::default(),
                stopping: CancellationToken::new(),
                stopped: CancellationToken::new(),
                call_threads: threads,
                audit: AuditQueue::start(store.clone()),
                home,
                config,
                store,
            }
        }))
    }

    /// Revokes a token. Its next request is refused, its streams end, and the tools it lends are withdrawn.
    pub async fn revoke_token(&self, token: &TokenId) -> Result<()> {
        self.auth.revoke(token).await?;
        self.sessions.token_revoked(token);
        Ok(())
    }

    /// Queues the audit entry of a frequent action, a file change or a login. It is written within about
    /// [`AUDIT_BATCH_WAIT`], which may be after the answer.
    pub async fn queue_audit(&self, entry: AuditEntry) {
        self.audit.push(entry).await;
    }

    /// Waits until every audit entry queued so far is written.
    pub async fn flush_audit(&self) {
        self.audit.flush().await;
    }

    /// Ends all streams, writes queued audit entries and closes the database, which releases the home's lock.
    pub async fn close(&self) {
        self.stopping.cancel();
        self.stopped.cancel();
        self.flush_audit().await;
        self.store.close().await;
    }
}

/// Finds `oubliette-client` and `oubliette-agent` in this program's directory or its parent, where builds and packages
/// install them.
pub(crate) fn find_programs() -> ProgramPaths {
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
    ProgramPaths {
        client: find("oubliette-client"),
        agent: find("oubliette-agent"),
    }
}

/// Audit entries of frequent actions, written in batches so that the disk is not synchronised for each.
struct AuditQueue {
    sender: mpsc::Sender<AuditEntry>,
    queued: AtomicU64,
    written: watch::Receiver<u64>,
    flush_requested: Arc<Notify>,
}

/// Maximum number of entries waiting to be written; an action that would exceed it waits.
const AUDIT_QUEUE_MAX: usize = 10_000;
/// Maximum number of entries in one write.
const AUDIT_BATCH_MAX: usize = 1000;
/// How long entries are collected before a write.
const AUDIT_BATCH_WAIT: Duration = Duration::from_millis(200);

impl AuditQueue {
    fn start(store: Store) -> Self {
        let (sender, mut receiver) = mpsc::channel::<AuditEntry>(AUDIT_QUEUE_MAX);
        let (done, written) = watch::channel(0);
        let flush_requested = Arc::new(Notify::new());
        let flush = flush_requested.clone();
        tokio::spawn(async move {
            while let Some(first) = receiver.recv().await {
                let mut entries = vec![first];
                let fill_batch = async {
                    while entries.len() < AUDIT_BATCH_MAX
                        && let Some(entry) = receiver.recv().await
                    {
                        entries.push(entry);
                    }
                };
                tokio::select! {
                    () = fill_batch => {}
                    () = flush.notified() => {}
                    () = tokio::time::sleep(AUDIT_BATCH_WAIT) => {}
                }
                while entries.len() < AUDIT_BATCH_MAX
                    && let Ok(entry) = receiver.try_recv()
                {
                    entries.push(entry);
                }
                let count = entries.len() as u64;
                if let Err(error) = store.audit_append_all(entries).await {
                    tracing::error!(count, error = %error.for_log(), "writing audit entries failed; they are lost");
                }
                done.send_modify(|n| *n += count);
            }
        });
        Self {
            sender,
            queued: AtomicU64::new(0),
            written,
            flush_requested,
        }
    }

    async fn push(&self, entry: AuditEntry) {
        // Counted before it is sent: `flush` must not miss an entry that waits for room in the channel.
        self.queued.fetch_add(1, Ordering::AcqRel);
        let _ = self.sender.send(entry).await;
    }

    async fn flush(&self) {
        let target = self.queued.load(Ordering::Acquire);
        let mut written = self.written.clone();
        while *written.borrow_and_update() < target {
            self.flush_requested.notify_one();
            if written.changed().await.is_err() {
                return;
            }
        }
    }
}
