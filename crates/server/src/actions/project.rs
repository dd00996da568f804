//! `project_*`: projects, which sessions and workspaces belong to.

use std::borrow::Cow;

use indexmap::IndexMap;
use oubliette_protocol::{Error, ProjectId, Result, Scope, Slug, WorkspaceId, WorkspacePolicy};
use oubliette_store::{PageRequest, ProjectFilter, ProjectRow, TokenFilter, WorkspaceRow};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    ActionCall, ActionHandler, Effect, StateOwner, input,
    output::{self, ProjectPage, ProjectView},
    project_settings::{ProjectLimits, ProjectSandbox, SessionKeySettings},
};
use crate::{app::App, workspace};

/// `project_create`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectCreate {
    /// Display name: one line of 1 to 200 characters. Need not be unique.
    pub name: String,
    /// What the project is for, at most 10000 characters. Default: empty.
    #[serde(default)]
    pub description: Option<String>,
    /// Slug of an existing agent, which new sessions run when session_message names none, for example "assistant".
    /// Default: none; session_message must then name one.
    #[serde(default)]
    pub agent: Option<Slug>,
    /// Environment variables of the project's agents, name to value: at most 256; names of letters, digits and _;
    /// values of at most 65536 bytes. Answers show each value as `***`.
    #[serde(default)]
    pub env: Option<IndexMap<String, String>>,
    /// Create an API key for each session, which its agent gets as OUBLIETTE_API_KEY and which ends with the
    /// session. Default: no key is created.
    #[serde(default)]
    pub api_key: Option<SessionKeySettings>,
    /// Sandbox settings. Absent fields: the server's defaults.
    #[serde(default)]
    pub sandbox: Option<ProjectSandbox>,
    /// Limits on sessions. Absent fields: the server's defaults.
    #[serde(default)]
    pub limits: Option<ProjectLimits>,
    /// Where sessions work that name no workspace: "shared", all in the project's default one, or "own", each in a new one.
    /// A session started by another of the project works where that one does. Default: "shared".
    #[serde(default)]
    pub workspaces: Option<WorkspacePolicy>,
}

/// `project_update`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectUpdate {
    /// Id of the project to change (`proj_…`).
    pub project_id: ProjectId,
    /// New display name: one line of 1 to 200 characters. Absent: unchanged.
    #[serde(default)]
    pub name: Option<String>,
    /// New description, at most 10000 characters. Absent: unchanged.
    #[serde(default)]
    pub description: Option<String>,
    /// Slug of the new default agent, which must exist; null for none. Absent: unchanged.
    #[serde(default, deserialize_with = "input::nullable")]
    #[schemars(with = "Option<Slug>")]
    pub agent: Option<Option<Slug>>,
    /// Environment variables, name to value, that replace all present ones; the value `***` keeps the stored value
    /// of that name. At most 256; values of at most 65536 bytes. Absent: unchanged.
    #[serde(default)]
    pub env: Option<IndexMap<String, String>>,
    /// Create an API key of this scope for each new session; null: create none. Absent: unchanged.
    #[serde(default, deserialize_with = "input::nullable")]
    #[schemars(with = "Option<SessionKeySettings>")]
    pub api_key: Option<Option<SessionKeySettings>>,
    /// Sandbox settings to change; absent fields stay as they are.
    #[serde(default)]
    pub sandbox: Option<ProjectSandbox>,
    /// Limits to change; absent fields stay as they are.
    #[serde(default)]
    pub limits: Option<ProjectLimits>,
    /// Where new sessions work that name no workspace: "shared" or "own". Absent: unchanged.
    #[serde(default)]
    pub workspaces: Option<WorkspacePolicy>,
}

/// `project_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectList {
    /// Only projects whose name contains this text, upper and lower case alike; at most 1000 bytes. Absent: all.
    #[serde(default)]
    pub name_contains: Option<String>,
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `project_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectGet {
    /// Id of the project (`proj_…`).
    pub project_id: ProjectId,
}

/// `project_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectDelete {
    /// Id of the project to delete (`proj_…`).
    pub project_id: ProjectId,
}

impl ActionHandler for ProjectCreate {
    type Output = ProjectView;

    const NAME: &'static str = "project_create";
    const DESCRIPTION: &'static str = "Create a project with its default workspace.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Write;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(input::check_name("name", &self.name).unwrap_or_default().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let now = oubliette_store::now();
        let mut row = ProjectRow {
            project_id: ProjectId::generate(),
            name: String::new(),
            description: String::new(),
            agent: None,
            env: IndexMap::new(),
            api_key_scope: None,
            sandbox: json!({}),
            limits: json!({}),
            default_workspace: WorkspaceId::generate(),
            workspaces: WorkspacePolicy::Shared,
            created_at: now,
            updated_at: now,
        };
        let change = ProjectUpdate {
            project_id: row.project_id.clone(),
            name: Some(self.name),
            description: self.description,
            agent: self.agent.map(Some),
            env: self.env,
            api_key: self.api_key.map(Some),
            sandbox: self.sandbox,
            limits: self.limits,
            workspaces: self.workspaces,
        };
        change.apply(call, &mut row)?;
        create(call.app, &row).await?;
        call.note_project(&row.project_id);
        Ok(ProjectView::from(&row))
    }
}

