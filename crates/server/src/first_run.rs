//! Fills a new home: configuration file, sample agents, tools and project, and an admin token.

use indexmap::IndexMap;
use oubliette_home::{HomeDir, safe_fs};
use oubliette_protocol::{Error, ProjectId, Result, Scope, Slug, WorkspaceId};
use oubliette_store::{PageRequest, ProjectFilter, ProjectRow, TokenFilter};
use serde_json::{Value, json};

use crate::{
    actions::project,
    app::App,
    auth::{TokenSpec, expose},
    config::TEMPLATE,
};

/// Creates the home and its configuration file if missing.
pub fn create_home(home: &HomeDir) -> Result<()> {
    home.create()?;
    let path = home.config_path();
    if path.exists() {
        return Ok(());
    }
    safe_fs::write_atomic(&path, TEMPLATE.as_bytes(), 0o600)
}

/// Adds samples to a home without projects, tools and agents, and an admin token if there is none. Returns the token if
/// one was created.
pub async fn populate(app: &App) -> Result<Option<String>> {
    let projects = app
        .store
        .project_list(ProjectFilter::default(), PageRequest::first(1))
        .await?;
    if projects.items.is_empty() && app.library.catalog().is_empty() && app.library.agents().is_empty() {
        put_sample_definitions(app).await?;
        create_sample_project(app).await?;
    }
    ensure_admin_token(app).await
}

/// Creates an admin token and its file, unless the file exists or there is a token with admin scope for all projects.
async fn ensure_admin_token(app: &App) -> Result<Option<String>> {
    let path = app.home.admin_token_path();
    if path.exists() {
        return Ok(None);
    }
    let tokens = app
        .store
        .token_list(TokenFilter::default(), PageRequest::first(1000))
        .await?;
    if tokens
        .items
        .iter()
        .any(|t| t.scope == Scope::Admin && t.project_id.is_none())
    {
        return Ok(None);
    }
    let mint = TokenSpec {
        name: "admin".into(),
        scope: Scope::Admin,
        project: None,
        expires_at: None,
        session: None,
    };
    let (_, token) = app.auth.mint(mint).await?;
    safe_fs::write_atomic(&path, format!("{}\n", expose(&token)).as_bytes(), 0o600)?;
    Ok(Some(expose(&token).to_owned()))
}

async fn create_sample_project(app: &App) -> Result<()> {
    let now = oubliette_store::now();
    let row = ProjectRow {
        project_id: ProjectId::generate(),
        name: "sandbox".into(),
        description: "A project to try things in.".into(),
        agent: app
            .library
            .agents()
            .keys()
            .find(|slug| slug.as_str() == "demo")
            .cloned(),
        env: IndexMap::new(),
        api_key_scope: None,
        sandbox: json!({}),
        limits: json!({}),
        default_workspace: WorkspaceId::generate(),
        workspaces: oubliette_protocol::WorkspacePolicy::Shared,
        created_at: now,
        updated_at: now,
    };
    project::create(app, &row).await
}

async fn put_sample_definitions(app: &App) -> Result<()> {
    for definition in sample_catalog() {
        let id = definition["id"].as_str().unwrap_or_default().parse()?;
        app.definitions.tool_put(id, definition).await?;
    }
    let demo: Slug = "demo".parse()?;
    let script = serde_json::to_string_pretty(&demo_script()).map_err(Error::internal)?;
    let files = [("script.json".to_owned(), script)].into();
    app.definitions.agent_put(demo, demo_agent(), files).await?;
    let assistant: Slug = "assistant".parse()?;
    app.definitions
        .agent_put(assistant, assistant_agent(), std::collections::BTreeMap::new())
        .await?;
    Ok(())
}

/// Commands of the sample shell. None runs another program, whatever its arguments and the files of the workspace say:
/// `find` has -exec, and git runs what a repository's configuration names (fsmonitor, diff drivers, pagers).
const SAMPLE_COMMANDS: [&str; 6] = ["ls", "cat", "head", "tail", "wc", "grep"];

fn sample_catalog() -> [Value; 3] {
    [
        json!({"id": "reader", "kind": "builtin", "description": "Reads files of the workspace.",
               "builtinPolicy": {"name": "fs_read", "allowedPaths": ["."]}}),
        json!({"id": "writer", "kind": "builtin", "description": "Writes files of the workspace.",
               "builtinPolicy": {"name": "fs_write", "allowedPaths": ["."]}}),
        json!({"id": "shell", "kind": "builtin", "description": "Runs a few harmless commands.",
               "builtinPolicy": {"name": "shell_exec",
                                 "allowedCommands": SAMPLE_COMMANDS,
                                 "allowedEnv": [], "timeoutMs": 30000}}),
    ]
}

/// An agent that works offline: it follows a script instead of asking a model.
fn demo_agent() -> Value {
    json!({
        "name": "Demo",
        "description": "Follows a script: shows what a session looks like, without a model or a network.",
        "prompt": "You are a demonstration.",
        "model": "script:script.json",
        "tools": sample_tools(),
    })
}

fn sample_tools() -> Value {
    json!({
        "use": ["reader", "writer", "shell"],
        "aliases": {"read": "@reader/fs_read", "write": "@writer/fs_write", "run": "@shell/shell_exec"},
    })
}

fn demo_script() -> Value {
    json!({"turns": [[
        {"say": "Hello. I am a scripted agent in a sandbox; I will write a file, read it back and list the folder."},
        {"call": {"tool": "write", "arguments": {"path": "hello.txt", "content": "Hello from the sandbox.\n"}}},
        {"call": {"tool": "read", "arguments": {"path": "hello.txt"}}},
        {"call": {"tool": "run", "arguments": {"argv": ["ls", "-l"]}}},
        {"say": "Done. Set a provider in oubliette.toml and use the agent `assistant` for real work."}
    ]]})
}

fn assistant_agent() -> Value {
    json!({
        "name": "Assistant",
        "description": "A general assistant with the workspace's files and a small shell.",
        "prompt": "You are a careful software engineer working in /workspace. Read before you write, make small \
                   changes, check them, and say briefly what you did and what you did not.",
        "model": "anthropic/claude-sonnet-4-5",
        "tools": sample_tools(),
    })
}

#[cfg(test)]
mod tests {
    use oubliette_protocol::{agent::AgentDefinition, catalog::ToolDefinition};

    use super::*;

    #[test]
    fn the_samples_are_valid_definitions() {
        for agent in [demo_agent(), assistant_agent()] {
            AgentDefinition::parse(&agent.to_string()).unwrap();
        }
        for tool in sample_catalog() {
            ToolDefinition::from_value(tool).unwrap();
        }
    }
}
