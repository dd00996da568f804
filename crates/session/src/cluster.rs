//! Sessions of a server that is one of a cluster: a tree of sessions is in the memory of the server that owns it, and nowhere
//! else.
//!
//! A tree is adopted before the first of its sessions is brought into memory: claimed in the database, then recovered, because
//! whoever ran it may have been killed. It is released when the last has left memory.

use std::time::Duration;

use oubliette_protocol::{Error, ErrorCode, Result, SessionId};
use oubliette_store::{MemberState, SessionOwner};

use crate::Sessions;

/// How long to wait before a tree is tried again that could not be adopted.
const ADOPT_RETRY: Duration = Duration::from_millis(500);

impl Sessions {
    /// Takes over, until the server stops, trees of sessions whose server is gone. Returns at once without a cluster.
    pub async fn take_over_left_trees(&self) {
        let Some(member) = self.deps.store.cluster() else {
            return;
        };
        let mut failed: Vec<SessionId> = Vec::new();
        loop {
            let found = async {
                match failed.is_empty() {
                    true => member.next_left_trees().await,
                    false => {
                        tokio::select! {
                            found = member.next_left_trees() => found,
                            () = tokio::time::sleep(ADOPT_RETRY) => Some(Vec::new()),
                        }
                    }
                }
            };
            let found = tokio::select! {
                () = self.stopping().cancelled() => return,
                found = found => found,
            };
            let Some(found) = found else { return };
            let trees = std::mem::take(&mut failed).into_iter().chain(found);
            for root in trees.collect::<std::collections::BTreeSet<_>>() {
                if self.stopping().is_cancelled() || member.state() != MemberState::Active {
                    return;
                }
                match self.take_over(&root).await {
                    Ok(()) => {}
                    Err(error) if matches!(error.code, ErrorCode::NotFound | ErrorCode::Conflict) => {}
                    Err(error) => {
                        tracing::warn!(session = %root, error = %error.for_log(), "taking over a session failed; trying again");
                        failed.push(root);
                    }
                }
            }
        }
    }

    /// Adopts a tree and begins with the messages that wait in it. Does nothing if another server has it.
    async fn take_over(&self, root: &SessionId) -> Result<()> {
        let waiting = {
            let _one_at_a_time = self.load_lock.lock().await;
            if self.is_adopted(root) {
                return Ok(());
            }
            match self.deps.store.claim_session(root).await {
                Ok(SessionOwner::ThisServer) => self.finish_adoption(root).await?,
                Ok(SessionOwner::Peer(_) | SessionOwner::Unowned) => return Ok(()),
                Err(error) if error.code == ErrorCode::NotFound => {
                    // It was deleted, and its server died before it let go of it.
                    return self.deps.store.release_tree(root).await;
                }
                Err(error) => return Err(error),
            }
        };
        self.start_waiting(waiting).await;
        let tree = self.deps.store.session_tree(root).await?;
        if !tree.iter().any(|row| row.status.is_active()) {
            self.release_if_unused(root).await;
        }
        Ok(())
    }

    /// Makes this server the one that runs a tree, before a session of it is brought into memory; `load_lock` is held. Returns
    /// the sessions that have messages left to run. `unavailable` if another server runs it.
    pub(crate) async fn adopt(&self, root: &SessionId) -> Result<Vec<SessionId>> {
        if self.deps.store.cluster().is_none() || self.is_adopted(root) {
            return Ok(Vec::new());
        }
        match self.deps.store.claim_session(root).await? {
            SessionOwner::ThisServer => self.finish_adoption(root).await,
            SessionOwner::Peer(peer) => Err(Error::unavailable(format!(
                "the session is run by server {} at {}; try again",
                peer.server_id, peer.address
            ))),
            SessionOwner::Unowned => Err(Error::unavailable("the session is changing servers; try again")),
        }
    }

    /// Makes this server the one that runs a tree, if no other does, without bringing a session of it into memory: for whoever
    /// waits here for something of it. Returns which server runs it.
    pub async fn claim_tree(&self, root: &SessionId) -> Result<SessionOwner> {
        let _one_at_a_time = self.load_lock.lock().await;
        if self.is_adopted(root) {
            return Ok(SessionOwner::ThisServer);
        }
        let owner = self.deps.store.claim_session(root).await?;
        if owner == SessionOwner::ThisServer && self.deps.store.cluster().is_some() {
            let waiting = self.finish_adoption(root).await?;
            if !waiting.is_empty() {
                self.start_waiting_soon(waiting);
            }
        }
        Ok(owner)
    }

    async fn finish_adoption(&self, root: &SessionId) -> Result<Vec<SessionId>> {
        let waiting = self.recover_tree(root).await?;
        self.adopted.lock().insert(root.clone());
        Ok(waiting)
    }

    /// Brings sessions into memory, soon, whose messages wait. Not an `async fn`: loading a session calls it.
    pub(crate) fn start_waiting_soon(&self, waiting: Vec<SessionId>) {
        if let Some(sessions) = self.weak_self.upgrade() {
            tokio::spawn(async move { sessions.start_waiting(waiting).await });
        }
    }

    /// Brings sessions into memory whose messages wait.
    async fn start_waiting(&self, sessions: Vec<SessionId>) {
        for id in sessions {
            match Box::pin(self.load(&id)).await {
                Ok(_) => {}
                Err(error) if matches!(error.code, ErrorCode::Conflict | ErrorCode::NotFound) => {
                    if let Err(error) = self.deps.store.queue_drop(&id, None).await {
                        tracing::warn!(session = %id, error = %error.for_log(), "dropping messages of a session that is over failed");
                    }
                }
                Err(error) => {
                    tracing::error!(session = %id, error = %error.for_log(), "loading a session with queued messages failed; they stay queued");
                }
            }
        }
    }

    fn is_adopted(&self, root: &SessionId) -> bool {
        self.adopted.lock().contains(root)
    }

    /// Records that a new session, whose tree was claimed with it, is this server's.
    pub(crate) fn note_adopted(&self, root: &SessionId) {
        if self.deps.store.cluster().is_some() {
            self.adopted.lock().insert(root.clone());
        }
    }

    /// Lets go of a tree once nothing of it is in memory.
    pub(crate) async fn release_if_unused(&self, root: &SessionId) {
        let _not_loaded = self.load_lock.lock().await;
        let is_used = |root: &SessionId| self.all_in_memory().iter().any(|live| live.row.root_id == *root);
        if !self.is_adopted(root) || is_used(root) || self.stopping().is_cancelled() {
            return;
        }
        match self.deps.store.release_tree(root).await {
            Ok(()) => {
                self.adopted.lock().remove(root);
            }
            Err(error) => {
                tracing::debug!(session = %root, error = %error.for_log(), "releasing a session failed; it stays this server's");
            }
        }
    }

    /// Kills every agent and tool server at once and writes nothing: other servers run these sessions now, or will soon.
    pub fn abandon(&self) {
        self.stopping().cancel();
        // Ends their tasks, so that none begins with its next message.
        self.abandoned.cancel();
        for live in self.all_in_memory() {
            live.sandbox_group.kill();
        }
    }
}