/// Creates a project and its default workspace. The folder is made before the rows, so that no row names a folder
/// that does not exist.
pub(crate) async fn create(app: &App, row: &ProjectRow) -> Result<()> {
    let workspace = WorkspaceRow {
        workspace_id: row.default_workspace.clone(),
        project_id: row.project_id.clone(),
        name: "default".into(),
        env: IndexMap::new(),
        source: None,
        created_at: row.created_at,
    };
    let made = async {
        workspace::create(app, &row.project_id, &workspace.workspace_id, None).await?;
        app.store.project_create(row.clone(), workspace).await
    }
    .await;
    if made.is_err() {
        workspace::remove_project(app, &row.project_id).await;
    }
    made
}

impl ProjectUpdate {
    /// Checks each field that is present and writes it into the row.
    fn apply(self, call: &ActionCall<'_>, row: &mut ProjectRow) -> Result<()> {
        if let Some(name) = &self.name {
            row.name = input::check_name("name", name)?;
        }
        if let Some(text) = &self.description {
            row.description = input::check_description(text)?;
        }
        if let Some(agent) = self.agent {
            if let Some(agent) = &agent {
                call.app.library.agent(agent)?;
            }
            row.agent = agent;
        }
        if let Some(workspaces) = self.workspaces {
            row.workspaces = workspaces;
        }
        if let Some(env) = self.env {
            row.env = input::check_env(env, &row.env)?;
        }
        if let Some(key) = self.api_key {
            // Without this check a write token could have the server create an admin key.
            if let Some(key) = &key
                && key.scope > call.grant.scope()
            {
                return Err(Error::permission_denied(format!(
                    "api_key.scope {} is above this token's own scope {}",
                    key.scope,
                    call.grant.scope()
                )));
            }
            row.api_key_scope = key.map(|key| key.scope);
        }
        let config = call.app.live.config();
        let config = &*config;
        if let Some(given) = self.sandbox {
            given.check(call, config)?;
            row.sandbox = merged(&row.sandbox, &given)?;
        }
        if let Some(given) = self.limits {
            given.check(call, config)?;
            given.check_budgets(call, &row.limits)?;
            row.limits = merged(&row.limits, &given)?;
        }
        Ok(())
    }
}
/// `before` with the fields of `given` put over it; those that are null are removed.
fn merged<T: Serialize>(before: &Value, given: &T) -> Result<Value> {
    let mut object = before.as_object().cloned().unwrap_or_default();
    if let Value::Object(given) = output::to_json(given)? {
        object.extend(given);
        object.retain(|_, value| !value.is_null());
    }
    Ok(object.into())
}

impl ActionHandler for ProjectUpdate {
    type Output = ProjectView;

    const NAME: &'static str = "project_update";
    const DESCRIPTION: &'static str = "Change a project. Fields that are absent stay as they are.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.project_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let mut row = call.project(&self.project_id).await?;
        self.apply(call, &mut row)?;
        row.updated_at = oubliette_store::now();
        call.app.store.project_update(row.clone()).await?;
        Ok(ProjectView::from(&row))
    }
}

impl ActionHandler for ProjectList {
    type Output = ProjectPage;

    const NAME: &'static str = "project_list";
    const DESCRIPTION: &'static str = "List projects, newest first.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let filter = ProjectFilter {
            project: call.grant.project().cloned(),
            name_contains: self.name_contains,
        };
        let page = call
            .app
            .store
            .project_list(filter, input::page_request(self.limit, self.cursor))
            .await?;
        Ok(page.into())
    }
}

impl ActionHandler for ProjectGet {
    type Output = ProjectView;

    const NAME: &'static str = "project_get";
    const DESCRIPTION: &'static str = "Show one project.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        Ok(ProjectView::from(&call.project(&self.project_id).await?))
    }
}

/// Result of `project_delete`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProjectDeleted {
    /// The project.
    project_id: ProjectId,
    /// True.
    deleted: bool,
}

impl ActionHandler for ProjectDelete {
    type Output = ProjectDeleted;

    const NAME: &'static str = "project_delete";
    const DESCRIPTION: &'static str =
        "Delete a project with its workspaces, files and tokens. Refused while a session is active.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.project_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let row = call.project(&self.project_id).await?;
        let app = call.app;
        let active = app.store.session_count_active(Some(&row.project_id)).await?;
        if active > 0 {
            return Err(Error::conflict(format!(
                "project {} has {active} active session(s); end them first with session_end",
                row.project_id
            )));
        }
        // The row goes first, so that no session can start while files are removed and no project is ever without
        // its files.
        app.store.project_delete(&row.project_id).await?;
        loop {
            let filter = TokenFilter {
                project: Some(row.project_id.clone()),
                ..TokenFilter::default()
            };
            let tokens = app.store.token_list(filter, PageRequest::first(1000)).await?;
            if tokens.items.is_empty() {
                break;
            }
            for token in tokens.items {
                app.revoke_token(&token.token_id).await?;
            }
        }
        workspace::remove_project(app, &row.project_id).await;
        Ok(ProjectDeleted {
            project_id: row.project_id,
            deleted: true,
        })
    }
}
