//! The permission table: one row for each action. A row says which scope the action needs, what a token bound to
//! another project gets, and which arguments are refused from inside a sandbox whatever the key.

#![allow(dead_code, unreachable_pub, missing_docs, clippy::unwrap_used)]

use oubliette_protocol::{ApprovalId, ProjectId, Scope, SessionId, TokenId, WorkspaceId};
use oubliette_server::testing::{TokenSpec, actions};
use serde_json::{Value, json};

use super::common::InProcessServer;

/// The project, workspace, sessions and token that a test case acts on.
pub struct GrantTargets {
    pub project: ProjectId,
    pub workspace: WorkspaceId,
    /// A session outside the tree of `child` and `parent`.
    pub session: SessionId,
    pub token: TokenId,
    /// For calls from inside: the session whose relay socket is used.
    pub child: SessionId,
    /// The session that started `child`.
    pub parent: SessionId,
}

impl GrantTargets {
    /// Creates all of them in a new project; `child` and `parent` are an id that no session has.
    pub async fn in_new_project(server: &InProcessServer) -> Self {
        let project = server.project("acted on").await;
        let child = SessionId::generate();
        Self::in_project(server, project, child.clone(), child).await
    }

    /// Creates the workspace, session and token in an existing project.
    pub async fn in_project(
        server: &InProcessServer,
        project: ProjectId,
        child: SessionId,
        parent: SessionId,
    ) -> Self {
        let mint = TokenSpec {
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
            child,
            parent,
        }
    }
}

/// What a token bound to another project gets when it performs the action.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ForeignProjectResult {
    /// `not_found`, as if the target did not exist.
    Missing,
    /// A list that does not contain the target.
    Unlisted,
    /// The same result as an unbound token: the action concerns no project.
    Same,
    /// `permission_denied`: the action changes the whole server, which needs an unbound token.
    Denied,
}

/// The project that the token under test is bound to, relative to the target's.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum TokenBinding {
    Unbound,
    SameProject,
    OtherProject,
}

impl TokenBinding {
    pub const ALL: [TokenBinding; 3] = [
        TokenBinding::Unbound,
        TokenBinding::SameProject,
        TokenBinding::OtherProject,
    ];
}

/// Makes an action's arguments for the given targets.
pub type BuildArguments = fn(&GrantTargets) -> Value;

/// One row of [`PERMISSION_TABLE`].
pub struct PermissionRow {
    pub action: &'static str,
    pub min_scope: Scope,
    pub foreign: ForeignProjectResult,
    pub arguments: BuildArguments,
    /// Arguments that are refused from inside a sandbox, whatever the key.
    pub never_inside: &'static [BuildArguments],
}

impl PermissionRow {
    /// Whether the action is refused from inside a sandbox whatever its arguments are.
    pub fn is_outside_only(&self) -> bool {
        matches!(
            self.action,
            "approval_decide"
                | "session_delete"
                | "program_install"
                | "program_remove"
                | "tool_add"
                | "library_list"
                | "library_read"
                | "library_push"
                | "catalog_test"
                | "session_queue_remove"
        )
    }
}

const fn permission(
    action: &'static str,
    min_scope: Scope,
    foreign: ForeignProjectResult,
    arguments: BuildArguments,
    never_inside: &'static [BuildArguments],
) -> PermissionRow {
    PermissionRow {
        action,
        min_scope,
        foreign,
        arguments,
        never_inside,
    }
}

use ForeignProjectResult::{Denied, Missing, Same, Unlisted};
use Scope::{Admin, Read, Write};

const PROJECT: BuildArguments = |t| json!({ "project_id": t.project });
const WORKSPACE: BuildArguments = |t| json!({ "workspace_id": t.workspace });
const SESSION: BuildArguments = |t| json!({ "session_id": t.session });
const QUEUED: BuildArguments = |t| json!({ "session_id": t.session, "turn": 99 });
const ENTRY: BuildArguments = |_| json!({ "id": "reader" });
const NOTHING: BuildArguments = |_| json!({});
const DECISION: BuildArguments = |_| json!({ "approval_id": ApprovalId::generate(), "decision": "allow" });

/// `agent_put` of an agent that no session of the test uses, with `more` merged into its definition.
fn agent(more: Value) -> Value {
    put("slug", json!({ "name": "N", "prompt": "p" }), more)
}

/// `catalog_put` of a stdio server that no session of the test uses, with `more` merged into its definition.
fn stdio(more: Value) -> Value {
    put(
        "id",
        json!({ "kind": "mcp", "transport": "stdio", "command": "x" }),
        more,
    )
}

/// `catalog_put` of a server reached over the network.
fn remote(transport: &str, endpoint: &str) -> Value {
    json!({ "id": "other", "definition": { "kind": "mcp", "transport": transport, "endpoint": endpoint } })
}

