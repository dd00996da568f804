//! [`SessionProcesses`]: what a session has running: its tool servers, its egress sockets and its agent.
//!
//! Tools and agent are started concurrently, because neither needs the other until the agent opens its
//! conversation. By then the tools must be installed, since some agents list them only once.

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
    agent::{AgentRuntime, NetworkAccess},
    relay::{HANDOFF_SOCKET_NAME, HANDOFF_SOCKET_PATH, KEY_ENV, SOCKET_PATH},
};
use oubliette_sandbox::{BindMount, PortForward, SandboxSpec, SocketMount};
use oubliette_tools::{AgentContext, ContextSpec, DebugSink, ServerSetup, ToolPlane};
use tokio::task::JoinHandle;
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    agent_plan::AgentPlan,
    agent_process::{AgentProcess, AgentStart, Conversation, memory::MemoryHandler},
    debug::{ContextDebugSink, ModelDebugSink},
    environment::{self, AgentEnvironment, CONFIG_FILE, LoopbackPorts},
    ports::SessionDeps,
    relay_socket,
};

const MODEL_SOCKET: &str = "/run/oubliette/model.sock";
const PROXY_SOCKET: &str = "/run/oubliette/proxy.sock";
const AGENT_PROGRAM: &str = "/opt/oubliette/oubliette-agent";

/// What a session's processes are started with: shared dependencies and the session's own handles.
#[derive(Clone)]
pub(crate) struct SessionEnv {
    pub(crate) deps: Arc<SessionDeps>,
    pub(crate) session: SessionId,
    pub(crate) plane: Arc<ToolPlane>,
    pub(crate) debug: Arc<dyn DebugSink>,
    /// The session's socket directory.
    pub(crate) socket_dir: PathBuf,
    /// The agent's process id, read by the relay socket to decide who may connect; 0 while there is none.
    pub(crate) agent_pid: Arc<AtomicU32>,
}

/// The running parts of a session. The tool servers belong to the context installed in the tool plane.
pub(crate) struct SessionProcesses {
    pub(crate) plan: AgentPlan,
    pub(crate) agent: Option<AgentProcess>,
    egress: EgressSockets,
}

impl SessionProcesses {
    /// Starts the tools without the agent, for calls from outside while the session is idle.
    pub(crate) async fn start_tools(env: &SessionEnv, plan: AgentPlan) -> Result<Self> {
        let egress = EgressSockets::open(env, &plan)?;
        let context = build_context(env, &plan).await?;
        env.plane.install(context);
        Ok(Self {
            plan,
            agent: None,
            egress,
        })
    }

    /// Starts tools and agent. When one fails, the other is stopped.
    pub(crate) async fn start(
        env: &SessionEnv,
        plan: AgentPlan,
        before: Option<&Conversation>,
    ) -> Result<Self> {
        let egress = EgressSockets::open(env, &plan)?;
        let (context, agent) = tokio::join!(build_context(env, &plan), spawn_and_initialize(env, &plan));
        let (context, mut agent) = match (context, agent) {
            (Ok(context), Ok(agent)) => (context, agent),
            (Ok(context), Err(error)) => {
                context.teardown().await;
                return Err(error);
            }
            (Err(error), Ok(agent)) => {
                agent.stop().await;
                return Err(error);
            }
            (Err(error), Err(_)) => return Err(error),
        };
        env.plane.install(context);
        if let Err(error) = agent.open_conversation(before, &env.deps.config).await {
            agent.stop().await;
            env.tear_down_tools().await;
            return Err(error);
        }
        Ok(Self {
            plan,
            agent: Some(agent),
            egress,
        })
    }

    /// Starts the agent alone; its tools are running already.
    pub(crate) async fn start_agent(
        env: &SessionEnv,
        plan: &AgentPlan,
        before: Option<&Conversation>,
    ) -> Result<AgentProcess> {
        let mut agent = spawn_and_initialize(env, plan).await?;
        match agent.open_conversation(before, &env.deps.config).await {
            Ok(()) => Ok(agent),
            Err(error) => {
                agent.stop().await;
                Err(error)
            }
        }
    }

