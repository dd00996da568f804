//! Starts an agent's tools as a session would, in a temporary workspace, lists them and stops them. Needs no server,
//! database or session.

use std::{
    os::fd::AsFd as _,
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use oubliette_egress::{
    EgressList, EgressProxy, EgressRecord, EgressSink, ProxyClient, ProxyLimits, SandboxListener,
};
use oubliette_home::{DefinitionLibrary, HomeDir, safe_fs};
use oubliette_os::{DescriptorWorker, DiskWatch, PassedDescriptors, UntrustedListener, UntrustedSocket};
use oubliette_programs::ProgramStore;
use oubliette_protocol::{
    ByteBudget, CatalogId, Error, Result, SessionId, Slug, agent::AgentDefinition, catalog::ToolDefinition,
    egress::HostPattern, tool::ToolList,
};
use oubliette_sandbox::{HostDriver, SandboxDriver, SandboxGroup};
use oubliette_tools::{
    AgentContext, CallThread, ContextSpec, DiscardDebug, ProcessEnvironment, ProxySockets, ServerSetup,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    app::{self, App},
    config::ServerConfig,
    definitions,
    sandbox_drivers::{SandboxDrivers, mountable_programs},
    scratch_dir::ScratchDir,
};

/// The definitions and configuration that trials are run with.
pub(crate) struct ToolTrial {
    config: ServerConfig,
    home: HomeDir,
    /// The home's agents and catalog.
    pub library: Arc<DefinitionLibrary>,
    /// The running server's driver and programs, if it is run in one.
    server: Option<(Arc<dyn SandboxDriver>, Arc<ProgramStore>)>,
}

/// The tools that were found.
pub(crate) struct TrialResult {
    /// The tools and servers, as `tool_list` shows them.
    pub list: ToolList,
    /// Time until every tool server was ready or had failed.
    pub took: Duration,
}

/// Drops records of connections: a trial has no session to record them for.
struct DiscardEgress;

impl EgressSink for DiscardEgress {
    fn record(&self, _record: EgressRecord) {}
}

/// The HTTP proxy for servers with `network: "proxy"`, served until the guard is dropped.
struct TrialProxies {
    proxy: Arc<EgressProxy>,
    /// The folder of the sockets.
    dir: PathBuf,
    sandbox: Arc<dyn SandboxDriver>,
    stop: DropGuard,
}

impl ProxySockets for TrialProxies {
    fn socket_for(&self, server: &CatalogId, egress: Option<&[HostPattern]>) -> Result<PathBuf> {
        let lists = egress.map(|hosts| EgressList {
            hosts: hosts.to_vec(),
            setting: format!("egress in tools/{server}/tool.json"),
        });
        let socket = self.dir.join(format!("{server}.sock"));
        let worker = DescriptorWorker::default();
        let listener =
            UntrustedListener::bind(&socket, PassedDescriptors::Refused, worker).map_err(scratch_error)?;
        let (sandbox, path) = (self.sandbox.clone(), socket.clone());
        let admits = move |peer: &UntrustedSocket| sandbox.may_connect(&path, peer.as_fd());
        let client = ProxyClient::new(lists.into_iter().collect(), Arc::new(DiscardEgress));
        let stop = self.stop.token().clone();
        tokio::spawn(
            self.proxy
                .clone()
                .serve_client(SandboxListener::new(listener, admits), stop, client),
        );
        Ok(socket)
    }
}

impl ToolTrial {
    /// Reads a home's definitions and configuration.
    pub(crate) fn new(home: &HomeDir) -> Result<Self> {
        let config = ServerConfig::load(&home.config_path(), &|name| std::env::var(name).ok())?;
        Ok(Self {
            library: definitions::open_stopped(home, &config.store_location(home))?,
            config,
            home: home.clone(),
            server: None,
        })
    }

    /// A trial in a running server.
    pub(crate) fn in_server(app: &App) -> Self {
        Self {
            config: app.config.clone(),
            home: (*app.home).clone(),
            library: app.library.clone(),
            server: Some((app.sandbox.driver().clone(), app.programs.clone())),
        }
    }

    /// The catalog entries in an agent's `tools.use`; those not in the catalog are left out.
    pub(crate) fn used_definitions(&self, definition: &AgentDefinition) -> Vec<Arc<ToolDefinition>> {
        let catalog = self.library.catalog();
        definition
            .tools
            .uses
            .iter()
            .filter_map(|id| Some(catalog.get(id)?.definition.clone()))
            .collect()
    }

    /// Starts the tools an agent uses, lists them and stops them.
    pub(crate) async fn run(&self, agent: Slug, definition: Arc<AgentDefinition>) -> Result<TrialResult> {
        let scratch = self.make_scratch_dir()?;
        let folder = |name: &str| -> Result<PathBuf> {
            let path = scratch.path().join(name);
            std::fs::create_dir(&path).map_err(scratch_error)?;
            Ok(path)
        };
        let (workspace, run_dir) = (folder("workspace")?, folder("run")?);
        let client = app::find_programs().client;
        let (sandbox, programs) = match &self.server {
            Some((sandbox, programs)) => (sandbox.clone(), programs.clone()),
            None => self.open_driver(run_dir).await?,
        };
        let limits = self.config.session_config().limits;
        let image = definition.sandbox.image.as_deref();
        let image = sandbox.prepare_image(image, None, &|_| {}).await;
        let image = image.map_err(|e| Error::unavailable(e.to_string()))?;
        let group = SandboxGroup::new("trial", limits.clone());
        group.set_image(image);
        let disk = limits
            .workspace_mb
            .map(|most| DiskWatch::new([scratch.path().to_owned()], most).with_writers(group.clone()));
        let proxies = TrialProxies {
            proxy: EgressProxy::new(self.config.egress_allow.clone(), ProxyLimits::default())?,
            dir: scratch.path().to_path_buf(),
            sandbox: sandbox.clone(),
            stop: CancellationToken::new().drop_guard(),
        };
        let spec = ContextSpec {
            session_id: SessionId::generate(),
            catalog: self.used_definitions(&definition),
            definition,
            catalog_ids: Arc::new(self.library.catalog().keys().cloned().collect()),
            setup: ServerSetup {
                agent,
                workspace,
                sandbox,
                host: Arc::new(HostDriver::new(client)),
                trust: Arc::new(self.config.trust.resolve(&self.home)),
                limits,
                group: Some(group.clone()),
                env: Arc::new(ProcessEnvironment),
                debug: Arc::new(DiscardDebug),
                programs: Some(programs),
                caches: Some(scratch.path().join("caches")),
                proxy: Some(Arc::new(proxies)),
                thread: CallThread::current_runtime(),
                buffers: ByteBudget::default(),
            },
        };
        let started = Instant::now();
        let tried = async {
            let context = AgentContext::build(spec).await?;
            let took = started.elapsed();
            let list = ToolList {
                tools: context.rows(),
                servers: context.servers(),
            };
            context.teardown().await;
            Ok(TrialResult { list, took })
        };
        let tried = tokio::select! {
            tried = tried => tried,
            error = exceeded(disk.as_ref()) => {
                group.kill();
                Err(error)
            }
        };
        drop(group);
        scratch.remove().await;
        tried
    }

    /// A temporary folder. With a driver of containers it is in the home, which a container engine sees at the same path also when
    /// this program runs in a container, and which is on the volume of pods.
    fn make_scratch_dir(&self) -> Result<ScratchDir> {
        let made = match self.config.sandbox.has_containers() {
            false => ScratchDir::new("oubliette-trial-"),
            true => {
                let run_dir = self.home.run_dir();
                safe_fs::create_private_dir(&run_dir)?;
                // A short name: the path of a socket has at most 107 bytes.
                ScratchDir::new_in(&run_dir, "trial-")
            }
        };
        made.map_err(scratch_error)
    }

    /// A sandbox driver of its own, and the home's programs.
    async fn open_driver(&self, run_dir: PathBuf) -> Result<(Arc<dyn SandboxDriver>, Arc<ProgramStore>)> {
        let config = &self.config.sandbox;
        let programs = mountable_programs(config, app::find_programs(), run_dir.clone()).await?;
        let SandboxDrivers { sandbox, local } =
            SandboxDrivers::open(&self.home, config, programs.client, run_dir).await?;
        // Finish the drivers' probes now: running later, they could write into the scratch folder while that is deleted.
        local.probe().await;
        sandbox.probe().await;
        let env = |name: &str| std::env::var(name).ok();
        let home = Arc::new(self.home.clone());
        let programs = ProgramStore::reader(home, local, self.config.programs, env);
        Ok((sandbox, programs))
    }
}

/// Waits until the temporary directory holds more than a session may have on disk; for ever without a limit.
async fn exceeded(disk: Option<&DiskWatch>) -> Error {
    let Some(disk) = disk else {
        return std::future::pending().await;
    };
    let usage = disk.exceeded().await;
    Error::limit_exceeded(format!(
        "the tools were stopped: they wrote {} MiB, more than the workspace_mb of [sandbox] in oubliette.toml",
        usage.bytes >> 20
    ))
}

fn scratch_error(error: std::io::Error) -> Error {
    Error::unavailable(format!("making a scratch folder failed: {error}"))
}
