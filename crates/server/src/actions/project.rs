//! Projects: what sessions and workspaces belong to.

use std::borrow::Cow;

use indexmap::IndexMap;
use oubliette_protocol::{Error, ProjectId, Result, Scope, Slug, WorkspaceId, agent::Network};
use oubliette_store::{Page, ProjectFilter, ProjectRow, TokenFilter, WorkspaceRow};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Call, Effect, Reach, Tool, fields, shape};
use crate::{app::App, config::Config, workspace};

/// What a project's sessions may use of the machine.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Sandbox {
    /// Sandbox driver (admin).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub driver: Option<String>,
    /// Image of the sandbox, for drivers that have images (admin).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// What sandboxes may reach: none, proxy or host (admin).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<Network>,
    /// Memory in MiB; above the server's default: admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_mb: Option<u64>,
    /// Processors; above the server's default: admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<f64>,
    /// Processes; above the server's default: admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pids: Option<u64>,
    /// Workspace size in MiB; above the server's default: admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workspace_mb: Option<u64>,
}

/// How many sessions a project may have.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct Limits {
    /// How deep sessions may start sessions; above the server's default: admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_depth: Option<u32>,
    /// Active sessions; above the server's default: admin.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_sessions: Option<u32>,
}

/// The key the server mints for each session of a project.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ApiKey {
    /// How far it reaches, at most as far as the token that sets it.
    pub scope: Scope,
}

/// `project_create`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectCreate {
    /// What people call it.
    pub name: String,
    /// What it is for.
    #[serde(default)]
    pub description: Option<String>,
    /// The agent its sessions run when none is named.
    #[serde(default)]
    pub agent: Option<Slug>,
    /// Environment of its agents. Values are never shown again.
    #[serde(default)]
    pub env: Option<IndexMap<String, String>>,
    /// Mint a key for each session, instead of keeping one in env.
    #[serde(default)]
    pub api_key: Option<ApiKey>,
    /// What its sandboxes may use.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
    /// How many sessions it may have.
    #[serde(default)]
    pub limits: Option<Limits>,
}

/// `project_update`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectUpdate {
    /// Which.
    pub project_id: ProjectId,
    /// A new name.
    #[serde(default)]
    pub name: Option<String>,
    /// A new description.
    #[serde(default)]
    pub description: Option<String>,
    /// Another default agent; null for none.
    #[serde(default, deserialize_with = "fields::or_null")]
    #[schemars(with = "Option<Slug>")]
    pub agent: Option<Option<Slug>>,
    /// Replaces the environment; a value of `***` keeps what is there.
    #[serde(default)]
    pub env: Option<IndexMap<String, String>>,
    /// Mint a key for each session; null for none.
    #[serde(default, deserialize_with = "fields::or_null")]
    #[schemars(with = "Option<ApiKey>")]
    pub api_key: Option<Option<ApiKey>>,
    /// Changes what is given of it.
    #[serde(default)]
    pub sandbox: Option<Sandbox>,
    /// Changes what is given of it.
    #[serde(default)]
    pub limits: Option<Limits>,
}

/// `project_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectList {
    /// Only names with this in them.
    #[serde(default)]
    pub name_contains: Option<String>,
    /// At most so many (1 to 1000, default 100).
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the list before.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `project_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectGet {
    /// Which.
    pub project_id: ProjectId,
}

/// `project_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProjectDelete {
    /// Which.
    pub project_id: ProjectId,
}

impl Tool for ProjectCreate {
    const NAME: &'static str = "project_create";
    const DESCRIPTION: &'static str = "Create a project with its default workspace.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Write;
    const REACH: Reach = Reach::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(super::fields::name("name", &self.name).unwrap_or_default().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
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
        Ok(shape::project(&row))
    }
}

