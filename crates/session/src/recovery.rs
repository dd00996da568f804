//! After a start: what the server was doing when it stopped or was killed is brought to a true end.

use std::{collections::BTreeSet, time::SystemTime};

use oubliette_protocol::{
    ErrorCode, RequestId, Result, SessionId,
    event::{EventBody, Outcome, Status},
};
use oubliette_store::{SessionPatch, SessionRow};

use crate::{Sessions, events::MAX_EVENTS};

impl Sessions {
    /// Brings every session that was cut short to a state that says so: a turn that was running is an
    /// error, open caller requests are over, and the session waits for its next message. Messages that were
    /// accepted and not begun are run now, in order: whoever sent them was told they would be. Sockets and
    /// directories that nobody owns are removed. Called once, before the first request.
    pub async fn recover(&self) -> Result<()> {
        let since = SystemTime::now();
        self.remove_leftovers().await;
        let mut workspaces = BTreeSet::new();
        for row in self.deps.store.sessions_interrupted().await? {
            let id = row.session_id.clone();
            workspaces.insert(self.deps.home.workspace_dir(&row.project_id, &row.workspace_id));
            // Keys of a dead process serve nobody.
            self.deps.store.tokens_revoke_of_session(&id).await?;
            if let Err(error) = self.recover_one(row).await {
                tracing::error!(session = %id, error = %error.for_log(), "a session was not recovered");
            }
        }
        // Nobody waits for this: a workspace may hold a million files.
        tokio::task::spawn_blocking(move || {
            for workspace in workspaces {
                oubliette_tools::builtin::sweep(&workspace, since);
            }
        });
        for id in self.deps.store.queue_sessions().await? {
            match self.load(&id).await {
                Ok(_) => {}
                Err(error) if matches!(error.code, ErrorCode::Conflict | ErrorCode::NotFound) => {
                    self.deps.store.queue_drop(&id, None).await?;
                }
                Err(error) => {
                    tracing::error!(session = %id, error = %error.for_log(), "what waits in a session waits on");
                }
            }
        }
        Ok(())
    }

    async fn recover_one(&self, row: SessionRow) -> Result<()> {
        let mut events: Vec<EventBody> = Vec::new();
        let waiting = self.deps.store.queue_of(&row.session_id).await?;
        let begun = waiting.first().is_none_or(|next| next.turn > row.turn.max(1));
        for request_id in self.open_in_log(&row).await? {
            events.push(EventBody::CallerToolDone {
                request_id,
                outcome: Outcome::Disconnected,
            });
        }
        let mut patch = SessionPatch::default();
        let reason = match row.status {
            // The turn was not begun: its message waits, and is about to be run.
            Status::Starting | Status::Running if !begun => Some("the server restarted".to_owned()),
            Status::Starting | Status::Running => {
                let turn = row.turn.max(1);
                patch.turn = Some(turn);
                let what = format!("the server restarted during turn {turn}");
                events.push(EventBody::Error {
                    code: ErrorCode::Unavailable,
                    message: what.clone(),
                });
                Some(format!("{what}; send a message to go on"))
            }
            Status::Switching => {
                let what = format!(
                    "the server restarted during a switch of agents; the agent is {}",
                    row.agent
                );
                events.push(EventBody::Error {
                    code: ErrorCode::Unavailable,
                    message: what.clone(),
                });
                Some(format!("{what}; send a message to go on"))
            }
            Status::Idle | Status::Ended | Status::Failed => None,
        };
        if let Some(reason) = reason {
            patch.status = Some(Status::Idle);
            patch.reason = Some(Some(reason.clone()));
            events.push(EventBody::Status {
                status: Status::Idle,
                reason: Some(reason),
            });
        }
        if !events.is_empty() {
            self.deps
                .store
                .events()
                .append_with(&row.session_id, events, patch)
                .await?;
        }
        Ok(())
    }

    /// Caller requests in the log without an end. An idle session's are near the end of it: only calls
    /// from outside can have been open, and nothing else was being written.
    async fn open_in_log(&self, row: &SessionRow) -> Result<BTreeSet<RequestId>> {
        let id = &row.session_id;
        let mut open = BTreeSet::new();
        let mut since = match row.status {
            Status::Idle => self
                .deps
                .store
                .events()
                .last_index(id)
                .await?
                .saturating_sub(MAX_EVENTS as i64)
                .max(-1),
            Status::Starting | Status::Running | Status::Switching | Status::Ended | Status::Failed => -1,
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

    /// No session is in memory yet, so every session socket is a leftover; so is the directory of a
    /// session that has ended or is unknown.
    async fn remove_leftovers(&self) {
        let sockets = self.deps.home.sockets_dir().to_path_buf();
        for (id, path) in session_entries(&sockets) {
            tracing::debug!(session = %id, "removing a leftover socket directory");
            remove(&path);
        }
        for (id, path) in session_entries(&self.deps.home.sessions_dir()) {
            match self.deps.store.session_get(&id).await {
                Ok(Some(row)) if row.status != Status::Ended => {}
                Ok(_) => remove(&path),
                Err(error) => tracing::warn!(session = %id, %error, "a session directory was left alone"),
            }
        }
    }
}

/// The entries of a directory that are named after sessions.
fn session_entries(dir: &std::path::Path) -> Vec<(SessionId, std::path::PathBuf)> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.file_name().to_str()?.parse().ok()?, entry.path())))
        .collect()
}

fn remove(path: &std::path::Path) {
    if let Err(error) = std::fs::remove_dir_all(path) {
        tracing::warn!(%error, path = %path.display(), "a leftover was not removed");
    }
}
