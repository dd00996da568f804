//! The dependencies of sessions, and the traits through which they reach the server.

use std::{path::PathBuf, sync::Arc};

use async_trait::async_trait;
use oubliette_egress::{EgressProxy, ModelGateway, ServiceGateway};
use oubliette_home::{DefinitionLibrary, HomeDir};
use oubliette_os::UntrustedSocket;
use oubliette_programs::ProgramStore;
use oubliette_protocol::{ByteBudget, Error, ProjectId, Result, Scope, SessionId, WorkspaceId};
use oubliette_sandbox::SandboxDriver;
use oubliette_store::{ProjectRow, Store};
use oubliette_tools::{CallThreads, ServerEnvironment, TrustedResources};

use crate::LiveConfig;

/// Everything a session manager is built from.
#[derive(Clone)]
pub struct SessionDeps {
    /// The database: rows, event logs, queued messages, memory, debugger.
    pub store: Store,
    /// The paths of workspaces, session directories and sockets.
    pub home: Arc<HomeDir>,
    /// The definitions of agents and catalog tools.
    pub library: Arc<DefinitionLibrary>,
    /// Runs agents and tool servers, isolated.
    pub sandbox: Arc<dyn SandboxDriver>,
    /// Runs trusted tool servers, directly on the host.
    pub host: Arc<dyn SandboxDriver>,
    /// Forwards model requests of sandboxes to the providers.
    pub gateway: Arc<ModelGateway>,
    /// Forwards requests of sandboxes to services, with their credential.
    pub services: Arc<ServiceGateway>,
    /// The HTTP proxy of sandboxes with `network: "proxy"`.
    pub proxy: Arc<EgressProxy>,
    /// Which parts of the host the configuration makes available to agents and tools.
    pub trust: Arc<TrustedResources>,
    /// The server's environment variables, for `${NAME}` in definitions.
    pub env: Arc<dyn ServerEnvironment>,
    /// The threads tool calls run on.
    pub threads: Arc<CallThreads>,
    /// Timeouts and limits.
    pub config: LiveConfig,
    /// What the server may keep in memory for others; each session's budget is part of it.
    pub buffers: ByteBudget,
    /// Serves connections to relay sockets.
    pub door: Arc<dyn RelayDoor>,
    /// Creates and revokes API keys of sessions.
    pub keys: Arc<dyn KeyMinter>,
    /// Creates workspaces.
    pub workspaces: Arc<dyn WorkspaceMaker>,
    /// The packages that are installed, for agents and tool servers that are programs.
    pub program_store: Arc<ProgramStore>,
    /// Where our own programs are on the host.
    pub programs: ProgramPaths,
}

impl SessionDeps {
    /// A project's row; `not_found` if there is none.
    pub(crate) async fn project(&self, id: &ProjectId) -> Result<ProjectRow> {
        let row = self.store.project_get(id).await?;
        row.ok_or_else(|| no_project(id))
    }
}

/// The error for a project that does not exist or that the principal may not see.
pub(crate) fn no_project(id: &ProjectId) -> Error {
    Error::not_found(format!("there is no project {id}"))
}

/// The host paths of our own programs, which are mounted into sandboxes.
#[derive(Debug, Clone)]
pub struct ProgramPaths {
    /// `oubliette-client`.
    pub client: PathBuf,
    /// `oubliette-agent`.
    pub agent: PathBuf,
}

/// Serves connections to relay sockets. `session` is the session whose socket was connected to; nothing the
/// peer sends can name another one.
pub trait RelayDoor: Send + Sync {
    /// Serves a connection to the relay socket. Must not block. What is kept in memory for it is charged to `buffers`.
    fn accept(&self, session: SessionId, socket: UntrustedSocket, buffers: ByteBudget);

    /// Serves a connection over which a client hands off its stdin and stdout. Must not block. Closing the
    /// connection refuses: the client then makes its calls over the relay socket.
    fn accept_handoff(&self, _session: SessionId, _socket: UntrustedSocket) {}

    /// Closes every connection of a session, because its agent is being replaced or has ended.
    fn disconnect(&self, _session: &SessionId) {}
}

/// Creates API keys that are valid as long as a session (`api_key: {scope}` of a project).
#[async_trait]
pub trait KeyMinter: Send + Sync {
    /// Creates a key for one session, bound to its project. Earlier keys of the session are revoked.
    async fn mint(&self, session: &SessionId, project: &ProjectId, scope: Scope) -> Result<String>;

    /// Revokes every key of a session.
    async fn revoke(&self, session: &SessionId) -> Result<()>;
}

/// Creates workspaces for sessions started with a new one.
#[async_trait]
pub trait WorkspaceMaker: Send + Sync {
    /// Creates an empty workspace in a project: its row and its directory.
    async fn create(&self, project: &ProjectId) -> Result<WorkspaceId>;
}
