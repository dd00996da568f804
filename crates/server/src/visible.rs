//! Reading rows that a grant may see. What it may not see is `not_found`, exactly as what does not exist, so that
//! nobody learns which ids are in use.

use std::str::FromStr;

use oubliette_protocol::{Error, Result, SessionId, WorkspaceId, id::quoted};
use oubliette_store::{SessionRow, WorkspaceRow};

use crate::{app::App, auth::Grant};

impl App {
    /// Reads a session; `not_found` if the grant cannot see its project.
    pub(crate) async fn visible_session(&self, grant: &Grant, id: &SessionId) -> Result<SessionRow> {
        let row = self.store.session_get(id).await?;
        row.filter(|row| grant.principal().sees(&row.project_id))
            .ok_or_else(|| Error::not_found(format!("there is no session {id}")))
    }

    /// Reads a workspace; `not_found` if the grant cannot see its project.
    pub(crate) async fn visible_workspace(&self, grant: &Grant, id: &WorkspaceId) -> Result<WorkspaceRow> {
        let row = self.store.workspace_get(id).await?;
        row.filter(|row| grant.principal().sees(&row.project_id))
            .ok_or_else(|| Error::not_found(format!("there is no workspace {id}")))
    }
}

/// Parses an id in a URL; `not_found` if it is malformed. `noun` is what the id is of.
pub(crate) fn parse_id<T: FromStr>(noun: &str, text: &str) -> Result<T> {
    text.parse()
        .map_err(|_| Error::not_found(format!("there is no {noun} {}", quoted(text))))
}
