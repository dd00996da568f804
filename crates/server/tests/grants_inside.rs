//! Who may do what from inside: every action, by a key of every scope and binding, over the relay socket of a
//! session that runs, and what no key may do there.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;
mod grant_rows;

use std::collections::BTreeMap;

use common::{Server, siblings::siblings};
use grant_rows::{
    Bound,
    Foreign::{Denied, Missing, Unlisted},
    ROWS, Things, rows_cover_every_action,
};
use oubliette_protocol::{ProjectId, Scope, SessionId};
use oubliette_server::actions;
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncWriteExt as _, BufReader, Lines},
    net::{
        UnixStream,
        unix::{OwnedReadHalf, OwnedWriteHalf},
    },
};

/// A raw client of a relay socket.
struct Socket {
    lines: Lines<BufReader<OwnedReadHalf>>,
    write: OwnedWriteHalf,
    last: u64,
}

impl Socket {
    async fn of(server: &Server, session: &SessionId) -> Self {
        let (_, shown) = server
            .tool(&server.admin, "session_get", json!({ "session_id": session }))
            .await;
        let path = shown["relay_socket"].as_str().expect("a session that runs");
        let (read, write) = UnixStream::connect(path).await.unwrap().into_split();
        Self {
            lines: BufReader::new(read).lines(),
            write,
            last: 0,
        }
    }

    /// The result, or the error.
    async fn ask(&mut self, method: &str, params: Value) -> Result<Value, Value> {
        self.last += 1;
        let request = json!({ "jsonrpc": "2.0", "id": self.last, "method": method, "params": params });
        self.write
            .write_all(format!("{request}\n").as_bytes())
            .await
            .unwrap();
        loop {
            let line = self.lines.next_line().await.unwrap().expect("an answer");
            let mut answer: Value = serde_json::from_str(&line).unwrap();
            if answer["id"] == self.last {
                return match answer.get("error") {
                    Some(error) => Err(error.clone()),
                    None => Ok(answer["result"].take()),
                };
            }
        }
    }

    async fn call(&mut self, key: &str, tool: &str, arguments: Value) -> Result<Value, Value> {
        let params = json!({ "tool": tool, "arguments": arguments, "api_key": key });
        self.ask("oubliette_call_tool", params).await
    }
}

fn code(outcome: &Result<Value, Value>) -> Option<&str> {
    outcome.as_ref().err().map(|error| {
        error["data"]["code"]
            .as_str()
            .expect("every error says which it is")
    })
}

/// A session that runs, started by another that runs.
struct World {
    server: Server,
    project: ProjectId,
    elsewhere: ProjectId,
    own: SessionId,
    parent: SessionId,
    socket: Socket,
}

impl World {
    async fn new() -> Self {
        let server = Server::start().await;
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
        let mut above = Socket::of(&server, &parent).await;
        let reply = above
            .ask("session_message", json!({ "message": "go", "wait": true }))
            .await
            .unwrap();
        let own: SessionId = reply["session_id"].as_str().unwrap().parse().unwrap();
        let socket = Socket::of(&server, &own).await;
        Self {
            server,
            project,
            elsewhere,
            own,
            parent,
            socket,
        }
    }

    async fn things(&self) -> Things {
        Things::within(
            &self.server,
            self.project.clone(),
            self.own.clone(),
            self.parent.clone(),
        )
        .await
    }

