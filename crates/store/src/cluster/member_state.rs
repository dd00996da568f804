//! Whether a server of a cluster may run sessions, and how that changes.

use oubliette_protocol::Error;
use tokio::sync::watch;

use crate::db::postgres::lease::fenced_error;

/// Whether a server may run sessions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MemberState {
    /// It may.
    Active,
    /// It has not reached the database for so long that others may take over: what it runs has to be stopped.
    Isolated,
    /// Others have taken over what it ran, or it was isolated and has reached the database again: it has to start anew.
    Fenced,
}

impl MemberState {
    /// What whoever asks something of such a server is told.
    pub(crate) fn error(self) -> Error {
        match self {
            MemberState::Active | MemberState::Fenced => fenced_error(),
            MemberState::Isolated => Error::unavailable(
                "this server cannot reach its database; ask another one, or look at the server's log",
            ),
        }
    }
}

/// The state of this server. It goes from active over isolated to fenced and never back, whether its heartbeat or its
/// writer notices first.
#[derive(Debug)]
pub(crate) struct OwnMemberState(watch::Sender<MemberState>);

impl OwnMemberState {
    /// Of a server that has joined.
    pub(crate) fn new() -> Self {
        Self(watch::Sender::new(MemberState::Active))
    }

    pub(crate) fn current(&self) -> MemberState {
        *self.0.borrow()
    }

    pub(crate) fn is_active(&self) -> bool {
        self.current() == MemberState::Active
    }

    /// The database was not reached for too long. Returns whether the server was active until now.
    pub(crate) fn isolate(&self) -> bool {
        self.0.send_if_modified(|state| {
            let was_active = *state == MemberState::Active;
            if was_active {
                *state = MemberState::Isolated;
            }
            was_active
        })
    }

    /// The server has to start anew.
    pub(crate) fn fence(&self) {
        self.0.send_replace(MemberState::Fenced);
    }

    pub(crate) fn subscribe(&self) -> watch::Receiver<MemberState> {
        self.0.subscribe()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_fenced_server_is_not_isolated_any_more() {
        let state = OwnMemberState::new();
        assert!(state.isolate());
        assert!(!state.isolate());
        state.fence();
        assert!(!state.isolate());
        assert_eq!(state.current(), MemberState::Fenced);

        // The writer may notice that the lease is lost while the heartbeat still waits for its answer.
        let state = OwnMemberState::new();
        state.fence();
        assert!(!state.isolate());
        assert_eq!(state.current(), MemberState::Fenced);
    }
}
