//! The accept loop of gateway and proxy.

use std::{future::Future, time::Duration};

use tokio::{
    net::{UnixListener, UnixStream},
    task::JoinSet,
};
use tokio_util::sync::CancellationToken;

/// Serves connections until `cancel`, at most `most` at once; further ones wait in the listener's
/// queue. When it returns, all its connections are closed.
pub(crate) async fn serve<F>(
    listener: UnixListener,
    most: usize,
    cancel: CancellationToken,
    mut handle: impl FnMut(UnixStream) -> F,
) where
    F: Future<Output = ()> + Send + 'static,
{
    let mut open = JoinSet::new();
    loop {
        tokio::select! {
            biased;
            () = cancel.cancelled() => break,
            Some(_ended) = open.join_next() => {}
            accepted = listener.accept(), if open.len() < most.max(1) => match accepted {
                Ok((stream, _)) => {
                    open.spawn(handle(stream));
                }
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
