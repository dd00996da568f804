//! Whether this server, as one of a cluster, runs the sessions it appends to.
//!
//! Each transaction asks which of its sessions' trees the server owns, with the statement that checks its lease. A tree changes
//! hands only in a transaction of its owner, which passes this writer, or in one that deletes its owner's lease; so what is
//! cached of the logs of an owned tree is right.

use std::collections::{HashMap, HashSet};

use oubliette_protocol::{Error, SessionId};

use super::{
    group::DatabaseWriter,
    job::{EventJob, SessionRowChange},
    slot::GroupSlot,
};
use crate::{
    cluster::{SessionOwner, ownership},
    db::query,
    db_error::WriteError,
};

/// The trees of the sessions that are appended to.
#[derive(Default)]
pub(super) struct OwnedTrees {
    /// The root of each session's tree.
    roots: HashMap<SessionId, SessionId>,
    /// The trees that this server owns, as the transaction under way found.
    owned: HashSet<SessionId>,
}

impl OwnedTrees {
    /// The trees of a group's sessions, as far as they are known.
    pub(super) fn roots_of(&self, slots: &[GroupSlot]) -> Vec<SessionId> {
        let roots: HashSet<&SessionId> = slots
            .iter()
            .filter_map(|slot| match slot {
                GroupSlot::Events { job, .. } => match &job.row_change {
                    Some(SessionRowChange::Insert(insert)) => Some(&insert.row.root_id),
                    _ => self.roots.get(&job.session),
                },
                GroupSlot::Work { .. } | GroupSlot::Audit { .. } | GroupSlot::Debug { .. } => None,
            })
            .collect();
        roots.into_iter().cloned().collect()
    }

    /// A transaction has begun, in which the server owns these.
    pub(super) fn begin_transaction(&mut self, owned: Vec<SessionId>) {
        self.owned.clear();
        self.owned.extend(owned);
    }

    pub(super) fn forget_session(&mut self, session: &SessionId) {
        self.roots.remove(session);
    }

    pub(super) fn forget(&mut self) {
        self.roots.clear();
        self.owned.clear();
    }
}

impl DatabaseWriter {
    /// Why these events may not be appended by this server, if it is one of a cluster and another one runs the session. A tree
    /// that nobody runs becomes this server's.
    pub(super) async fn check_owner(&mut self, job: &EventJob) -> Result<Option<Error>, WriteError> {
        let Some(server) = self.tx.member.clone() else {
            return Ok(None);
        };
        let root = match (&job.row_change, self.trees.roots.get(&job.session)) {
            (Some(SessionRowChange::Insert(insert)), _) => insert.row.root_id.clone(),
            (_, Some(root)) => root.clone(),
            (_, None) => {
                let row = query("SELECT root_id FROM sessions WHERE session_id = $1")
                    .bind(job.session.as_str())
                    .fetch_optional(&mut self.tx.db)
                    .await?;
                match row {
                    Some(row) => row.text(0)?.parse()?,
                    None => {
                        return Ok(Some(Error::not_found(format!(
                            "there is no session {}",
                            job.session
                        ))));
                    }
                }
            }
        };
        self.trees.roots.insert(job.session.clone(), root.clone());
        if self.trees.owned.contains(&root) {
            return Ok(None);
        }
        match ownership::claim_tree(&mut self.tx, &root, &server).await {
            Ok(SessionOwner::ThisServer) => {
                self.forget_moved_trees();
                self.trees.owned.insert(root);
                Ok(None)
            }
            Ok(SessionOwner::Peer(_) | SessionOwner::Unowned) => {
                Ok(Some(ownership::moved_error(&job.session)))
            }
            Err(WriteError::Refused(error)) => Ok(Some(error)),
            Err(error) => Err(error),
        }
    }

    /// Drops what is cached of trees that the transaction has claimed or released.
    pub(super) fn forget_moved_trees(&mut self) {
        for root in std::mem::take(&mut self.tx.moved_trees) {
            self.trees.owned.remove(&root);
            let sessions: Vec<SessionId> = self
                .trees
                .roots
                .iter()
                .filter(|(_, of)| **of == root)
                .map(|(session, _)| session.clone())
                .collect();
            for session in sessions {
                self.positions.remove(&session);
            }
        }
    }
}
