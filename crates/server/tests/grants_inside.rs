//! Permissions of calls from inside a sandbox: every action, with keys of every scope and binding, over the relay
//! socket of a running session, and what is refused there whatever the key.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
mod grant_rows;

use std::collections::BTreeMap;

use common::{InProcessServer, siblings::build_sibling_programs};
use grant_rows::{
    ForeignProjectResult::{Denied, Missing, Unlisted},
    GrantTargets, PERMISSION_TABLE, TokenBinding, rows_cover_every_action,
};
use oubliette_protocol::{ProjectId, Scope, SessionId};
use oubliette_server::testing::actions;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// A JSON-RPC client that writes raw lines to a session's relay socket.
struct RelayClient {
    lines: Lines<BufReader<OwnedReadHalf>>,
    write: OwnedWriteHalf,
    last_id: u64,
}

impl RelayClient {
    async fn connect(server: &InProcessServer, session: &SessionId) -> Self {
        let (_, shown) = server
            .tool(&server.admin, "session_get", json!({ "session_id": session }))
            .await;
        let path = shown["relay_socket"].as_str().expect("a running session");
        let (read, write) = UnixStream::connect(path).await.unwrap().into_split();
        Self {
            lines: BufReader::new(read).lines(),
            write,
            last_id: 0,
        }
    }

    /// Sends a request and returns the `result` or the `error` of its response.
    async fn request(&mut self, method: &str, params: Value) -> Result<Value, Value> {
        self.last_id += 1;
        let request = json!({ "jsonrpc": "2.0", "id": self.last_id, "method": method, "params": params });
        self.write
            .write_all(format!("{request}\n").as_bytes())
            .await
            .unwrap();
        loop {
            let line = self.lines.next_line().await.unwrap().expect("an answer");
            let mut answer: Value = serde_json::from_str(&line).unwrap();
            if answer["id"] == self.last_id {
                return match answer.get("error") {
                    Some(error) => Err(error.clone()),
                    None => Ok(answer["result"].take()),
                };
            }
        }
    }

    async fn call(&mut self, key: &str, tool: &str, arguments: Value) -> Result<Value, Value> {
        let params = json!({ "tool": tool, "arguments": arguments, "api_key": key });
        self.request("oubliette_call_tool", params).await
    }
}

fn code(outcome: &Result<Value, Value>) -> Option<&str> {
    outcome.as_ref().err().map(|error| {
        error["data"]["code"]
            .as_str()
            .expect("every error says which it is")
    })
}

/// A server with two running sessions, one started by the other, and a client of the child's relay socket.
struct NestedSessionFixture {
    server: InProcessServer,
    project: ProjectId,
    elsewhere: ProjectId,
    child: SessionId,
    parent: SessionId,
    relay: RelayClient,
}

impl NestedSessionFixture {
    async fn new() -> Self {
        let server = InProcessServer::start().await;
        let library = &server.app.library;
        for (slug, tools, children) in [
            ("grandchild", json!({ "use": ["shell"] }), json!([])),
            ("helper", json!({}), json!(["grandchild"])),
            ("insider", json!({ "use": ["reader"] }), json!(["helper"])),
        ] {
            let definition = json!({ "name": slug, "prompt": "p", "model": "script:script.json",
                "tools": tools, "children": children });
            let script = json!({ "turns": [[{ "say": "here" }]] }).to_string();
            let files = [("script.json".to_owned(), script)].into();
            library
                .agent_put(slug.parse().unwrap(), definition, files)
                .await
                .unwrap();
        }
        let (project, elsewhere) = (server.project("home").await, server.project("elsewhere").await);
        let message = json!({ "message": "go", "project_id": project, "agent": "insider", "wait": true });
        let (status, reply) = server.tool(&server.admin, "session_message", message).await;
        assert_eq!(status, 200, "{reply}");
        let parent: SessionId = reply["session_id"].as_str().unwrap().parse().unwrap();
        let mut parent_relay = RelayClient::connect(&server, &parent).await;
        let reply = parent_relay
            .request("session_message", json!({ "message": "go", "wait": true }))
            .await
            .unwrap();
        let child: SessionId = reply["session_id"].as_str().unwrap().parse().unwrap();
        let relay = RelayClient::connect(&server, &child).await;
        Self {
            server,
            project,
            elsewhere,
            child,
            parent,
            relay,
        }
    }

