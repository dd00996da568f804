//! The MCP servers of a session, started as `session/new` says, and calls to them.

use std::{
    path::{Path, PathBuf},
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use agent_client_protocol::v1::schema::{McpServer, McpServerStdio};
use futures::future::try_join_all;
use oubliette_protocol::{
    Object,
    tool::{CallResult, ToolSpec},
};
use rmcp::{
    ClientHandler, RoleClient, ServiceExt,
    model::{
        CallToolRequest, CallToolRequestParams, ClientCapabilities, ClientConfig, ClientRequest,
        Implementation, ServerResult, Tool,
    },
    service::{NotificationContext, Peer, PeerRequestOptions, RunningService, ServiceError},
    transport::TokioChildProcess,
};
use serde_json::{Value, json};
use tokio::process::Command;
use tokio_util::sync::CancellationToken;

use crate::config;

/// How long a server may take to start and to list its tools.
const STARTUP: Duration = Duration::from_secs(30);

/// All servers of a session, in the order they were given.
pub(crate) struct Tools {
    servers: Vec<Server>,
}

struct Server {
    spec: McpServerStdio,
    cwd: PathBuf,
    /// The process and the connection to it; another one when it died.
    link: tokio::sync::Mutex<RunningService<RoleClient, Watcher>>,
    listed: Mutex<Vec<Tool>>,
    /// How often the list changed, and up to where it is known here.
    changes: Arc<AtomicU64>,
    seen: AtomicU64,
}

/// The client's side of a connection: it only wants to know when the list of tools changed.
struct Watcher {
    changes: Arc<AtomicU64>,
}

impl ClientHandler for Watcher {
    fn get_info(&self) -> ClientConfig {
        let me = Implementation::new("oubliette-agent", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), me)
    }

    async fn on_tool_list_changed(&self, _context: NotificationContext<RoleClient>) {
        // Listed again before the next request to the model, not here: a burst is one listing.
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}

impl Tools {
    /// Starts every server, side by side. One that does not start fails the session: an agent
    /// without its tools would do the wrong thing quietly.
    pub(crate) async fn start(servers: &[McpServer], cwd: &Path) -> Result<Self, String> {
        let servers = try_join_all(servers.iter().map(|server| Server::start(server, cwd))).await?;
        Ok(Self { servers })
    }

    /// The tools as they are listed now; a name listed twice is the first server's.
    pub(crate) async fn list(&self) -> Vec<ToolSpec> {
        let mut specs: Vec<ToolSpec> = Vec::new();
        for server in &self.servers {
            server.refresh().await;
            for tool in lock(&server.listed).iter() {
                if specs.iter().all(|spec| spec.name != tool.name) {
                    specs.push(ToolSpec {
                        name: tool.name.to_string(),
                        description: tool.description.as_deref().unwrap_or_default().to_owned(),
                        input_schema: Value::Object((*tool.input_schema).clone()),
                    });
                }
            }
        }
        specs
    }

    /// Calls a tool by its exact name, listed or not: what is not listed is the first server's to
    /// refuse. Whatever goes wrong is a result the model can read.
    pub(crate) async fn call(&self, tool: &str, arguments: Object, cancel: &CancellationToken) -> CallResult {
        let lists = |server: &&Server| lock(&server.listed).iter().any(|listed| listed.name == tool);
        let Some(server) = self.servers.iter().find(lists).or(self.servers.first()) else {
            return failed(
                "not_found",
                format!("there is no tool {tool:?}: the session has no tool server"),
            );
        };
        server.call(tool, arguments, cancel).await
    }
}

impl Server {
    async fn start(server: &McpServer, cwd: &Path) -> Result<Self, String> {
        let McpServer::Stdio(stdio) = server else {
            return Err("only MCP servers on stdio can be used".to_owned());
        };
        let name = stdio.name.clone();
        match tokio::time::timeout(STARTUP, Self::connect(stdio, cwd)).await {
            Ok(Ok(started)) => Ok(started),
            Ok(Err(error)) => Err(format!("the tool server {name:?} did not start: {error}")),
            Err(_) => Err(format!(
                "the tool server {name:?} was not ready within {} s",
                STARTUP.as_secs()
            )),
        }
    }

    async fn connect(spec: &McpServerStdio, cwd: &Path) -> Result<Self, String> {
        let changes = Arc::new(AtomicU64::new(1));
        let link = tokio::sync::Mutex::new(started(spec, cwd, changes.clone()).await?);
        let (spec, cwd) = (spec.clone(), cwd.to_owned());
        let server = Self {
            spec,
            cwd,
            link,
            listed: Mutex::new(Vec::new()),
            changes,
            seen: AtomicU64::new(0),
        };
        server.refresh().await;
        Ok(server)
    }

    /// The server to talk to, started again if it has died: a session outlives its tool server.
    async fn peer(&self) -> Result<Peer<RoleClient>, String> {
        let mut service = self.link.lock().await;
        if service.peer().is_transport_closed() {
            let again = started(&self.spec, &self.cwd, self.changes.clone());
            *service = tokio::time::timeout(STARTUP, again)
                .await
                .map_err(|_| "it does not start".to_owned())??;
            self.changes.fetch_add(1, Ordering::AcqRel);
        }
        Ok(service.peer().clone())
    }

    /// Lists the tools again if the server said they changed. A listing that fails leaves the old
    /// one, and is tried again next time.
    async fn refresh(&self) {
        let listing = async {
            let peer = self.peer().await?;
            // Counted before the question: what changes while it is answered is asked for again. And
            // noted after the answer: a listing broken off by a cancel is as if it had not been.
            let changes = self.changes.load(Ordering::Acquire);
            if self.seen.load(Ordering::Acquire) != changes {
                *lock(&self.listed) = peer.list_all_tools().await.map_err(|e| e.to_string())?;
                self.seen.store(changes, Ordering::Release);
            }
            Ok(())
        };
        let listed = tokio::time::timeout(STARTUP, listing).await;
        if let Err(why) = listed.unwrap_or_else(|_| Err("no answer".to_owned())) {
            eprintln!(
                "oubliette-agent: the tools of {:?} could not be listed: {why}",
                self.spec.name
            );
        }
    }

    async fn call(&self, tool: &str, arguments: Object, cancel: &CancellationToken) -> CallResult {
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
        let peer = tokio::select! {
            biased;
            () = cancel.cancelled() => return cancelled(tool),
            peer = self.peer() => match peer {
                Ok(peer) => peer,
                Err(why) => return self.gone(tool, &why),
            },
        };
        let options = PeerRequestOptions::no_options();
        let mut handle = match peer.send_cancellable_request(request, options).await {
            Ok(handle) => handle,
            Err(error) => return self.broken(tool, error),
        };
        let answer = tokio::select! {
            biased;
            () = cancel.cancelled() => {
                // The server must hear of it: it may be holding a process or a caller for this call.
                let _gone = handle.cancel(Some("the turn was cancelled".to_owned())).await;
                return cancelled(tool);
            }
            answer = &mut handle.rx => answer.unwrap_or(Err(ServiceError::TransportClosed)),
        };
        match answer {
            Ok(ServerResult::CallToolResult(result)) => match serde_json::to_value(result) {
                Ok(value) => serde_json::from_value(value).unwrap_or_else(|e| {
                    failed("internal", format!("{tool} answered in a strange shape: {e}"))
                }),
                Err(error) => failed("internal", format!("{tool} answered in a strange shape: {error}")),
            },
            Ok(_) => failed(
                "internal",
                format!("{tool} answered with something that is no tool result"),
            ),
            Err(error) => self.broken(tool, error),
        }
    }

    fn broken(&self, tool: &str, error: ServiceError) -> CallResult {
        match error {
            ServiceError::McpError(error) => {
                let code = error
                    .data
                    .as_ref()
                    .and_then(|data| data.get("code"))
                    .and_then(Value::as_str);
                let code = code.unwrap_or(if error.code.0 == -32602 {
                    "invalid_argument"
                } else {
                    "tool_error"
                });
                failed(code, error.message.to_string())
            }
            ServiceError::TransportClosed | ServiceError::TransportSend(_) => self.gone(tool, "it ended"),
            other => failed("internal", format!("{tool}: {other}")),
        }
    }

    fn gone(&self, tool: &str, why: &str) -> CallResult {
        let name = &self.spec.name;
        failed(
            "unavailable",
            format!("{tool}: the tool server {name:?} is gone: {why}"),
        )
    }
}

/// Starts a server's process and shakes hands with it. Its stderr is ours: the host keeps the tail.
async fn started(
    spec: &McpServerStdio,
    cwd: &Path,
    changes: Arc<AtomicU64>,
) -> Result<RunningService<RoleClient, Watcher>, String> {
    let mut command = Command::new(&spec.command);
    command
        .args(&spec.args)
        .env_remove(config::VARIABLE)
        .kill_on_drop(true);
    command.envs(spec.env.iter().map(|variable| (&variable.name, &variable.value)));
    if cwd.is_dir() {
        command.current_dir(cwd);
    }
    let child = TokioChildProcess::new(command).map_err(|e| format!("{}: {e}", spec.command.display()))?;
    Watcher { changes }.serve(child).await.map_err(|e| e.to_string())
}

fn cancelled(tool: &str) -> CallResult {
    failed(
        "cancelled",
        format!("the call of {tool} was cancelled with its turn"),
    )
}

fn failed(code: &str, message: String) -> CallResult {
    let structured = json!({ "error": { "code": code, "message": &message } });
    CallResult {
        structured_content: Some(structured),
        is_error: true,
        ..CallResult::text(message)
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
