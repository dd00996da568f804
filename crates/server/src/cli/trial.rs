//! Starts an agent's tools as a session would, in a temporary workspace, lists them and stops them. Needs no server,
//! database or session.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use oubliette_egress::{EgressProxy, ProxyLimits};
use oubliette_home::{DefinitionLibrary, HomeDir};
use oubliette_protocol::{
    Error, Result, SessionId, Slug, agent::AgentDefinition, catalog::ToolDefinition, debug::DebugBody,
    tool::ToolList,
};
use oubliette_sandbox::{HostDriver, LocalDriver, LocalDriverConfig, SandboxDriver};
use oubliette_tools::{AgentContext, CallThread, ContextSpec, DebugSink, ProcessEnvironment, ServerSetup};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{app, config::ServerConfig};

/// The definitions and configuration that trials are run with.
pub(crate) struct ToolTrial {
    config: ServerConfig,
    home: HomeDir,
    /// The home's agents and catalog.
    pub library: Arc<DefinitionLibrary>,
}

/// The tools that were found.
pub(crate) struct TrialResult {
    /// The tools and servers, as `tool_list` shows them.
    pub list: ToolList,
    /// Time until every tool server was ready or had failed.
    pub took: Duration,
}

/// Drops the debugger's events: a trial has no session to record them for.
struct DiscardDebug;

impl DebugSink for DiscardDebug {
    fn record(&self, _agent: Option<&Slug>, _body: DebugBody) {}
}

impl ToolTrial {
    /// Reads a home's definitions and configuration.
    pub(crate) fn new(home: &HomeDir) -> Result<Self> {
        let config = ServerConfig::load(&home.config_path(), &|name| std::env::var(name).ok())?;
        Ok(Self {
            config,
            library: DefinitionLibrary::open(home)?,
            home: home.clone(),
        })
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
        let scratch = tempfile::Builder::new()
            .prefix("oubliette-trial-")
            .tempdir()
            .map_err(scratch_error)?;
        let folder = |name: &str| -> Result<PathBuf> {
            let path = scratch.path().join(name);
            std::fs::create_dir(&path).map_err(scratch_error)?;
            Ok(path)
        };
        let (workspace, run_dir) = (folder("workspace")?, folder("run")?);
        let client = app::find_programs().client;
        let local = LocalDriverConfig {
            client: client.clone(),
            minimum: self.config.sandbox.minimum,
            bwrap: None,
            run_dir,
        };
        let sandbox = LocalDriver::new(local)
            .await
            .map_err(|e| Error::unavailable(e.to_string()))?;
        // Finish the driver's probe now: running later, it could write into the scratch folder while that is deleted.
        sandbox.probe().await;
        let socket = scratch.path().join("proxy.sock");
        let _proxy = self.serve_proxy(&socket)?;
        let spec = ContextSpec {
            session_id: SessionId::generate(),
            catalog: self.used_definitions(&definition),
            definition,
            catalog_ids: Arc::new(self.library.catalog().keys().cloned().collect()),
            setup: ServerSetup {
                agent,
                workspace,
                sandbox: Arc::new(sandbox) as Arc<dyn SandboxDriver>,
                host: Arc::new(HostDriver::new(client)),
                trust: Arc::new(self.config.trust.resolve(&self.home)),
                limits: self.config.session_config().limits,
                env: Arc::new(ProcessEnvironment),
                debug: Arc::new(DiscardDebug),
                proxy_socket: Some(socket),
                thread: CallThread::current_runtime(),
            },
        };
        let started = Instant::now();
        let context = AgentContext::build(spec).await?;
        let took = started.elapsed();
        let list = ToolList {
            tools: context.rows(),
            servers: context.servers(),
        };
        context.teardown().await;
        Ok(TrialResult { list, took })
    }

    /// Serves the HTTP proxy for servers with `network: "proxy"`, until the guard is dropped.
    fn serve_proxy(&self, socket: &std::path::Path) -> Result<DropGuard> {
        let proxy = EgressProxy::new(self.config.egress_allow.clone(), ProxyLimits::default())?;
        let listener = oubliette_os::bind_private_socket(socket).map_err(scratch_error)?;
        let done = CancellationToken::new();
        tokio::spawn(proxy.serve(listener, done.clone()));
        Ok(done.drop_guard())
    }
}

fn scratch_error(error: std::io::Error) -> Error {
    Error::unavailable(format!(
        "no scratch folder could be made in {}: {error}",
        std::env::temp_dir().display()
    ))
}
