//! Sessions: everything stored about each except its events.

use jiff::Timestamp;
use oubliette_protocol::{
    Error, ProjectId, Result, SessionId, Slug, TokenId, WorkspaceId, event::SessionStatus,
};

use super::row::{number, optional_parsed, optional_text, parsed, time};
use crate::{
    db::{DbRow, QueryBuilder, query},
    db_error::{WriteError, read_error},
    page::{ListPage, PageRequest, PagedList},
    store::Store,
    writer::{StoreWrite, WriteTx},
};

static LIST: PagedList<SessionRow, SessionId> = PagedList {
    name: "sessions",
    order: "session_id DESC",
    after: "session_id < ",
    key: |row| row.session_id.clone(),
    read: session_from_row,
};
/// Columns are named: one that a newer version adds while this one runs would change the type of a prepared statement's rows.
const SELECT_SESSIONS: &str = "SELECT session_id, project_id, workspace_id, agent, status, reason, parent_id, root_id, depth, turn, \
     created_at, updated_at, created_by, title, agent_session, isolation, images FROM sessions";
/// The condition of the partial index of active sessions. SQLite uses that index only if a query contains
/// exactly this expression.
const ACTIVE_CONDITION: &str = "status NOT IN ('ended', 'failed')";

/// The first half of the key of the lock under which a project's sessions are counted.
const PROJECT_LOCK_CLASS: i32 = 0x0b13;

/// A session.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SessionRow {
    /// Its id.
    pub session_id: SessionId,
    /// The project it belongs to.
    pub project_id: ProjectId,
    /// The workspace it works in.
    pub workspace_id: WorkspaceId,
    /// The agent it runs.
    pub agent: Slug,
    /// Its current status.
    pub status: SessionStatus,
    /// The reason for the status.
    pub reason: Option<String>,
    /// The session that started it, if one did.
    pub parent_id: Option<SessionId>,
    /// The topmost session of its tree; itself if no session started it.
    pub root_id: SessionId,
    /// Number of ancestors.
    pub depth: u32,
    /// The number of its last turn; 0 if there is none yet.
    pub turn: u64,
    /// When it was started.
    pub created_at: Timestamp,
    /// When it was last changed.
    pub updated_at: Timestamp,
    /// The token that started it; none: the home's owner.
    pub created_by: Option<TokenId>,
    /// Its display title.
    pub title: Option<String>,
    /// The agent's own session id (ACP).
    pub agent_session: Option<String>,
    /// The isolation level of its sandbox.
    pub isolation: Option<String>,
    /// The images of its sandboxes: a JSON object of names and the digests they stood for.
    pub images: Option<String>,
}

/// A partial update of a session; absent fields are left unchanged.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SessionPatch {
    /// New status.
    pub status: Option<SessionStatus>,
    /// New reason; `Some(None)` clears it.
    pub reason: Option<Option<String>>,
    /// New agent.
    pub agent: Option<Slug>,
    /// New workspace.
    pub workspace_id: Option<WorkspaceId>,
    /// New last turn.
    pub turn: Option<u64>,
    /// New title; `Some(None)` clears it.
    pub title: Option<Option<String>>,
    /// New ACP session id; `Some(None)` clears it.
    pub agent_session: Option<Option<String>>,
    /// New isolation level; `Some(None)` clears it.
    pub isolation: Option<Option<String>>,
    /// New images; `Some(None)` clears them.
    pub images: Option<Option<String>>,
    /// Removes the queued message of this turn, because it is now in the event log.
    pub dequeue_turn: Option<u64>,
}

/// Selects sessions to list.
#[derive(Debug, Clone, Default)]
pub struct SessionFilter {
    /// Only sessions of this project.
    pub project: Option<ProjectId>,
    /// Only sessions in this status.
    pub status: Option<SessionStatus>,
    /// Only sessions started by this session.
    pub parent: Option<SessionId>,
    /// Only sessions in a status other than `ended` and `failed`.
    pub active_only: bool,
}

impl Store {
    /// Stores a new session; `not_found` if its project does not exist.
    pub async fn session_insert(&self, session: SessionRow) -> Result<()> {
        self.write(InsertSession {
            row: session,
            max_active: None,
        })
        .await
    }

