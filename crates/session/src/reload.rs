//! Applies edits of agents and of the catalog to running sessions.
//!
//! The tools an agent may call, and the servers behind them, change at once. Its prompt, model, runtime and
//! environment belong to its process and change when that is next started.

use std::sync::Weak;

use tokio_util::sync::CancellationToken;

use crate::{Sessions, live::TaskCommand};

/// Sends [`TaskCommand::ApplyEdits`] to every session with tools when the library changes, until the server stops.
pub(crate) async fn follow_library(sessions: Weak<Sessions>, stop: CancellationToken) {
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
        // A session whose tools are being built checks the library itself afterwards.
        for live in sessions.all_in_memory() {
            if live.plane.context().is_some() {
                // Concurrently, because a session with a full command queue must not delay the others.
                tokio::spawn(async move {
                    let _ = live.commands.send(TaskCommand::ApplyEdits).await;
                });
            }
        }
    }
}
