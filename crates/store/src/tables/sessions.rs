//! Sessions: what is known of each besides its events.

use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, SessionId, Slug, TokenId, WorkspaceId, event::Status};
use sqlx::{QueryBuilder, Sqlite, sqlite::SqliteRow};

use super::row::{maybe, maybe_text, number, parsed, time};
use crate::{
    fault::{Fault, read_error},
    page::{Page, Paged},
    store::Store,
    writer::{Tx, Write},
};

const LIST: &str = "sessions";
/// As the index of active sessions says it, word for word: only then is it used.
const ACTIVE: &str = "status NOT IN ('ended', 'failed')";

/// A session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRow {
    /// Its id.
    pub session_id: SessionId,
    /// Whose it is.
    pub project_id: ProjectId,
    /// What it works on.
    pub workspace_id: WorkspaceId,
    /// What works.
    pub agent: Slug,
    /// How it is.
    pub status: Status,
    /// Why it is so.
    pub reason: Option<String>,
    /// The session that started it.
    pub parent_id: Option<SessionId>,
    /// The session that started all of its tree; itself if none did.
    pub root_id: SessionId,
    /// How many parents are above it.
    pub depth: u32,
    /// Its last turn; 0: none yet.
    pub turn: u64,
    /// When it was started.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
    /// The token that started it; none: the home's owner.
    pub created_by: Option<TokenId>,
    /// What people call it.
    pub title: Option<String>,
    /// The agent's own id for it (ACP).
    pub agent_session: Option<String>,
    /// The isolation it reached.
    pub isolation: Option<String>,
}

/// A change of a session; what is absent stays.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionPatch {
    /// How it is now.
    pub status: Option<Status>,
    /// Why; `Some(None)`: for no reason.
    pub reason: Option<Option<String>>,
    /// Another agent.
    pub agent: Option<Slug>,
    /// Another workspace.
    pub workspace_id: Option<WorkspaceId>,
    /// A later turn.
    pub turn: Option<u64>,
    /// Another name.
    pub title: Option<Option<String>>,
    /// Another id of the agent's.
    pub agent_session: Option<Option<String>>,
    /// The isolation it reached.
    pub isolation: Option<Option<String>>,
    /// The message of this turn is in the log now, and waits no more.
    pub begun: Option<u64>,
}

/// Which sessions to list.
#[derive(Debug, Clone, Default)]
pub struct SessionFilter {
    /// Of this project.
    pub project: Option<ProjectId>,
    /// In this status.
    pub status: Option<Status>,
    /// Started by this session.
    pub parent: Option<SessionId>,
    /// In any status but `ended` and `failed`.
    pub active_only: bool,
}

impl Store {
    /// Keeps a new session; `not_found` if its project is not there.
    pub async fn session_insert(&self, session: SessionRow) -> Result<()> {
        self.write(Insert(session)).await
    }

    /// Changes a session; `not_found` if there is none.
    pub async fn session_update(&self, id: &SessionId, patch: SessionPatch) -> Result<()> {
        self.write(Update(id.clone(), patch)).await
    }

    /// One session.
    pub async fn session_get(&self, id: &SessionId) -> Result<Option<SessionRow>> {
        let row = sqlx::query("SELECT * FROM sessions WHERE session_id = $1")
            .bind(id.as_str())
            .fetch_optional(self.readers())
            .await;
        row.map_err(read_error)?.map(|row| session(&row)).transpose()
    }

    /// The project of a session, if there is such a session.
    pub async fn session_project(&self, id: &SessionId) -> Result<Option<ProjectId>> {
        let moment = match self.remembered().sessions.get(id) {
            Ok(project) => return Ok(Some(project)),
            Err(moment) => moment,
        };
        let row = sqlx::query("SELECT project_id FROM sessions WHERE session_id = $1")
            .bind(id.as_str())
            .fetch_optional(self.readers())
            .await;
        let Some(row) = row.map_err(read_error)? else {
            return Ok(None);
        };
        let project: ProjectId = parsed(&row, "project_id")?;
        self.remembered()
            .sessions
            .keep(moment, id.clone(), project.clone());
        Ok(Some(project))
    }

    /// Sessions, newest first.
    pub async fn session_list(&self, filter: SessionFilter, page: Page) -> Result<Paged<SessionRow>> {
        let (limit, after) = (page.rows()?, page.after::<SessionId>(LIST)?);
        let mut query = QueryBuilder::<Sqlite>::new("SELECT * FROM sessions WHERE 1 = 1");
        if let Some(project) = &filter.project {
            query.push(" AND project_id = ").push_bind(project.as_str());
        }
        if let Some(status) = filter.status {
            query.push(" AND status = ").push_bind(status.as_str());
        }
        if let Some(parent) = &filter.parent {
            query.push(" AND parent_id = ").push_bind(parent.as_str());
        }
        if filter.active_only {
            query.push(" AND ").push(ACTIVE);
        }
        if let Some(after) = after {
            query.push(" AND session_id < ").push_bind(after.as_str());
        }
        query
            .push(" ORDER BY session_id DESC LIMIT ")
            .push_bind(limit as i64 + 1);
        let sessions = self.sessions(query).await?;
        Ok(Paged::cut(sessions, limit, LIST, |row| {
            row.session_id.to_string()
        }))
    }