    /// Applies an edited definition: tools at once and in place, everything else when the agent is next started.
    pub(crate) fn apply_edit(&mut self, env: &SessionEnv, plan: AgentPlan) -> Result<()> {
        self.egress.ensure(env, &plan)?;
        if let Some(context) = env.plane.context() {
            let servers = context.apply(
                plan.entry.definition.clone(),
                &plan.catalog,
                plan.catalog_ids.clone(),
            )?;
            // In the background: a turn does not wait until servers have started or stopped.
            tokio::spawn(servers);
        }
        self.plan = plan;
        Ok(())
    }

    /// Stops everything: the agent first, so that it calls no tool that is being stopped.
    pub(crate) async fn stop(self, env: &SessionEnv) {
        if let Some(agent) = self.agent {
            agent.stop().await;
        }
        env.tear_down_tools().await;
    }
}

impl SessionEnv {
    /// Takes the context out of the tool plane, if there is one, and stops its tool servers. Also needed when
    /// a start was interrupted after the context was installed.
    pub(crate) async fn tear_down_tools(&self) {
        if let Some(context) = self.plane.uninstall() {
            context.teardown().await;
        }
    }
}

/// A tool context being built. When it is dropped before it is finished, the build runs to its end in the
/// background and is then torn down: its servers are processes, and none may be left running.
struct ContextBuild(Option<JoinHandle<Result<Arc<AgentContext>>>>);

impl ContextBuild {
    async fn finish(mut self) -> Result<Arc<AgentContext>> {
        let Some(task) = &mut self.0 else {
            return Err(Error::internal("a context is built once"));
        };
        let built = task.await;
        self.0 = None;
        built.map_err(Error::internal)?
    }
}

