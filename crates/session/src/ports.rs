//! What sessions are made of and what they need from the server.

use std::{path::PathBuf, sync::Arc};

use async_trait::async_trait;
use oubliette_egress::{EgressProxy, ModelGateway};
use oubliette_home::{Home, Library};
use oubliette_protocol::{ProjectId, Result, Scope, SessionId, WorkspaceId};
use oubliette_sandbox::Sandbox;
use oubliette_store::Store;
use oubliette_tools::{CallThreads, Environment, Trust};
use tokio::net::UnixStream;

use crate::SessionConfig;

/// Everything sessions are made of.
#[derive(Clone)]
pub struct Deps {
    /// The durable truth.
    pub store: Store,
    /// Where things lie.
    pub home: Arc<Home>,
    /// Agents and catalog.
    pub library: Arc<Library>,
    /// Where agents and tool servers run.
    pub sandbox: Arc<dyn Sandbox>,
    /// Where trusted tool servers run.
    pub host: Arc<dyn Sandbox>,
    /// Model providers.
    pub gateway: Arc<ModelGateway>,
    /// The way out of `network: "proxy"`.
    pub proxy: Arc<EgressProxy>,
    /// What the configuration opens of the host.
    pub trust: Arc<Trust>,
    /// The server's environment.
    pub env: Arc<dyn Environment>,
    /// Where calls are made.
    pub threads: Arc<CallThreads>,
    /// Times and limits.
    pub config: SessionConfig,
    /// Who serves relay connections.
    pub door: Arc<dyn RelayDoor>,
    /// Who makes keys for sessions.
    pub keys: Arc<dyn KeyMinter>,
    /// Who makes workspaces.
    pub workspaces: Arc<dyn WorkspaceMaker>,
    /// Our own programs on the host.
    pub programs: Programs,
}

/// Our own programs on the host, mounted into sandboxes.
#[derive(Debug, Clone)]
pub struct Programs {
    /// `oubliette-client`.
    pub client: PathBuf,
    /// `oubliette-agent`.
    pub agent: PathBuf,
}

/// Serves connections to relay sockets. The socket is the identity: `session` is whose it is, whatever
/// the other end says.
pub trait RelayDoor: Send + Sync {
    /// Takes a connection over. It must not block.
    fn accept(&self, session: SessionId, stream: UnixStream);

    /// Takes over the connection of a client that lends its stdin and stdout. It must not block. Hanging up is a
    /// refusal: the client then does without.
    fn borrow(&self, _session: SessionId, _stream: UnixStream) {}

    /// Hangs up on every connection of a session: its agent is being replaced or has ended.
    fn close(&self, _session: &SessionId) {}
}

/// Makes keys that live as long as a session (`api_key: {scope}` of a project).
#[async_trait]
pub trait KeyMinter: Send + Sync {
    /// A key for this session alone, bound to its project. Earlier keys of the session are revoked.
    async fn mint(&self, session: &SessionId, project: &ProjectId, scope: Scope) -> Result<String>;

    /// Revokes every key of a session.
    async fn revoke(&self, session: &SessionId) -> Result<()>;
}

/// Makes the workspace of a session that wants one of its own.
#[async_trait]
pub trait WorkspaceMaker: Send + Sync {
    /// An empty workspace of a project: its row and its directory.
    async fn create(&self, project: &ProjectId) -> Result<WorkspaceId>;
}
