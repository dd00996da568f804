//! The HTTP proxy of agents with `network: "proxy"`.

use std::sync::Arc;

use oubliette_protocol::Result;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use crate::ProxyLimits;

/// The proxy, shared by every session.
#[derive(Debug)]
pub struct EgressProxy {
    #[allow(dead_code, reason = "used by the handler")]
    limits: ProxyLimits,
}

impl EgressProxy {
    /// `allow`: hosts, `host:port`, `*.suffix` and CIDR blocks that may be reached although private.
    pub fn new(_allow: Vec<String>, limits: ProxyLimits) -> Result<Arc<Self>> {
        Ok(Arc::new(Self { limits }))
    }

    /// Serves one session's socket until `cancel`.
    pub async fn serve(self: Arc<Self>, listener: UnixListener, cancel: CancellationToken) {
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                accepted = listener.accept() => drop(accepted),
            }
        }
    }
}
