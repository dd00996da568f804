//! Upstream MCP servers over stdio, ws, tcp and http: started, supervised, called and stopped.
//!
//! A server that floods, hangs, sends invalid messages, crashes or never reads fails its own calls and affects no other.
//!
//! Its files, in the order a server passes them:
//!
//! - this file: [`Upstream`], the handle the rest of the crate has of a server.
//! - [`supervisor`]: the task that starts, watches, restarts and stops it; [`state`]: what that task publishes.
//! - [`startup`]: process or socket, [`handshake`] in either MCP lifecycle, tool [`listing`].
//! - [`connection`]: an established connection; [`tool_calls`]: calls over it, [`direct_call`] those that bypass
//!   the MCP library.
//! - [`stdio`], [`ws`], [`tcp`], [`http`]: the transports; [`lines`] and [`tls`]: what they share; [`cache`]: the cache
//!   of a stdio server; [`ws_frames`] and [`http_response`]: how what is read is bounded and charged; [`dropped_message`]:
//!   what is left of a message without room.
//! - [`wire`]: a persistent connection with its write queue; [`traffic`]: the filter of its messages, with
//!   [`envelope`] to classify them and [`unsolicited`] to detect floods.
//! - [`fault`]: why it is down; [`limits`]: every bound; [`latch`]: a
//!   value set once. [`fuzzing`]: the fuzz target of all that reads messages.
//!
//! "The library" in these files is rmcp, the MCP client library.

mod cache;
mod connection;
mod direct_call;
mod dropped_message;
mod envelope;
mod fault;
mod fuzzing;
mod handshake;
mod http;
mod http_response;
mod latch;
mod limits;
mod lines;
mod listing;
mod startup;
mod state;
mod stdio;
mod supervisor;
mod tcp;
mod tls;
mod tool_calls;
mod traffic;
mod unsolicited;
mod wire;
mod ws;
mod ws_frames;

use std::{path::PathBuf, sync::Arc, time::Duration};

use oubliette_programs::ProgramStore;
use oubliette_protocol::{
    ByteBudget, Error, JsonObject, Result, Slug,
    catalog::{McpServerDefinition, ServerStart},
    tool::{CallResult, ListedServer},
};
use oubliette_sandbox::{ResourceLimits, SandboxDriver, SandboxGroup};
use tokio::sync::{mpsc, oneshot, watch};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    CallContext, CallThread, DebugSink, ProxySockets, ServerEnvironment, TrustedResources, call::ToolAnswer,
    registry::ToolInfo,
};
use connection::UpstreamConnection;
use state::{UpstreamPhase, UpstreamState};
use supervisor::{SupervisorCommand, UpstreamSupervisor};

#[doc(hidden)]
pub use fuzzing::fuzz_messages;

/// What all tool servers of one agent are started with.
#[derive(Clone)]
pub struct ServerSetup {
    /// The agent they are started for.
    pub agent: Slug,
    /// The session's workspace, on the host.
    pub workspace: PathBuf,
    /// The sandbox driver of servers and commands.
    pub sandbox: Arc<dyn SandboxDriver>,
    /// The driver of stdio servers with `isolation: "host"`.
    pub host: Arc<dyn SandboxDriver>,
    /// The host resources that definitions may use: host tools, host network, paths, environment variables.
    pub trust: Arc<TrustedResources>,
    /// The resource limits of each server and command.
    pub limits: ResourceLimits,
    /// The session's group, whose limits hold for all its servers, commands and its agent together. None: each has its
    /// own limits only.
    pub group: Option<SandboxGroup>,
    /// The environment of the Oubliette server, read for `${env:NAME}`.
    pub env: Arc<dyn ServerEnvironment>,
    /// The session's debugger.
    pub debug: Arc<dyn DebugSink>,
    /// The programs that stdio servers may be; none: they can only be commands.
    pub programs: Option<Arc<ProgramStore>>,
    /// The directory of the servers' caches, on the host; none: they have no `/cache`.
    pub caches: Option<PathBuf>,
    /// The egress proxy's sockets, for servers with `network: "proxy"`.
    pub proxy: Option<Arc<dyn ProxySockets>>,
    /// The thread their supervisors, pipes and connections run on.
    pub thread: CallThread,
    /// What messages to and from them are charged to while they are kept in memory.
    pub buffers: ByteBudget,
}

/// What a server is started from.
#[derive(Clone)]
pub struct UpstreamSpec {
    /// Its definition.
    pub server: McpServerDefinition,
    /// What it is started with.
    pub setup: ServerSetup,
}

/// A tool server of one agent context. Dropping it stops the server; [`Upstream::stop`] also waits.
pub struct Upstream {
    state: Arc<UpstreamState>,
    commands: mpsc::Sender<SupervisorCommand>,
    /// How long a call waits for a server that is starting.
    start_timeout: Duration,
    _abandon_guard: DropGuard,
}

/// Delays the first start of a successor until it is dropped.
pub(crate) struct StartHold {
    _sender: oneshot::Sender<()>,
}

impl Upstream {
    /// Spawns the server's supervisor, which starts it. Returns at once.
    pub fn start(spec: UpstreamSpec) -> Arc<Self> {
        Self::start_with(spec, Arc::from([]), None)
    }

