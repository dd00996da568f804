//! What a session has running: its tools, its ways out, its agent.
//!
//! Tools and agent are started side by side, because neither needs the other before the agent opens its
//! conversation; by then the tools must be there, since some agents list them only once.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
};

use oubliette_protocol::{
    Error, Result, SessionId, Slug,
    agent::{Network, Runtime},
    relay::{KEY_ENV, SOCKET_PATH, STDIO_SOCKET_NAME, STDIO_SOCKET_PATH},
};
use oubliette_sandbox::{Forward, Mount, Socket, Spec};
use oubliette_tools::{BuildSpec, Context, DebugSink, Plane};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    agent_host::{Conversation, Host, Start, memory::MemoryDesk},
    blueprint::Blueprint,
    debug::{ContextDebug, ModelDebug},
    environment::{self, CONFIG_FILE, Ports, Surroundings},
    ports::Deps,
    relay_socket,
};

const MODEL_SOCKET: &str = "/run/oubliette/model.sock";
const PROXY_SOCKET: &str = "/run/oubliette/proxy.sock";
const AGENT_PROGRAM: &str = "/opt/oubliette/oubliette-agent";

/// Where a rig is put up.
#[derive(Clone)]
pub(crate) struct Site {
    pub(crate) deps: Arc<Deps>,
    pub(crate) session: SessionId,
    pub(crate) plane: Arc<Plane>,
    pub(crate) debug: Arc<dyn DebugSink>,
    /// The session's socket directory.
    pub(crate) sockets: PathBuf,
    /// The process whose tree may use the relay socket.
    pub(crate) admit: Arc<AtomicU32>,
}

/// What runs. The context is installed in the plane.
pub(crate) struct Rig {
    pub(crate) plan: Blueprint,
    pub(crate) host: Option<Host>,
    ways_out: Ways,
}

impl Rig {
    /// Tools alone, for calls from outside while the agent sleeps.
    pub(crate) async fn tools(site: &Site, plan: Blueprint) -> Result<Self> {
        let ways_out = Ways::open(site, &plan)?;
        let context = context(site, &plan).await?;
        site.plane.install(context);
        Ok(Self {
            plan,
            host: None,
            ways_out,
        })
    }

    /// Tools and agent. When either cannot be had, nothing is left of the other.
    pub(crate) async fn whole(site: &Site, plan: Blueprint, before: Option<&Conversation>) -> Result<Self> {
        let ways_out = Ways::open(site, &plan)?;
        let (context, host) = tokio::join!(context(site, &plan), introduced(site, &plan));
        let (context, mut host) = match (context, host) {
            (Ok(context), Ok(host)) => (context, host),
            (Ok(context), Err(error)) => {
                context.teardown().await;
                return Err(error);
            }
            (Err(error), Ok(host)) => {
                host.stop().await;
                return Err(error);
            }
            (Err(error), Err(_)) => return Err(error),
        };
        site.plane.install(context);
        if let Err(error) = host.open(before, &site.deps.config).await {
            host.stop().await;
            site.clear().await;
            return Err(error);
        }
        Ok(Self {
            plan,
            host: Some(host),
            ways_out,
        })
    }

    /// An agent for tools that are there already.
    pub(crate) async fn agent(site: &Site, plan: &Blueprint, before: Option<&Conversation>) -> Result<Host> {
        let mut host = introduced(site, plan).await?;
        match host.open(before, &site.deps.config).await {
            Ok(()) => Ok(host),
            Err(error) => {
                host.stop().await;
                Err(error)
            }
        }
    }

    /// Takes an edit in: tools at once and in place, everything else when the agent is next started.
    pub(crate) fn renew(&mut self, site: &Site, plan: Blueprint) -> Result<()> {
        self.ways_out.suit(site, &plan)?;
        if let Some(context) = site.plane.context() {
            let servers = context.apply(plan.entry.definition.clone(), &plan.catalog, plan.known.clone())?;
            // Servers come and go by themselves: a turn does not wait for them.
            tokio::spawn(servers);
        }
        self.plan = plan;
        Ok(())
    }

