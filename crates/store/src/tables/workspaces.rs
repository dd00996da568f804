//! Workspaces: the directories that sessions of a project work in.

use indexmap::IndexMap;
use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, WorkspaceId};
use serde_json::Value;

use super::row::{json, optional_json, parsed, text, time, to_json};
use crate::{
    db::{DbRow, QueryBuilder, query},
    db_error::{WriteError, read_error},
    page::{ListPage, PageRequest, PagedList, TimeIdKey},
    store::Store,
    writer::{StoreWrite, WriteTx},
};

static LIST: PagedList<WorkspaceRow, TimeIdKey<WorkspaceId>> = PagedList {
    name: "workspaces",
    order: "created_at, workspace_id",
    after: "(created_at, workspace_id) > ",
    key: |row| TimeIdKey {
        millis: row.created_at.as_millisecond(),
        id: row.workspace_id.clone(),
    },
    read: workspace_from_row,
};
/// Columns are named: one that a newer version adds while this one runs would change the type of a prepared statement's rows.
const SELECT_WORKSPACES: &str =
    "SELECT workspace_id, project_id, name, env, source, created_at FROM workspaces";

/// A workspace.
#[derive(Debug, Clone, PartialEq)]
pub struct WorkspaceRow {
    /// Its id, which is also its directory's name.
    pub workspace_id: WorkspaceId,
    /// The project it belongs to.
    pub project_id: ProjectId,
    /// Its display name.
    pub name: String,
    /// Environment variables of sessions on it, in addition to the project's.
    pub env: IndexMap<String, String>,
    /// Where its content came from, as JSON.
    pub source: Option<Value>,
    /// When it was created.
    pub created_at: Timestamp,
}

impl Store {
    /// Stores a new workspace; `not_found` if its project does not exist.
    pub async fn workspace_insert(&self, workspace: WorkspaceRow) -> Result<()> {
        self.write(InsertWorkspace(workspace)).await
    }

    /// Replaces a workspace's name, environment and source; `not_found` if there is none.
    pub async fn workspace_update(&self, workspace: WorkspaceRow) -> Result<()> {
        self.write(UpdateWorkspace(workspace)).await
    }

    /// One workspace.
    pub async fn workspace_get(&self, id: &WorkspaceId) -> Result<Option<WorkspaceRow>> {
        let mut query = QueryBuilder::new(SELECT_WORKSPACES);
        query.push(" WHERE workspace_id = ").push_bind(id.as_str());
        let row = query.build().fetch_optional(self.readers()).await;
        row.map_err(read_error)?
            .map(|row| workspace_from_row(&row))
            .transpose()
    }

    /// A project's workspaces, oldest first.
    pub async fn workspace_list(
        &self,
        project: &ProjectId,
        page: PageRequest,
    ) -> Result<ListPage<WorkspaceRow>> {
        let mut query = QueryBuilder::new(SELECT_WORKSPACES);
        query.push(" WHERE project_id = ");
        query.push_bind(project.as_str());
        self.fetch_page(query, &LIST, &page).await
    }

    /// Deletes a workspace. Returns false if there is none.
    pub async fn workspace_delete(&self, id: &WorkspaceId) -> Result<bool> {
        self.write(DeleteWorkspace(id.clone())).await
    }
}

fn workspace_from_row(row: &DbRow) -> Result<WorkspaceRow> {
    Ok(WorkspaceRow {
        workspace_id: parsed(row, "workspace_id")?,
        project_id: parsed(row, "project_id")?,
        name: text(row, "name")?,
        env: json(row, "env")?,
        source: optional_json(row, "source")?,
        created_at: time(row, "created_at")?,
    })
}

pub(super) async fn insert(tx: &mut WriteTx, workspace: &WorkspaceRow) -> Result<(), WriteError> {
    query(
        "INSERT INTO workspaces (workspace_id, project_id, name, env, source, created_at)
         VALUES ($1, $2, $3, $4, $5, $6)",
    )
    .bind(workspace.workspace_id.as_str())
    .bind(workspace.project_id.as_str())
    .bind(&workspace.name)
    .bind(to_json(&workspace.env)?)
    .bind(workspace.source.as_ref().map(to_json).transpose()?)
    .bind(workspace.created_at.as_millisecond())
    .execute(&mut tx.db)
    .await?;
    Ok(())
}

struct InsertWorkspace(WorkspaceRow);

impl StoreWrite for InsertWorkspace {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        insert(tx, &self.0).await
    }
}

struct UpdateWorkspace(WorkspaceRow);

impl StoreWrite for UpdateWorkspace {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        let workspace = &self.0;
        let done = query("UPDATE workspaces SET name = $2, env = $3, source = $4 WHERE workspace_id = $1")
            .bind(workspace.workspace_id.as_str())
            .bind(&workspace.name)
            .bind(to_json(&workspace.env)?)
            .bind(workspace.source.as_ref().map(to_json).transpose()?)
            .execute(&mut tx.db)
            .await?;
        match done.rows_affected() {
            0 => Err(Error::not_found(format!("there is no workspace {}", workspace.workspace_id)).into()),
            _ => Ok(()),
        }
    }
}

struct DeleteWorkspace(WorkspaceId);

impl StoreWrite for DeleteWorkspace {
    type Out = bool;

    async fn apply(&self, tx: &mut WriteTx) -> Result<bool, WriteError> {
        let done = query("DELETE FROM workspaces WHERE workspace_id = $1")
            .bind(self.0.as_str())
            .execute(&mut tx.db)
            .await?;
        Ok(done.rows_affected() > 0)
    }
}
