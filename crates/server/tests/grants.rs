//! Who may do what: every action, by every scope, with and without a project binding, from outside and
//! from inside.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use common::Server;
use oubliette_protocol::{ErrorCode, ProjectId, Result, Scope, SessionId, TokenId, WorkspaceId};
use oubliette_server::{
    actions::{self, Inside, Origin, call::Reason},
    auth::{Mint, expose},
};
use serde_json::{Value, json};

/// What a case acts on.
struct Things {
    project: ProjectId,
    workspace: WorkspaceId,
    session: SessionId,
    token: TokenId,
}

impl Things {
    async fn make(server: &Server) -> Self {
        let project = server.project("acted on").await;
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
        }
    }
}

/// What a token of another project gets.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Foreign {
    /// The thing is not there.
    Missing,
    /// A list without it.
    Unlisted,
    /// Nothing of a project is concerned.
    Same,
    /// The whole server is, and only an unbound token may change it.
    Denied,
}

struct Row {
    action: &'static str,
    least: Scope,
    foreign: Foreign,
    arguments: fn(&Things) -> Value,
}

const fn row(action: &'static str, least: Scope, foreign: Foreign, arguments: fn(&Things) -> Value) -> Row {
    Row {
        action,
        least,
        foreign,
        arguments,
    }
}

use Foreign::{Denied, Missing, Same, Unlisted};
use Scope::{Admin, Read, Write};

/// One row an action. An action without a row fails the test.
const ROWS: &[Row] = &[
    row("project_create", Write, Denied, |_| json!({ "name": "new" })),
    row(
        "project_update",
        Write,
        Missing,
        |t| json!({ "project_id": t.project, "name": "other" }),
    ),
    row("project_list", Read, Unlisted, |_| json!({})),
    row(
        "project_get",
        Read,
        Missing,
        |t| json!({ "project_id": t.project }),
    ),
    row(
        "project_delete",
        Write,
        Missing,
        |t| json!({ "project_id": t.project }),
    ),
    row(
        "workspace_create",
        Write,
        Missing,
        |t| json!({ "project_id": t.project }),
    ),
    row(
        "workspace_list",
        Read,
        Missing,
        |t| json!({ "project_id": t.project }),
    ),
    row(
        "workspace_delete",
        Write,
        Missing,
        |t| json!({ "workspace_id": t.workspace }),
    ),
    row(
        "workspace_diff",
        Read,
        Missing,
        |t| json!({ "workspace_id": t.workspace }),
    ),
    row(
        "session_message",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "message": "hi" }),
    ),
    row(
        "session_cancel",
        Write,
        Missing,
        |t| json!({ "session_id": t.session }),
    ),
    row(
        "session_end",
        Write,
        Missing,
        |t| json!({ "session_id": t.session }),
    ),
    row(
        "session_get",
        Read,
        Missing,
        |t| json!({ "session_id": t.session }),
    ),
    row("session_list", Read, Unlisted, |_| json!({})),
    row(
        "session_events",
        Read,
        Missing,
        |t| json!({ "session_id": t.session }),
    ),
    row(
        "session_switch_agent",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "agent": "demo" }),
    ),
    row(
        "caller_tool_response",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "request_id": "x" }),
    ),
    row("tool_list", Read, Missing, |t| json!({ "session_id": t.session })),
    row(
        "tool_call",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "tool": "read" }),
    ),
    row(
        "tool_server_restart",
        Write,
        Missing,
        |t| json!({ "session_id": t.session, "server": "reader" }),
    ),
    row(
        "debugger_events",
        Read,
        Missing,
        |t| json!({ "session_id": t.session }),
    ),
    row("agent_list", Read, Same, |_| json!({})),
    row("agent_get", Read, Same, |_| json!({ "slug": "demo" })),
    row(
        "agent_put",
        Admin,
        Denied,
        |_| json!({ "slug": "new", "definition": { "name": "N", "prompt": "p" } }),
    ),
    row("agent_delete", Admin, Denied, |_| json!({ "slug": "nobody" })),
    row("catalog_list", Read, Same, |_| json!({})),
    row("catalog_get", Read, Same, |_| json!({ "id": "reader" })),
    row("catalog_put", Admin, Denied, |_| {
        json!({ "id": "new", "definition": {
        "kind": "builtin", "builtinPolicy": { "name": "fs_read", "allowedPaths": ["."] } } })
    }),
    row("catalog_delete", Admin, Denied, |_| json!({ "id": "nothing" })),
    row(
        "token_create",
        Admin,
        Missing,
        |t| json!({ "name": "n", "scope": "read", "project_id": t.project }),
    ),
    row("token_list", Admin, Unlisted, |_| json!({})),
    row("token_revoke", Admin, Missing, |t| json!({ "token_id": t.token })),
    row("audit_list", Admin, Unlisted, |_| json!({})),
    row("server_info", Read, Same, |_| json!({})),
    row("doctor", Admin, Same, |_| json!({})),
];