impl Drop for ContextBuild {
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

async fn build_context(env: &SessionEnv, plan: &AgentPlan) -> Result<Arc<AgentContext>> {
    let deps = &env.deps;
    let entries = deps.store.memory_len(&env.session, plan.agent()).await?;
    let debug = Arc::new(ContextDebugSink {
        inner: env.debug.clone(),
        entries,
    });
    let proxy = env.socket_dir.join("proxy.sock");
    let spec = ContextSpec {
        session_id: env.session.clone(),
        definition: plan.entry.definition.clone(),
        catalog: plan.catalog.clone(),
        catalog_ids: plan.catalog_ids.clone(),
        setup: ServerSetup {
            agent: plan.agent().clone(),
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
            thread: env.plane.thread().clone(),
        },
    };
    ContextBuild(Some(tokio::spawn(AgentContext::build(spec))))
        .finish()
        .await
}

/// Starts the agent's process and sends it ACP's `initialize`.
async fn spawn_and_initialize(env: &SessionEnv, plan: &AgentPlan) -> Result<AgentProcess> {
    let deps = &env.deps;
    let minted = match plan.project.api_key_scope {
        Some(scope) => Some(
            deps.keys
                .mint(&env.session, &plan.project.project_id, scope)
                .await?,
        ),
        None => None,
    };
    let ports = LoopbackPorts::choose(plan.network, deps.sandbox.level())?;
    let variables = environment::agent_environment(deps, plan, ports, minted)?;
    if let Some((_, key)) = variables.client.iter().find(|(name, _)| name == KEY_ENV) {
        env.plane.hide_secret(key);
    }
    let home = agent_home(deps, &env.session, plan.agent())?;
    if let Some(config) = &variables.config_file {
        std::fs::write(home.join(CONFIG_FILE), config).map_err(Error::internal)?;
    }
    let start = AgentStart {
        permissions: plan.entry.definition.permissions,
        memory: MemoryHandler::new(deps.store.clone(), env.session.clone(), plan.agent().clone()),
        client_env: variables.client.clone(),
        instructions: match plan.entry.definition.runtime {
            AgentRuntime::Builtin {} => None,
            AgentRuntime::Acp { .. } => Some(plan.entry.definition.prompt.clone()),
        },
        spec: sandbox_spec(env, plan, ports, variables, &home),
    };
    let mut agent = AgentProcess::spawn(&deps.sandbox, start, deps.config.agent_output.clone()).await?;
    env.agent_pid.store(agent.pid(), Ordering::Relaxed);
    match agent.initialize(&deps.config).await {
        Ok(()) => Ok(agent),
        Err(error) => {
            agent.stop().await;
            Err(error)
        }
    }
}

fn sandbox_spec(
    env: &SessionEnv,
    plan: &AgentPlan,
    ports: LoopbackPorts,
    variables: AgentEnvironment,
    home: &Path,
) -> SandboxSpec {
    let deps = &env.deps;
    let (argv, mut mounts) = match &plan.entry.definition.runtime {
        AgentRuntime::Builtin {} => (
            vec![AGENT_PROGRAM.to_owned()],
            vec![BindMount::read_only(&deps.programs.agent, AGENT_PROGRAM)],
        ),
        AgentRuntime::Acp { command, .. } => (command.clone(), Vec::new()),
    };
    mounts.extend(plan.read_only.iter().cloned());
    let mut sockets = vec![
        SocketMount::new(relay_socket::path(&deps.home, &env.session), SOCKET_PATH),
        SocketMount::new(env.socket_dir.join(HANDOFF_SOCKET_NAME), HANDOFF_SOCKET_PATH),
        SocketMount::new(env.socket_dir.join("model.sock"), MODEL_SOCKET),
    ];
    let mut forwards = vec![PortForward {
        port: ports.model,
        socket: MODEL_SOCKET.into(),
    }];
    if plan.network == NetworkAccess::Proxy {
        sockets.push(SocketMount::new(env.socket_dir.join("proxy.sock"), PROXY_SOCKET));
        forwards.push(PortForward {
            port: ports.proxy,
            socket: PROXY_SOCKET.into(),
        });
    }
    SandboxSpec {
        workspace: Some(
            deps.home
                .workspace_dir(&plan.project.project_id, &plan.workspace.workspace_id),
        ),
        home: Some(home.to_path_buf()),
        mounts,
        sockets,
        forwards,
        env: variables.agent,
        network: match plan.network {
            NetworkAccess::None | NetworkAccess::Proxy => oubliette_sandbox::SandboxNetwork::None,
            NetworkAccess::Host => oubliette_sandbox::SandboxNetwork::Host,
        },
        limits: plan.limits.clone(),
        ..SandboxSpec::new(env.session.as_str(), argv)
    }
}

/// Creates the agent's home directory in this session. It is mounted into this agent's sandbox only.
fn agent_home(deps: &SessionDeps, session: &SessionId, agent: &Slug) -> Result<PathBuf> {
    let dir = deps.home.session_dir(session).join("homes").join(agent.as_str());
    std::fs::create_dir_all(&dir).map_err(Error::internal)?;
    for private in [deps.home.session_dir(session), dir.clone()] {
        std::fs::set_permissions(private, std::fs::Permissions::from_mode(0o700)).map_err(Error::internal)?;
    }
    Ok(dir)
}

/// The sockets through which a session's sandboxes reach model providers and the HTTP proxy. Served until
/// this is dropped.
struct EgressSockets {
    stop: CancellationToken,
    /// Whether the proxy's socket is bound. That happens only when something needs it, because without a mount
    /// namespace a socket cannot be hidden from the agent.
    proxy_open: bool,
    _stop_when_dropped: DropGuard,
}

impl EgressSockets {
    fn open(env: &SessionEnv, plan: &AgentPlan) -> Result<Self> {
        let stop = CancellationToken::new();
        let model = relay_socket::bind(&env.socket_dir.join("model.sock"))?;
        let sink = Arc::new(ModelDebugSink {
            inner: env.debug.clone(),
            agent: plan.agent().clone(),
        });
        tokio::spawn(env.deps.gateway.clone().serve(model, sink, stop.clone()));
        let mut sockets = Self {
            _stop_when_dropped: stop.clone().drop_guard(),
            stop,
            proxy_open: false,
        };
        sockets.ensure(env, plan)?;
        Ok(sockets)
    }

    /// Binds the proxy's socket if the plan needs it and it is not bound yet.
    fn ensure(&mut self, env: &SessionEnv, plan: &AgentPlan) -> Result<()> {
        if plan.needs_proxy() && !self.proxy_open {
            let proxy = relay_socket::bind(&env.socket_dir.join("proxy.sock"))?;
            tokio::spawn(env.deps.proxy.clone().serve(proxy, self.stop.clone()));
            self.proxy_open = true;
        }
        Ok(())
    }
}
