//! `workspace_*`: workspaces, the folders sessions work in.

use std::{borrow::Cow, sync::Arc};

use indexmap::IndexMap;
use oubliette_protocol::{Error, ProjectId, Result, Scope, WorkspaceId};
use oubliette_store::{PageRequest, SessionFilter, WorkspaceRow};
use oubliette_tools::without_url_credentials;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;
use tracing::Instrument as _;

use super::{
    ActionCall, ActionHandler, Effect, input,
    output::{WorkspacePage, WorkspaceView},
};
use crate::{
    app::App,
    workspace::{self, git},
};

/// The git repository a workspace's first files come from.
#[derive(Clone, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkspaceSource {
    /// Git URL to clone, at most 2000 characters: `https://`, `http://`, `ssh://` or `git://`, for example
    /// `https://github.com/owner/repo.git`. A path on the server's machine only beneath one of `[trust] read_only`.
    /// User name and password in it are used for this clone and not stored.
    pub git: String,
    /// Branch, tag or commit to check out, at most 250 bytes. Default: the repository's default branch.
    #[serde(default, rename = "ref", skip_serializing_if = "Option::is_none")]
    pub reference: Option<String>,
}

// The URL may hold credentials.
impl std::fmt::Debug for WorkspaceSource {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("WorkspaceSource")
            .field("git", &without_url_credentials(&self.git))
            .field("reference", &self.reference)
            .finish()
    }
}

/// `workspace_create`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkspaceCreate {
    /// Id of the project to create the workspace in (`proj_…`).
    pub project_id: ProjectId,
    /// Display name: one line of 1 to 200 characters. Default: "workspace".
    #[serde(default)]
    pub name: Option<String>,
    /// Environment variables of agents in this workspace, name to value, over the project's: at most 256; values of
    /// at most 65536 bytes. Answers show each value as `***`.
    #[serde(default)]
    pub env: Option<IndexMap<String, String>>,
    /// Git repository to clone into it. Default: the workspace is empty.
    #[serde(default)]
    pub source: Option<WorkspaceSource>,
}

/// `workspace_list`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkspaceList {
    /// Id of the project whose workspaces to list. Default: the only project your token can see; an error if there
    /// are several.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `workspace_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkspaceDelete {
    /// Id of the workspace to delete (a UUID). Not a project's default one, nor one an active session works in.
    pub workspace_id: WorkspaceId,
}

/// `workspace_diff`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkspaceDiff {
    /// Id of the workspace (a UUID).
    pub workspace_id: WorkspaceId,
}

impl ActionHandler for WorkspaceCreate {
    type Output = WorkspaceView;

    const NAME: &'static str = "workspace_create";
    const DESCRIPTION: &'static str = "Create a workspace in a project, empty or from a git repository.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Write;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.project_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let project = call.project(&self.project_id).await?;
        let app = call.app;
        let name = match &self.name {
            Some(name) => input::check_name("name", name)?,
            None => "workspace".into(),
        };
        let env = input::check_env(self.env.unwrap_or_default(), &IndexMap::new())?;
        let remote = match &self.source {
            Some(source) => Some(git::GitRemote::check(
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
            source: remote
                .as_ref()
                .map(|remote| json!({ "git": remote.url(), "ref": remote.reference() })),
            created_at: oubliette_store::now(),
        };
        // A task of its own: a call that is cancelled and dropped leaves no half of a clone on disk.
        let making = create_with_row(app.clone(), row.clone(), remote);
        tokio::spawn(making.in_current_span())
            .await
            .map_err(Error::internal)??;
        Ok(WorkspaceView::new(&row, &project.default_workspace))
    }
}

/// Creates a workspace's files and its row, or neither.
async fn create_with_row(app: Arc<App>, row: WorkspaceRow, remote: Option<git::GitRemote>) -> Result<()> {
    let (project, id) = (row.project_id.clone(), row.workspace_id.clone());
    let made = async {
        workspace::create(&app, &project, &id, remote.as_ref()).await?;
        app.store.workspace_insert(row).await
    }
    .await;
    if made.is_err() {
        workspace::remove(&app, &project, &id).await;
    }
    made
}

impl ActionHandler for WorkspaceList {
    type Output = WorkspacePage;

    const NAME: &'static str = "workspace_list";
    const DESCRIPTION: &'static str = "List the workspaces of a project.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let project = match &self.project_id {
            Some(id) => call.project(id).await?,
            None => call.only_project().await?,
        };
        let page = input::page_request(self.limit, self.cursor);
        let page = call.app.store.workspace_list(&project.project_id, page).await?;
        Ok(WorkspacePage::new(page, &project.default_workspace))
    }
}

/// Result of `workspace_delete`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WorkspaceDeleted {
    /// The workspace.
    workspace_id: WorkspaceId,
    /// True.
    deleted: bool,
}

impl ActionHandler for WorkspaceDelete {
    type Output = WorkspaceDeleted;

    const NAME: &'static str = "workspace_delete";
    const DESCRIPTION: &'static str =
        "Delete a workspace and its files. The default workspace of a project cannot be deleted.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.workspace_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let row = call.workspace(&self.workspace_id).await?;
        if deletable_workspace(call.app, &row.workspace_id).await?.is_some() {
            delete_workspace(call.app, &row).await?;
        }
        Ok(WorkspaceDeleted {
            workspace_id: row.workspace_id,
            deleted: true,
        })
    }
}

/// A workspace that may be deleted, none if it is gone already. `conflict` if it is its project's default one, or an
/// active session works in it.
pub(super) async fn deletable_workspace(app: &App, id: &WorkspaceId) -> Result<Option<WorkspaceRow>> {
    let Some(row) = app.store.workspace_get(id).await? else {
        return Ok(None);
    };
    let project = app.store.project_get(&row.project_id).await?;
    if project.is_some_and(|project| project.default_workspace == row.workspace_id) {
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
        let request = PageRequest {
            limit: Some(1000),
            cursor,
        };
        let page = app.store.session_list(filter.clone(), request).await?;
        if let Some(user) = page.items.iter().find(|s| s.workspace_id == row.workspace_id) {
            return Err(Error::conflict(format!(
                "session {} is working in this workspace; end it first with session_end",
                user.session_id
            )));
        }
        cursor = page.next_cursor;
        if cursor.is_none() {
            return Ok(Some(row));
        }
    }
}

/// Deletes a workspace's row and files.
pub(super) async fn delete_workspace(app: &App, row: &WorkspaceRow) -> Result<()> {
    app.store.workspace_delete(&row.workspace_id).await?;
    workspace::remove(app, &row.project_id, &row.workspace_id).await;
    Ok(())
}

/// Result of `workspace_diff`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WorkspaceChanges {
    /// The workspace.
    workspace_id: WorkspaceId,
    /// What changed since it was created, as a git diff; empty if nothing did.
    diff: String,
    /// Whether there is more than the 2 MiB shown.
    truncated: bool,
}

impl ActionHandler for WorkspaceDiff {
    type Output = WorkspaceChanges;

    const NAME: &'static str = "workspace_diff";
    const DESCRIPTION: &'static str = "Show, as a git diff, what changed in a workspace since it was created. At most 2 MiB; truncated says whether there is more.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let row = call.workspace(&self.workspace_id).await?;
        let diff = git::diff(call.app, &row.project_id, &row.workspace_id).await?;
        Ok(WorkspaceChanges {
            workspace_id: row.workspace_id,
            diff: diff.text,
            truncated: diff.truncated,
        })
    }
}