    /// Updates a session; `not_found` if there is none.
    pub async fn session_update(&self, id: &SessionId, patch: SessionPatch) -> Result<()> {
        self.write(UpdateSession(id.clone(), patch)).await
    }

    /// One session.
    pub async fn session_get(&self, id: &SessionId) -> Result<Option<SessionRow>> {
        let mut query = QueryBuilder::new(SELECT_SESSIONS);
        query.push(" WHERE session_id = ").push_bind(id.as_str());
        let row = query.build().fetch_optional(self.readers()).await;
        row.map_err(read_error)?
            .map(|row| session_from_row(&row))
            .transpose()
    }

    /// The project of a session; none if the session does not exist. Cached.
    pub async fn session_project(&self, id: &SessionId) -> Result<Option<ProjectId>> {
        let cache_version = match self.caches().sessions.get(id) {
            Ok(project) => return Ok(Some(project)),
            Err(cache_version) => cache_version,
        };
        let row = query("SELECT project_id FROM sessions WHERE session_id = $1")
            .bind(id.as_str())
            .fetch_optional(self.readers())
            .await;
        let Some(row) = row.map_err(read_error)? else {
            return Ok(None);
        };
        let project: ProjectId = parsed(&row, "project_id")?;
        self.caches()
            .sessions
            .insert(cache_version, id.clone(), project.clone());
        Ok(Some(project))
    }

    /// Sessions, newest first.
    pub async fn session_list(
        &self,
        filter: SessionFilter,
        page: PageRequest,
    ) -> Result<ListPage<SessionRow>> {
        let mut query = QueryBuilder::new(SELECT_SESSIONS);
        query.push(" WHERE 1 = 1");
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
            query.push(" AND ").push(ACTIVE_CONDITION);
        }
        self.fetch_page(query, &LIST, &page).await
    }

    /// The direct children of a session, oldest first.
    pub async fn session_children(&self, id: &SessionId) -> Result<Vec<SessionRow>> {
        let mut query = QueryBuilder::new(SELECT_SESSIONS);
        query.push(" WHERE parent_id = ");
        query.push_bind(id.as_str()).push(" ORDER BY session_id");
        self.fetch_sessions(query).await
    }

    /// A session and its ancestors, up to its root. Empty if there is no such session.
    pub async fn session_ancestry(&self, id: &SessionId) -> Result<Vec<SessionRow>> {
        let mut ancestry = Vec::new();
        let mut next = Some(id.clone());
        while let Some(id) = next {
            let Some(row) = self.session_get(&id).await? else {
                break;
            };
            next = row.parent_id.clone();
            ancestry.push(row);
        }
        Ok(ancestry)
    }

    /// A root session and all its descendants, oldest first.
    pub async fn session_tree(&self, root: &SessionId) -> Result<Vec<SessionRow>> {
        let mut query = QueryBuilder::new(SELECT_SESSIONS);
        query.push(" WHERE root_id = ");
        query.push_bind(root.as_str()).push(" ORDER BY session_id");
        self.fetch_sessions(query).await
    }

    /// Every active session. Right after the server has started, these are the ones its last run left unfinished.
    pub async fn sessions_interrupted(&self) -> Result<Vec<SessionRow>> {
        let mut query = QueryBuilder::new(SELECT_SESSIONS);
        query.push(" WHERE ");
        query.push(ACTIVE_CONDITION).push(" ORDER BY session_id");
        self.fetch_sessions(query).await
    }

    /// How many sessions are active: of a project, or of all.
    pub async fn session_count_active(&self, project: Option<&ProjectId>) -> Result<u64> {
        let mut query = QueryBuilder::new("SELECT COUNT(*) FROM sessions WHERE ");
        query.push(ACTIVE_CONDITION);
        if let Some(project) = project {
            query.push(" AND project_id = ").push_bind(project.as_str());
        }
        let count: i64 = query
            .build_query_scalar()
            .fetch_one(self.readers())
            .await
            .map_err(read_error)?;
        u64::try_from(count).map_err(Error::internal)
    }

    async fn fetch_sessions(&self, query: QueryBuilder<'_>) -> Result<Vec<SessionRow>> {
        let rows = query
            .build()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        rows.iter().map(session_from_row).collect()
    }
}