    /// Creates the server that replaces this one; it is started once the hold is dropped, which is after this one
    /// has stopped. Until it has listed its own tools it shows those of this one, and calls to them wait.
    pub(crate) fn start_successor(&self, spec: UpstreamSpec) -> (Arc<Self>, StartHold) {
        let (hold, start_gate) = oneshot::channel();
        (
            Self::start_with(spec, self.tools(), Some(start_gate)),
            StartHold { _sender: hold },
        )
    }

    fn start_with(
        spec: UpstreamSpec,
        tools: Arc<[Arc<ToolInfo>]>,
        start_gate: Option<oneshot::Receiver<()>>,
    ) -> Arc<Self> {
        let state = Arc::new(UpstreamState::new(
            spec.server.id.clone(),
            spec.server.transport.as_str(),
            spec.setup.agent.clone(),
            spec.setup.debug.clone(),
            tools,
        ));
        let timeouts = spec.server.timeouts;
        let (commands, receiver) = mpsc::channel(8);
        let abandoned = CancellationToken::new();
        let abandon_guard = abandoned.clone().drop_guard();
        let thread = spec.setup.thread.clone();
        let supervisor = UpstreamSupervisor {
            spec,
            state: state.clone(),
            commands: receiver,
            abandoned,
        };
        thread.spawn(supervisor.run(start_gate));
        let start_timeout =
            Duration::from_millis(timeouts.request_ms.min(timeouts.startup_ms(ServerStart::Later)));
        Arc::new(Self {
            state,
            commands,
            start_timeout,
            _abandon_guard: abandon_guard,
        })
    }

    /// Waits until the first start has succeeded or failed.
    pub async fn wait_first_start(&self) {
        // The sender is in `self.state`, which outlives this borrow, so the wait cannot fail.
        let _ = self
            .state
            .subscribe_snapshots()
            .wait_for(|snapshot| snapshot.first_start_over)
            .await;
    }

    /// The tools it has, or had before it went down.
    pub fn tools(&self) -> Arc<[Arc<ToolInfo>]> {
        self.state.tools()
    }

    /// Its health and tool count, as `tool_list` shows them.
    pub fn status(&self) -> ListedServer {
        self.state.to_row()
    }

    /// Whether it is connected and can be called now.
    pub fn is_up(&self) -> bool {
        self.state.connection().is_some()
    }

    /// A counter that grows whenever its tools or its health status change.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.state.subscribe_changes()
    }

    /// Calls one of its tools. While the server is starting or restarting the call waits for it; while it is down
    /// the call fails at once, with the reason.
    pub async fn call(&self, tool: &str, arguments: JsonObject, ctx: &CallContext) -> Result<CallResult> {
        self.call_unparsed(tool, &arguments, ctx)
            .await
            .map(ToolAnswer::into_result)
    }

    /// Like [`Upstream::call`], but a plain result is returned as its unparsed text.
    pub(crate) async fn call_unparsed(
        &self,
        tool: &str,
        arguments: &JsonObject,
        ctx: &CallContext,
    ) -> Result<ToolAnswer> {
        let connection = match self.state.connection() {
            Some(connection) => connection,
            None => Box::pin(self.wait_until_up(ctx)).await?,
        };
        connection.call(tool, arguments, ctx).await
    }

    async fn wait_until_up(&self, ctx: &CallContext) -> Result<Arc<UpstreamConnection>> {
        let id = &self.state.id;
        let mut snapshots = self.state.subscribe_snapshots();
        let ready_or_down = snapshots.wait_for(|snapshot| match snapshot.phase {
            UpstreamPhase::Starting => false,
            // The connection may be lost without its supervisor having noticed yet.
            UpstreamPhase::Up => self.state.connection().is_some(),
            UpstreamPhase::Down | UpstreamPhase::Stopped => true,
        });
        let snapshot = tokio::select! {
            biased;
            snapshot = ready_or_down => snapshot.map_err(Error::internal)?.clone(),
            () = ctx.cancel.cancelled() => return Err(Error::unavailable("the call was cancelled")),
            () = tokio::time::sleep(self.start_timeout) => {
                return Err(Error::unavailable(format!("tool server {id} is still starting; try again later")));
            }
        };
        self.state.connection().ok_or_else(|| {
            let reason = snapshot.error.as_deref().unwrap_or("no reason is known");
            Error::unavailable(format!("tool server {id} is down: {reason}"))
        })
    }

    /// Restarts it, whatever phase it is in, and waits until it is up or has failed.
    pub async fn restart(&self) -> Result<()> {
        let (asked, answer) = oneshot::channel();
        let stopped = || Error::unavailable(format!("tool server {} was stopped", self.state.id));
        self.commands
            .send(SupervisorCommand::Restart(asked))
            .await
            .map_err(|_| stopped())?;
        answer.await.map_err(|_| stopped())?
    }

    /// Stops it: its stdin is closed, then it gets SIGTERM, then its whole process tree SIGKILL. When this returns
    /// nothing of it runs any more.
    pub async fn stop(&self, reason: &str) {
        let (done, stopped) = oneshot::channel();
        if self
            .commands
            .send(SupervisorCommand::Stop(reason.into(), done))
            .await
            .is_ok()
        {
            let _ = stopped.await;
        }
    }
}

impl std::fmt::Debug for Upstream {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Upstream")
            .field("status", &self.status())
            .finish_non_exhaustive()
    }
}
