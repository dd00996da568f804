//! Recovery after a start, and in a cluster after another server's death: ends in the log what was running when the server
//! stopped or was killed.

use std::{
    collections::BTreeSet,
    path::PathBuf,
    time::{Duration, SystemTime},
};

use oubliette_protocol::{
    ErrorCode, RequestId, Result, SessionId,
    event::{CallerToolOutcome, EventBody, SessionStatus},
};
use oubliette_store::{SessionPatch, SessionRow};

use crate::{Sessions, events::MAX_EVENTS};

/// How old an unfinished write of a server that is gone has to be.
const UNFINISHED_WRITE_AGE: Duration = Duration::from_secs(120);

impl Sessions {
    /// Recovers every interrupted session. A turn that was running is logged as an error, open caller requests
    /// as disconnected, pending approvals as cancelled, and the session becomes idle. Messages that were accepted but not begun are run now,
    /// in order, because their senders were told that they would be. Sockets and directories of sessions that
    /// no longer exist are removed. Call it once, before the first request.
    ///
    /// In a cluster only the leftovers are removed here; [`Sessions::take_over_left_trees`] recovers what no server runs.
    pub async fn recover(&self) -> Result<()> {
        let since = SystemTime::now();
        self.remove_leftovers().await;
        if self.deps.store.cluster().is_some() {
            return Ok(());
        }
        for session in self.deps.store.approvals_pending_sessions().await? {
            self.cancel_left_approvals(&session).await?;
        }
        let mut workspaces = BTreeSet::new();
        for row in self.deps.store.sessions_interrupted().await? {
            let id = row.session_id.clone();
            workspaces.insert(self.deps.home.workspace_dir(&row.project_id, &row.workspace_id));
            // The agent that held the session's keys is dead.
            self.deps.store.tokens_revoke_of_session(&id).await?;
            if let Err(error) = self.recover_one(row).await {
                tracing::error!(session = %id, error = %error.for_log(), "recovering a session failed");
            }
        }
        remove_unfinished_writes(workspaces, since);
        for id in self.deps.store.queue_sessions().await? {
            match self.load(&id).await {
                Ok(_) => {}
                Err(error) if matches!(error.code, ErrorCode::Conflict | ErrorCode::NotFound) => {
                    self.deps.store.queue_drop(&id, None).await?;
                }
                Err(error) => {
                    tracing::error!(session = %id, error = %error.for_log(), "loading a session with queued messages failed; they stay queued");
                }
            }
        }
        Ok(())
    }

    /// Recovers the sessions of a tree that this server has just claimed. Returns those that have messages left to run.
    pub(crate) async fn recover_tree(&self, root: &SessionId) -> Result<Vec<SessionId>> {
        let mut workspaces = BTreeSet::new();
        let mut waiting = Vec::new();
        for row in self.deps.store.session_tree(root).await? {
            let id = row.session_id.clone();
            self.deps.store.events().forget_size(&id);
            self.cancel_left_approvals(&id).await?;
            // Whoever holds a key of it runs on a server that is gone, or is being stopped.
            self.deps.store.tokens_revoke_of_session(&id).await?;
            let has_messages = !self.deps.store.queue_list(&id).await?.is_empty();
            if !row.status.is_active() {
                if has_messages {
                    match row.status {
                        SessionStatus::Ended => self.deps.store.queue_drop(&id, None).await?,
                        _ => waiting.push(id),
                    }
                }
                continue;
            }
            workspaces.insert(self.deps.home.workspace_dir(&row.project_id, &row.workspace_id));
            self.recover_one(row).await?;
            if has_messages {
                waiting.push(id);
            }
        }
        // Another server may be writing in a workspace that it shares: only what is older than any write is left over.
        let since = SystemTime::now() - UNFINISHED_WRITE_AGE;
        remove_unfinished_writes(workspaces, since);
        Ok(waiting)
    }