    /// Stops everything: the agent first, so that it calls nothing that is being stopped.
    pub(crate) async fn down(self, site: &Site) {
        if let Some(host) = self.host {
            host.stop().await;
        }
        site.clear().await;
    }
}

impl Site {
    /// Closes the plane and takes down what it held, also when no rig came of it.
    pub(crate) async fn clear(&self) {
        if let Some(context) = self.plane.take() {
            context.teardown().await;
        }
    }
}

/// A context being built. Dropped half way, it is built to the end and taken down in order: its servers
/// are processes, and none may be left behind.
struct Building(Option<JoinHandle<Result<Arc<Context>>>>);

impl Building {
    async fn done(mut self) -> Result<Arc<Context>> {
        let Some(task) = &mut self.0 else {
            return Err(Error::internal("a context is built once"));
        };
        let built = task.await;
        self.0 = None;
        built.map_err(Error::internal)?
    }
}

impl Drop for Building {
    fn drop(&mut self) {
        if let (Some(task), Ok(runtime)) = (self.0.take(), tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move {
                if let Ok(Ok(context)) = task.await {
                    context.teardown().await;
                }
            });
        }
    }
}

async fn context(site: &Site, plan: &Blueprint) -> Result<Arc<Context>> {
    let deps = &site.deps;
    let entries = deps.store.memory_len(&site.session, plan.agent()).await?;
    let debug = Arc::new(ContextDebug {
        inner: site.debug.clone(),
        entries,
    });
    let proxy = site.sockets.join("proxy.sock");
    let spec = BuildSpec {
        session_id: site.session.clone(),
        agent: plan.agent().clone(),
        definition: plan.entry.definition.clone(),
        catalog: plan.catalog.clone(),
        known: plan.known.clone(),
        workspace: deps
            .home
            .workspace_dir(&plan.project.project_id, &plan.workspace.workspace_id),
        sandbox: deps.sandbox.clone(),
        host: deps.host.clone(),
        trust: deps.trust.clone(),
        limits: plan.limits.clone(),
        env: deps.env.clone(),
        debug,
        proxy_socket: Some(proxy),
        thread: site.plane.thread().clone(),
    };
    Building(Some(tokio::spawn(Context::build(spec)))).done().await
}

/// Starts the agent's process and gets to know it.
async fn introduced(site: &Site, plan: &Blueprint) -> Result<Host> {
    let deps = &site.deps;
    let minted = match plan.project.api_key_scope {
        Some(scope) => Some(
            deps.keys
                .mint(&site.session, &plan.project.project_id, scope)
                .await?,
        ),
        None => None,
    };
    let ports = Ports::choose(plan.network, deps.sandbox.level())?;
    let around = environment::surroundings(deps, plan, ports, minted)?;
    if let Some((_, key)) = around.client.iter().find(|(name, _)| name == KEY_ENV) {
        site.plane.hide(key);
    }
    let home = agent_home(deps, &site.session, plan.agent())?;
    if let Some(config) = &around.config_file {
        std::fs::write(home.join(CONFIG_FILE), config).map_err(Error::internal)?;
    }
    let start = Start {
        permissions: plan.entry.definition.permissions,
        memory: MemoryDesk::new(deps.store.clone(), site.session.clone(), plan.agent().clone()),
        client_env: around.client.clone(),
        prompt: match plan.entry.definition.runtime {
            Runtime::Builtin {} => None,
            Runtime::Acp { .. } => Some(plan.entry.definition.prompt.clone()),
        },
        spec: spec(site, plan, ports, around, &home),
    };
    let mut host = Host::spawn(&deps.sandbox, start, deps.config.voice.clone()).await?;
    site.admit.store(host.pid(), Ordering::Relaxed);
    match host.initialize(&deps.config).await {
        Ok(()) => Ok(host),
        Err(error) => {
            host.stop().await;
            Err(error)
        }
    }
}

