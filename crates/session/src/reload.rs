//! Edits of the catalog, carried into running contexts: a changed tool.json rebuilds just that server.

use std::sync::Weak;

use tokio_util::sync::CancellationToken;

use crate::Sessions;

/// Follows the library until the server stops.
pub(crate) async fn follow(sessions: Weak<Sessions>, stop: CancellationToken) {
    let Some(library) = sessions.upgrade().map(|sessions| sessions.deps.library.clone()) else {
        return;
    };
    let mut changes = library.changes();
    let mut seen = library.version();
    loop {
        tokio::select! {
            () = stop.cancelled() => return,
            changed = changes.changed() => if changed.is_err() { return },
        }
        let Some(sessions) = sessions.upgrade() else {
            return;
        };
        let before = std::mem::replace(&mut seen, library.version());
        let tools = library.changed_tools(before);
        for live in sessions.all_in_memory() {
            let Some(context) = live.plane.context() else {
                continue;
            };
            let tools = tools.clone();
            // Side by side: one server that does not stop must not hold up the others' sessions.
            tokio::spawn(async move {
                for tool in tools {
                    if let Err(error) = context.reload(tool.definition.clone()).await {
                        tracing::warn!(tool = %tool.id, %error, "a changed tool was not taken into a running context");
                    }
                }
            });
        }
    }
}