    /// The sessions a session started itself, oldest first.
    pub async fn session_children(&self, id: &SessionId) -> Result<Vec<SessionRow>> {
        let mut query = QueryBuilder::<Sqlite>::new("SELECT * FROM sessions WHERE parent_id = ");
        query.push_bind(id.as_str()).push(" ORDER BY session_id");
        self.sessions(query).await
    }

    /// A root session and everything started below it, oldest first.
    pub async fn session_tree(&self, root: &SessionId) -> Result<Vec<SessionRow>> {
        let mut query = QueryBuilder::<Sqlite>::new("SELECT * FROM sessions WHERE root_id = ");
        query.push_bind(root.as_str()).push(" ORDER BY session_id");
        self.sessions(query).await
    }

    /// Every active session. When the server has just started, these are the ones that were cut short.
    pub async fn sessions_interrupted(&self) -> Result<Vec<SessionRow>> {
        let mut query = QueryBuilder::<Sqlite>::new("SELECT * FROM sessions WHERE ");
        query.push(ACTIVE).push(" ORDER BY session_id");
        self.sessions(query).await
    }

    /// How many sessions of a project are active.
    pub async fn session_count_active(&self, project: &ProjectId) -> Result<u64> {
        let mut query = QueryBuilder::<Sqlite>::new("SELECT COUNT(*) FROM sessions WHERE project_id = ");
        query.push_bind(project.as_str()).push(" AND ").push(ACTIVE);
        let count: i64 = query
            .build_query_scalar()
            .fetch_one(self.readers())
            .await
            .map_err(read_error)?;
        u64::try_from(count).map_err(Error::internal)
    }

    async fn sessions(&self, mut query: QueryBuilder<Sqlite>) -> Result<Vec<SessionRow>> {
        let rows = query
            .build()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        rows.iter().map(session).collect()
    }
}

fn session(row: &SqliteRow) -> Result<SessionRow> {
    Ok(SessionRow {
        session_id: parsed(row, "session_id")?,
        project_id: parsed(row, "project_id")?,
        workspace_id: parsed(row, "workspace_id")?,
        agent: parsed(row, "agent")?,
        status: parsed(row, "status")?,
        reason: maybe_text(row, "reason")?,
        parent_id: maybe(row, "parent_id")?,
        root_id: parsed(row, "root_id")?,
        depth: number(row, "depth")?,
        turn: number(row, "turn")?,
        created_at: time(row, "created_at")?,
        updated_at: time(row, "updated_at")?,
        created_by: maybe(row, "created_by")?,
        title: maybe_text(row, "title")?,
        agent_session: maybe_text(row, "agent_session")?,
        isolation: maybe_text(row, "isolation")?,
    })
}

struct Insert(SessionRow);

impl Write for Insert {
    type Out = ();

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        let s = &self.0;
        sqlx::query(
            "INSERT INTO sessions (session_id, project_id, workspace_id, agent, status, reason, parent_id,
                                   root_id, depth, turn, created_at, updated_at, created_by, title,
                                   agent_session, isolation)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16)",
        )
        .bind(s.session_id.as_str())
        .bind(s.project_id.as_str())
        .bind(s.workspace_id.as_str())
        .bind(s.agent.as_str())
        .bind(s.status.as_str())
        .bind(s.reason.as_deref())
        .bind(s.parent_id.as_ref().map(SessionId::as_str))
        .bind(s.root_id.as_str())
        .bind(i64::from(s.depth))
        .bind(i64::try_from(s.turn).map_err(Error::internal)?)
        .bind(s.created_at.as_millisecond())
        .bind(s.updated_at.as_millisecond())
        .bind(s.created_by.as_ref().map(TokenId::as_str))
        .bind(s.title.as_deref())
        .bind(s.agent_session.as_deref())
        .bind(s.isolation.as_deref())
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}

struct Update(SessionId, SessionPatch);

impl Write for Update {
    type Out = ();

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        self.1.apply(&self.0, tx).await
    }
}

impl SessionPatch {
    /// A change of status with its reason.
    pub fn status(status: Status, reason: Option<String>) -> Self {
        Self {
            status: Some(status),
            reason: Some(reason),
            ..Self::default()
        }
    }

    pub(crate) async fn apply(&self, id: &SessionId, tx: &mut Tx) -> Result<(), Fault> {
        let mut query = QueryBuilder::<Sqlite>::new("UPDATE sessions SET updated_at = ");
        query.push_bind(tx.millis());
        if let Some(status) = self.status {
            query.push(", status = ").push_bind(status.as_str());
        }
        if let Some(agent) = &self.agent {
            query.push(", agent = ").push_bind(agent.as_str());
        }
        if let Some(workspace) = &self.workspace_id {
            query.push(", workspace_id = ").push_bind(workspace.as_str());
        }
        if let Some(turn) = self.turn {
            query
                .push(", turn = ")
                .push_bind(i64::try_from(turn).map_err(Error::internal)?);
        }
        for (column, value) in [
            (", reason = ", &self.reason),
            (", title = ", &self.title),
            (", agent_session = ", &self.agent_session),
            (", isolation = ", &self.isolation),
        ] {
            if let Some(value) = value {
                query.push(column).push_bind(value.as_deref());
            }
        }
        query.push(" WHERE session_id = ").push_bind(id.as_str());
        if let Some(turn) = self.begun {
            super::queue::begun(id, turn, tx).await?;
        }
        match query.build().execute(&mut tx.db).await?.rows_affected() {
            0 => Err(Error::not_found(format!("there is no session {id}")).into()),
            _ => Ok(()),
        }
    }
}
