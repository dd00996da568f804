//! The table of permissions: one row an action. It says who may do it, what a token of another project gets,
//! and what no key may do with it from inside a sandbox.

#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used)]

use oubliette_protocol::{ProjectId, Scope, SessionId, TokenId, WorkspaceId};
use oubliette_server::{actions, auth::Mint};
use serde_json::{Value, json};

use super::common::Server;

/// What a case acts on.
pub struct Things {
    pub project: ProjectId,
    pub workspace: WorkspaceId,
    /// A session of nobody's tree.
    pub session: SessionId,
    pub token: TokenId,
    /// From inside: the session whose socket it is, and the one that started it.
    pub own: SessionId,
    pub parent: SessionId,
}

impl Things {
    /// In a project of their own.
    pub async fn make(server: &Server) -> Self {
        let project = server.project("acted on").await;
        let own = SessionId::generate();
        Self::within(server, project, own.clone(), own).await
    }

    /// In a project that is there.
    pub async fn within(server: &Server, project: ProjectId, own: SessionId, parent: SessionId) -> Self {
        let mint = Mint {
            name: "acted on".into(),
            scope: Scope::Read,
            project: Some(project.clone()),
            expires_at: None,
            session: None,
        };
        let (token, _) = server.app.auth.mint(mint).await.unwrap();
        let (_, workspace) = server
            .tool(
                &server.admin,
                "workspace_create",
                json!({ "project_id": project }),
            )
            .await;
        Self {
            session: server.session(&project, None).await,
            workspace: workspace["workspace_id"].as_str().unwrap().parse().unwrap(),
            project,
            token,
            own,
            parent,
        }
    }
}

/// What a token of another project gets.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Foreign {
    /// The thing is not there.
    Missing,
    /// A list without it.
    Unlisted,
    /// Nothing of a project is concerned.
    Same,
    /// The whole server is, and only an unbound token may change it.
    Denied,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Bound {
    No,
    Here,
    Elsewhere,
}

impl Bound {
    pub const ALL: [Bound; 3] = [Bound::No, Bound::Here, Bound::Elsewhere];
}

pub type Arguments = fn(&Things) -> Value;

pub struct Row {
    pub action: &'static str,
    pub least: Scope,
    pub foreign: Foreign,
    pub arguments: Arguments,
    /// What is refused from inside, whatever the key.
    pub never_inside: &'static [Arguments],
}

const fn row(
    action: &'static str,
    least: Scope,
    foreign: Foreign,
    arguments: Arguments,
    never_inside: &'static [Arguments],
) -> Row {
    Row {
        action,
        least,
        foreign,
        arguments,
        never_inside,
    }
}

use Foreign::{Denied, Missing, Same, Unlisted};
use Scope::{Admin, Read, Write};

const PROJECT: Arguments = |t| json!({ "project_id": t.project });
const WORKSPACE: Arguments = |t| json!({ "workspace_id": t.workspace });
const SESSION: Arguments = |t| json!({ "session_id": t.session });
const NOTHING: Arguments = |_| json!({});

/// An agent other than those in use.
fn agent(more: Value) -> Value {
    put("slug", json!({ "name": "N", "prompt": "p" }), more)
}

/// A catalog entry other than those in use.
fn stdio(more: Value) -> Value {
    put(
        "id",
        json!({ "kind": "mcp", "transport": "stdio", "command": "x" }),
        more,
    )
}

fn put(key: &str, mut definition: Value, more: Value) -> Value {
    let more = more.as_object().unwrap().clone();
    definition.as_object_mut().unwrap().extend(more);
    json!({ key: "other", "definition": definition })
}

fn reader(id: &str) -> Value {
    json!({ "id": id, "definition": {
        "kind": "builtin", "builtinPolicy": { "name": "fs_read", "allowedPaths": ["."] } } })
}

