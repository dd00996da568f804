//! What follows a commit: followers and other servers are told of the group, and its callers are answered.

use std::collections::HashMap;

use super::{group::DatabaseWriter, slot::GroupSlot};
use crate::db::postgres::notice::CommitNotice;

impl DatabaseWriter {
    /// What a commit of these tells other servers.
    pub(super) fn notices(&self, slots: &[GroupSlot]) -> Vec<CommitNotice> {
        if !self.tx.db.is_postgres() {
            return Vec::new();
        }
        let mut last_events = HashMap::new();
        let mut last_debug = None;
        for slot in slots {
            match slot {
                GroupSlot::Events {
                    events,
                    refused: None,
                    ..
                } => {
                    if let Some(last) = events.last() {
                        last_events.insert(&last.session_id, last.index);
                    }
                }
                GroupSlot::Debug {
                    position: Some(position),
                    ..
                } => last_debug = Some(position.index),
                GroupSlot::Events { .. }
                | GroupSlot::Work { .. }
                | GroupSlot::Audit { .. }
                | GroupSlot::Debug { .. } => {}
            }
        }
        let events = last_events
            .into_iter()
            .map(|(session, last)| CommitNotice::Events(session.clone(), last));
        let deleted = self
            .tx
            .deleted_sessions
            .iter()
            .cloned()
            .map(CommitNotice::SessionDeleted);
        let tokens = self.tx.touched.tokens.then_some(CommitNotice::Tokens);
        let revoked = self
            .tx
            .revoked_tokens
            .iter()
            .cloned()
            .map(CommitNotice::TokenRevoked);
        let projects = self.tx.touched.projects.then_some(CommitNotice::Projects);
        let definitions = self.tx.touched.definitions.then_some(CommitNotice::Definitions);
        let debug = last_debug.map(CommitNotice::Debug);
        let outbox = (self.outbox_filled && self.tx.member.is_some()).then_some(CommitNotice::Outbox);
        events
            .chain(deleted)
            .chain(tokens)
            .chain(revoked)
            .chain(projects)
            .chain(definitions)
            .chain(debug)
            .chain(outbox)
            .collect()
    }

    /// Invalidates the row caches that this transaction made stale.
    pub(super) fn invalidate_caches(&mut self) {
        let touched = std::mem::take(&mut self.tx.touched);
        if touched.tokens {
            self.caches.tokens.invalidate();
        }
        if touched.projects {
            self.caches.projects.invalidate();
            self.caches.sessions.invalidate();
        }
        if touched.definitions {
            self.caches.library_changed();
        }
    }

    /// Publishes a committed group to followers, then answers its callers.
    pub(super) fn publish_and_answer(&mut self, slots: Vec<GroupSlot>) {
        self.invalidate_caches();
        for session in std::mem::take(&mut self.tx.deleted_sessions) {
            self.positions.remove(&session);
            self.session_projects.remove(&session);
            self.trees.forget_session(&session);
            self.tails.close_session(&session);
            self.unwritten.drop_session(&session);
        }
        self.purging |= std::mem::take(&mut self.tx.needs_purge);
        if std::mem::take(&mut self.outbox_filled) {
            self.webhooks.filled.notify_one();
        }
        // A follower that subscribes after this check finds the events in the database.
        let followed = self.debug_queue.tail.is_followed();
        let (mut recorded, mut last) = (Vec::new(), None);
        for slot in &slots {
            match slot {
                GroupSlot::Events {
                    job,
                    events,
                    refused: None,
                } => {
                    let sizes = job.bodies.iter().map(|(_, text)| text.len());
                    self.tails
                        .publish(&job.session, events.iter().cloned().zip(sizes));
                }
                GroupSlot::Debug {
                    job,
                    position: Some(position),
                } => {
                    last = Some(position.index);
                    if followed {
                        recorded.push(job.recorded(position.index, position.project.clone()));
                    }
                }
                GroupSlot::Events { .. }
                | GroupSlot::Work { .. }
                | GroupSlot::Audit { .. }
                | GroupSlot::Debug { .. } => {}
            }
        }
        match recorded.into_iter().collect::<Option<Vec<_>>>() {
            Some(recorded) => self.debug_queue.tail.publish(recorded.into_iter()),
            None => self.debug_queue.tail.clear_ring(),
        }
        if let Some(last) = last {
            self.debug_queue.tail.advance_to(last);
        }
        for slot in slots {
            slot.answer(None);
        }
    }
}
