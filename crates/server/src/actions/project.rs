//! `project_*`: projects, which sessions and workspaces belong to.

use std::{borrow::Cow, ops::RangeInclusive};

use indexmap::IndexMap;
use oubliette_protocol::{Error, ProjectId, Result, Scope, Slug, WorkspaceId, agent::NetworkAccess};
use oubliette_store::{PageRequest, ProjectFilter, ProjectRow, TokenFilter, WorkspaceRow};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{ActionCall, Effect, StateOwner, ActionHandler, input, output};
use crate::{app::App, config::ServerConfig, workspace};

/// Sandbox settings of a project: what its sessions may use of the machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectSandbox {
    /// Sandbox driver. Must be the one this server is configured with (`driver` of server_info). Needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Container image of the sandboxes. Refused by drivers without images, such as "local". Needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// Network access of the sandboxes: "none", "proxy" (HTTP and HTTPS through the server) or "host" (only if
    /// `[trust] host_network` is true in the server's configuration). Default: what each agent's definition asks for.
    /// Needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkAccess>,
    /// Memory limit of a sandbox in MiB, 16 to 1000000000. Default: the server's (`limits` of server_info); more needs
    /// admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// CPU limit of a sandbox in cores, 0.01 to 1000000000, for example 1.5. Default: the server's (`limits` of
    /// server_info); more needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Maximum number of processes and threads in a sandbox, 8 to 1000000000. Default: the server's (`limits` of
    /// server_info); more needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u64>,
    /// Maximum size of a workspace in MiB, 1 to 1000000000. Default: the server's (`limits` of server_info); more needs
    /// admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_mb: Option<u64>,
}

/// Limits on the number of a project's sessions.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProjectLimits {
    /// Maximum depth of sessions started by sessions: 0 allows no child sessions, 1 children, 2 children of children.
    /// Default: the server's (`limits` of server_info); more needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_depth: Option<u32>,
    /// Maximum number of active sessions at once, 1 to 1000000. Default: the server's (`limits` of server_info);
    /// more needs admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u32>,
}

/// The API key that the server creates for each session of a project, so that its agent can use Oubliette's own tools.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionKeySettings {
    /// Scope of the key: "read", "write" or "admin". Not above the scope of the token that sets it.
    pub scope: Scope,
}

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
    const NAME: &'static str = "project_create";
    const DESCRIPTION: &'static str = "Create a project with its default workspace.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Write;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(input::check_name("name", &self.name).unwrap_or_default().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
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
        };
        change.apply(call, &mut row)?;
        create(call.app, &row).await?;
        call.note_project(&row.project_id);
        Ok(output::project(&row))
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
        let config = &call.app.config;
        if let Some(given) = self.sandbox {
            given.check(call, config)?;
            row.sandbox = merged(&row.sandbox, &given)?;
        }
        if let Some(given) = self.limits {
            given.check(call, config)?;
            row.limits = merged(&row.limits, &given)?;
        }
        Ok(())
    }
}

impl ProjectSandbox {
    fn check(&self, call: &ActionCall<'_>, config: &ServerConfig) -> Result<()> {
        let admin = |field: &str| call.grant.require(Scope::Admin, &format!("sandbox.{field}"));
        if let Some(driver) = &self.driver {
            admin("driver")?;
            if *driver != config.sandbox.driver {
                return Err(Error::invalid(format!(
                    "sandbox.driver: this server has the driver {:?}",
                    config.sandbox.driver
                )));
            }
        }
        if let Some(image) = &self.image {
            admin("image")?;
            return Err(Error::invalid(format!(
                "sandbox.image: the driver {:?} has no images, so {} cannot be used",
                config.sandbox.driver,
                oubliette_protocol::id::quoted(image)
            )));
        }
        if let Some(network) = self.network {
            admin("network")?;
            if network == NetworkAccess::Host && !config.trust.host_network {
                return Err(Error::invalid(
                    "sandbox.network: \"host\" needs `host_network = true` under [trust] in oubliette.toml",
                ));
            }
        }
        check_numbers(call, &self.numbers(config))
    }