#[derive(Debug, Clone, Copy, PartialEq)]
enum Bound {
    No,
    Here,
    Elsewhere,
}

async fn perform(
    server: &Server,
    token: &str,
    name: &str,
    arguments: Value,
    origin: &Origin,
) -> Result<Value> {
    let Value::Object(arguments) = arguments else {
        panic!("{name}: arguments are an object")
    };
    let grant = server.app.auth.token(token).await.unwrap();
    actions::perform(&server.app, &grant, name, arguments, origin).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_action_by_every_scope_and_binding() {
    let server = Server::start().await;
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
    let elsewhere = server.project("elsewhere").await;
    for row in ROWS {
        for scope in Scope::ALL {
            for bound in [Bound::No, Bound::Here, Bound::Elsewhere] {
                let things = Things::make(&server).await;
                let project = match bound {
                    Bound::No => None,
                    Bound::Here => Some(&things.project),
                    Bound::Elsewhere => Some(&elsewhere),
                };
                let token = server.token(scope, project).await;
                // Looked at first: deleting a project ends its tokens.
                let grant = server.app.auth.token(&token).await.unwrap();
                let listed = actions::visible(&grant).any(|d| d.name == row.action);
                let case = format!("{} by {scope}, bound {bound:?}", row.action);
                let outcome = perform(
                    &server,
                    &token,
                    row.action,
                    (row.arguments)(&things),
                    &Origin::outside(),
                )
                .await;
                let code = outcome.as_ref().err().map(|e| e.code);
                let denied = scope < row.least || (bound != Bound::No && row.foreign == Denied);
                assert_eq!(listed, !denied, "{case}: shown as a tool");
                if denied {
                    assert_eq!(code, Some(ErrorCode::PermissionDenied), "{case}: {outcome:?}");
                    continue;
                }
                match (bound, row.foreign) {
                    (Bound::Elsewhere, Missing) => {
                        assert_eq!(code, Some(ErrorCode::NotFound), "{case}: {outcome:?}")
                    }
                    (Bound::Elsewhere, Unlisted) => {
                        let text = outcome.unwrap().to_string();
                        for id in [
                            things.project.as_str(),
                            things.session.as_str(),
                            things.token.as_str(),
                        ] {
                            assert!(!text.contains(id), "{case} shows {id}");
                        }
                    }
                    _ => assert!(
                        !matches!(
                            code,
                            Some(
                                ErrorCode::PermissionDenied
                                    | ErrorCode::Unauthenticated
                                    | ErrorCode::Internal
                            )
                        ),
                        "{case}: {outcome:?}"
                    ),
                }
            }
        }
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_key_reaches_further_than_itself() {
    let server = Server::start().await;
    let (project, other) = (server.project("here").await, server.project("other").await);
    let bound = server.token(Admin, Some(&project)).await;
    let writer = server.token(Write, None).await;
    let outside = Origin::outside();
    let cases = [
        (
            &bound,
            "token_create",
            json!({ "name": "n", "scope": "read" }),
            ErrorCode::PermissionDenied,
        ),
        (
            &bound,
            "token_create",
            json!({ "name": "n", "scope": "read", "project_id": other }),
            ErrorCode::NotFound,
        ),
        (
            &writer,
            "project_create",
            json!({ "name": "n", "api_key": { "scope": "admin" } }),
            ErrorCode::PermissionDenied,
        ),
        (
            &writer,
            "project_update",
            json!({ "project_id": project, "sandbox": { "network": "none" } }),
            ErrorCode::PermissionDenied,
        ),
        (
            &writer,
            "project_update",
            json!({ "project_id": project, "sandbox": { "driver": "local" } }),
            ErrorCode::PermissionDenied,
        ),
        (
            &writer,
            "project_update",
            json!({ "project_id": project, "sandbox": { "image": "x" } }),
            ErrorCode::PermissionDenied,
        ),
        (
            &writer,
            "project_update",
            json!({ "project_id": project, "sandbox": { "memory_mb": 1000000 } }),
            ErrorCode::PermissionDenied,
        ),
        (
            &writer,
            "project_update",
            json!({ "project_id": project, "limits": { "max_sessions": 51 } }),
            ErrorCode::PermissionDenied,
        ),
        (
            &server.admin,
            "project_update",
            json!({ "project_id": project, "sandbox": { "network": "host" } }),
            ErrorCode::InvalidArgument,
        ),
    ];
    for (token, name, arguments, code) in cases {
        let outcome = perform(&server, token, name, arguments.clone(), &outside).await;
        assert_eq!(
            outcome.as_ref().err().map(|e| e.code),
            Some(code),
            "{name} {arguments}: {outcome:?}"
        );
    }
    for (token, arguments) in [
        (
            &writer,
            json!({ "project_id": project, "sandbox": { "memory_mb": 64 }, "limits": { "max_sessions": 2 } }),
        ),
        (
            &server.admin,
            json!({ "project_id": project, "sandbox": { "network": "proxy", "memory_mb": 100000 } }),
        ),
    ] {
        perform(&server, token, "project_update", arguments, &outside)
            .await
            .unwrap();
    }
    let kept = perform(
        &server,
        &writer,
        "project_get",
        json!({ "project_id": project }),
        &outside,
    )
    .await
    .unwrap();
    assert_eq!(
        kept["sandbox"],
        json!({ "memory_mb": 100000, "network": "proxy" })
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_from_inside_widens_a_session() {
    let server = Server::start().await;
    let project = server.project("here").await;
    let parent = server.session(&project, None).await;
    let session = server.session(&project, Some(&parent)).await;
    let stranger = server.session(&project, None).await;
    let inside = Origin::Inside(Inside {
        session: session.clone(),
        reason: Reason::Key,
        gone: Default::default(),
    });
    let agent = |extra: Value| {
        let mut definition = json!({ "name": "N", "prompt": "p" });
        definition
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        json!({ "slug": "other", "definition": definition })
    };
    let stdio = |extra: Value| {
        let mut definition = json!({ "kind": "mcp", "transport": "stdio", "command": "x" });
        definition
            .as_object_mut()
            .unwrap()
            .extend(extra.as_object().unwrap().clone());
        json!({ "id": "other", "definition": definition })
    };
    let refused = [
        (
            "project_create",
            json!({ "name": "n", "sandbox": { "driver": "local" } }),
        ),
        (
            "project_create",
            json!({ "name": "n", "sandbox": { "network": "proxy" } }),
        ),
        (
            "project_create",
            json!({ "name": "n", "sandbox": { "image": "x" } }),
        ),
        (
            "project_create",
            json!({ "name": "n", "limits": { "max_depth": 100 } }),
        ),
        (
            "project_update",
            json!({ "project_id": project, "limits": { "max_depth": 3 } }),
        ),
        (
            "project_update",
            json!({ "project_id": project, "api_key": { "scope": "admin" } }),
        ),
        (
            "project_update",
            json!({ "project_id": project, "env": { "A": "b" } }),
        ),
        (
            "workspace_create",
            json!({ "project_id": project, "source": { "git": "https://example.com/x" } }),
        ),
        (
            "agent_put",
            json!({ "slug": "demo", "definition": { "name": "N", "prompt": "p" } }),
        ),
        ("agent_put", agent(json!({ "sandbox": { "network": "host" } }))),
        (
            "agent_put",
            agent(json!({ "runtime": { "kind": "acp", "command": ["x"], "read_only": ["/etc"] } })),
        ),
        ("agent_delete", json!({ "slug": "demo" })),
        (
            "catalog_put",
            json!({ "id": "reader", "definition": {
            "kind": "builtin", "builtinPolicy": { "name": "fs_read", "allowedPaths": ["/"] } } }),
        ),
        ("catalog_put", stdio(json!({ "isolation": "host" }))),
        ("catalog_put", stdio(json!({ "network": "proxy" }))),
        ("catalog_put", stdio(json!({ "read_only": ["/etc"] }))),
        ("catalog_delete", json!({ "id": "reader" })),
        (
            "session_switch_agent",
            json!({ "session_id": session, "agent": "assistant" }),
        ),
        (
            "session_switch_agent",
            json!({ "session_id": parent, "agent": "assistant" }),
        ),
        ("tool_call", json!({ "session_id": parent, "tool": "read" })),
    ];
    for (name, arguments) in refused {
        let outcome = perform(&server, &server.admin, name, arguments.clone(), &inside).await;
        assert_eq!(
            outcome.as_ref().err().map(|e| e.code),
            Some(ErrorCode::PermissionDenied),
            "{name} {arguments}: {outcome:?}"
        );
    }
    let allowed = [
        (
            "project_create",
            json!({ "name": "n", "sandbox": { "memory_mb": 64 } }),
        ),
        ("agent_put", agent(json!({}))),
        ("catalog_put", stdio(json!({}))),
        ("token_create", json!({ "name": "n", "scope": "write" })),
    ];
    for (name, arguments) in allowed {
        perform(&server, &server.admin, name, arguments, &inside)
            .await
            .unwrap();
    }
    let elsewhere = json!({ "session_id": stranger, "agent": "assistant" });
    let outcome = perform(&server, &server.admin, "session_switch_agent", elsewhere, &inside).await;
    assert_eq!(
        outcome.unwrap_err().code,
        ErrorCode::Conflict,
        "it has ended; it was not forbidden"
    );
    // Who did it, from where, is written down; what was refused too.
    let log = perform(
        &server,
        &server.admin,
        "audit_list",
        json!({ "session_id": session, "limit": 1000 }),
        &Origin::outside(),
    )
    .await;
    let log = log.unwrap();
    let entries = log["entries"].as_array().unwrap();
    assert!(
        entries
            .iter()
            .any(|e| e["action"] == "token_create" && e["outcome"] == "ok"),
        "{log}"
    );
    assert!(
        entries
            .iter()
            .any(|e| e["action"] == "agent_put" && e["outcome"] == "permission_denied"),
        "{log}"
    );
    assert!(entries.iter().all(|e| e["token_id"].is_string()), "{log}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_token_dies_at_once_and_leaves_no_trace_of_itself() {
    let server = Server::start().await;
    let (_, made) = server
        .tool(
            &server.admin,
            "token_create",
            json!({ "name": "n", "scope": "read", "expires_in": "1h" }),
        )
        .await;
    let token = made["token"].as_str().unwrap();
    assert!(
        token.starts_with("oub_") && made["expires_at"].is_string(),
        "{made}"
    );
    assert_eq!(server.tool(token, "project_list", json!({})).await.0, 200);
    server
        .tool(
            &server.admin,
            "token_revoke",
            json!({ "token_id": made["token_id"] }),
        )
        .await;
    assert_eq!(server.tool(token, "project_list", json!({})).await.0, 401);
    let mint = Mint {
        name: "short".into(),
        scope: Read,
        project: None,
        expires_at: Some(oubliette_store::now()),
        session: None,
    };
    let (_, expired) = server.app.auth.mint(mint).await.unwrap();
    assert_eq!(
        server.tool(expose(&expired), "project_list", json!({})).await.0,
        401
    );
    server.app.store.close().await;
    let database = std::fs::read(server.app.home.database_path()).unwrap();
    for secret in [token, server.admin.as_str()] {
        assert!(
            !database.windows(secret.len()).any(|w| w == secret.as_bytes()),
            "a token is in the database"
        );
    }
}
