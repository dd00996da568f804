//! `server_list`: the servers that make up this Oubliette.

use jiff::Timestamp;
use oubliette_protocol::{Result, Scope, ServerId};
use oubliette_store::ServerRow;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActionCall, ActionHandler, Effect, StateOwner};

/// `server_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ServerList {}

/// Result of `server_list`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ServerPage {
    /// The servers, oldest first.
    servers: Vec<KnownServer>,
}

/// One server.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct KnownServer {
    /// Its id (`srv_…`), new at every start.
    pub(crate) server_id: ServerId,
    /// Its base URL.
    pub(crate) address: String,
    /// Its version.
    pub(crate) version: String,
    /// How many active sessions run on it; for a token that is limited to a project, those of the project.
    pub(crate) sessions: u64,
    /// When it started.
    pub(crate) since: Timestamp,
    /// When it was last known to run; now for the server that answers.
    pub(crate) last_seen: Timestamp,
}

impl From<ServerRow> for KnownServer {
    fn from(row: ServerRow) -> Self {
        let ServerRow {
            server_id,
            address,
            version,
            sessions,
            since,
            last_seen,
        } = row;
        Self {
            server_id,
            address,
            version,
            sessions,
            since,
            last_seen,
        }
    }
}

impl ActionHandler for ServerList {
    type Output = ServerPage;

    const NAME: &'static str = "server_list";
    const DESCRIPTION: &'static str = "List the servers that make up this Oubliette: address, version, active sessions, since when each runs and when it was last seen.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let mut servers = known_servers(call).await?;
        servers.sort_by(|a, b| (a.since, &a.server_id).cmp(&(b.since, &b.server_id)));
        Ok(ServerPage { servers })
    }
}

/// Every server that is known to this one, itself included, in no order. Whoever lists servers asks here.
async fn known_servers(call: &ActionCall<'_>) -> Result<Vec<KnownServer>> {
    // A token that sees one project learns nothing about how busy the others are.
    let project = call.grant.project();
    if let Some(member) = call.app.store.cluster() {
        let servers = member.servers(project).await?.into_iter();
        return Ok(servers.map(KnownServer::from).collect());
    }
    let identity = &call.app.identity;
    // A command that works on the home without a server serves nobody.
    let Some(address) = identity.address() else {
        return Ok(Vec::new());
    };
    Ok(vec![KnownServer {
        server_id: identity.server_id.clone(),
        address: address.to_owned(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        sessions: call.app.store.session_count_active(project).await?,
        since: identity.since,
        last_seen: Timestamp::now(),
    }])
}
