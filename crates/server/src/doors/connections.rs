//! The open connections of each session, so that they can be counted and closed when its agent is replaced or ends.

use std::{collections::HashMap, sync::Arc};

use oubliette_protocol::SessionId;
use oubliette_relay::RpcPeer;
use parking_lot::Mutex;
use tokio_util::sync::CancellationToken;

/// Connections of one session at once; a sandbox that opens more has them closed.
const MAX_CONNECTIONS_PER_SESSION: usize = 64;

/// Something a session's client has open.
pub(super) trait OpenConnection: Clone {
    /// Closes it; what comes over it afterwards is not served.
    fn close(&self);

    fn is_closed(&self) -> bool;
}

impl OpenConnection for RpcPeer {
    fn close(&self) {
        RpcPeer::close(self);
    }

    fn is_closed(&self) -> bool {
        RpcPeer::is_closed(self)
    }
}

/// The token that stops whatever serves the connection.
impl OpenConnection for CancellationToken {
    fn close(&self) {
        self.cancel();
    }

    fn is_closed(&self) -> bool {
        self.is_cancelled()
    }
}

/// Open connections by session. Clones share one table.
#[derive(Clone)]
pub(super) struct ConnectionTable<C>(Arc<Mutex<HashMap<SessionId, Vec<C>>>>);

impl<C> Default for ConnectionTable<C> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

/// The session has as many connections as it may.
pub(super) struct TooManyConnections;

impl<C: OpenConnection> ConnectionTable<C> {
    /// Adds the connection that `open` makes. It is made while the table is locked, so that
    /// [`ConnectionTable::close_all`] misses none.
    pub(super) fn add<E>(
        &self,
        session: &SessionId,
        open: impl FnOnce() -> Result<C, E>,
    ) -> Result<Result<C, E>, TooManyConnections> {
        let mut table = self.0.lock();
        let connections = table.entry(session.clone()).or_default();
        connections.retain(|connection| !connection.is_closed());
        if connections.len() >= MAX_CONNECTIONS_PER_SESSION {
            return Err(TooManyConnections);
        }
        let opened = open();
        connections.extend(opened.as_ref().ok().cloned());
        if connections.is_empty() {
            table.remove(session);
        }
        Ok(opened)
    }

    /// Forgets the connections of a session that are closed.
    pub(super) fn remove_closed(&self, session: &SessionId) {
        let mut table = self.0.lock();
        if let Some(connections) = table.get_mut(session) {
            connections.retain(|connection| !connection.is_closed());
            if connections.is_empty() {
                table.remove(session);
            }
        }
    }

    /// Closes every connection of a session.
    pub(super) fn close_all(&self, session: &SessionId) {
        for connection in self.0.lock().remove(session).unwrap_or_default() {
            connection.close();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_session_has_so_many_connections_and_closed_ones_do_not_count() {
        let (table, session) = (ConnectionTable::default(), SessionId::generate());
        let add = || {
            table
                .add(&session, || Ok::<_, ()>(CancellationToken::new()))
                .map(Result::unwrap)
        };
        let all: Vec<_> = (0..MAX_CONNECTIONS_PER_SESSION)
            .map(|_| add().ok().unwrap())
            .collect();
        assert!(add().is_err());
        all[0].cancel();
        assert!(add().is_ok());
        table.close_all(&session);
        assert!(all.iter().all(CancellationToken::is_cancelled));
        assert!(table.0.lock().is_empty());
        let last = add().ok().unwrap();
        table.remove_closed(&session);
        assert_eq!(table.0.lock().len(), 1);
        last.cancel();
        table.remove_closed(&session);
        assert!(table.0.lock().is_empty());
    }
}
