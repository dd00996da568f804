//! The MCP servers of a session, started as `session/new` says, and calls to them.

use std::{
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
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
    name: String,
    service: RunningService<RoleClient, Watcher>,
    listed: Mutex<Vec<Tool>>,
    stale: Arc<AtomicBool>,
}

/// The client's side of a connection: it only wants to know when the list of tools changed.
struct Watcher {
    stale: Arc<AtomicBool>,
}

impl ClientHandler for Watcher {
    fn get_info(&self) -> ClientConfig {
        let me = Implementation::new("oubliette-agent", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), me)
    }

    async fn on_tool_list_changed(&self, _context: NotificationContext<RoleClient>) {
        // Listed again before the next request to the model, not here: a burst is one listing.
        self.stale.store(true, Ordering::Release);
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

    async fn connect(stdio: &McpServerStdio, cwd: &Path) -> Result<Self, String> {
        let mut command = Command::new(&stdio.command);
        command
            .args(&stdio.args)
            .env_remove(config::VARIABLE)
            .kill_on_drop(true);
        command.envs(stdio.env.iter().map(|variable| (&variable.name, &variable.value)));
        if cwd.is_dir() {
            command.current_dir(cwd);
        }
        // Its stderr is ours: the host keeps the tail of it.
        let child =
            TokioChildProcess::new(command).map_err(|e| format!("{}: {e}", stdio.command.display()))?;
        let stale = Arc::new(AtomicBool::new(true));
        let service = Watcher { stale: stale.clone() }
            .serve(child)
            .await
            .map_err(|e| e.to_string())?;
        let server = Self {
            name: stdio.name.clone(),
            service,
            listed: Mutex::new(Vec::new()),
            stale,
        };
        server.refresh().await;
        Ok(server)
    }

    /// Lists the tools again if the server said they changed. A listing that fails leaves the old
    /// one, and is tried again next time.
    async fn refresh(&self) {
        if !self.stale.swap(false, Ordering::AcqRel) {
            return;
        }
        match tokio::time::timeout(STARTUP, self.peer().list_all_tools()).await {
            Ok(Ok(tools)) => *lock(&self.listed) = tools,
            Ok(Err(error)) => self.not_listed(&error.to_string()),
            Err(_) => self.not_listed("no answer"),
        }
    }

    fn not_listed(&self, why: &str) {
        self.stale.store(true, Ordering::Release);
        eprintln!(
            "oubliette-agent: the tools of {:?} could not be listed: {why}",
            self.name
        );
    }

    fn peer(&self) -> &Peer<RoleClient> {
        self.service.peer()
    }

    async fn call(&self, tool: &str, arguments: Object, cancel: &CancellationToken) -> CallResult {
        let params = CallToolRequestParams::new(tool.to_owned()).with_arguments(arguments);
        let request = ClientRequest::CallToolRequest(CallToolRequest::new(params));
        let sent = self
            .peer()
            .send_cancellable_request(request, PeerRequestOptions::no_options())
            .await;
        let mut handle = match sent {
            Ok(handle) => handle,
            Err(error) => return self.broken(tool, error),
        };
        let answer = tokio::select! {
            biased;
            () = cancel.cancelled() => {
                // The server must hear of it: it may be holding a process or a caller for this call.
                let _gone = handle.cancel(Some("the turn was cancelled".to_owned())).await;
                return failed("cancelled", format!("the call of {tool} was cancelled with its turn"));
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
            ServiceError::TransportClosed | ServiceError::TransportSend(_) => failed(
                "unavailable",
                format!("{tool}: the tool server {:?} is gone", self.name),
            ),
            other => failed("internal", format!("{tool}: {other}")),
        }
    }
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
