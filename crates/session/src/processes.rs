//! [`SessionProcesses`]: what a session has running: its tool servers, its egress sockets and its agent.
//!
//! Tools and agent are started concurrently, because neither needs the other until the agent opens its
//! conversation. By then the tools must be installed, since some agents list them only once.

use std::{
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
    sync::Arc,
};

use oubliette_os::DescriptorWorker;
use oubliette_programs::ProgramLaunch;
use oubliette_protocol::{
    Error, Result, SessionId,
    agent::{AgentRuntime, McpTransport, NetworkAccess},
    relay::{HANDOFF_SOCKET_NAME, HANDOFF_SOCKET_PATH, KEY_ENV, SOCKET_PATH},
};
use oubliette_sandbox::{BindMount, PortForward, SandboxGroup, SandboxSpec, SocketMount};
use oubliette_tools::{AgentContext, ContextSpec, DebugSink, ServerSetup, ToolPlane};
use tokio::task::JoinHandle;

use crate::{
    agent_plan::AgentPlan,
    agent_process::{
        AgentProcess, AgentStart, Conversation,
        memory::MemoryHandler,
        open_permissions::PermissionApprover,
        permission::PermissionResponder,
        tools_endpoint::{self, LoopbackEndpoint, ToolsEndpoint},
    },
    approvals::SessionApprovals,
    debug::ContextDebugSink,
    disk_guard::{DiskAlarm, DiskGuard},
    egress_sockets::{EgressSockets, MODEL_SOCKET_NAME, PROXY_SOCKET_NAME},
    environment::{self, AgentEnvironment, CONFIG_FILE, LoopbackPorts},
    home_seed,
    ports::SessionDeps,
    relay_socket, sandbox_image,
    shown_tools::ShownTools,
    start_hints,
    usage::SessionMeter,
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
    pub(crate) approvals: Arc<SessionApprovals>,
    pub(crate) debug: Arc<dyn DebugSink>,
    /// What the session uses.
    pub(crate) meter: Arc<SessionMeter>,
    /// The session's socket directory.
    pub(crate) socket_dir: PathBuf,
    /// The group of all sandboxes of the session, which share its limits.
    pub(crate) sandbox_group: SandboxGroup,
    /// The thread that closes what comes from the session's sandboxes.
    pub(crate) descriptors: DescriptorWorker,
    /// Which tools the running agent has been shown.
    pub(crate) shown_tools: Arc<ShownTools>,
    /// Raised when the session exceeds its disk limit.
    pub(crate) disk_alarm: DiskAlarm,
}

/// The running parts of a session. The tool servers belong to the context installed in the tool plane.
pub(crate) struct SessionProcesses {
    pub(crate) plan: AgentPlan,
    pub(crate) agent: Option<AgentProcess>,
    egress: EgressSockets,
    /// Watches the disk as long as anything runs.
    _disk_guard: DiskGuard,
}

impl SessionProcesses {
    /// Starts the tools without the agent, for calls from outside while the session is idle.
    pub(crate) async fn start_tools(env: &SessionEnv, plan: AgentPlan) -> Result<Self> {
        sandbox_image::prepare(env, &plan).await?;
        let egress = EgressSockets::open(env, &plan)?;
        let disk_guard = DiskGuard::start(env, &plan);
        let context = build_context(env, &plan, &egress).await?;
        env.plane.install(context);
        Ok(Self {
            plan,
            agent: None,
            egress,
            _disk_guard: disk_guard,
        })
    }

    /// Starts tools and agent. When one fails, the other is stopped.
    pub(crate) async fn start(
        env: &SessionEnv,
        plan: AgentPlan,
        before: Option<&Conversation>,
    ) -> Result<Self> {
        check_start(&env.deps, &plan)?;
        sandbox_image::prepare(env, &plan).await?;
        let egress = EgressSockets::open(env, &plan)?;
        let disk_guard = DiskGuard::start(env, &plan);
        let (context, agent) = tokio::join!(
            build_context(env, &plan, &egress),
            spawn_and_initialize(env, &plan)
        );
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
        if let Err(error) = agent.open_conversation(before, &env.deps.config.load()).await {
            agent.stop().await;
            env.tear_down_tools().await;
            return Err(error);
        }
        Ok(Self {
            plan,
            agent: Some(agent),
            egress,
            _disk_guard: disk_guard,
        })
    }

