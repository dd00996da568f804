//! The MCP servers of a session, started as `session/new` specifies, and calls to their tools.

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
    JsonObject,
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

/// How long a server may take to start, and to list its tools.
const STARTUP_TIMEOUT: Duration = Duration::from_secs(30);

/// All MCP servers of a session, in the order of `session/new`.
pub(crate) struct ToolServers {
    servers: Vec<AgentToolServer>,
}

struct AgentToolServer {
    spec: McpServerStdio,
    cwd: PathBuf,
    /// The process and the connection to it; replaced when the process has died.
    connection: tokio::sync::Mutex<RunningService<RoleClient, ToolListWatcher>>,
    listed: Mutex<Vec<Tool>>,
    /// How often the tool list has changed. `listed_at_change` is its value at the last successful listing.
    list_changes: Arc<AtomicU64>,
    listed_at_change: AtomicU64,
}

/// The client's notification handler: it counts changes of the tool list.
struct ToolListWatcher {
    changes: Arc<AtomicU64>,
}

impl ClientHandler for ToolListWatcher {
    fn get_info(&self) -> ClientConfig {
        let me = Implementation::new("oubliette-agent", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), me)
    }

    async fn on_tool_list_changed(&self, _context: NotificationContext<RoleClient>) {
        // The listing happens before the next request to the model, so many notifications cost one listing.
        self.changes.fetch_add(1, Ordering::AcqRel);
    }
}

impl ToolServers {
    /// Starts all servers concurrently. If one does not start the session fails: an agent without its tools
    /// would give wrong answers without saying so.
    pub(crate) async fn start(servers: &[McpServer], cwd: &Path) -> Result<Self, String> {
        let servers = try_join_all(servers.iter().map(|server| AgentToolServer::start(server, cwd))).await?;
        Ok(Self { servers })
    }

    /// The current tools of all servers; when two servers list the same name, the first server's.
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

    /// Calls a tool by its exact name. A name that no server lists goes to the first server, which refuses it.
    /// Every failure becomes an error result that the model can read.
    pub(crate) async fn call(
        &self,
        tool: &str,
        arguments: JsonObject,
        cancel: &CancellationToken,
    ) -> CallResult {
        let lists = |server: &&AgentToolServer| lock(&server.listed).iter().any(|listed| listed.name == tool);
        let Some(server) = self.servers.iter().find(lists).or(self.servers.first()) else {
            return error_result(
                "not_found",
                format!("there is no tool {tool:?}: the session has no tool server"),
            );
        };
        server.call(tool, arguments, cancel).await
    }
}

impl AgentToolServer {
    async fn start(server: &McpServer, cwd: &Path) -> Result<Self, String> {
        let McpServer::Stdio(stdio) = server else {
            return Err("only MCP servers on stdio can be used".to_owned());
        };
        let name = stdio.name.clone();
        match tokio::time::timeout(STARTUP_TIMEOUT, Self::connect(stdio, cwd)).await {
            Ok(Ok(started)) => Ok(started),
            Ok(Err(error)) => Err(format!("the tool server {name:?} did not start: {error}")),
            Err(_) => Err(format!(
                "the tool server {name:?} was not ready within {} s",
                STARTUP_TIMEOUT.as_secs()
            )),
        }
    }

    async fn connect(spec: &McpServerStdio, cwd: &Path) -> Result<Self, String> {
        let changes = Arc::new(AtomicU64::new(1));
        let link = tokio::sync::Mutex::new(spawn_and_initialize(spec, cwd, changes.clone()).await?);
        let (spec, cwd) = (spec.clone(), cwd.to_owned());
        let server = Self {
            spec,
            cwd,
            connection: link,
            listed: Mutex::new(Vec::new()),
            list_changes: changes,
            listed_at_change: AtomicU64::new(0),
        };
        server.refresh().await;
        Ok(server)
    }

    /// The connection to the server, which is started again if its process has died.
    async fn running_peer(&self) -> Result<Peer<RoleClient>, String> {
        let mut service = self.connection.lock().await;
        if service.peer().is_transport_closed() {
            let again = spawn_and_initialize(&self.spec, &self.cwd, self.list_changes.clone());
            *service = tokio::time::timeout(STARTUP_TIMEOUT, again)
                .await
                .map_err(|_| "it did not start in time".to_owned())??;
            self.list_changes.fetch_add(1, Ordering::AcqRel);
        }
        Ok(service.peer().clone())
    }

