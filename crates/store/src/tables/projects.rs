//! Projects: their settings, and deleting one with everything that belongs to it.

use std::sync::Arc;

use indexmap::IndexMap;
use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, Scope, Slug, WorkspaceId, WorkspacePolicy};
use serde_json::Value;

use super::{
    row::{json, optional_parsed, parsed, text, time, to_json},
    workspaces::{self, WorkspaceRow},
};
use crate::{
    db::{DbRow, QueryBuilder, query},
    db_error::{WriteError, read_error},
    page::{ListPage, PageRequest, PagedList},
    store::Store,
    writer::{StoreWrite, Survives, WriteTx},
};

static LIST: PagedList<ProjectRow, ProjectId> = PagedList {
    name: "projects",
    order: "project_id DESC",
    after: "project_id < ",
    key: |row| row.project_id.clone(),
    read: project_from_row,
};
/// Columns are named: one that a newer version adds while this one runs would change the type of a prepared statement's rows.
const SELECT_PROJECTS: &str = "SELECT project_id, name, description, agent, env, api_key_scope, sandbox, limits, default_workspace, \
     workspaces, created_at, updated_at FROM projects";
/// Maximum length of `name_contains` in bytes, below SQLite's own limit for patterns, whose error is less
/// helpful.
const MAX_NEEDLE: usize = 1000;
/// Maximum size of a cached page of the project list, in bytes.
const MAX_CACHED_PAGE_BYTES: usize = 64 * 1024;

/// A project.
#[derive(Debug, Clone, PartialEq)]
pub struct ProjectRow {
    /// Its id.
    pub project_id: ProjectId,
    /// Its display name.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// The default agent of its sessions.
    pub agent: Option<Slug>,
    /// Environment variables of its sessions.
    pub env: IndexMap<String, String>,
    /// Scope of the API key its sessions get; none: they get no key.
    pub api_key_scope: Option<Scope>,
    /// Its sandbox settings, as JSON.
    pub sandbox: Value,
    /// Its limits, as JSON.
    pub limits: Value,
    /// The default workspace of its sessions.
    pub default_workspace: WorkspaceId,
    /// Where sessions work that name no workspace.
    pub workspaces: WorkspacePolicy,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
}

/// Selects projects to list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct ProjectFilter {
    /// Only this project.
    pub project: Option<ProjectId>,
    /// Only projects whose name contains this text, ignoring case.
    pub name_contains: Option<String>,
}

impl Store {
    /// Stores a new project without a workspace.
    pub async fn project_insert(&self, project: ProjectRow) -> Result<()> {
        self.write(InsertProject {
            project,
            workspace: None,
        })
        .await
    }

    /// Stores a new project with its first workspace, in one transaction.
    pub async fn project_create(&self, project: ProjectRow, workspace: WorkspaceRow) -> Result<()> {
        self.write(InsertProject {
            project,
            workspace: Some(workspace),
        })
        .await
    }

    /// Replaces all of a project's fields except `project_id` and `created_at`; `not_found` if there is none.
    pub async fn project_update(&self, project: ProjectRow) -> Result<()> {
        self.write(UpdateProject(project)).await
    }

    /// One project.
    pub async fn project_get(&self, id: &ProjectId) -> Result<Option<ProjectRow>> {
        let mut query = QueryBuilder::new(SELECT_PROJECTS);
        query.push(" WHERE project_id = ").push_bind(id.as_str());
        let row = query.build().fetch_optional(self.readers()).await;
        row.map_err(read_error)?
            .map(|row| project_from_row(&row))
            .transpose()
    }

    /// Projects, newest first.
    pub async fn project_list(
        &self,
        filter: ProjectFilter,
        page: PageRequest,
    ) -> Result<ListPage<ProjectRow>> {
        let asked = (filter, page);
        let cache_version = match self.caches().projects.get(&asked) {
            Ok(page) => return Ok(ListPage::clone(&page)),
            Err(cache_version) => cache_version,
        };
        let found = self.project_page(&asked.0, &asked.1).await?;
        if found.items.iter().map(approx_bytes).sum::<usize>() <= MAX_CACHED_PAGE_BYTES {
            let kept = Arc::new(found.clone());
            self.caches().projects.insert(cache_version, asked, kept);
        }
        Ok(found)
    }

