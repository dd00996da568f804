//! Projects.

use std::sync::Arc;

use indexmap::IndexMap;
use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, Scope, Slug, WorkspaceId};
use serde_json::Value;
use sqlx::{QueryBuilder, Row, Sqlite, sqlite::SqliteRow};

use super::{
    row::{json, maybe, parsed, text, time, to_json},
    workspaces::{self, WorkspaceRow},
};
use crate::{
    fault::{Fault, read_error},
    page::{Page, Paged},
    store::Store,
    writer::{Survives, Tx, Write},
};

const LIST: &str = "projects";
/// The longest `name_contains`; databases limit patterns too, and less kindly.
const MAX_NEEDLE: usize = 1000;
/// The largest page that is remembered, in bytes of text.
const REMEMBERED_BYTES: usize = 64 * 1024;

/// A project.
#[derive(Debug, Clone, PartialEq)]
pub struct ProjectRow {
    /// Its id.
    pub project_id: ProjectId,
    /// What people call it.
    pub name: String,
    /// What it is for.
    pub description: String,
    /// The agent its sessions run when nobody says which.
    pub agent: Option<Slug>,
    /// The environment of its sessions.
    pub env: IndexMap<String, String>,
    /// How far the API key of its sessions reaches; none: they have no key.
    pub api_key_scope: Option<Scope>,
    /// Its sandboxes, as JSON.
    pub sandbox: Value,
    /// Its limits, as JSON.
    pub limits: Value,
    /// The workspace of sessions that name none.
    pub default_workspace: WorkspaceId,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
}

/// Which projects to list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct ProjectFilter {
    /// This one alone.
    pub only: Option<ProjectId>,
    /// Those with this in their name, in any case.
    pub name_contains: Option<String>,
}

impl Store {
    /// Keeps a new project.
    pub async fn project_insert(&self, project: ProjectRow) -> Result<()> {
        self.write(Insert {
            project,
            workspace: None,
        })
        .await
    }

    /// Keeps a new project with its first workspace, both or neither.
    pub async fn project_create(&self, project: ProjectRow, workspace: WorkspaceRow) -> Result<()> {
        self.write(Insert {
            project,
            workspace: Some(workspace),
        })
        .await
    }

    /// Replaces all of a project but its id and when it was made.
    pub async fn project_update(&self, project: ProjectRow) -> Result<()> {
        self.write(Update(project)).await
    }

    /// One project.
    pub async fn project_get(&self, id: &ProjectId) -> Result<Option<ProjectRow>> {
        let row = sqlx::query("SELECT * FROM projects WHERE project_id = $1")
            .bind(id.as_str())
            .fetch_optional(self.readers())
            .await;
        row.map_err(read_error)?.map(|row| project(&row)).transpose()
    }

    /// Projects, newest first.
    pub async fn project_list(&self, filter: ProjectFilter, page: Page) -> Result<Paged<ProjectRow>> {
        let asked = (filter, page);
        let moment = match self.remembered().projects.get(&asked) {
            Ok(page) => return Ok(Paged::clone(&page)),
            Err(moment) => moment,
        };
        let found = self.project_page(&asked.0, &asked.1).await?;
        if found.items.iter().map(weight).sum::<usize>() <= REMEMBERED_BYTES {
            let kept = Arc::new(found.clone());
            self.remembered().projects.keep(moment, asked, kept);
        }
        Ok(found)
    }

    async fn project_page(&self, filter: &ProjectFilter, page: &Page) -> Result<Paged<ProjectRow>> {
        let (limit, after) = (page.rows()?, page.after::<ProjectId>(LIST)?);
        let mut query = QueryBuilder::<Sqlite>::new("SELECT * FROM projects WHERE 1 = 1");
        if let Some(only) = &filter.only {
            query.push(" AND project_id = ").push_bind(only.as_str());
        }
        if let Some(needle) = &filter.name_contains {
            query
                .push(" AND name_folded LIKE ")
                .push_bind(pattern(needle)?)
                .push(" ESCAPE '\\'");
        }
        if let Some(after) = after {
            query.push(" AND project_id < ").push_bind(after.as_str());
        }
        query
            .push(" ORDER BY project_id DESC LIMIT ")
            .push_bind(limit as i64 + 1);
        let rows = query
            .build()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        let projects = rows.iter().map(project).collect::<Result<Vec<_>>>()?;
        Ok(Paged::cut(projects, limit, LIST, |row| {
            row.project_id.to_string()
        }))
    }