    async fn key(&self, scope: Scope, bound: Bound) -> String {
        let project = match bound {
            Bound::No => None,
            Bound::Here => Some(&self.project),
            Bound::Elsewhere => Some(&self.elsewhere),
        };
        self.server.token(scope, project).await
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_action_by_every_key_over_the_relay_socket() {
    siblings();
    rows_cover_every_action();
    let mut world = World::new().await;
    for scope in Scope::ALL {
        for bound in Bound::ALL {
            let key = world.key(scope, bound).await;
            let grant = world.server.app.auth.token(&key).await.unwrap();
            let expected: BTreeMap<_, _> = actions::visible(&grant)
                .map(|d| (d.name.to_owned(), Value::Object((d.schema)().clone())))
                .collect();
            let listed = world
                .socket
                .ask("oubliette_tools", json!({ "api_key": key }))
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
            for row in ROWS {
                let case = format!("{} by {scope}, bound {bound:?}", row.action);
                let things = world.things().await;
                let outcome = world
                    .socket
                    .call(&key, row.action, (row.arguments)(&things))
                    .await;
                let code = code(&outcome);
                let denied = scope < row.least || (bound != Bound::No && row.foreign == Denied);
                assert_eq!(
                    listed.contains_key(row.action),
                    !denied,
                    "{case}: shown as a tool"
                );
                if denied {
                    assert_eq!(code, Some("permission_denied"), "{case}: {outcome:?}");
                    assert_eq!(outcome.unwrap_err()["code"], -32002, "{case}");
                    continue;
                }
                match (bound, row.foreign) {
                    (Bound::Elsewhere, Missing) => {
                        assert_eq!(code, Some("not_found"), "{case}: {outcome:?}")
                    }
                    (Bound::Elsewhere, Unlisted) => {
                        let text = outcome.unwrap().to_string();
                        let mut hidden = vec![things.session.as_str(), things.token.as_str()];
                        // The log tells a token what it tried itself, and where.
                        if row.action != "audit_list" {
                            hidden.push(things.project.as_str());
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
    // Who did it, from where, is written down; what was refused too.
    world.server.app.audit_settled().await;
    let filter = json!({ "session_id": world.own, "limit": 1000 });
    let (_, log) = world.server.tool(&world.server.admin, "audit_list", filter).await;
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
    world.server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nothing_from_inside_widens_a_session_whatever_the_key() {
    siblings();
    let mut world = World::new().await;
    let things = world.things().await;
    for scope in Scope::ALL {
        for bound in Bound::ALL {
            let key = world.key(scope, bound).await;
            for row in ROWS {
                for arguments in row.never_inside {
                    let arguments = arguments(&things);
                    let case = format!("{} {arguments} by {scope}, bound {bound:?}", row.action);
                    let outcome = world.socket.call(&key, row.action, arguments).await;
                    let refused = code(&outcome).unwrap_or_else(|| panic!("{case} was done"));
                    // Out of reach it may look as if it were not there; within reach it is refused, and says why.
                    match (scope >= row.least, bound) {
                        (true, Bound::No) => {
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
    // What widens nothing goes.
    let admin = world.server.admin.clone();
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
        world.socket.call(&admin, name, arguments).await.unwrap();
    }
    world.server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_sessions_key_makes_dies_with_the_session() {
    siblings();
    let mut world = World::new().await;
    let mint = oubliette_server::auth::Mint {
        name: "key".into(),
        scope: Scope::Admin,
        project: Some(world.project.clone()),
        expires_at: None,
        session: Some(world.own.clone()),
    };
    let (_, key) = world.server.app.auth.mint(mint).await.unwrap();
    let key = oubliette_server::auth::expose(&key).to_owned();
    let asked = json!({ "name": "n", "scope": "admin", "project_id": world.project });
    let made = world
        .socket
        .call(&key, "token_create", asked.clone())
        .await
        .unwrap();
    let first = made["token"].as_str().unwrap().to_owned();
    // And what that makes, from outside.
    let (_, made) = world.server.tool(&first, "token_create", asked).await;
    let second = made["token"].as_str().unwrap().to_owned();
    for token in [&key, &first, &second] {
        assert_eq!(world.server.tool(token, "project_list", json!({})).await.0, 200);
    }
    let end = json!({ "session_id": world.own });
    world.server.tool(&world.server.admin, "session_end", end).await;
    for token in [&key, &first, &second] {
        assert_eq!(world.server.tool(token, "project_list", json!({})).await.0, 401);
    }
    let (_, tokens) = world
        .server
        .tool(&world.server.admin, "token_list", json!({}))
        .await;
    assert!(!tokens.to_string().contains(world.own.as_str()), "{tokens}");
    world.server.stop().await;
}