    async fn project_page(&self, filter: &ProjectFilter, page: &PageRequest) -> Result<ListPage<ProjectRow>> {
        let mut query = QueryBuilder::new(SELECT_PROJECTS);
        query.push(" WHERE 1 = 1");
        if let Some(only) = &filter.project {
            query.push(" AND project_id = ").push_bind(only.as_str());
        }
        if let Some(needle) = &filter.name_contains {
            query
                .push(" AND name_folded LIKE ")
                .push_bind(like_pattern(needle)?)
                .push(" ESCAPE '\\'");
        }
        self.fetch_page(query, &LIST, page).await
    }

    /// Deletes a project with its workspaces, sessions, their events and memory, and revokes its tokens.
    /// `conflict` while one of its sessions is active. Returns false if there is no such project.
    pub async fn project_delete(&self, id: &ProjectId) -> Result<bool> {
        self.write(DeleteProject(id.clone())).await
    }
}

/// Approximate memory of a row, in bytes.
fn approx_bytes(row: &ProjectRow) -> usize {
    let env: usize = row.env.iter().map(|(name, value)| name.len() + value.len()).sum();
    std::mem::size_of::<ProjectRow>() + row.name.len() + row.description.len() + env
}

/// A `LIKE` pattern that matches names containing a text, ignoring case, with wildcards in it escaped.
fn like_pattern(needle: &str) -> Result<String> {
    if needle.len() > MAX_NEEDLE {
        return Err(Error::invalid(format!(
            "name_contains is too long: at most {MAX_NEEDLE} bytes"
        )));
    }
    let mut pattern = String::from("%");
    for c in needle.to_lowercase().chars() {
        if matches!(c, '%' | '_' | '\\') {
            pattern.push('\\');
        }
        pattern.push(c);
    }
    pattern.push('%');
    Ok(pattern)
}

fn project_from_row(row: &DbRow) -> Result<ProjectRow> {
    Ok(ProjectRow {
        project_id: parsed(row, "project_id")?,
        name: text(row, "name")?,
        description: text(row, "description")?,
        agent: optional_parsed(row, "agent")?,
        env: json(row, "env")?,
        api_key_scope: optional_parsed(row, "api_key_scope")?,
        sandbox: json(row, "sandbox")?,
        limits: json(row, "limits")?,
        default_workspace: parsed(row, "default_workspace")?,
        workspaces: parsed(row, "workspaces")?,
        created_at: time(row, "created_at")?,
        updated_at: time(row, "updated_at")?,
    })
}

struct InsertProject {
    project: ProjectRow,
    workspace: Option<WorkspaceRow>,
}

impl StoreWrite for InsertProject {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        let p = &self.project;
        query(
            "INSERT INTO projects (project_id, name, name_folded, description, agent, env, api_key_scope,
                                   sandbox, limits, default_workspace, created_at, updated_at, workspaces)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13)",
        )
        .bind(p.project_id.as_str())
        .bind(&p.name)
        .bind(p.name.to_lowercase())
        .bind(&p.description)
        .bind(p.agent.as_ref().map(Slug::as_str))
        .bind(to_json(&p.env)?)
        .bind(p.api_key_scope.map(Scope::as_str))
        .bind(to_json(&p.sandbox)?)
        .bind(to_json(&p.limits)?)
        .bind(p.default_workspace.as_str())
        .bind(p.created_at.as_millisecond())
        .bind(p.updated_at.as_millisecond())
        .bind(p.workspaces.as_str())
        .execute(&mut tx.db)
        .await?;
        tx.touched.projects = true;
        match &self.workspace {
            Some(workspace) => workspaces::insert(tx, workspace).await,
            None => Ok(()),
        }
    }
}

struct UpdateProject(ProjectRow);

