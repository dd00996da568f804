//! Edits of agents and of the catalog, carried into what runs.
//!
//! The tools an agent may call, and the servers behind them, follow at once; its prompt, model, runtime and
//! environment are those of its process, and change when that is next started.

use std::sync::Weak;

use tokio_util::sync::CancellationToken;

use crate::{Sessions, live::Command};

/// Follows the library until the server stops.
pub(crate) async fn follow(sessions: Weak<Sessions>, stop: CancellationToken) {
    let Some(library) = sessions.upgrade().map(|sessions| sessions.deps.library.clone()) else {
        return;
    };
    let mut changes = library.changes();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
        let Some(sessions) = sessions.upgrade() else {
            return;
        };
        // A session that is just being built looks by itself when it is.
        for live in sessions.all_in_memory() {
            if live.plane.context().is_some() {
                // Side by side: a session that is busy must not hold up the others.
                tokio::spawn(async move {
                    let _ = live.commands.send(Command::Refresh).await;
                });
            }
        }
    }
}
