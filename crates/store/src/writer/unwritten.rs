//! Events that could not be written and that nobody waits for. They are kept in memory and written before
//! anything else of their session once the database can be written again, so that a session's log misses
//! none of them.

use std::{collections::HashSet, mem};

use oubliette_protocol::SessionId;
use parking_lot::Mutex;

use super::job::EventJob;

/// The event jobs that could not be written.
#[derive(Default)]
pub(crate) struct UnwrittenEvents(Mutex<UnwrittenState>);

#[derive(Default)]
struct UnwrittenState {
    /// In the order they were sent. Taken out while they are tried again.
    jobs: Vec<EventJob>,
    /// Their sessions, also while the jobs are tried again.
    sessions: HashSet<SessionId>,
}

impl UnwrittenEvents {
    /// Keeps a job. Its share of the memory limit is released: whoever appends for the session sees that events
    /// are unwritten and waits for its next one, so no more are kept than were under way.
    pub(super) fn keep(&self, mut job: EventJob) {
        job.pending_budget = None;
        let mut state = self.0.lock();
        if state.sessions.insert(job.session.clone()) {
            tracing::warn!(session = %job.session, "events could not be written; they are kept in memory and written later");
        }
        state.jobs.push(job);
    }

    /// Takes the jobs out to try them again; [`end_retry`](Self::end_retry) is to follow.
    pub(super) fn begin_retry(&self) -> Vec<EventJob> {
        mem::take(&mut self.0.lock().jobs)
    }

    /// Forgets the sessions whose events have been written.
    pub(super) fn end_retry(&self) {
        let mut state = self.0.lock();
        if !state.sessions.is_empty() {
            state.sessions = state.jobs.iter().map(|job| job.session.clone()).collect();
        }
    }

    /// Whether jobs wait to be tried again.
    pub(super) fn is_empty(&self) -> bool {
        self.0.lock().jobs.is_empty()
    }

    /// Whether jobs of this session wait to be tried again.
    pub(super) fn is_waiting(&self, session: &SessionId) -> bool {
        self.0.lock().jobs.iter().any(|job| job.session == *session)
    }

    /// Drops the jobs of a deleted session.
    pub(super) fn drop_session(&self, session: &SessionId) {
        self.0.lock().jobs.retain(|job| job.session != *session);
    }

    /// Whether events of this session are unwritten.
    pub(crate) fn has(&self, session: &SessionId) -> bool {
        self.0.lock().sessions.contains(session)
    }
}
