//! [`ToolsEndpoint`]: the MCP server `oubliette-client` as an agent is given it, over stdio or HTTP.

use agent_client_protocol::v1::schema::{EnvVariable, HttpHeader, McpServer, McpServerHttp, McpServerStdio};
use oubliette_protocol::{Error, Result, agent::McpTransport, relay::HTTP_TOKEN_ENV};
use oubliette_sandbox::{IsolationLevel, SandboxPaths, SandboxSpec, spec::CLIENT};

/// The name of the MCP server in the agent's configuration.
pub(super) const SERVER_NAME: &str = "oubliette";

/// How an agent reaches its tools. It has no `Debug`: it holds secrets.
pub(crate) enum ToolsEndpoint {
    /// The agent starts `oubliette-client` with this environment.
    Stdio(Vec<(String, String)>),
    /// `oubliette-client` runs beside the agent and serves HTTP.
    Http(LoopbackEndpoint),
}

/// An `oubliette-client` that serves HTTP on the sandbox's loopback.
pub(crate) struct LoopbackEndpoint {
    port: u16,
    /// Every request must have it. In a network namespace of its own only the agent reaches the port; with the host's
    /// network everybody on the machine does.
    token: String,
}

impl LoopbackEndpoint {
    pub(crate) fn new(port: u16) -> Self {
        let token = [uuid::Uuid::new_v4(), uuid::Uuid::new_v4()];
        Self {
            port,
            token: token.map(|part| part.simple().to_string()).concat(),
        }
    }

    /// The token, to be hidden wherever it might be shown.
    pub(crate) fn token(&self) -> &str {
        &self.token
    }

    /// Has the sandbox run `oubliette-client`, which serves the tools and then becomes the agent's program.
    pub(crate) fn wrap(&self, spec: &mut SandboxSpec) {
        let before = [CLIENT.to_owned(), "with-http".to_owned(), self.port.to_string()];
        spec.argv.splice(..0, before);
        spec.env.push((HTTP_TOKEN_ENV.to_owned(), self.token.clone()));
    }
}

impl ToolsEndpoint {
    /// The server for the requests that open a conversation.
    pub(super) fn into_server(self, paths: &SandboxPaths) -> McpServer {
        match self {
            Self::Stdio(env) => {
                let env = env.into_iter().map(|(name, value)| {
                    let seen = if value.starts_with('/') {
                        paths.resolve(&value).to_string_lossy().into_owned()
                    } else {
                        value
                    };
                    EnvVariable::new(name, seen)
                });
                let server = McpServerStdio::new(SERVER_NAME, paths.resolve(CLIENT));
                McpServer::Stdio(server.env(env.collect()))
            }
            Self::Http(LoopbackEndpoint { port, token }) => {
                let authorization = HttpHeader::new("Authorization", format!("Bearer {token}"));
                let server = McpServerHttp::new(SERVER_NAME, format!("http://127.0.0.1:{port}/mcp"));
                McpServer::Http(server.headers(vec![authorization]))
            }
        }
    }
}

/// What an agent has to do with its server, as the end of "has not …".
pub(super) fn describe(server: &McpServer) -> String {
    match server {
        McpServer::Http(http) => format!("connected to the MCP server {SERVER_NAME} at {}", http.url),
        _ => format!("started the MCP server {SERVER_NAME}"),
    }
}

/// Refuses tools over HTTP where programs in a sandbox cannot listen on a loopback interface of their own.
pub(crate) fn check_level(transport: McpTransport, level: IsolationLevel) -> Result<()> {
    match (transport, level) {
        (McpTransport::Stdio, _) | (McpTransport::Http, IsolationLevel::Namespaces) => Ok(()),
        (McpTransport::Http, _) => Err(Error::unavailable(
            "\"runtime\": {\"mcp_transport\": \"http\"} needs a sandbox with a network of its own, and this server's sandboxes have \
             none (isolation level landlock): make namespaces available (`oubliette doctor` says what is missing), or give \
             the agent its tools over stdio",
        )),
    }
}
