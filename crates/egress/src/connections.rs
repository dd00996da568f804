//! The accept loop of gateway and proxy.

use std::{future::Future, time::Duration};

use oubliette_os::{UntrustedListener, UntrustedSocket, UntrustedStream};
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

/// A socket of one session, and which connections to it are from that session's sandboxes.
pub struct SandboxListener {
    listener: UntrustedListener,
    admits: Option<AdmitConnection>,
}

type AdmitConnection = Box<dyn Fn(&UntrustedSocket) -> bool + Send + Sync>;

impl SandboxListener {
    /// Serves only the connections that `admits` returns true for; the others are closed.
    pub fn new(
        listener: UntrustedListener,
        admits: impl Fn(&UntrustedSocket) -> bool + Send + Sync + 'static,
    ) -> Self {
        Self {
            listener,
            admits: Some(Box::new(admits)),
        }
    }

    fn is_admitted(&self, socket: &UntrustedSocket) -> bool {
        self.admits.as_ref().is_none_or(|admits| admits(socket))
    }
}

/// A listener that serves whoever connects.
impl From<UntrustedListener> for SandboxListener {
    fn from(listener: UntrustedListener) -> Self {
        Self {
            listener,
            admits: None,
        }
    }
}

/// Serves connections until `cancel`, at most `most` at once; further ones wait in the listener's
/// queue. When it returns, all its connections are closed.
pub(crate) async fn serve<F>(
    listener: SandboxListener,
    most: usize,
    cancel: CancellationToken,
    mut handle: impl FnMut(UntrustedStream) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = cancel.cancelled() => break,
            Some(_ended) = open.join_next() => {}
            accepted = listener.listener.accept(), if open.len() < most.max(1) => match accepted {
                Ok(socket) if listener.is_admitted(&socket) => match UntrustedStream::new(socket) {
                    Ok(stream) => {
                        open.spawn(handle(stream));
                    }
                    Err(error) => tracing::warn!(%error, "a connection from a sandbox could not be served"),
                },
                Ok(_refused) => {}
                Err(error) => {
                    // Most likely out of file descriptors: retrying at once would spin.
                    tracing::warn!(%error, "accepting a connection from a sandbox failed");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            },
        }
    }
    open.shutdown().await;
}
