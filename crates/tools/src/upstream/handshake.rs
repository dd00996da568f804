//! The MCP handshake over a fresh connection, in either lifecycle (`initialize` or `server/discover`).
//!
//! `initialize` is tried first, and `server/discover` (revision 2026-07-28) when it is refused. The other
//! order would cost every older server a round trip, and a server that does not answer unknown methods its
//! whole startup time. The lifecycle that worked is tried first at the next start.

use rmcp::{
    ClientHandler, ClientServiceExt, RoleClient,
    model::{ClientCapabilities, ClientConfig, Implementation, ProtocolVersion},
    service::{ClientInitializeError, ClientLifecycleMode, RunningService},
};

use super::{
    fault::{UpstreamFault, error_chain},
    http::HttpEndpoint,
    wire::UpstreamWire,
};

/// The client information sent in the handshake. It offers no capabilities, so requests from servers (sampling,
/// elicitation, roots) are refused or answered empty by the library's defaults.
pub(super) struct OublietteClientHandler;

impl ClientHandler for OublietteClientHandler {
    fn get_info(&self) -> ClientConfig {
        let us = Implementation::new("oubliette", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), us)
            .with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE)
    }
}

/// The MCP library's running client.
pub(super) type RunningMcpClient = RunningService<RoleClient, OublietteClientHandler>;

/// Which MCP lifecycle a server supports: how a connection begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum McpLifecycle {
    /// With `initialize`: revisions up to 2025-11-25.
    #[default]
    Initialize,
    /// With `server/discover`: 2026-07-28.
    Discover,
}

impl McpLifecycle {
    fn alternative(self) -> Self {
        match self {
            McpLifecycle::Initialize => McpLifecycle::Discover,
            McpLifecycle::Discover => McpLifecycle::Initialize,
        }
    }

    fn method(self) -> &'static str {
        match self {
            McpLifecycle::Initialize => "initialize",
            McpLifecycle::Discover => "server/discover",
        }
    }

    fn mode(self) -> ClientLifecycleMode {
        match self {
            McpLifecycle::Initialize => ClientLifecycleMode::Initialize,
            McpLifecycle::Discover => ClientLifecycleMode::Discover {
                preferred_versions: vec![ProtocolVersion::NO_INITIALIZE],
            },
        }
    }
}

/// The transport an MCP client runs over.
pub(super) enum ClientTransport {
    /// A persistent message connection: stdio, ws or tcp.
    Wire(UpstreamWire),
    /// A streamable HTTP endpoint.
    Http(HttpEndpoint),
}

impl ClientTransport {
    async fn start_client(&self, lifecycle: McpLifecycle) -> Result<RunningMcpClient, ClientInitializeError> {
        match self {
            ClientTransport::Wire(wire) => {
                OublietteClientHandler
                    .serve_with_lifecycle(wire.clone(), lifecycle.mode())
                    .await
            }
            ClientTransport::Http(endpoint) => {
                OublietteClientHandler
                    .serve_with_lifecycle(endpoint.transport(), lifecycle.mode())
                    .await
            }
        }
    }
}

/// Makes the handshake in the `known` lifecycle, or in the other one if the server refuses that.
pub(super) async fn perform_handshake(
    transport: &ClientTransport,
    known: McpLifecycle,
) -> Result<(RunningMcpClient, McpLifecycle), UpstreamFault> {
    let first = match Box::pin(transport.start_client(known)).await {
        Ok(client) => return Ok((client, known)),
        Err(error) => error,
    };
    let describe = |lifecycle: McpLifecycle, error: &ClientInitializeError| {
        format!("{} failed: {}", lifecycle.method(), error_chain(error))
    };
    let first_failure = describe(known, &first);
    if !refused_by_server(&first) {
        return Err(UpstreamFault::new(first_failure));
    }
    let other = known.alternative();
    match Box::pin(transport.start_client(other)).await {
        Ok(client) => Ok((client, other)),
        Err(error) => Err(UpstreamFault::new(format!(
            "{first_failure}; {}",
            describe(other, &error)
        ))),
    }
}

/// Whether the server itself refused the handshake, so that the connection can be used for another attempt.
fn refused_by_server(error: &ClientInitializeError) -> bool {
    matches!(
        error,
        ClientInitializeError::JsonRpcError(_)
            | ClientInitializeError::ExpectedInitResult(_)
            | ClientInitializeError::NoCompatibleProtocolVersion { .. }
    )
}