fn spec(site: &Site, plan: &Blueprint, ports: Ports, around: Surroundings, home: &Path) -> Spec {
    let deps = &site.deps;
    let (argv, mut mounts) = match &plan.entry.definition.runtime {
        Runtime::Builtin {} => (
            vec![AGENT_PROGRAM.to_owned()],
            vec![Mount::read_only(&deps.programs.agent, AGENT_PROGRAM)],
        ),
        Runtime::Acp { command, .. } => (command.clone(), Vec::new()),
    };
    mounts.extend(plan.read_only.iter().cloned());
    let mut sockets = vec![
        Socket::new(relay_socket::path(&deps.home, &site.session), SOCKET_PATH),
        Socket::new(site.sockets.join(STDIO_SOCKET_NAME), STDIO_SOCKET_PATH),
        Socket::new(site.sockets.join("model.sock"), MODEL_SOCKET),
    ];
    let mut forwards = vec![Forward {
        port: ports.model,
        socket: MODEL_SOCKET.into(),
    }];
    if plan.network == Network::Proxy {
        sockets.push(Socket::new(site.sockets.join("proxy.sock"), PROXY_SOCKET));
        forwards.push(Forward {
            port: ports.proxy,
            socket: PROXY_SOCKET.into(),
        });
    }
    Spec {
        workspace: Some(
            deps.home
                .workspace_dir(&plan.project.project_id, &plan.workspace.workspace_id),
        ),
        home: Some(home.to_path_buf()),
        mounts,
        sockets,
        forwards,
        env: around.agent,
        network: match plan.network {
            Network::None | Network::Proxy => oubliette_sandbox::Network::None,
            Network::Host => oubliette_sandbox::Network::Host,
        },
        limits: plan.limits.clone(),
        ..Spec::new(site.session.as_str(), argv)
    }
}

/// The agent's own home in this session: no other agent's sandbox ever sees it.
fn agent_home(deps: &Deps, session: &SessionId, agent: &Slug) -> Result<PathBuf> {
    let dir = deps.home.session_dir(session).join("homes").join(agent.as_str());
    std::fs::create_dir_all(&dir).map_err(Error::internal)?;
    for private in [deps.home.session_dir(session), dir.clone()] {
        std::fs::set_permissions(private, std::fs::Permissions::from_mode(0o700)).map_err(Error::internal)?;
    }
    Ok(dir)
}

/// The ways out of a session's sandboxes, on its own sockets; served until this is dropped.
struct Ways {
    stop: CancellationToken,
    /// Only while something needs it: without a mount namespace a socket cannot be hidden.
    proxy: bool,
    _stop_when_dropped: DropGuard,
}

impl Ways {
    fn open(site: &Site, plan: &Blueprint) -> Result<Self> {
        let stop = CancellationToken::new();
        let model = relay_socket::bind(&site.sockets.join("model.sock"))?;
        let sink = Arc::new(ModelDebug {
            inner: site.debug.clone(),
            agent: plan.agent().clone(),
        });
        tokio::spawn(site.deps.gateway.clone().serve(model, sink, stop.clone()));
        let mut ways = Self {
            _stop_when_dropped: stop.clone().drop_guard(),
            stop,
            proxy: false,
        };
        ways.suit(site, plan)?;
        Ok(ways)
    }

    /// Opens what a plan needs and is not open.
    fn suit(&mut self, site: &Site, plan: &Blueprint) -> Result<()> {
        if plan.needs_proxy() && !self.proxy {
            let proxy = relay_socket::bind(&site.sockets.join("proxy.sock"))?;
            tokio::spawn(site.deps.proxy.clone().serve(proxy, self.stop.clone()));
            self.proxy = true;
        }
        Ok(())
    }
}
