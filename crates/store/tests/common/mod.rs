//! Shared by the tests: a store in a temporary directory, and rows to insert.
#![allow(dead_code, unreachable_pub, clippy::unwrap_used)]

use std::path::PathBuf;

use oubliette_protocol::{
    ProjectId, SessionId, WorkspaceId,
    event::{EventBody, SessionEvent, SessionStatus},
};
use oubliette_store::{ProjectRow, SessionRow, Store, WorkspaceRow, now};

pub struct StoreFixture {
    pub dir: tempfile::TempDir,
    pub store: Store,
}

impl StoreFixture {
    pub async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("oubliette.db")).await.unwrap();
        Self { dir, store }
    }

    pub fn path(&self) -> PathBuf {
        self.dir.path().join("oubliette.db")
    }

    /// Closes the store and opens it again.
    pub async fn reopen(&mut self) {
        self.store.close().await;
        self.store = Store::open(&self.path()).await.unwrap();
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