    async fn targets(&self) -> GrantTargets {
        GrantTargets::in_project(
            &self.server,
            self.project.clone(),
            self.child.clone(),
            self.parent.clone(),
        )
        .await
    }

    async fn key(&self, scope: Scope, bound: TokenBinding) -> String {
        let project = match bound {
            TokenBinding::Unbound => None,
            TokenBinding::SameProject => Some(&self.project),
            TokenBinding::OtherProject => Some(&self.elsewhere),
        };
        self.server.token(scope, project).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_action_by_every_key_over_the_relay_socket() {
    build_sibling_programs();
    rows_cover_every_action();
    let mut fixture = NestedSessionFixture::new().await;
    for scope in Scope::ALL {
        for bound in TokenBinding::ALL {
            let key = fixture.key(scope, bound).await;
            let grant = fixture.server.app.auth.authenticate_token(&key).await.unwrap();
            let expected: BTreeMap<_, _> = actions::visible(&grant)
                .map(|d| (d.name.to_owned(), Value::Object((d.schema)().clone())))
                .collect();
            let listed = fixture
                .relay
                .request("oubliette_tools", json!({ "api_key": key }))
                .await;
            let listed: BTreeMap<_, _> = listed.unwrap()["tools"]
                .as_array()
                .unwrap()
                .iter()
                .map(|tool| {
                    (
                        tool["name"].as_str().unwrap().to_owned(),
                        tool["inputSchema"].clone(),
                    )
                })
                .collect();
            assert_eq!(
                listed, expected,
                "{scope}, bound {bound:?}: another list than outside"
            );
            for row in PERMISSION_TABLE {
                let case = format!("{} by {scope}, bound {bound:?}", row.action);
                let targets = fixture.targets().await;
                let outcome = fixture
                    .relay
                    .call(&key, row.action, (row.arguments)(&targets))
                    .await;
                let code = code(&outcome);
                let denied =
                    scope < row.min_scope || (bound != TokenBinding::Unbound && row.foreign == Denied);
                assert_eq!(
                    listed.contains_key(row.action),
                    !denied,
                    "{case}: shown as a tool"
                );
                if denied || row.is_outside_only() {
                    assert_eq!(code, Some("permission_denied"), "{case}: {outcome:?}");
                    assert_eq!(outcome.unwrap_err()["code"], -32002, "{case}");
                    continue;
                }
                match (bound, row.foreign) {
                    (TokenBinding::OtherProject, Missing) => {
                        assert_eq!(code, Some("not_found"), "{case}: {outcome:?}")
                    }
                    (TokenBinding::OtherProject, Unlisted) => {
                        let text = outcome.unwrap().to_string();
                        let mut hidden = vec![targets.session.as_str(), targets.token.as_str()];
                        // The audit log shows a token its own attempts, with the project they named.
                        if row.action != "audit_list" {
                            hidden.push(targets.project.as_str());
                        }
                        for id in hidden {
                            assert!(!text.contains(id), "{case} shows {id}");
                        }
                    }
                    _ => assert!(
                        !matches!(code, Some("permission_denied" | "unauthenticated" | "internal")),
                        "{case}: {outcome:?}"
                    ),
                }
            }
        }
    }
    // The audit log has token and session of each change, of refused ones too.
    let filter = json!({ "session_id": fixture.child, "limit": 1000 });
    let (_, log) = fixture
        .server
        .tool(&fixture.server.admin, "audit_list", filter)
        .await;
    let entries = log["entries"].as_array().unwrap();
    assert!(entries.iter().all(|e| e["token_id"].is_string()), "{log}");
    for definition in actions::all() {
        let of: Vec<_> = entries
            .iter()
            .filter(|e| e["action"] == definition.name)
            .collect();
        let refused = of.iter().any(|e| e["outcome"] == "permission_denied");
        let changes = definition.effect.changes();
        assert_eq!(of.is_empty(), !changes, "{} in the audit log", definition.name);
        assert_eq!(
            refused, changes,
            "{}: refusals are in the audit log",
            definition.name
        );
    }
    fixture.server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_from_inside_widens_a_session_whatever_the_key() {
    build_sibling_programs();
    let mut fixture = NestedSessionFixture::new().await;
    let targets = fixture.targets().await;
    for scope in Scope::ALL {
        for bound in TokenBinding::ALL {
            let key = fixture.key(scope, bound).await;
            for row in PERMISSION_TABLE {
                for arguments in row.never_inside {
                    let arguments = arguments(&targets);
                    let case = format!("{} {arguments} by {scope}, bound {bound:?}", row.action);
                    let outcome = fixture.relay.call(&key, row.action, arguments).await;
                    let refused = code(&outcome).unwrap_or_else(|| panic!("{case} was done"));
                    // A key without access may get not_found; one with access gets permission_denied and the reason.
                    match (scope >= row.min_scope, bound) {
                        (true, TokenBinding::Unbound) => {
                            assert_eq!(refused, "permission_denied", "{case}: {outcome:?}");
                            let message = outcome.unwrap_err()["message"].to_string();
                            assert!(message.contains("from inside a sandbox"), "{case}: {message}");
                        }
                        _ => assert!(
                            ["permission_denied", "not_found"].contains(&refused),
                            "{case}: {outcome:?}"
                        ),
                    }
                }
            }
        }
    }
    // Changes that widen nothing are allowed.
    let admin = fixture.server.admin.clone();
    for (name, arguments) in [
        (
            "project_create",
            json!({ "name": "n", "sandbox": { "memory_mb": 64 } }),
        ),
        (
            "agent_put",
            json!({ "slug": "other", "definition": { "name": "N", "prompt": "p" } }),
        ),
        (
            "catalog_put",
            json!({ "id": "other", "definition": { "kind": "mcp", "transport": "stdio", "command": "x" } }),
        ),
        ("token_create", json!({ "name": "n", "scope": "write" })),
    ] {
        fixture.relay.call(&admin, name, arguments).await.unwrap();
    }
    fixture.server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn tokens_made_with_a_session_key_end_with_the_session() {
    build_sibling_programs();
    let mut fixture = NestedSessionFixture::new().await;
    let mint = oubliette_server::testing::TokenSpec {
        name: "key".into(),
        scope: Scope::Admin,
        project: Some(fixture.project.clone()),
        expires_at: None,
        session: Some(fixture.child.clone()),
    };
    let (_, key) = fixture.server.app.auth.mint(mint).await.unwrap();
    let key = oubliette_server::testing::expose(&key).to_owned();
    let asked = json!({ "name": "n", "scope": "admin", "project_id": fixture.project });
    let made = fixture
        .relay
        .call(&key, "token_create", asked.clone())
        .await
        .unwrap();
    let first = made["token"].as_str().unwrap().to_owned();
    // A token made with that token, from outside.
    let (_, made) = fixture.server.tool(&first, "token_create", asked).await;
    let second = made["token"].as_str().unwrap().to_owned();
    for token in [&key, &first, &second] {
        assert_eq!(fixture.server.tool(token, "project_list", json!({})).await.0, 200);
    }
    let end = json!({ "session_id": fixture.child });
    fixture
        .server
        .tool(&fixture.server.admin, "session_end", end)
        .await;
    for token in [&key, &first, &second] {
        assert_eq!(fixture.server.tool(token, "project_list", json!({})).await.0, 401);
    }
    let (_, tokens) = fixture
        .server
        .tool(&fixture.server.admin, "token_list", json!({}))
        .await;
    assert!(!tokens.to_string().contains(fixture.child.as_str()), "{tokens}");
    fixture.server.stop().await;
}