    async fn recover_one(&self, row: SessionRow) -> Result<()> {
        let mut events: Vec<EventBody> = Vec::new();
        let waiting = self.deps.store.queue_list(&row.session_id).await?;
        let begun = waiting.first().is_none_or(|next| next.turn > row.turn.max(1));
        for request_id in self.open_in_log(&row).await? {
            events.push(EventBody::CallerToolDone {
                request_id,
                outcome: CallerToolOutcome::Disconnected,
            });
        }
        let mut patch = SessionPatch::default();
        let reason = match row.status {
            // The turn was not begun: its message is still queued and will run.
            SessionStatus::Starting | SessionStatus::Running if !begun => {
                Some("the server restarted".to_owned())
            }
            SessionStatus::Starting | SessionStatus::Running => {
                let turn = row.turn.max(1);
                patch.turn = Some(turn);
                let what = format!("the server restarted during turn {turn}");
                events.push(EventBody::error(ErrorCode::Unavailable, what.as_str()));
                Some(format!("{what}; send a message to go on"))
            }
            SessionStatus::Switching => {
                let what = format!(
                    "the server restarted during a switch of agents; the agent is {}",
                    row.agent
                );
                events.push(EventBody::error(ErrorCode::Unavailable, what.as_str()));
                Some(format!("{what}; send a message to go on"))
            }
            SessionStatus::Idle | SessionStatus::Ended | SessionStatus::Failed => None,
        };
        if let Some(reason) = reason {
            patch.status = Some(SessionStatus::Idle);
            patch.reason = Some(Some(reason.clone()));
            events.push(EventBody::Status {
                status: SessionStatus::Idle,
                reason: Some(reason),
            });
        }
        if !events.is_empty() {
            self.deps
                .store
                .events()
                .append_with_patch(&row.session_id, events, patch)
                .await?;
        }
        Ok(())
    }

    /// Caller requests in the log without a matching end. Of an idle session only the last events are read:
    /// without a turn only calls from outside can have been open, and little else was written meanwhile.
    async fn open_in_log(&self, row: &SessionRow) -> Result<BTreeSet<RequestId>> {
        let id = &row.session_id;
        let mut open = BTreeSet::new();
        let mut since = match row.status {
            SessionStatus::Idle => self
                .deps
                .store
                .events()
                .last_index(id)
                .await?
                .saturating_sub(MAX_EVENTS as i64)
                .max(-1),
            SessionStatus::Starting
            | SessionStatus::Running
            | SessionStatus::Switching
            | SessionStatus::Ended
            | SessionStatus::Failed => -1,
        };
        loop {
            let page = self.deps.store.events().read(id, since, MAX_EVENTS).await?;
            let Some(last) = page.last() else { return Ok(open) };
            since = last.index;
            for event in &page {
                match &event.body {
                    EventBody::CallerToolRequest { request_id, .. } => {
                        open.insert(request_id.clone());
                    }
                    EventBody::CallerToolDone { request_id, .. } => {
                        open.remove(request_id);
                    }
                    _ => {}
                }
            }
        }
    }

    /// Removes all session socket directories, because no session is in memory yet, and the directories of
    /// sessions that have ended or are unknown.
    async fn remove_leftovers(&self) {
        let sockets = self.deps.home.sockets_dir().to_path_buf();
        for (id, path) in session_entries(&sockets) {
            tracing::debug!(session = %id, "removing a leftover socket directory");
            // No agent can write there, so it is small.
            if let Err(error) = oubliette_os::remove_tree_blocking(&path) {
                tracing::warn!(%error, path = %path.display(), "removing a leftover socket directory failed");
            }
        }
        self.deps.home.remove_discarded();
        let mut left = Vec::new();
        for (id, path) in session_entries(&self.deps.home.sessions_dir()) {
            match self.deps.store.session_get(&id).await {
                Ok(Some(row)) if row.status != SessionStatus::Ended => {}
                Ok(_) => left.push(path),
                Err(error) => {
                    tracing::warn!(session = %id, %error, "looking up a session failed; its directory is kept")
                }
            }
        }
        // In the background, because they may have a million files.
        let home = self.deps.home.clone();
        tokio::spawn(async move {
            for path in left {
                home.discard(&path).await;
            }
        });
    }
}

/// Removes what interrupted writes left in workspaces, in the background, because a workspace may have a million files.
fn remove_unfinished_writes(workspaces: BTreeSet<PathBuf>, since: SystemTime) {
    tokio::task::spawn_blocking(move || {
        for workspace in workspaces {
            oubliette_tools::builtin::remove_unfinished_writes(&workspace, since);
        }
    });
}

/// The entries of a directory that are named after sessions.
fn session_entries(dir: &std::path::Path) -> Vec<(SessionId, std::path::PathBuf)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
        .collect()
}