    /// Lists the tools again if the server reported a change. If listing fails the old list stays, and the
    /// next call tries again.
    async fn refresh(&self) {
        let listing = async {
            let peer = self.running_peer().await?;
            // Read before listing, so that a change during the listing causes another one; stored after it,
            // so that a listing interrupted by a cancel counts as not done.
            let changes = self.list_changes.load(Ordering::Acquire);
            if self.listed_at_change.load(Ordering::Acquire) != changes {
                *lock(&self.listed) = peer.list_all_tools().await.map_err(|e| e.to_string())?;
                self.listed_at_change.store(changes, Ordering::Release);
            }
            Ok(())
        };
        let listed = tokio::time::timeout(STARTUP_TIMEOUT, listing).await;
        if let Err(why) = listed.unwrap_or_else(|_| Err("no answer".to_owned())) {
            eprintln!(
                "oubliette-agent: the tools of {:?} could not be listed: {why}",
                self.spec.name
            );
        }
    }

    async fn call(&self, tool: &str, arguments: JsonObject, cancel: &CancellationToken) -> CallResult {
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
        let peer = tokio::select! {
            biased;
            () = cancel.cancelled() => return cancelled_result(tool),
            peer = self.running_peer() => match peer {
                Ok(peer) => peer,
                Err(why) => return self.unavailable_result(tool, &why),
            },
        };
        let options = PeerRequestOptions::no_options();
        let mut handle = match peer.send_cancellable_request(request, options).await {
            Ok(handle) => handle,
            Err(error) => return self.service_error_result(tool, error),
        };
        let answer = tokio::select! {
            biased;
            () = cancel.cancelled() => {
                // Tell the server: it may keep a process or a caller's request open for this call.
                let _gone = handle.cancel(Some("the turn was cancelled".to_owned())).await;
                return cancelled_result(tool);
            }
            answer = &mut handle.rx => answer.unwrap_or(Err(ServiceError::TransportClosed)),
        };
        match answer {
            Ok(ServerResult::CallToolResult(result)) => match serde_json::to_value(result) {
                Ok(value) => serde_json::from_value(value).unwrap_or_else(|e| {
                    error_result("internal", format!("{tool} returned an invalid tool result: {e}"))
                }),
                Err(error) => error_result(
                    "internal",
                    format!("{tool} returned an invalid tool result: {error}"),
                ),
            },
            Ok(_) => error_result(
                "internal",
                format!("{tool} answered with something other than a tool result"),
            ),
            Err(error) => self.service_error_result(tool, error),
        }
    }

    fn service_error_result(&self, tool: &str, error: ServiceError) -> CallResult {
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
                error_result(code, error.message.to_string())
            }
            ServiceError::TransportClosed | ServiceError::TransportSend(_) => {
                self.unavailable_result(tool, "it ended")
            }
            other => error_result("internal", format!("{tool}: {other}")),
        }
    }

    fn unavailable_result(&self, tool: &str, why: &str) -> CallResult {
        let name = &self.spec.name;
        error_result(
            "unavailable",
            format!("{tool}: the tool server {name:?} is gone: {why}"),
        )
    }
}

/// Starts a server's process and performs the MCP handshake. It inherits our stderr, whose tail the host
/// keeps. It does not inherit our configuration variable.
async fn spawn_and_initialize(
    spec: &McpServerStdio,
    cwd: &Path,
    changes: Arc<AtomicU64>,
) -> Result<RunningService<RoleClient, ToolListWatcher>, String> {
    let mut command = Command::new(&spec.command);
    command
        .args(&spec.args)
        .env_remove(config::CONFIG_VARIABLE)
        .kill_on_drop(true);
    command.envs(spec.env.iter().map(|variable| (&variable.name, &variable.value)));
    if cwd.is_dir() {
        command.current_dir(cwd);
    }
    let child = TokioChildProcess::new(command).map_err(|e| format!("{}: {e}", spec.command.display()))?;
    ToolListWatcher { changes }
        .serve(child)
        .await
        .map_err(|e| e.to_string())
}

fn cancelled_result(tool: &str) -> CallResult {
    error_result(
        "cancelled",
        format!("the call of {tool} was cancelled with its turn"),
    )
}

fn error_result(code: &str, message: String) -> CallResult {
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
