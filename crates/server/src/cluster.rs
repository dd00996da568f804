//! What a server does as one of a cluster: it takes over sessions of servers that are gone, lets go of its own when others may
//! have them, and hears of tokens that others revoke.

use std::{sync::Arc, time::Duration};

use tokio::sync::broadcast::error::RecvError;

use crate::app::App;

/// How often the servers are counted among which a token's rate is shared.
const SHARE_INTERVAL: Duration = Duration::from_secs(5);

/// Starts the tasks of a server of a cluster; nothing without one.
pub(crate) fn start(app: &Arc<App>) {
    let Some(member) = app.store.cluster().cloned() else {
        return;
    };
    tracing::info!(server = %member.server_id(), address = member.address(), "one of a cluster");
    tokio::spawn({
        let sessions = app.sessions.clone();
        async move { sessions.take_over_left_trees().await }
    });
    tokio::spawn({
        let app = app.clone();
        async move {
            let state = member.wait_until_inactive().await;
            tracing::error!(?state, "every agent of this server is stopped");
            app.sessions.abandon();
        }
    });
    tokio::spawn(hear_revocations(app.clone()));
    tokio::spawn(share_rate_limit(app.clone()));
}

/// Gives each server its share of what a token may ask for, so that all together allow about as much as one alone.
async fn share_rate_limit(app: Arc<App>) {
    let Some(member) = app.store.cluster().cloned() else {
        return;
    };
    loop {
        // While the database does not answer nobody is let in anyway.
        if let Ok(servers) = member.running_servers().await {
            let (rate, share) = (app.live.config().rate, servers.len().max(1) as f64);
            app.rate_limit.set_rate(
                (f64::from(rate.per_second) / share).max(1.0),
                (f64::from(rate.burst) / share).max(1.0),
            );
        }
        tokio::select! {
            () = tokio::time::sleep(SHARE_INTERVAL) => {}
            () = app.stopping.cancelled() => return,
        }
    }
}

/// Ends streams of tokens that other servers revoke, and withdraws the tools they lend.
async fn hear_revocations(app: Arc<App>) {
    let mut revoked = app.store.revoked_tokens();
    loop {
        tokio::select! {
            token = revoked.recv() => match token {
                Ok(token) => {
                    app.auth.recheck_streams();
                    app.sessions.token_revoked(&token);
                }
                Err(RecvError::Lagged(_)) => app.auth.recheck_streams(),
                Err(RecvError::Closed) => return,
            },
            () = app.stopping.cancelled() => return,
        }
    }
}