fn put(key: &str, mut definition: Value, more: Value) -> Value {
    let more = more.as_object().unwrap().clone();
    definition.as_object_mut().unwrap().extend(more);
    json!({ key: "other", "definition": definition })
}

/// `catalog_put` of a built-in `fs_read` entry.
fn reader(id: &str) -> Value {
    json!({ "id": id, "definition": {
        "kind": "builtin", "builtinPolicy": { "name": "fs_read", "allowedPaths": ["."] } } })
}

/// One row for each action; [`rows_cover_every_action`] fails for an action without one.
pub const PERMISSION_TABLE: &[PermissionRow] = &[
    permission(
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
    permission(
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
            |t| json!({ "project_id": t.project, "limits": { "tokens_per_day": 1 } }),
            |t| json!({ "project_id": t.project, "limits": { "cost_usd_per_day": null } }),
            |t| json!({ "project_id": t.project, "limits": { "tool_calls_per_turn": 1 } }),
            |t| json!({ "project_id": t.project, "api_key": { "scope": "read" } }),
            |t| json!({ "project_id": t.project, "env": { "A": "b" } }),
            |t| json!({ "project_id": t.project, "agent": "assistant" }),
        ],
    ),
    permission("project_list", Read, Unlisted, NOTHING, &[]),
    permission("project_get", Read, Missing, PROJECT, &[]),
    permission("project_delete", Write, Missing, PROJECT, &[]),
    permission(
        "workspace_create",
        Write,
        Missing,
        PROJECT,
        &[|t| json!({ "project_id": t.project, "source": { "git": "https://example.com/x" } })],
    ),
    permission("workspace_list", Read, Missing, PROJECT, &[]),
    permission("workspace_delete", Write, Missing, WORKSPACE, &[]),
    permission("workspace_diff", Read, Missing, WORKSPACE, &[]),
    permission(
        "session_message",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "message": "hi" }),
        &[],
    ),
    permission("session_cancel", Write, Missing, SESSION, &[]),
    permission("session_end", Write, Missing, SESSION, &[]),
    permission("session_delete", Write, Missing, SESSION, &[SESSION]),
    permission("session_get", Read, Missing, SESSION, &[]),
    permission("session_list", Read, Unlisted, NOTHING, &[]),
    permission("session_events", Read, Missing, SESSION, &[]),
    permission(
        "session_switch_agent",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "agent": "demo" }),
        &[
            |t| json!({ "session_id": t.child, "agent": "assistant" }),
            |t| json!({ "session_id": t.parent, "agent": "assistant" }),
        ],
    ),
    permission("session_queue_list", Read, Missing, SESSION, &[]),
    permission("session_queue_remove", Write, Missing, QUEUED, &[QUEUED]),
    permission(
        "caller_tool_response",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "request_id": "x" }),
        &[],
    ),
    permission("approval_list", Read, Missing, PROJECT, &[]),
    permission("approval_decide", Write, Missing, DECISION, &[DECISION]),
    permission("tool_list", Read, Missing, SESSION, &[]),
    permission(
        "tool_call",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "tool": "read" }),
        &[|t| json!({ "session_id": t.parent, "tool": "read" })],
    ),
    permission(
        "tool_server_restart",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "server": "reader" }),
        &[|t| json!({ "session_id": t.parent, "server": "reader" })],
    ),
    permission(
        "tool_explain",
        Admin,
        Missing,
        |t| json!({ "agent": "demo", "session_id": t.session }),
        &[],
    ),
    permission("debugger_events", Read, Missing, SESSION, &[]),
    permission(
        "figures_report",
        Read,
        Missing,
        |t| json!({ "project_id": t.project, "minutes": 15 }),
        &[],
    ),
    permission("catalog_status", Read, Unlisted, NOTHING, &[]),
    permission("catalog_test", Admin, Denied, ENTRY, &[ENTRY]),
    permission("preset_list", Read, Same, NOTHING, &[]),
    permission("agent_list", Read, Same, NOTHING, &[]),
    permission("agent_get", Read, Same, |_| json!({ "slug": "demo" }), &[]),
    permission(
        "agent_put",
        Admin,
        Denied,
        |_| agent(json!({})),
        &[
            |_| json!({ "slug": "insider", "definition": { "name": "N", "prompt": "p" } }),
            // Agents the session may start, and agents those may start.
            |_| json!({ "slug": "helper", "definition": { "name": "N", "prompt": "p" } }),
            |_| json!({ "slug": "grandchild", "definition": { "name": "N", "prompt": "p" } }),
            |_| agent(json!({ "sandbox": { "network": "host" } })),
            |_| agent(json!({ "sandbox": { "network": "proxy" } })),
            |_| agent(json!({ "env": { "A": "${env:HOME}" } })),
            |_| agent(json!({ "env": { "A": "***" } })),
            |_| {
                agent(
                    json!({ "runtime": { "kind": "acp", "command": ["x"], "env": { "A": "${env:HOME}" } } }),
                )
            },
            |_| agent(json!({ "runtime": { "kind": "acp", "command": ["x"], "read_only": ["/etc"] } })),
            |_| agent(json!({ "runtime": { "kind": "acp", "program": { "npm": "left-pad@1.3.0" } } })),
        ],
    ),
    permission(
        "agent_delete",
        Admin,
        Denied,
        |_| json!({ "slug": "nobody" }),
        &[|_| json!({ "slug": "insider" }), |_| json!({ "slug": "helper" })],
    ),
    permission("catalog_list", Read, Same, NOTHING, &[]),
    permission("catalog_get", Read, Same, |_| json!({ "id": "reader" }), &[]),
    permission(
        "catalog_put",
        Admin,
        Denied,
        |_| reader("new"),
        &[
            |_| reader("reader"),
            // An entry that only a grandchild agent uses.
            |_| reader("shell"),
            |_| stdio(json!({ "isolation": "host" })),
            |_| stdio(json!({ "network": "proxy" })),
            |_| stdio(json!({ "args": ["${env:HOME}"] })),
            |_| stdio(json!({ "env": { "A": "x${env:HOME}" } })),
            |_| stdio(json!({ "env": { "A": "***" } })),
            |_| remote("http", "http://example.com/mcp"),
            |_| remote("ws", "ws://example.com"),
            |_| remote("tcp", "example.com:80"),
            |_| stdio(json!({ "read_only": ["/etc"] })),
            |_| stdio(json!({ "command": "", "program": { "npm": "left-pad@1.3.0" } })),
        ],
    ),
    permission(
        "catalog_delete",
        Admin,
        Denied,
        |_| json!({ "id": "nothing" }),
        &[|_| json!({ "id": "reader" })],
    ),
    permission(
        "program_install",
        Admin,
        Denied,
        |_| json!({ "package": "npm:not-pinned" }),
        &[|_| json!({ "package": "npm:left-pad@1.3.0" })],
    ),
    permission("program_list", Read, Same, NOTHING, &[]),
    permission(
        "program_remove",
        Admin,
        Denied,
        |_| json!({ "program_id": "npm-nothing-1.0.0-00000000" }),
        &[|_| json!({ "program_id": "npm-nothing-1.0.0-00000000" })],
    ),
    permission(
        "tool_add",
        Admin,
        Denied,
        |_| json!({ "command": ["some-server"], "id": "added" }),
        &[
            |_| json!({ "command": ["some-server"], "id": "added" }),
            |_| json!({ "command": ["npx", "-y", "left-pad"] }),
        ],
    ),
    permission("library_list", Admin, Denied, NOTHING, &[NOTHING]),
    permission(
        "library_read",
        Admin,
        Denied,
        |_| json!({ "kind": "agent", "id": "nobody" }),
        &[|_| json!({ "kind": "agent", "id": "nobody" })],
    ),
    permission(
        "library_push",
        Admin,
        Denied,
        |_| json!({ "puts": [] }),
        &[
            |_| json!({ "puts": [] }),
            |_| json!({ "deletes": [{ "kind": "agent", "id": "nobody" }] }),
        ],
    ),
    permission(
        "token_create",
        Admin,
        Missing,
        |t| json!({ "name": "n", "scope": "read", "project_id": t.project }),
        &[],
    ),
    permission("token_list", Admin, Unlisted, NOTHING, &[]),
    permission(
        "token_revoke",
        Admin,
        Missing,
        |t| json!({ "token_id": t.token }),
        &[],
    ),
    permission("audit_list", Admin, Unlisted, NOTHING, &[]),
    permission("usage_report", Read, Missing, PROJECT, &[]),
    permission("server_info", Read, Same, NOTHING, &[]),
    permission("server_list", Read, Same, NOTHING, &[]),
    permission("doctor", Admin, Same, NOTHING, &[]),
];

/// Fails unless the table has exactly one row, with the right scope, for each action.
pub fn rows_cover_every_action() {
    for definition in actions::all() {
        let row = PERMISSION_TABLE.iter().find(|row| row.action == definition.name);
        let row = row.unwrap_or_else(|| panic!("{} has no row: who may do it?", definition.name));
        assert_eq!(row.min_scope, definition.scope, "{}", row.action);
    }
    assert_eq!(
        PERMISSION_TABLE.len(),
        actions::all().len(),
        "a row names an action that does not exist"
    );
}
