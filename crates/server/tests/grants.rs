//! Permissions of calls from outside: every action, with tokens of every scope, with and without a project
//! binding. `grants_inside.rs` tests the same over a relay socket, from inside a sandbox.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
mod grant_rows;

use common::InProcessServer;
use grant_rows::{
    ForeignProjectResult::{Denied, Missing, Unlisted},
    GrantTargets, PERMISSION_TABLE, TokenBinding, rows_cover_every_action,
};
use oubliette_protocol::{
    ErrorCode, Result, Scope,
    Scope::{Admin, Read, Write},
};
use oubliette_server::testing::{
    TokenSpec,
    actions::{self, ClientContext},
    expose,
};
use serde_json::{Value, json};

async fn perform(
    server: &InProcessServer,
    token: &str,
    name: &str,
    arguments: Value,
    origin: &ClientContext,
) -> Result<Value> {
    let Value::Object(arguments) = arguments else {
        panic!("{name}: arguments are an object")
    };
    let grant = server.app.auth.authenticate_token(token).await.unwrap();
    actions::perform(&server.app, &grant, name, arguments, origin).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_action_by_every_scope_and_binding() {
    let server = InProcessServer::start().await;
    rows_cover_every_action();
    let elsewhere = server.project("elsewhere").await;
    for row in PERMISSION_TABLE {
        for scope in Scope::ALL {
            for bound in [
                TokenBinding::Unbound,
                TokenBinding::SameProject,
                TokenBinding::OtherProject,
            ] {
                let targets = GrantTargets::in_new_project(&server).await;
                let project = match bound {
                    TokenBinding::Unbound => None,
                    TokenBinding::SameProject => Some(&targets.project),
                    TokenBinding::OtherProject => Some(&elsewhere),
                };
                let token = server.token(scope, project).await;
                // Taken before the action runs, since deleting a project revokes its tokens.
                let grant = server.app.auth.authenticate_token(&token).await.unwrap();
                let listed = actions::visible(&grant).any(|d| d.name == row.action);
                let case = format!("{} by {scope}, bound {bound:?}", row.action);
                let outcome = perform(
                    &server,
                    &token,
                    row.action,
                    (row.arguments)(&targets),
                    &ClientContext::default(),
                )
                .await;
                let code = outcome.as_ref().err().map(|e| e.code);
                let denied =
                    scope < row.min_scope || (bound != TokenBinding::Unbound && row.foreign == Denied);
                assert_eq!(listed, !denied, "{case}: shown as a tool");
                if denied {
                    assert_eq!(code, Some(ErrorCode::PermissionDenied), "{case}: {outcome:?}");
                    continue;
                }
                match (bound, row.foreign) {
                    (TokenBinding::OtherProject, Missing) => {
                        assert_eq!(code, Some(ErrorCode::NotFound), "{case}: {outcome:?}")
                    }
                    (TokenBinding::OtherProject, Unlisted) => {
                        let text = outcome.unwrap().to_string();
                        for id in [
                            targets.project.as_str(),
                            targets.session.as_str(),
                            targets.token.as_str(),
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
async fn a_token_cannot_grant_more_than_it_may_do() {
    let server = InProcessServer::start().await;
    let (project, other) = (server.project("here").await, server.project("other").await);
    let bound = server.token(Admin, Some(&project)).await;
    let writer = server.token(Write, None).await;
    let outside = ClientContext::default();
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
async fn revoked_and_expired_tokens_are_refused_and_no_token_is_stored() {
    let server = InProcessServer::start().await;
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
    let mint = TokenSpec {
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
