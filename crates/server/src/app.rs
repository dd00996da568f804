//! The server's parts, built once at start and shared by every door.

use std::{path::Path, sync::Arc, time::Instant};

use oubliette_egress::{
    EgressProxy, GatewayLimits, ModelGateway, ProxyLimits, ServiceGateway, ServiceLimits,
};
use oubliette_home::{DefinitionLibrary, HomeDir};
use oubliette_programs::ProgramStore;
use oubliette_protocol::{ByteBudget, Result, TokenId};
use oubliette_sandbox::HostDriver;
use oubliette_session::{ProgramPaths, SessionDeps, Sessions};
use oubliette_store::{Store, StoreOptions};
use oubliette_tools::{CallThreads, ProcessEnvironment};
use tokio_util::sync::CancellationToken;

use crate::{
    auth::{Authenticator, rate_limit::RateLimiter},
    config::ServerConfig,
    definitions::DefinitionEditor,
    doors::{mcp::mcp_sessions::McpSessions, token_budget::TokenBudgets},
    hop::ClusterHop,
    metrics::Metrics,
    sandbox_drivers::{SandboxDrivers, mountable_programs},
    sandbox_status::SandboxStatus,
    server_identity::AdvertisedServer,
    session_services::SessionServices,
    workspace::{
        archive::{ArchiveDownloads, places::TransferPlaces},
        git::GitSandboxes,
        quota::WorkspaceSizes,
    },
};

/// Everything a door or an action may need.
pub struct App {
    /// The home directory.
    pub home: Arc<HomeDir>,
    /// The configuration that the server started with, validated. What changes while it runs is in [`Self::live`].
    pub(crate) config: ServerConfig,
    /// The settings that change while the server runs.
    pub(crate) live: crate::reload::LiveSettings,
    /// The database.
    pub store: Store,
    /// This server as one of several on one database; `None` without `[cluster]`.
    pub(crate) hop: Option<Arc<ClusterHop>>,
    /// Authenticates requests and makes their grants.
    pub auth: Arc<Authenticator>,
    /// Agent definitions and the tool catalog.
    pub library: Arc<DefinitionLibrary>,
    /// Changes them.
    pub(crate) definitions: DefinitionEditor,
    /// The sandbox driver and its probe report.
    pub sandbox: SandboxStatus,
    /// The packages that are installed for agents and tool servers.
    pub programs: Arc<ProgramStore>,
    /// Forwards model requests of sandboxes to the providers.
    pub(crate) gateway: Arc<ModelGateway>,
    /// Forwards requests of sandboxes to services.
    pub(crate) services: Arc<ServiceGateway>,
    /// The HTTP proxy of sandboxes.
    pub(crate) proxy: Arc<EgressProxy>,
    /// Runs git on workspaces.
    pub git: GitSandboxes,
    /// Starts, finds and ends sessions.
    pub sessions: Arc<Sessions>,
    /// Counters of requests and actions since the start.
    pub(crate) metrics: Metrics,
    /// Limits the request rate of each token.
    pub(crate) rate_limit: RateLimiter<TokenId>,
    /// When the server started.
    pub(crate) started: Instant,
    /// Its id and address among servers.
    pub(crate) identity: AdvertisedServer,
    /// Downloads of workspaces in progress.
    pub(crate) archives: ArchiveDownloads,
    /// The archives that are being received and unpacked.
    pub(crate) archive_uploads: TransferPlaces,
    /// Stateful MCP sessions.
    pub mcp_sessions: McpSessions,
    /// Cancelled when the server begins to stop: open streams end, requests in progress are finished.
    pub(crate) stopping: CancellationToken,
    /// Cancelled when all requests are finished, or when finishing them took too long.
    pub(crate) stopped: CancellationToken,
    /// The threads on which sessions' tool calls run.
    pub(crate) call_threads: Arc<CallThreads>,
    /// What large requests and event streams are charged to.
    pub(crate) token_budgets: TokenBudgets,
    /// Sizes of workspaces into which clients upload files.
    pub(crate) workspace_sizes: WorkspaceSizes,
}

