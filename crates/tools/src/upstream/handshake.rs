//! Getting from a connection to an MCP client that may call tools, in either lifecycle.
//!
//! `initialize` is tried first, and `server/discover` (revision 2026-07-28) when it is refused. The other
//! order costs every older server a round trip, and those that ignore what they do not know their whole
//! start. What worked is remembered for the next start.

use rmcp::{
    ClientHandler, ClientServiceExt, RoleClient,
    model::{ClientCapabilities, ClientConfig, Implementation, ProtocolVersion},
    service::{ClientInitializeError, ClientLifecycleMode, RunningService},
};

use super::{
    fault::{Fault, chain},
    http::Endpoint,
    wire::Wire,
};

/// Who we say we are. Requests of servers (sampling, elicitation, roots) are refused or answered empty, as
/// the client does by itself: no capability for them is offered.
pub(super) struct Us;

impl ClientHandler for Us {
    fn get_info(&self) -> ClientConfig {
        let us = Implementation::new("oubliette", env!("CARGO_PKG_VERSION"));
        ClientConfig::new(ClientCapabilities::default(), us)
            .with_protocol_version(ProtocolVersion::LATEST_WITH_INITIALIZE)
    }
}

/// A client at work.
pub(super) type Service = RunningService<RoleClient, Us>;

/// How a conversation begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) enum Lifecycle {
    /// With `initialize`: revisions up to 2025-11-25.
    #[default]
    Initialize,
    /// With `server/discover`: 2026-07-28.
    Discover,
}

impl Lifecycle {
    fn other(self) -> Self {
        match self {
            Lifecycle::Initialize => Lifecycle::Discover,
            Lifecycle::Discover => Lifecycle::Initialize,
        }
    }

    fn method(self) -> &'static str {
        match self {
            Lifecycle::Initialize => "initialize",
            Lifecycle::Discover => "server/discover",
        }
    }

    fn mode(self) -> ClientLifecycleMode {
        match self {
            Lifecycle::Initialize => ClientLifecycleMode::Initialize,
            Lifecycle::Discover => ClientLifecycleMode::Discover {
                preferred_versions: vec![ProtocolVersion::NO_INITIALIZE],
            },
        }
    }
}

/// What a handshake is made over.
pub(super) enum Link {
    /// A connection that stays.
    Wire(Wire),
    /// An HTTP endpoint.
    Http(Endpoint),
}

impl Link {
    async fn greet(&self, lifecycle: Lifecycle) -> Result<Service, ClientInitializeError> {
        match self {
            Link::Wire(wire) => Us.serve_with_lifecycle(wire.clone(), lifecycle.mode()).await,
            Link::Http(endpoint) => {
                Us.serve_with_lifecycle(endpoint.transport(), lifecycle.mode())
                    .await
            }
        }
    }
}

/// Makes the handshake, `known` first.
pub(super) async fn greet(link: &Link, known: Lifecycle) -> Result<(Service, Lifecycle), Fault> {
    let first = match Box::pin(link.greet(known)).await {
        Ok(service) => return Ok((service, known)),
        Err(error) => error,
    };
    let said = |lifecycle: Lifecycle, error: &ClientInitializeError| {
        format!("{} failed: {}", lifecycle.method(), chain(error))
    };
    let first_said = said(known, &first);
    if !answered(&first) {
        return Err(Fault::new(first_said));
    }
    let other = known.other();
    match Box::pin(link.greet(other)).await {
        Ok(service) => Ok((service, other)),
        Err(error) => Err(Fault::new(format!("{first_said}; {}", said(other, &error)))),
    }
}

/// Whether the server itself said no, so that the connection is good for another question.
fn answered(error: &ClientInitializeError) -> bool {
    matches!(
        error,
        ClientInitializeError::JsonRpcError(_)
            | ClientInitializeError::ExpectedInitResult(_)
            | ClientInitializeError::NoCompatibleProtocolVersion { .. }
    )
}