impl StoreWrite for UpdateProject {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        let p = &self.0;
        let done = query(
            "UPDATE projects SET name = $2, name_folded = $3, description = $4, agent = $5, env = $6,
                    api_key_scope = $7, sandbox = $8, limits = $9, default_workspace = $10, updated_at = $11,
                    workspaces = $12
             WHERE project_id = $1",
        )
        .bind(p.project_id.as_str())
        .bind(&p.name)
        .bind(p.name.to_lowercase())
        .bind(&p.description)
        .bind(p.agent.as_ref().map(Slug::as_str))
        .bind(to_json(&p.env)?)
        .bind(p.api_key_scope.map(Scope::as_str))
        .bind(to_json(&p.sandbox)?)
        .bind(to_json(&p.limits)?)
        .bind(p.default_workspace.as_str())
        .bind(p.updated_at.as_millisecond())
        .bind(p.workspaces.as_str())
        .execute(&mut tx.db)
        .await?;
        tx.touched.projects = true;
        match done.rows_affected() {
            0 => Err(Error::not_found(format!("there is no project {}", p.project_id)).into()),
            _ => Ok(()),
        }
    }
}

struct DeleteProject(ProjectId);

impl StoreWrite for DeleteProject {
    type Out = bool;
    // It revokes tokens.
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut WriteTx) -> Result<bool, WriteError> {
        let id = self.0.as_str();
        let sessions = query("SELECT session_id, status FROM sessions WHERE project_id = $1")
            .bind(id)
            .fetch_all(&mut tx.db)
            .await?;
        let mut gone = Vec::with_capacity(sessions.len());
        for row in &sessions {
            let status: oubliette_protocol::event::SessionStatus = row.text("status")?.parse()?;
            let session: oubliette_protocol::SessionId = row.text("session_id")?.parse()?;
            if status.is_active() {
                let why = format!("session {session} of project {id} is {status}: end it first");
                return Err(Error::conflict(why).into());
            }
            gone.push(session);
        }
        let now = tx.now_millis();
        query("UPDATE tokens SET revoked_at = $2 WHERE project_id = $1 AND revoked_at IS NULL")
            .bind(id)
            .bind(now)
            .execute(&mut tx.db)
            .await?;
        // The large tables are only marked here; `purge` deletes their rows in chunks afterwards.
        const STEPS: [&str; 11] = [
            "DELETE FROM approvals WHERE project_id = $1",
            "DELETE FROM tokens WHERE session_id IN (SELECT session_id FROM sessions WHERE project_id = $1)",
            "DELETE FROM queue WHERE session_id IN (SELECT session_id FROM sessions WHERE project_id = $1)",
            "DELETE FROM memory WHERE session_id IN (SELECT session_id FROM sessions WHERE project_id = $1)",
            "DELETE FROM session_usage WHERE session_id IN (SELECT session_id FROM sessions WHERE project_id = $1)",
            "INSERT INTO purge_events (log) SELECT log FROM event_logs
             WHERE session_id IN (SELECT session_id FROM sessions WHERE project_id = $1)",
            "DELETE FROM event_logs WHERE session_id IN (SELECT session_id FROM sessions WHERE project_id = $1)",
            "INSERT INTO purge_debug (project_id) SELECT project_id FROM projects WHERE project_id = $1",
            "DELETE FROM sessions WHERE project_id = $1",
            "DELETE FROM workspaces WHERE project_id = $1",
            "DELETE FROM projects WHERE project_id = $1",
        ];
        let mut deleted = 0;
        for step in STEPS {
            deleted = query(step).bind(id).execute(&mut tx.db).await?.rows_affected();
        }
        tx.deleted_sessions.append(&mut gone);
        (tx.touched.tokens, tx.touched.projects) = (true, true);
        tx.needs_purge |= deleted > 0;
        Ok(deleted > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_like_pattern_escapes_wildcards() {
        assert_eq!(like_pattern("a%B_c\\").unwrap(), "%a\\%b\\_c\\\\%");
        assert_eq!(like_pattern("ÄÖ").unwrap(), "%äö%");
        assert!(like_pattern(&"x".repeat(100_000)).is_err());
    }
}