    /// Deletes a project with its workspaces, sessions, their events and memory, and revokes its tokens.
    /// `conflict` while a session of it is active. False: there is none.
    pub async fn project_delete(&self, id: &ProjectId) -> Result<bool> {
        self.write(Delete(id.clone())).await
    }
}

/// About how many bytes a row takes.
fn weight(row: &ProjectRow) -> usize {
    let env: usize = row.env.iter().map(|(name, value)| name.len() + value.len()).sum();
    std::mem::size_of::<ProjectRow>() + row.name.len() + row.description.len() + env
}

/// A pattern that finds a text anywhere, in any case, and takes nothing in it as a wildcard.
fn pattern(needle: &str) -> Result<String> {
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

fn project(row: &SqliteRow) -> Result<ProjectRow> {
    Ok(ProjectRow {
        project_id: parsed(row, "project_id")?,
        name: text(row, "name")?,
        description: text(row, "description")?,
        agent: maybe(row, "agent")?,
        env: json(row, "env")?,
        api_key_scope: maybe(row, "api_key_scope")?,
        sandbox: json(row, "sandbox")?,
        limits: json(row, "limits")?,
        default_workspace: parsed(row, "default_workspace")?,
        created_at: time(row, "created_at")?,
        updated_at: time(row, "updated_at")?,
    })
}

struct Insert {
    project: ProjectRow,
    workspace: Option<WorkspaceRow>,
}

impl Write for Insert {
    type Out = ();

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        let p = &self.project;
        sqlx::query(
            "INSERT INTO projects (project_id, name, name_folded, description, agent, env, api_key_scope,
                                   sandbox, limits, default_workspace, created_at, updated_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12)",
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
        .execute(&mut tx.db)
        .await?;
        tx.touched.projects = true;
        match &self.workspace {
            Some(workspace) => workspaces::insert(tx, workspace).await,
            None => Ok(()),
        }
    }
}

struct Update(ProjectRow);

impl Write for Update {
    type Out = ();

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        let p = &self.0;
        let done = sqlx::query(
            "UPDATE projects SET name = $2, name_folded = $3, description = $4, agent = $5, env = $6,
                    api_key_scope = $7, sandbox = $8, limits = $9, default_workspace = $10, updated_at = $11
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
        .execute(&mut tx.db)
        .await?;
        tx.touched.projects = true;
        match done.rows_affected() {
            0 => Err(Error::not_found(format!("there is no project {}", p.project_id)).into()),
            _ => Ok(()),
        }
    }
}

struct Delete(ProjectId);

impl Write for Delete {
    type Out = bool;
    // Tokens go with it.
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut Tx) -> Result<bool, Fault> {
        let id = self.0.as_str();
        let sessions = sqlx::query("SELECT session_id, status FROM sessions WHERE project_id = $1")
            .bind(id)
            .fetch_all(&mut tx.db)
            .await?;
        let mut gone = Vec::with_capacity(sessions.len());
        for row in &sessions {
            let status: oubliette_protocol::event::Status = row.try_get::<&str, _>("status")?.parse()?;
            let session: oubliette_protocol::SessionId = row.try_get::<&str, _>("session_id")?.parse()?;
            if status.is_active() {
                let why = format!("session {session} of project {id} is {status}: end it first");
                return Err(Error::conflict(why).into());
            }
            gone.push(session);
        }
        let now = tx.millis();
        sqlx::query("UPDATE tokens SET revoked_at = $2 WHERE project_id = $1 AND revoked_at IS NULL")
            .bind(id)
            .bind(now)
            .execute(&mut tx.db)
            .await?;
        // What is large is only marked here: it is taken away piece by piece afterwards.
        const STEPS: [&str; 9] = [
            "DELETE FROM tokens WHERE session_id IN (SELECT session_id FROM sessions WHERE project_id = $1)",
            "DELETE FROM queue WHERE session_id IN (SELECT session_id FROM sessions WHERE project_id = $1)",
            "DELETE FROM memory WHERE session_id IN (SELECT session_id FROM sessions WHERE project_id = $1)",
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
            deleted = sqlx::query(step)
                .bind(id)
                .execute(&mut tx.db)
                .await?
                .rows_affected();
        }
        tx.gone.append(&mut gone);
        (tx.touched.tokens, tx.touched.projects) = (true, true);
        tx.purge |= deleted > 0;
        Ok(deleted > 0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_pattern_takes_wildcards_as_letters() {
        assert_eq!(pattern("a%B_c\\").unwrap(), "%a\\%b\\_c\\\\%");
        assert_eq!(pattern("ÄÖ").unwrap(), "%äö%");
        assert!(pattern(&"x".repeat(100_000)).is_err());
    }
}