    /// Starts the agent alone; its tools are running already.
    pub(crate) async fn start_agent(
        env: &SessionEnv,
        plan: &AgentPlan,
        before: Option<&Conversation>,
    ) -> Result<AgentProcess> {
        check_start(&env.deps, plan)?;
        sandbox_image::prepare(env, plan).await?;
        let mut agent = spawn_and_initialize(env, plan).await?;
        match agent.open_conversation(before, &env.deps.config.load()).await {
            Ok(()) => Ok(agent),
            Err(error) => {
                agent.stop().await;
                Err(error)
            }
        }
    }

    /// Applies an edited definition: tools and the hosts it may reach at once and in place, everything else when the
    /// agent is next started.
    pub(crate) fn apply_edit(&mut self, env: &SessionEnv, plan: AgentPlan) -> Result<()> {
        self.egress.apply(&plan)?;
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
    /// Takes the context out of the tool plane, if there is one, and stops its tool servers; calls that wait for
    /// approval are cancelled. Also needed when a start was interrupted after the context was installed.
    pub(crate) async fn tear_down_tools(&self) {
        const REASON: &str = "the agent's tools were stopped";
        let context = self.plane.uninstall();
        self.approvals.cancel_all(REASON).await;
        if let Some(context) = context {
            context.teardown().await;
            // A call that had the context already may have asked meanwhile.
            self.approvals.cancel_all(REASON).await;
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

async fn build_context(
    env: &SessionEnv,
    plan: &AgentPlan,
    egress: &EgressSockets,
) -> Result<Arc<AgentContext>> {
    let deps = &env.deps;
    env.sandbox_group.set_limits(&plan.limits);
    let entries = deps.store.memory_len(&env.session, plan.agent()).await?;
    let debug = Arc::new(ContextDebugSink {
        inner: env.debug.clone(),
        entries,
    });
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
            group: Some(env.sandbox_group.clone()),
            env: deps.env.clone(),
            debug,
            programs: Some(deps.program_store.clone()),
            caches: Some(deps.home.caches_dir(&plan.project.project_id)),
            proxy: Some(egress.tool_proxies()),
            thread: env.plane.thread().clone(),
            buffers: env.plane.buffers().clone(),
        },
    };
    ContextBuild(Some(tokio::spawn(AgentContext::build(spec))))
        .finish()
        .await
}

/// How the agent is given its tools.
fn mcp_transport(plan: &AgentPlan) -> McpTransport {
    match plan.entry.definition.runtime {
        AgentRuntime::Builtin {} => McpTransport::Stdio,
        AgentRuntime::Acp { mcp_transport, .. } => mcp_transport,
    }
}

/// Refuses an agent whose start is known to fail, before anything is started.
pub(crate) fn check_start(deps: &SessionDeps, plan: &AgentPlan) -> Result<()> {
    environment::check_providers(deps, plan)?;
    tools_endpoint::check_level(mcp_transport(plan), deps.sandbox.level())?;
    start_hints::check_package_runner(&plan.entry.definition, plan.network)
}

/// Starts the agent's process and sends it ACP's `initialize`.
async fn spawn_and_initialize(env: &SessionEnv, plan: &AgentPlan) -> Result<AgentProcess> {
    let deps = &env.deps;
    let launch = plan.prepare_program(deps).await?;
    env.sandbox_group.set_limits(&plan.limits);
    let minted = match plan.project.api_key_scope {
        Some(scope) => Some(
            deps.keys
                .mint(&env.session, &plan.project.project_id, scope)
                .await?,
        ),
        None => None,
    };
    let ports = LoopbackPorts::choose(plan.network, deps.sandbox.level())?;
    let variables = environment::agent_environment(deps, plan, launch.as_ref(), ports, minted)?;
    if let Some((_, key)) = variables.client.iter().find(|(name, _)| name == KEY_ENV) {
        env.plane.hide_secret(key);
    }
    let home = agent_home(deps, &env.session, plan, ports)?;
    if let Some(config) = &variables.config_file {
        // An agent that ran here before may have left a link in its place.
        let mode = rustix::fs::Mode::from_raw_mode(0o600);
        oubliette_os::replace_file(&home, CONFIG_FILE, config.as_bytes(), mode).map_err(Error::internal)?;
    }
    let client_env = variables.client.clone();
    let mut spec = sandbox_spec(env, plan, launch, ports, variables, &home);
    for word in &mut spec.argv {
        *word = environment::expand_model_urls(word, ports);
    }
    let argv = spec.argv.clone();
    let tools_endpoint = match mcp_transport(plan) {
        McpTransport::Stdio => ToolsEndpoint::Stdio(client_env),
        McpTransport::Http => {
            let http = LoopbackEndpoint::new(ports.tools);
            env.plane.hide_secret(http.token());
            http.wrap(&mut spec);
            ToolsEndpoint::Http(http)
        }
    };
    let start = AgentStart {
        permission_approver: PermissionApprover {
            approvals: env.approvals.clone(),
            plane: env.plane.clone(),
            agent: plan.agent().clone(),
            debug: env.debug.clone(),
        },
        permissions: PermissionResponder::new(
            plan.entry.definition.permissions,
            plan.agent().clone(),
            env.debug.clone(),
            env.plane.clone(),
            env.shown_tools.clone(),
        ),
        memory: MemoryHandler::new(
            deps.store.clone(),
            env.session.clone(),
            plan.agent().clone(),
            env.plane.buffers().clone(),
        ),
        tools_endpoint,
        instructions: match plan.entry.definition.runtime {
            AgentRuntime::Builtin {} => None,
            AgentRuntime::Acp { .. } => Some(plan.entry.definition.prompt.clone()),
        },
        spec,
    };
    env.shown_tools.reset();
    let (limits, buffers) = (
        deps.config.load().agent_output.clone(),
        env.plane.buffers().clone(),
    );
    let explained = |error| start_hints::explain(error, &argv, plan);
    let mut agent = AgentProcess::spawn(&deps.sandbox, start, limits, buffers)
        .await
        .map_err(explained)?;
    match agent.initialize(&deps.config.load()).await {
        Ok(()) => Ok(agent),
        Err(error) => {
            agent.stop().await;
            Err(explained(error))
        }
    }
}

fn sandbox_spec(
    env: &SessionEnv,
    plan: &AgentPlan,
    launch: Option<ProgramLaunch>,
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
        AgentRuntime::Acp { command, args, .. } => {
            let (mut argv, mounts) = match launch {
                Some(launch) => (launch.argv, launch.mounts),
                None => (command.clone(), Vec::new()),
            };
            argv.extend(args.iter().cloned());
            (argv, mounts)
        }
    };
    mounts.extend(plan.read_only.iter().cloned());
    let mut sockets = vec![
        SocketMount::new(relay_socket::path(&deps.home, &env.session), SOCKET_PATH),
        SocketMount::new(env.socket_dir.join(MODEL_SOCKET_NAME), MODEL_SOCKET),
    ];
    if deps.sandbox.passes_descriptors() {
        let handoff = env.socket_dir.join(HANDOFF_SOCKET_NAME);
        sockets.push(SocketMount::new(handoff, HANDOFF_SOCKET_PATH));
    }
    let mut forwards = vec![PortForward {
        port: ports.model,
        socket: MODEL_SOCKET.into(),
    }];
    if plan.network == NetworkAccess::Proxy {
        let proxy = env.socket_dir.join(PROXY_SOCKET_NAME);
        sockets.push(SocketMount::new(proxy, PROXY_SOCKET));
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
        group: Some(env.sandbox_group.clone()),
        ..SandboxSpec::new(env.session.as_str(), argv)
    }
}

/// Creates the agent's home directory in this session, with a copy of the definition's `home/`. It is mounted into this
/// agent's sandbox only. Nothing is copied into a directory that exists already: the agent may have changed it, and put
/// links there.
fn agent_home(
    deps: &SessionDeps,
    session: &SessionId,
    plan: &AgentPlan,
    ports: LoopbackPorts,
) -> Result<PathBuf> {
    let session_dir = deps.home.session_dir(session);
    let homes = session_dir.join("homes");
    let dir = homes.join(plan.agent().as_str());
    let private = || std::fs::Permissions::from_mode(0o700);
    std::fs::create_dir_all(&homes).map_err(Error::internal)?;
    std::fs::set_permissions(&session_dir, private()).map_err(Error::internal)?;
    if !dir.is_dir() {
        // Renamed when it is complete, so that a start that was interrupted leaves no half of it.
        let incomplete = homes.join(format!(".{}", plan.agent()));
        if incomplete.exists() {
            oubliette_os::remove_tree_blocking(&incomplete).map_err(Error::internal)?;
        }
        std::fs::create_dir(&incomplete).map_err(Error::internal)?;
        let seeds = deps.library.home_files(&plan.entry)?;
        home_seed::write(&incomplete, &seeds, |text| {
            environment::expand_model_urls(text, ports)
        })?;
        std::fs::rename(&incomplete, &dir).map_err(Error::internal)?;
    }
    std::fs::set_permissions(&dir, private()).map_err(Error::internal)?;
    Ok(dir)
}
