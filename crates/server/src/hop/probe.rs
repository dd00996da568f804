//! Whether a server of the cluster is reached at its address from here, and has the same key: for `doctor`.

use std::{
    error::Error as _,
    fmt,
    time::{Duration, Instant},
};

use oubliette_protocol::{Error, Result, ServerId};
use oubliette_store::PeerServer;
use tokio::sync::watch;

use super::{
    ClusterHop,
    client::{PeerClient, PeerFailure, PeerRequest},
    door::HopStatus,
    signature::ClusterKey,
};
use crate::config::ClusterConfig;

/// What asking a server at its address showed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum ProbeOutcome {
    /// It answered, and has the same key.
    Reached(Duration),
    /// It answered, and does not accept this server's key.
    OtherKey,
    /// A server of the cluster answered, but not the one that is expected there.
    OtherServer,
    /// Something answered, with this HTTP status, that is no server of a cluster.
    NoServer(u16),
    /// Nothing answered, for this reason.
    Unreachable(String),
}

impl fmt::Display for ProbeOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Reached(took) => write!(f, "reached in {} ms, same key", took.as_millis()),
            Self::OtherKey => f.write_str("it does not accept this server's cluster key"),
            Self::OtherServer => f.write_str("another server than the one in the database answers there"),
            Self::NoServer(status) => {
                write!(f, "what answers there is no server of a cluster (HTTP {status})")
            }
            Self::Unreachable(why) => write!(f, "not reached from here: {why}"),
        }
    }
}

impl ClusterHop {
    /// Makes requests to other servers.
    pub(crate) fn peer_client(&self) -> &PeerClient {
        &self.peers
    }
}

impl PeerClient {
    /// For a command beside the servers, which are asked in nobody's name.
    pub(crate) fn of_stopped(config: &ClusterConfig) -> Result<Self> {
        let (_, no_servers) = watch::channel(Default::default());
        Self::new(
            config,
            ClusterKey::new(config.key.clone()),
            ServerId::generate(),
            no_servers,
        )
    }

    /// Asks a server for a challenge, which it gives only to who has its key.
    pub(crate) async fn probe(&self, peer: PeerServer) -> ProbeOutcome {
        let began = Instant::now();
        match self.send_once(&peer, &PeerRequest::for_challenge(), None).await {
            Ok(answer) => match HopStatus::of(answer.headers()) {
                Some(HopStatus::Taken | HopStatus::OldChallenge) => ProbeOutcome::Reached(began.elapsed()),
                Some(HopStatus::Refused) => ProbeOutcome::OtherKey,
                Some(HopStatus::Moved) => ProbeOutcome::OtherServer,
                None => ProbeOutcome::NoServer(answer.status().as_u16()),
            },
            Err(PeerFailure::Moved) => ProbeOutcome::OtherServer,
            Err(PeerFailure::NotTaken(error) | PeerFailure::Unanswered(error)) => {
                ProbeOutcome::Unreachable(innermost_cause(&error))
            }
        }
    }
}

/// The last cause of an error, which names what happened to the connection; without one, its text.
fn innermost_cause(error: &Error) -> String {
    let mut cause = error.source();
    let mut text = None;
    while let Some(error) = cause {
        text = Some(error.to_string());
        cause = error.source();
    }
    text.unwrap_or_else(|| "it did not answer in time".to_owned())
}