fn session_from_row(row: &DbRow) -> Result<SessionRow> {
    Ok(SessionRow {
        session_id: parsed(row, "session_id")?,
        project_id: parsed(row, "project_id")?,
        workspace_id: parsed(row, "workspace_id")?,
        agent: parsed(row, "agent")?,
        status: parsed(row, "status")?,
        reason: optional_text(row, "reason")?,
        parent_id: optional_parsed(row, "parent_id")?,
        root_id: parsed(row, "root_id")?,
        depth: number(row, "depth")?,
        turn: number(row, "turn")?,
        created_at: time(row, "created_at")?,
        updated_at: time(row, "updated_at")?,
        created_by: optional_parsed(row, "created_by")?,
        title: optional_text(row, "title")?,
        agent_session: optional_text(row, "agent_session")?,
        isolation: optional_text(row, "isolation")?,
        images: optional_text(row, "images")?,
    })
}

/// Stores a new session. In a cluster this server becomes the one that runs it.
pub(crate) struct InsertSession {
    pub(crate) row: SessionRow,
    /// Refused in a cluster if the project has so many active sessions already: other servers start sessions too.
    pub(crate) max_active: Option<u64>,
}

impl StoreWrite for InsertSession {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        let s = &self.row;
        if let (Some(_), Some(max)) = (&tx.member, self.max_active) {
            check_active_count(tx, &s.project_id, max).await?;
        }
        query(
            "INSERT INTO sessions (session_id, project_id, workspace_id, agent, status, reason, parent_id,
                                   root_id, depth, turn, created_at, updated_at, created_by, title,
                                   agent_session, isolation, images)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17)",
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
        .bind(s.images.as_deref())
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}

/// Refuses a new session of a project that has as many as it may have. The project stays locked until the transaction ends.
async fn check_active_count(tx: &mut WriteTx, project: &ProjectId, max: u64) -> Result<(), WriteError> {
    query("SELECT pg_advisory_xact_lock($1::int, hashtext($2))")
        .bind(i64::from(PROJECT_LOCK_CLASS))
        .bind(project.as_str())
        .execute(&mut tx.db)
        .await?;
    let mut query = QueryBuilder::new("SELECT COUNT(*) FROM sessions WHERE project_id = ");
    query
        .push_bind(project.as_str())
        .push(" AND ")
        .push(ACTIVE_CONDITION);
    let row = query.build().fetch_one(&mut tx.db).await?;
    match row.try_get::<i64>(0)?.unsigned_abs() < max {
        true => Ok(()),
        false => Err(session_limit_error(max).into()),
    }
}

/// The error of a project that has as many active sessions as it may have.
pub fn session_limit_error(max: u64) -> Error {
    Error::limit_exceeded(format!(
        "the project has {max} active sessions, its most; end one first"
    ))
}

struct UpdateSession(SessionId, SessionPatch);

impl StoreWrite for UpdateSession {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        self.1.apply(&self.0, tx).await
    }
}

impl SessionPatch {
    /// A patch that sets the status and its reason.
    pub fn status(status: SessionStatus, reason: Option<String>) -> Self {
        Self {
            status: Some(status),
            reason: Some(reason),
            ..Self::default()
        }
    }

    /// Applies the patch; `not_found` if there is no such session.
    pub(crate) async fn apply(&self, id: &SessionId, tx: &mut WriteTx) -> Result<(), WriteError> {
        let mut query = QueryBuilder::new("UPDATE sessions SET updated_at = ");
        query.push_bind(tx.now_millis());
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
            (", images = ", &self.images),
        ] {
            if let Some(value) = value {
                query.push(column).push_bind(value.as_deref());
            }
        }
        query.push(" WHERE session_id = ").push_bind(id.as_str());
        if let Some(turn) = self.dequeue_turn {
            super::queue::remove_queued(id, turn, tx).await?;
        }
        match query.build().execute(&mut tx.db).await?.rows_affected() {
            0 => Err(Error::not_found(format!("there is no session {id}")).into()),
            _ => Ok(()),
        }
    }
}
