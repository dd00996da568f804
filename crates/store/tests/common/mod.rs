//! Shared by the tests: a store in a temporary directory, and rows to insert.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used, clippy::disallowed_types)]

pub mod postgres;

use std::path::PathBuf;

use oubliette_protocol::{
    ProjectId, SessionId, WorkspaceId,
    event::{EventBody, SessionEvent, SessionStatus},
};
use oubliette_store::{ProjectRow, SessionRow, Store, StoreLocation, StoreOptions, WorkspaceRow, now};
use sqlx::{ConnectOptions, sqlite::SqliteConnectOptions};

/// A store: SQLite, or PostgreSQL if `OUBLIETTE_TEST_STORE=postgres`.
pub struct StoreFixture {
    pub dir: tempfile::TempDir,
    /// Its schema, on PostgreSQL.
    pub schema: Option<String>,
    pub store: Store,
}

impl StoreFixture {
    pub async fn new() -> Self {
        let schema = match postgres::is_selected() {
            true => Some(postgres::new_schema().await),
            false => None,
        };
        let dir = tempfile::tempdir().unwrap();
        let store = open(&location(&dir, schema.as_deref())).await;
        Self { dir, schema, store }
    }

    /// Of a test that is about SQLite's file; none if the tests run on PostgreSQL.
    pub async fn of_file() -> Option<Self> {
        match postgres::is_selected() {
            true => None,
            false => Some(Self::new().await),
        }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("oubliette.db")
    }

    pub fn location(&self) -> StoreLocation {
        location(&self.dir, self.schema.as_deref())
    }

    /// The number that a query of the test's own returns.
    pub async fn count(&self, sql: &'static str) -> i64 {
        match &self.schema {
            Some(schema) => {
                let mut db = postgres::connect(schema).await;
                sqlx::query_scalar(sql).fetch_one(&mut db).await.unwrap()
            }
            None => {
                let mut db = self.connect_to_file().await;
                sqlx::query_scalar(sql).fetch_one(&mut db).await.unwrap()
            }
        }
    }

    /// The error of a statement of the test's own.
    pub async fn error_of(&self, sql: &'static str) -> sqlx::Error {
        match &self.schema {
            Some(schema) => {
                let mut db = postgres::connect(schema).await;
                sqlx::query(sql).execute(&mut db).await.unwrap_err()
            }
            None => {
                let mut db = self.connect_to_file().await;
                sqlx::query(sql).execute(&mut db).await.unwrap_err()
            }
        }
    }

    async fn connect_to_file(&self) -> sqlx::SqliteConnection {
        let options = SqliteConnectOptions::new().filename(self.path());
        options.connect().await.unwrap()
    }

    /// Closes the store and opens it again.
    pub async fn reopen(&mut self) {
        self.store.close().await;
        self.store = open(&self.location()).await;
    }

    pub async fn project(&self, name: &str) -> ProjectRow {
        let (project, workspace) = project(name);
        self.store
            .project_create(project.clone(), workspace)
            .await
            .unwrap();
        project
    }

    pub async fn session(&self, project: &ProjectRow) -> SessionRow {
        let row = session(project);
        self.store.session_insert(row.clone()).await.unwrap();
        row
    }
}

fn location(dir: &tempfile::TempDir, schema: Option<&str>) -> StoreLocation {
    match schema {
        Some(schema) => StoreLocation::Postgres(postgres::url(schema)),
        None => StoreLocation::File(dir.path().join("oubliette.db")),
    }
}

/// Opens a store that is to open.
pub async fn open(location: &StoreLocation) -> Store {
    Store::open_at(location, &StoreOptions::default()).await.unwrap()
}

pub fn project(name: &str) -> (ProjectRow, WorkspaceRow) {
    let project_id = ProjectId::generate();
    let workspace_id = WorkspaceId::generate();
    let project = ProjectRow {
        project_id: project_id.clone(),
        name: name.into(),
        description: String::new(),
        agent: Some("writer".parse().unwrap()),
        env: [("A".to_string(), "1".to_string())].into_iter().collect(),
        api_key_scope: Some(oubliette_protocol::Scope::Write),
        sandbox: serde_json::json!({ "network": "none" }),
        limits: serde_json::json!({}),
        default_workspace: workspace_id.clone(),
        workspaces: oubliette_protocol::WorkspacePolicy::Shared,
        created_at: now(),
        updated_at: now(),
    };
    let workspace = WorkspaceRow {
        workspace_id,
        project_id,
        name: "default".into(),
        env: Default::default(),
        source: None,
        created_at: now(),
    };
    (project, workspace)
}

pub fn session(project: &ProjectRow) -> SessionRow {
    let session_id = SessionId::generate();
    SessionRow {
        session_id: session_id.clone(),
        project_id: project.project_id.clone(),
        workspace_id: project.default_workspace.clone(),
        agent: "writer".parse().unwrap(),
        status: SessionStatus::Starting,
        reason: None,
        parent_id: None,
        root_id: session_id,
        depth: 0,
        turn: 0,
        created_at: now(),
        updated_at: now(),
        created_by: None,
        title: None,
        agent_session: None,
        isolation: None,
        images: None,
    }
}

pub fn delta(text: impl Into<String>) -> EventBody {
    EventBody::Delta { text: text.into() }
}

pub fn text_of(event: &SessionEvent) -> &str {
    match &event.body {
        EventBody::Delta { text } => text,
        other => panic!("not a delta: {other:?}"),
    }
}