impl App {
    /// Builds the server on an existing home directory: opens its database and library and finds the sandbox driver.
    pub async fn open(home: HomeDir, config: ServerConfig) -> Result<Arc<Self>> {
        let home = home.with_projects_dir(config.workspaces_dir.clone());
        let options = StoreOptions {
            // Two servers must not share a home either, wherever their databases are.
            lock_file: Some(home.database_path()),
            cluster: match &config.cluster {
                Some(cluster) => Some(cluster.store_options()?),
                None => None,
            },
            ..StoreOptions::default()
        };
        let store = Store::open_at(&config.store_location(&home), &options).await?;
        store.events().set_session_limit(config.limits.session_log_bytes);
        store
            .debugger()
            .set_session_limit(config.limits.session_log_bytes);
        let definitions = DefinitionEditor::open(&home, &store, &config.store_location(&home)).await?;
        let library = definitions.library().clone();
        let home = Arc::new(home);
        let programs = mountable_programs(&config.sandbox, find_programs(), home.run_dir()).await?;
        let SandboxDrivers { sandbox, local } =
            SandboxDrivers::open(&home, &config.sandbox, programs.client.clone(), home.run_dir()).await?;
        let gateway = ModelGateway::new(config.providers.clone(), GatewayLimits::default())?;
        let services_gateway = ServiceGateway::new(config.upstreams.clone(), ServiceLimits::default())?;
        let proxy = EgressProxy::new(config.egress_allow.clone(), ProxyLimits::default())?;
        let cores = std::thread::available_parallelism().map_or(2, usize::from);
        let threads = Arc::new(CallThreads::new(cores.min(4)));
        let buffers = ByteBudget::new("server_buffer_mb", config.limits.server_buffer_bytes);
        let program_store = ProgramStore::open(home.clone(), local.clone(), config.programs, |name| {
            std::env::var(name).ok()
        });
        let hop = match (&config.cluster, store.cluster()) {
            (Some(settings), Some(member)) => Some(ClusterHop::new(settings, member.clone())?),
            _ => None,
        };
        let git = GitSandboxes::new(local, proxy.clone(), &home, &config);
        Ok(Arc::new_cyclic(|app| {
            let services = SessionServices::new(app.clone());
            let sessions = Sessions::new(SessionDeps {
                store: store.clone(),
                home: home.clone(),
                library: library.clone(),
                sandbox: sandbox.clone(),
                host: Arc::new(HostDriver::new(programs.client.clone())),
                gateway: gateway.clone(),
                services: services_gateway.clone(),
                proxy: proxy.clone(),
                trust: Arc::new(config.trust.resolve(&home)),
                env: Arc::new(ProcessEnvironment),
                threads: threads.clone(),
                config: config.session_config().into(),
                buffers: buffers.clone(),
                door: services.clone(),
                keys: services.clone(),
                workspaces: services.clone(),
                program_store: program_store.clone(),
                programs,
            });
            sessions.set_own_tools(services);
            Self {
                hop,
                auth: Authenticator::new(store.clone()),
                library,
                definitions,
                sandbox: SandboxStatus::new(sandbox),
                programs: program_store,
                gateway,
                services: services_gateway,
                proxy,
                git,
                sessions,
                metrics: Metrics::default(),
                rate_limit: RateLimiter::new(config.rate.per_second.into(), config.rate.burst.into()),
                started: Instant::now(),
                identity: AdvertisedServer::generate(),
                archives: ArchiveDownloads::default(),
                archive_uploads: TransferPlaces::new("written"),
                mcp_sessions: McpSessions::new(config.clients.max_mcp_sessions),
                stopping: CancellationToken::new(),
                stopped: CancellationToken::new(),
                call_threads: threads,
                token_budgets: TokenBudgets::new(buffers, config.limits.session_buffer_bytes),
                workspace_sizes: WorkspaceSizes::default(),
                live: crate::reload::LiveSettings::new(&config),
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

    /// Ends all streams and closes the database, which releases the home's lock.
    pub async fn close(&self) {
        self.stopping.cancel();
        self.stopped.cancel();
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