/// Writes a new project with its default workspace; the folder first, so that a row never points to
/// nothing.
pub async fn create(app: &App, row: &ProjectRow) -> Result<()> {
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
    /// Checks each given field and puts it into the row.
    fn apply(self, call: &Call<'_>, row: &mut ProjectRow) -> Result<()> {
        if let Some(name) = &self.name {
            row.name = fields::name("name", name)?;
        }
        if let Some(text) = &self.description {
            row.description = fields::description(text)?;
        }
        if let Some(agent) = self.agent {
            if let Some(agent) = &agent {
                call.app.library.agent(agent)?;
            }
            row.agent = agent;
        }
        if let Some(env) = self.env {
            row.env = fields::env(env, &row.env)?;
        }
        if let Some(key) = self.api_key {
            // Else a write token could have the server mint it an admin one.
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

impl Sandbox {
    fn check(&self, call: &Call<'_>, config: &Config) -> Result<()> {
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
            if network == Network::Host && !config.trust.host_network {
                return Err(Error::invalid(
                    "sandbox.network: \"host\" needs `host_network = true` under [trust] in oubliette.toml",
                ));
            }
        }
        let numbers = [
            (
                "memory_mb",
                self.memory_mb.map(|n| n as f64),
                config.sandbox.memory_mb as f64,
                16.0,
            ),
            ("cpus", self.cpus, config.sandbox.cpus, 0.01),
            (
                "pids",
                self.pids.map(|n| n as f64),
                config.sandbox.pids as f64,
                8.0,
            ),
            (
                "workspace_mb",
                self.workspace_mb.map(|n| n as f64),
                config.sandbox.workspace_mb as f64,
                1.0,
            ),
        ];
        for (field, given, default, least) in numbers {
            let Some(given) = given else { continue };
            if !(given.is_finite() && (least..=1e9).contains(&given)) {
                return Err(Error::invalid(format!(
                    "sandbox.{field} must be at least {least}"
                )));
            }
            if given > default {
                admin(&format!("{field} above the server's default of {default}"))?;
            }
        }
        Ok(())
    }
}

impl Limits {
    fn check(&self, call: &Call<'_>, config: &Config) -> Result<()> {
        let numbers = [
            ("max_depth", self.max_depth, config.session.max_depth, 0),
            ("max_sessions", self.max_sessions, config.session.max_sessions, 1),
        ];
        for (field, given, default, least) in numbers {
            let Some(given) = given else { continue };
            if !(least..=1_000_000).contains(&given) {
                return Err(Error::invalid(format!("limits.{field} must be at least {least}")));
            }
            if given > default {
                let what = format!("limits.{field} above the server's default of {default}");
                call.grant.require(Scope::Admin, &what)?;
            }
        }
        Ok(())
    }
}

/// `before` with the fields that `given` has.
fn merged<T: Serialize>(before: &Value, given: &T) -> Result<Value> {
    let mut object = before.as_object().cloned().unwrap_or_default();
    if let Value::Object(given) = serde_json::to_value(given).map_err(Error::internal)? {
        object.extend(given);
    }
    Ok(object.into())
}

impl Tool for ProjectUpdate {
    const NAME: &'static str = "project_update";
    const DESCRIPTION: &'static str = "Change a project: only the given fields.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.project_id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let mut row = call.project(&self.project_id).await?;
        self.apply(call, &mut row)?;
        row.updated_at = oubliette_store::now();
        call.app.store.project_update(row.clone()).await?;
        Ok(shape::project(&row))
    }
}

impl Tool for ProjectList {
    const NAME: &'static str = "project_list";
    const DESCRIPTION: &'static str = "List projects, newest first.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let filter = ProjectFilter {
            only: call.grant.project().cloned(),
            name_contains: self.name_contains,
        };
        let page = call
            .app
            .store
            .project_list(filter, fields::page(self.limit, self.cursor))
            .await?;
        Ok(shape::list("projects", &page, shape::project))
    }
}

impl Tool for ProjectGet {
    const NAME: &'static str = "project_get";
    const DESCRIPTION: &'static str = "Show one project.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        Ok(shape::project(&call.project(&self.project_id).await?))
    }
}

impl Tool for ProjectDelete {
    const NAME: &'static str = "project_delete";
    const DESCRIPTION: &'static str =
        "Delete a project with its workspaces, files and tokens. Refused while a session is active.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.project_id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let row = call.project(&self.project_id).await?;
        let app = call.app;
        let active = app.store.session_count_active(&row.project_id).await?;
        if active > 0 {
            return Err(Error::conflict(format!(
                "project {} has {active} active session(s); end them first with session_end",
                row.project_id
            )));
        }
        // The row first: from here on nothing can start in it. Files after, so that a failure leaves
        // no project without its files.
        app.store.project_delete(&row.project_id).await?;
        loop {
            let filter = TokenFilter {
                project: Some(row.project_id.clone()),
                ..TokenFilter::default()
            };
            let tokens = app.store.token_list(filter, Page::first(1000)).await?;
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
