//! Workspaces: the folders sessions work in.

use std::borrow::Cow;

use indexmap::IndexMap;
use oubliette_protocol::{Error, ProjectId, Result, Scope, WorkspaceId};
use oubliette_store::{Page, SessionFilter, WorkspaceRow};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Call, Effect, Tool, fields, shape};
use crate::workspace::{self, git};

/// Where a workspace's first files come from.
#[derive(Debug, Clone, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Source {
    /// A git URL: https, http, ssh or git.
    pub git: String,
    /// A branch, tag or commit; the repository's default when absent.
    #[serde(default, rename = "ref", skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
}

/// `workspace_create`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkspaceCreate {
    /// In which project.
    pub project_id: ProjectId,
    /// What people call it.
    #[serde(default)]
    pub name: Option<String>,
    /// Environment on top of the project's. Values are never shown again.
    #[serde(default)]
    pub env: Option<IndexMap<String, String>>,
    /// Its first files.
    #[serde(default)]
    pub source: Option<Source>,
}

/// `workspace_list`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkspaceList {
    /// Of which project; the only visible one when absent.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// At most so many (1 to 1000, default 100).
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the list before.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `workspace_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkspaceDelete {
    /// Which.
    pub workspace_id: WorkspaceId,
}

/// `workspace_diff`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct WorkspaceDiff {
    /// Which.
    pub workspace_id: WorkspaceId,
}

impl Tool for WorkspaceCreate {
    const NAME: &'static str = "workspace_create";
    const DESCRIPTION: &'static str = "Create a workspace in a project, empty or from a git repository.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Write;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.project_id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let project = call.project(&self.project_id).await?;
        let app = call.app;
        let name = match &self.name {
            Some(name) => fields::name("name", name)?,
            None => "workspace".into(),
        };
        let env = fields::env(self.env.unwrap_or_default(), &IndexMap::new())?;
        let origin = match &self.source {
            Some(source) => Some(git::Origin::check(
                &source.git,
                source.reference.as_deref(),
                &app.config.trust,
            )?),
            None => None,
        };
        let row = WorkspaceRow {
            workspace_id: WorkspaceId::generate(),
            project_id: project.project_id.clone(),
            name,
            env,
            source: self
                .source
                .as_ref()
                .map(|s| json!({ "git": git::without_password(&s.git), "ref": s.reference })),
            created_at: oubliette_store::now(),
        };
        let made = async {
            workspace::create(app, &row.project_id, &row.workspace_id, origin.as_ref()).await?;
            app.store.workspace_insert(row.clone()).await
        }
        .await;
        if let Err(error) = made {
            workspace::remove(app, &row.project_id, &row.workspace_id).await;
            return Err(error);
        }
        Ok(shape::workspace(&row, &project.default_workspace))
    }
}

impl Tool for WorkspaceList {
    const NAME: &'static str = "workspace_list";
    const DESCRIPTION: &'static str = "List the workspaces of a project.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let project = match &self.project_id {
            Some(id) => call.project(id).await?,
            None => call.only_project().await?,
        };
        let page = fields::page(self.limit, self.cursor);
        let page = call.app.store.workspace_list(&project.project_id, page).await?;
        Ok(shape::list("workspaces", &page, |row| {
            shape::workspace(row, &project.default_workspace)
        }))
    }
}

impl Tool for WorkspaceDelete {
    const NAME: &'static str = "workspace_delete";
    const DESCRIPTION: &'static str =
        "Delete a workspace and its files. The default workspace of a project cannot be deleted.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.workspace_id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let row = call.workspace(&self.workspace_id).await?;
        let app = call.app;
        let project = call.project(&row.project_id).await?;
        if project.default_workspace == row.workspace_id {
            return Err(Error::conflict(
                "this is its project's default workspace, which stays as long as the project does",
            ));
        }
        let filter = SessionFilter {
            project: Some(row.project_id.clone()),
            active_only: true,
            ..SessionFilter::default()
        };
        let mut cursor = None;
        loop {
            let page = app
                .store
                .session_list(
                    filter.clone(),
                    Page {
                        limit: Some(1000),
                        cursor,
                    },
                )
                .await?;
            if let Some(user) = page.items.iter().find(|s| s.workspace_id == row.workspace_id) {
                return Err(Error::conflict(format!(
                    "session {} is working in this workspace; end it first with session_end",
                    user.session_id
                )));
            }
            cursor = page.next_cursor;
            if cursor.is_none() {
                break;
            }
        }
        app.store.workspace_delete(&row.workspace_id).await?;
        workspace::remove(app, &row.project_id, &row.workspace_id).await;
        Ok(json!({ "workspace_id": row.workspace_id, "deleted": true }))
    }
}

impl Tool for WorkspaceDiff {
    const NAME: &'static str = "workspace_diff";
    const DESCRIPTION: &'static str = "A git diff of what changed in a workspace since it was created.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let row = call.workspace(&self.workspace_id).await?;
        let diff = git::diff(call.app, &row.project_id, &row.workspace_id).await?;
        Ok(json!({ "workspace_id": row.workspace_id, "diff": diff.text, "truncated": diff.truncated }))
    }
}
