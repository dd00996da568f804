//! Model providers, asked on a sandbox's behalf.

use std::{sync::Arc, time::Duration};

use oubliette_protocol::Result;
use tokio::net::UnixListener;
use tokio_util::sync::CancellationToken;

use crate::{GatewayLimits, Provider};

/// Who hears of each request: the debugger. Never given a secret.
pub trait ModelSink: Send + Sync {
    /// One request was answered. `path` has no query; `status` is what the sandbox got.
    fn model_request(&self, provider: &str, path: &str, status: u16, duration: Duration);
}

/// All configured providers, shared by every session.
#[derive(Debug)]
pub struct ModelGateway {
    providers: Vec<Provider>,
    #[allow(dead_code, reason = "used by the handler")]
    limits: GatewayLimits,
}

impl ModelGateway {
    /// Checks the providers.
    pub fn new(providers: Vec<Provider>, limits: GatewayLimits) -> Result<Arc<Self>> {
        for provider in &providers {
            provider.check()?;
        }
        Ok(Arc::new(Self { providers, limits }))
    }

    /// The names of the configured providers.
    pub fn providers(&self) -> impl Iterator<Item = &Provider> {
        self.providers.iter()
    }

    /// Serves one session's socket until `cancel`.
    pub async fn serve(
        self: Arc<Self>,
        listener: UnixListener,
        _sink: Arc<dyn ModelSink>,
        cancel: CancellationToken,
    ) {
        loop {
            tokio::select! {
                () = cancel.cancelled() => return,
                accepted = listener.accept() => drop(accepted),
            }
        }
    }
}