    /// The settings that are numbers, with the server's defaults.
    pub(super) fn numbers(&self, config: &ServerConfig) -> [NumericSetting; 4] {
        let defaults = &config.sandbox;
        let setting = |field, given, default, least| NumericSetting {
            field,
            given,
            default,
            range: least..=MAX_SANDBOX_NUMBER,
        };
        let whole = |field, given: Option<u64>, default: u64, least| {
            setting(field, given.map(|n| n as f64), default as f64, least)
        };
        [
            whole("sandbox.memory_mb", self.memory_mb, defaults.memory_mb, 16.0),
            setting("sandbox.cpus", self.cpus, defaults.cpus, 0.01),
            whole("sandbox.pids", self.pids, defaults.pids, 8.0),
            whole("sandbox.workspace_mb", self.workspace_mb, defaults.workspace_mb, 1.0),
        ]
    }
}

impl ProjectLimits {
    fn check(&self, call: &ActionCall<'_>, config: &ServerConfig) -> Result<()> {
        check_numbers(call, &self.numbers(config))
    }

    /// The limits, with the server's defaults.
    pub(super) fn numbers(&self, config: &ServerConfig) -> [NumericSetting; 2] {
        let limit = |field, given: Option<u32>, default: u32, least| NumericSetting {
            field,
            given: given.map(f64::from),
            default: f64::from(default),
            range: least..=MAX_SESSION_LIMIT,
        };
        let defaults = &config.session;
        [
            limit("limits.max_depth", self.max_depth, defaults.max_depth, 0.0),
            limit("limits.max_sessions", self.max_sessions, defaults.max_sessions, 1.0),
        ]
    }
}

/// The largest number that a sandbox setting may have.
const MAX_SANDBOX_NUMBER: f64 = 1e9;
/// The largest limit on sessions.
const MAX_SESSION_LIMIT: f64 = 1e6;

/// A setting of a project that is a number.
pub(super) struct NumericSetting {
    /// Name of the argument.
    pub(super) field: &'static str,
    given: Option<f64>,
    /// The server's default, above which it needs admin.
    default: f64,
    range: RangeInclusive<f64>,
}

impl NumericSetting {
    /// Whether it is given and above the server's default.
    pub(super) fn is_above_default(&self) -> bool {
        self.given.is_some_and(|given| given > self.default)
    }
}

/// Checks that each number given is in its range, and that the token may set it.
fn check_numbers(call: &ActionCall<'_>, settings: &[NumericSetting]) -> Result<()> {
    for setting in settings {
        let (field, range) = (setting.field, &setting.range);
        // Not a number is in no range.
        if setting.given.is_some_and(|given| !range.contains(&given)) {
            let (least, most) = (range.start(), range.end());
            return Err(Error::invalid(format!("{field} must be {least} to {most}")));
        }
        if setting.is_above_default() {
            let what = format!("{field} above the server's default of {}", setting.default);
            call.grant.require(Scope::Admin, &what)?;
        }
    }
    Ok(())
}

/// `before` with the fields of `given` put over it.
fn merged<T: Serialize>(before: &Value, given: &T) -> Result<Value> {
    let mut object = before.as_object().cloned().unwrap_or_default();
    if let Value::Object(given) = output::to_json(given)? {
        object.extend(given);
    }
    Ok(object.into())
}

impl ActionHandler for ProjectUpdate {
    const NAME: &'static str = "project_update";
    const DESCRIPTION: &'static str = "Change a project. Fields that are absent stay as they are.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.project_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let mut row = call.project(&self.project_id).await?;
        self.apply(call, &mut row)?;
        row.updated_at = oubliette_store::now();
        call.app.store.project_update(row.clone()).await?;
        Ok(output::project(&row))
    }
}

impl ActionHandler for ProjectList {
    const NAME: &'static str = "project_list";
    const DESCRIPTION: &'static str = "List projects, newest first.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let filter = ProjectFilter {
            project: call.grant.project().cloned(),
            name_contains: self.name_contains,
        };
        let page = call
            .app
            .store
            .project_list(filter, input::page_request(self.limit, self.cursor))
            .await?;
        Ok(output::list_page("projects", &page, output::project))
    }
}

impl ActionHandler for ProjectGet {
    const NAME: &'static str = "project_get";
    const DESCRIPTION: &'static str = "Show one project.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        Ok(output::project(&call.project(&self.project_id).await?))
    }
}

impl ActionHandler for ProjectDelete {
    const NAME: &'static str = "project_delete";
    const DESCRIPTION: &'static str =
        "Delete a project with its workspaces, files and tokens. Refused while a session is active.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.project_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
        let row = call.project(&self.project_id).await?;
        let app = call.app;
        let active = app.store.session_count_active(&row.project_id).await?;
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
        Ok(json!({ "project_id": row.project_id, "deleted": true }))
    }
}
