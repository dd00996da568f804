//! A context for a moment: an agent's tools started as a session would start them, in a workspace that is
//! thrown away afterwards. It needs no server, no database and no session.

use std::{
    path::PathBuf,
    sync::Arc,
    time::{Duration, Instant},
};

use oubliette_egress::{EgressProxy, ProxyLimits};
use oubliette_home::{Home, Library};
use oubliette_protocol::{
    Error, Result, SessionId, Slug, agent::AgentDefinition, catalog::ToolDefinition, debug::DebugBody,
    tool::ToolList,
};
use oubliette_sandbox::{Host, Local, LocalConfig, Sandbox};
use oubliette_tools::{BuildSpec, CallThread, Context, DebugSink, ProcessEnvironment};
use tokio::net::UnixListener;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{app, config::Config};

/// What a trial is held with.
pub struct Trial {
    config: Config,
    home: Home,
    /// Agents and catalog.
    pub library: Arc<Library>,
}

/// What came of it.
pub struct Tried {
    /// The tools and servers, as `tool_list` shows them.
    pub list: ToolList,
    /// From the first start to the last server that was ready, or not.
    pub took: Duration,
}

/// Nobody follows a trial: what matters is in its list.
struct Unheard;

impl DebugSink for Unheard {
    fn record(&self, _agent: Option<&Slug>, _body: DebugBody) {}
}

impl Trial {
    /// With a home's definitions and configuration.
    pub fn new(home: &Home) -> Result<Self> {
        let config = Config::load(&home.config_path(), &|name| std::env::var(name).ok())?;
        Ok(Self {
            config,
            library: Library::open(home)?,
            home: home.clone(),
        })
    }

    /// The definitions an agent uses.
    pub fn used(&self, definition: &AgentDefinition) -> Vec<Arc<ToolDefinition>> {
        let catalog = self.library.catalog();
        definition
            .tools
            .uses
            .iter()
            .filter_map(|id| Some(catalog.get(id)?.definition.clone()))
            .collect()
    }

    /// Starts what an agent uses, looks, and stops it.
    pub async fn hold(&self, agent: Slug, definition: Arc<AgentDefinition>) -> Result<Tried> {
        let scratch = tempfile::Builder::new()
            .prefix("oubliette-trial-")
            .tempdir()
            .map_err(no_room)?;
        let folder = |name: &str| -> Result<PathBuf> {
            let path = scratch.path().join(name);
            std::fs::create_dir(&path).map_err(no_room)?;
            Ok(path)
        };
        let (workspace, run_dir) = (folder("workspace")?, folder("run")?);
        let client = app::programs().client;
        let local = LocalConfig {
            client: client.clone(),
            minimum: self.config.sandbox.minimum,
            bwrap: None,
            run_dir,
        };
        let sandbox = Local::new(local)
            .await
            .map_err(|e| Error::unavailable(e.to_string()))?;
        // Once it has looked around it writes no more, and the scratch folder can go when we are done.
        sandbox.probe().await;
        let socket = scratch.path().join("proxy.sock");
        let _proxy = self.proxy(&socket)?;
        let spec = BuildSpec {
            session_id: SessionId::generate(),
            agent,
            catalog: self.used(&definition),
            definition,
            known: Arc::new(self.library.catalog().keys().cloned().collect()),
            workspace,
            sandbox: Arc::new(sandbox) as Arc<dyn Sandbox>,
            host: Arc::new(Host::new(client)),
            trust: Arc::new(self.config.trust.resolve(&self.home)),
            limits: self.config.sessions().limits,
            env: Arc::new(ProcessEnvironment),
            debug: Arc::new(Unheard),
            proxy_socket: Some(socket),
            thread: CallThread::here(),
        };
        let started = Instant::now();
        let context = Context::build(spec).await?;
        let took = started.elapsed();
        let list = ToolList {
            tools: context.rows(),
            servers: context.servers(),
        };
        context.teardown().await;
        Ok(Tried { list, took })
    }

    /// The way out for servers with `network: "proxy"`.
    fn proxy(&self, socket: &std::path::Path) -> Result<DropGuard> {
        let proxy = EgressProxy::new(self.config.egress_allow.clone(), ProxyLimits::default())?;
        let listener = UnixListener::bind(socket).map_err(no_room)?;
        let done = CancellationToken::new();
        tokio::spawn(proxy.serve(listener, done.clone()));
        Ok(done.drop_guard())
    }
}

fn no_room(error: std::io::Error) -> Error {
    Error::unavailable(format!(
        "no scratch folder could be made in {}: {error}",
        std::env::temp_dir().display()
    ))
}
