//! Which server runs a tree of sessions: the one that is named in `session_owners`, as long as it has its lease.

use oubliette_protocol::{Error, Result, ServerId, SessionId};

use super::{PeerServer, SessionOwner};
use crate::{
    Store,
    db::{DbRow, query},
    db_error::WriteError,
    writer::{StoreWrite, WriteTx},
};

impl Store {
    /// Which server runs a session; none if there is no such session. Without a cluster always this one.
    pub async fn session_owner(&self, session: &SessionId) -> Result<Option<SessionOwner>> {
        match self.cluster() {
            Some(member) => member.session_owner(session).await,
            None => Ok(Some(SessionOwner::ThisServer)),
        }
    }

    /// Makes this server the one that runs a session and the others of its tree, if no other does. Returns which one does
    /// now; never [`SessionOwner::Unowned`]. `not_found` if there is no such session.
    pub async fn claim_session(&self, session: &SessionId) -> Result<SessionOwner> {
        let Some(member) = self.cluster() else {
            return Ok(SessionOwner::ThisServer);
        };
        self.write(ClaimSession {
            session: session.clone(),
            server: member.server_id().clone(),
        })
        .await
    }
}

impl Store {
    /// Lets go of a tree of which nothing is in this server's memory, so that any server may claim it.
    pub async fn release_tree(&self, root: &SessionId) -> Result<()> {
        match self.cluster() {
            Some(_) => self.write(ReleaseTree(root.clone())).await,
            None => Ok(()),
        }
    }
}

struct ReleaseTree(SessionId);

impl StoreWrite for ReleaseTree {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        let Some(server) = tx.member.clone() else {
            return Ok(());
        };
        query("DELETE FROM session_owners WHERE root_id = $1 AND server_id = $2")
            .bind(self.0.as_str())
            .bind(server.as_str())
            .execute(&mut tx.db)
            .await?;
        tx.moved_trees.push(self.0.clone());
        Ok(())
    }
}

/// The error of a write to a session that another server runs.
pub(crate) fn moved_error(session: &SessionId) -> Error {
    Error::unavailable(format!(
        "session {session} is run by another server now; try again"
    ))
}

struct ClaimSession {
    session: SessionId,
    server: ServerId,
}

impl StoreWrite for ClaimSession {
    type Out = SessionOwner;

    async fn apply(&self, tx: &mut WriteTx) -> Result<SessionOwner, WriteError> {
        let row = query("SELECT root_id FROM sessions WHERE session_id = $1")
            .bind(self.session.as_str())
            .fetch_optional(&mut tx.db)
            .await?;
        let Some(row) = row else {
            return Err(Error::not_found(format!("there is no session {}", self.session)).into());
        };
        let root: SessionId = row.text(0)?.parse()?;
        claim_tree(tx, &root, &self.server).await
    }
}

/// Claims a tree for a server whose transaction this is. A server without a lease never gets it back, so what it owned is free.
pub(crate) async fn claim_tree(
    tx: &mut WriteTx,
    root: &SessionId,
    server: &ServerId,
) -> Result<SessionOwner, WriteError> {
    let inserted = query(
        "INSERT INTO session_owners (root_id, server_id) VALUES ($1, $2)
         ON CONFLICT (root_id) DO NOTHING RETURNING root_id",
    )
    .bind(root.as_str())
    .bind(server.as_str())
    .fetch_optional(&mut tx.db)
    .await?;
    if inserted.is_none() && !take_unowned(tx, root, server).await? {
        return peer_that_owns(tx, root).await;
    }
    tx.moved_trees.push(root.clone());
    Ok(SessionOwner::ThisServer)
}

/// Makes a server the owner of a tree that has one, if that is itself or has no lease. Returns whether it is now.
async fn take_unowned(tx: &mut WriteTx, root: &SessionId, server: &ServerId) -> Result<bool, WriteError> {
    // Before the lease is looked for, by a statement of its own: a statement that waits for this row sees the row as it is
    // after the wait, and leases as they were before. It would take the tree from a server that has joined meanwhile.
    query("SELECT 1 FROM session_owners WHERE root_id = $1 FOR UPDATE")
        .bind(root.as_str())
        .fetch_optional(&mut tx.db)
        .await?;
    let taken = query(
        "UPDATE session_owners SET server_id = $2 WHERE root_id = $1 AND (server_id = $2
             OR NOT EXISTS (SELECT 1 FROM server_leases l WHERE l.server_id = session_owners.server_id))
         RETURNING root_id",
    )
    .bind(root.as_str())
    .bind(server.as_str())
    .fetch_optional(&mut tx.db)
    .await?;
    Ok(taken.is_some())
}

async fn peer_that_owns(tx: &mut WriteTx, root: &SessionId) -> Result<SessionOwner, WriteError> {
    let row = query(
        "SELECT session_owners.server_id, COALESCE(servers.address, '') FROM session_owners
         LEFT JOIN servers ON servers.server_id = session_owners.server_id WHERE root_id = $1",
    )
    .bind(root.as_str())
    .fetch_optional(&mut tx.db)
    .await?;
    match row.as_ref().map(peer_of).transpose()? {
        Some(peer) => Ok(SessionOwner::Peer(peer)),
        // Released between the statements.
        None => Err(Error::unavailable("the session is changing servers; try again").into()),
    }
}

fn peer_of(row: &DbRow) -> Result<PeerServer, WriteError> {
    Ok(PeerServer {
        server_id: row.text(0)?.parse()?,
        address: row.try_get(1)?,
    })
}