/// One row an action. An action without a row fails the tests.
pub const ROWS: &[Row] = &[
    row(
        "project_create",
        Write,
        Denied,
        |_| json!({ "name": "new" }),
        &[
            |_| json!({ "name": "n", "sandbox": { "driver": "local" } }),
            |_| json!({ "name": "n", "sandbox": { "image": "x" } }),
            |_| json!({ "name": "n", "sandbox": { "network": "none" } }),
            |_| json!({ "name": "n", "sandbox": { "network": "host" } }),
            |_| json!({ "name": "n", "sandbox": { "memory_mb": 1_000_000 } }),
            |_| json!({ "name": "n", "limits": { "max_depth": 100 } }),
            |_| json!({ "name": "n", "limits": { "max_sessions": 100 } }),
        ],
    ),
    row(
        "project_update",
        Write,
        Missing,
        |t| json!({ "project_id": t.project, "name": "other" }),
        &[
            |t| json!({ "project_id": t.project, "sandbox": { "driver": "local" } }),
            |t| json!({ "project_id": t.project, "sandbox": { "image": "x" } }),
            |t| json!({ "project_id": t.project, "sandbox": { "network": "proxy" } }),
            |t| json!({ "project_id": t.project, "sandbox": { "memory_mb": 64 } }),
            |t| json!({ "project_id": t.project, "limits": { "max_depth": 3 } }),
            |t| json!({ "project_id": t.project, "api_key": { "scope": "read" } }),
            |t| json!({ "project_id": t.project, "env": { "A": "b" } }),
            |t| json!({ "project_id": t.project, "agent": "assistant" }),
        ],
    ),
    row("project_list", Read, Unlisted, NOTHING, &[]),
    row("project_get", Read, Missing, PROJECT, &[]),
    row("project_delete", Write, Missing, PROJECT, &[]),
    row(
        "workspace_create",
        Write,
        Missing,
        PROJECT,
        &[|t| json!({ "project_id": t.project, "source": { "git": "https://example.com/x" } })],
    ),
    row("workspace_list", Read, Missing, PROJECT, &[]),
    row("workspace_delete", Write, Missing, WORKSPACE, &[]),
    row("workspace_diff", Read, Missing, WORKSPACE, &[]),
    row(
        "session_message",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "message": "hi" }),
        &[],
    ),
    row("session_cancel", Write, Missing, SESSION, &[]),
    row("session_end", Write, Missing, SESSION, &[]),
    row("session_get", Read, Missing, SESSION, &[]),
    row("session_list", Read, Unlisted, NOTHING, &[]),
    row("session_events", Read, Missing, SESSION, &[]),
    row(
        "session_switch_agent",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "agent": "demo" }),
        &[
            |t| json!({ "session_id": t.own, "agent": "assistant" }),
            |t| json!({ "session_id": t.parent, "agent": "assistant" }),
        ],
    ),
    row(
        "caller_tool_response",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "request_id": "x" }),
        &[],
    ),
    row("tool_list", Read, Missing, SESSION, &[]),
    row(
        "tool_call",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "tool": "read" }),
        &[|t| json!({ "session_id": t.parent, "tool": "read" })],
    ),
    row(
        "tool_server_restart",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "server": "reader" }),
        &[|t| json!({ "session_id": t.parent, "server": "reader" })],
    ),
    row("debugger_events", Read, Missing, SESSION, &[]),
    row("agent_list", Read, Same, NOTHING, &[]),
    row("agent_get", Read, Same, |_| json!({ "slug": "demo" }), &[]),
    row(
        "agent_put",
        Admin,
        Denied,
        |_| agent(json!({})),
        &[
            |_| json!({ "slug": "insider", "definition": { "name": "N", "prompt": "p" } }),
            // What it may start, and what that may start.
            |_| json!({ "slug": "helper", "definition": { "name": "N", "prompt": "p" } }),
            |_| json!({ "slug": "grandchild", "definition": { "name": "N", "prompt": "p" } }),
            |_| agent(json!({ "sandbox": { "network": "host" } })),
            |_| agent(json!({ "sandbox": { "network": "proxy" } })),
            |_| agent(json!({ "runtime": { "kind": "acp", "command": ["x"], "read_only": ["/etc"] } })),
        ],
    ),
    row(
        "agent_delete",
        Admin,
        Denied,
        |_| json!({ "slug": "nobody" }),
        &[|_| json!({ "slug": "insider" }), |_| json!({ "slug": "helper" })],
    ),
    row("catalog_list", Read, Same, NOTHING, &[]),
    row("catalog_get", Read, Same, |_| json!({ "id": "reader" }), &[]),
    row(
        "catalog_put",
        Admin,
        Denied,
        |_| reader("new"),
        &[
            |_| reader("reader"),
            // What only a child's child uses.
            |_| reader("shell"),
            |_| stdio(json!({ "isolation": "host" })),
            |_| stdio(json!({ "network": "proxy" })),
            |_| stdio(json!({ "read_only": ["/etc"] })),
        ],
    ),
    row(
        "catalog_delete",
        Admin,
        Denied,
        |_| json!({ "id": "nothing" }),
        &[|_| json!({ "id": "reader" })],
    ),
    row(
        "token_create",
        Admin,
        Missing,
        |t| json!({ "name": "n", "scope": "read", "project_id": t.project }),
        &[],
    ),
    row("token_list", Admin, Unlisted, NOTHING, &[]),
    row(
        "token_revoke",
        Admin,
        Missing,
        |t| json!({ "token_id": t.token }),
        &[],
    ),
    row("audit_list", Admin, Unlisted, NOTHING, &[]),
    row("server_info", Read, Same, NOTHING, &[]),
    row("doctor", Admin, Same, NOTHING, &[]),
];

pub fn rows_cover_every_action() {
    for definition in actions::all() {
        let row = ROWS.iter().find(|row| row.action == definition.name);
        let row = row.unwrap_or_else(|| panic!("{} has no row: who may do it?", definition.name));
        assert_eq!(row.least, definition.scope, "{}", row.action);
    }
    assert_eq!(
        ROWS.len(),
        actions::all().len(),
        "a row for an action that is no more"
    );
}
