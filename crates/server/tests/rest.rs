//! `/api`, tested over raw HTTP, with the checks every request passes: token, host, origin, body size, rate limit.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::io::Read as _;

use common::{InProcessServer, SseReader};
use oubliette_protocol::{
    Scope,
    debug::DebugBody,
    event::{EventBody, SessionStatus},
};
use serde_json::{Value, json};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_request_needs_a_good_token() {
    let server = InProcessServer::start().await;
    for (method, path) in [
        ("POST", "/mcp"),
        ("GET", "/mcp"),
        ("POST", "/api/tools/project_list"),
        ("GET", "/api/debugger"),
        ("GET", "/api/sessions/x/events"),
        ("GET", "/api/workspaces/x/files/a"),
        ("GET", "/api/workspaces/x/archive"),
        ("GET", "/metrics"),
    ] {
        for bearer in [None, Some("oub_wrong"), Some(&*format!("oub_{}", "A".repeat(43)))] {
            let method = method.parse().unwrap();
            let mut request = server.http.request(method, format!("{}{path}", server.url));
            if let Some(token) = bearer {
                request = request.bearer_auth(token);
            }
            let response = request.send().await.unwrap();
            assert_eq!(response.status(), 401, "{path} {bearer:?}");
            assert_eq!(response.headers()["www-authenticate"], "Bearer");
            assert!(response.headers().contains_key("x-request-id"));
            assert_eq!(
                response.json::<Value>().await.unwrap()["error"]["code"],
                "unauthenticated"
            );
        }
    }
    for path in ["/health", "/api/openapi.json", "/"] {
        assert_eq!(server.get(path).send().await.unwrap().status(), 200, "{path}");
    }
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_host_and_origin_headers_are_refused() {
    let server = InProcessServer::start_with("[server]\nallowed_hosts = [\"box.example\"]").await;
    let ask = |path: &'static str, header: &'static str, value: &'static str| {
        let request = server.get(path).header(header, value);
        async move { request.send().await.unwrap().status().as_u16() }
    };
    for path in ["/", "/mcp", "/api/openapi.json"] {
        assert_eq!(ask(path, "host", "evil.test").await, 403, "{path}");
        assert_eq!(ask(path, "origin", "https://evil.test").await, 403, "{path}");
        assert_eq!(ask(path, "origin", "null").await, 403, "{path}");
    }
    assert_eq!(ask("/", "host", "box.example").await, 200);
    assert_eq!(ask("/", "origin", "http://localhost:1").await, 200);
    assert_eq!(ask("/health", "host", "evil.test").await, 200);
    let walls = server.app.sandbox.probe().await.ok;
    assert_eq!(
        ask("/ready", "origin", "https://evil.test").await / 100,
        if walls { 2 } else { 5 }
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unknown_paths_and_methods_get_json_errors() {
    let server = InProcessServer::start().await;
    for path in [
        "/nothing",
        "/.well-known/oauth-protected-resource",
        "/api/nothing",
        "/mcp/x",
        "/..%2f..%2fetc/passwd",
    ] {
        let response = server.get(path).send().await.unwrap();
        assert_eq!(response.status(), 404, "{path}");
        assert_eq!(
            response.json::<Value>().await.unwrap()["error"]["code"],
            "not_found",
            "{path}"
        );
    }
    let response = server
        .get("/api/tools/project_list")
        .bearer_auth(&server.admin)
        .send()
        .await
        .unwrap();
    assert_eq!(
        (
            response.status().as_u16(),
            response.headers()["allow"].to_str().unwrap()
        ),
        (405, "POST")
    );
    let (status, body) = server.tool(&server.admin, "no_such_tool", json!({})).await;
    assert_eq!(
        (status, body["error"]["code"].as_str().unwrap()),
        (404, "not_found")
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_input_is_named_and_changes_nothing() {
    let server = InProcessServer::start().await;
    let before = server.tool(&server.admin, "project_list", json!({})).await.1;
    let long = "x".repeat(100_000);
    for (arguments, named) in [
        (json!({}), "name"),
        (json!({ "name": 5 }), "name"),
        (json!({ "name": "" }), "name"),
        (json!({ "name": long }), "name"),
        (json!({ "name": "a", "colour": "red" }), "colour"),
        (json!({ "name": "a", "env": { "A B": "x" } }), "A B"),
        (json!({ "name": "a", "sandbox": { "memory_mb": 0 } }), "memory_mb"),
        (json!({ "name": "a", "sandbox": { "cpus": -1 } }), "cpus"),
        (
            json!({ "name": "a", "sandbox": { "pids": 2_000_000_000 } }),
            "sandbox.pids must be 8 to 1000000000",
        ),
        (
            json!({ "name": "a", "limits": { "max_sessions": 1_000_001 } }),
            "limits.max_sessions must be 1 to 1000000",
        ),
        (json!({ "name": "a", "agent": "../../etc" }), "agent"),
        (json!({ "name": "a", "agent": "nobody" }), "nobody"),
    ] {
        let (status, body) = server
            .tool(&server.admin, "project_create", arguments.clone())
            .await;
        let shown = arguments.to_string().chars().take(80).collect::<String>();
        assert!((400..=404).contains(&status), "{shown}: {body}");
        assert!(
            body["error"]["message"].as_str().unwrap().contains(named),
            "{shown}: {body}"
        );
    }
    for body in ["{", "[]", "nonsense", "{\"name\":\"a\"}}", "\u{0}"] {
        let response = server
            .post("/api/tools/project_create")
            .bearer_auth(&server.admin)
            .body(body)
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 400, "{body}");
        assert_eq!(
            response.json::<Value>().await.unwrap()["error"]["code"],
            "invalid_argument"
        );
    }
    for id in [
        "../x",
        "proj_",
        "proj_\u{0}",
        "ｐroj_01M7GGQJQQAM2YCR1XDSFEHMR3",
        "proj_01M7GGQJQQAM2YCR1XDSFEHMR3/..",
    ] {
        let (status, body) = server
            .tool(&server.admin, "project_get", json!({ "project_id": id }))
            .await;
        assert_eq!(status, 400, "{id}: {body}");
    }
    assert_eq!(
        server.tool(&server.admin, "project_list", json!({})).await.1,
        before
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_over_4_mib_is_413_everywhere() {
    let server = InProcessServer::start().await;
    let project = server.project("p").await;
    let workspace = server.default_workspace(&project).await;
    let big = vec![b' '; 5 * 1024 * 1024];
    for path in [
        "/mcp".to_owned(),
        "/api/tools/project_create".into(),
        "/api/login".into(),
    ] {
        let request = server
            .post(&path)
            .bearer_auth(&server.admin)
            .header("content-type", "application/json");
        let response = request
            .header("accept", "application/json, text/event-stream")
            .body(big.clone())
            .send()
            .await
            .unwrap();
        assert_eq!(response.status(), 413, "{path}");
    }
    let url = format!("{}/api/workspaces/{workspace}/files/big", server.url);
    // Chunked: without a Content-Length header.
    let chunks = big
        .chunks(64 * 1024)
        .map(|c| Ok::<_, std::io::Error>(c.to_vec()))
        .collect::<Vec<_>>();
    let body = reqwest::Body::wrap_stream(futures::stream::iter(chunks));
    let response = server
        .http
        .put(&url)
        .bearer_auth(&server.admin)
        .body(body)
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 413);
    assert_eq!(
        server
            .http
            .get(&url)
            .bearer_auth(&server.admin)
            .send()
            .await
            .unwrap()
            .status(),
        404
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_rate_limited_token_gets_429_with_retry_after() {
    let server = InProcessServer::start_with("[server]\nrate_limit = { per_second = 1, burst = 3 }").await;
    let (one, other) = (
        server.token(Scope::Read, None).await,
        server.token(Scope::Read, None).await,
    );
    for _ in 0..3 {
        assert_eq!(server.tool(&one, "project_list", json!({})).await.0, 200);
    }
    // The bucket refills by one request each second, so slow runs get more than three.
    let mut more = 0;
    let response = loop {
        let asked = server.post("/api/tools/project_list").bearer_auth(&one);
        let response = asked.send().await.unwrap();
        if response.status() != 200 {
            break response;
        }
        more += 1;
        assert!(more < 1000, "no rate limit after 1000 requests");
    };
    assert_eq!(response.status(), 429);
    assert!(
        response.headers()["retry-after"]
            .to_str()
            .unwrap()
            .parse::<u64>()
            .unwrap()
            >= 1
    );
    assert_eq!(
        response.json::<Value>().await.unwrap()["error"]["code"],
        "limit_exceeded"
    );
    assert_eq!(server.tool(&other, "project_list", json!({})).await.0, 200);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_console_cookie_works_only_on_api_and_ends_with_its_token() {
    let server = InProcessServer::start().await;
    let (_, made) = server
        .tool(
            &server.admin,
            "token_create",
            json!({ "name": "n", "scope": "write" }),
        )
        .await;
    let response = server
        .post("/api/login")
        .json(&json!({ "token": made["token"] }))
        .send()
        .await
        .unwrap();
    assert_eq!(response.status(), 200);
    let cookie = response.headers()["set-cookie"].to_str().unwrap().to_owned();
    for part in ["Path=/api", "HttpOnly", "SameSite=Strict"] {
        assert!(cookie.contains(part), "{cookie}");
    }
    assert!(!cookie.contains(made["token"].as_str().unwrap()));
    let cookie = cookie.split(';').next().unwrap().to_owned();
    let call = |name: &str, arguments: Value, confirm: bool| {
        let mut request = server
            .post(&format!("/api/tools/{name}"))
            .header("cookie", &cookie)
            .json(&arguments);
        if confirm {
            request = request.header("x-oubliette", "1");
        }
        async move { request.send().await.unwrap().status().as_u16() }
    };
    assert_eq!(call("project_list", json!({}), false).await, 200);
    assert_eq!(call("project_create", json!({ "name": "a" }), false).await, 403);
    assert_eq!(call("project_create", json!({ "name": "a" }), true).await, 200);
    assert_eq!(
        server
            .post("/mcp")
            .header("cookie", &cookie)
            .send()
            .await
            .unwrap()
            .status(),
        401
    );
    assert_eq!(
        server
            .get("/metrics")
            .header("cookie", &cookie)
            .send()
            .await
            .unwrap()
            .status(),
        401
    );
    server
        .tool(
            &server.admin,
            "token_revoke",
            json!({ "token_id": made["token_id"] }),
        )
        .await;
    assert_eq!(call("project_list", json!({}), false).await, 401);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn logout_ends_the_cookie_and_failed_logins_are_rate_limited() {
    let server = InProcessServer::start().await;
    let login = |token: String| {
        let request = server.post("/api/login").json(&json!({ "token": token }));
        async move { request.send().await.unwrap() }
    };
    let response = login(server.admin.clone()).await;
    let cookie = response.headers()["set-cookie"]
        .to_str()
        .unwrap()
        .split(';')
        .next()
        .unwrap()
        .to_owned();
    let list = || async {
        server
            .post("/api/tools/project_list")
            .header("cookie", &cookie)
            .send()
            .await
            .unwrap()
            .status()
    };
    assert_eq!(list().await, 200);
    server
        .post("/api/logout")
        .header("cookie", &cookie)
        .send()
        .await
        .unwrap();
    assert_eq!(list().await, 401);
    // Ten attempts, and one more for every six seconds that passed.
    let mut wrong = 0;
    let response = loop {
        let response = login("oub_wrong".into()).await;
        if response.status() != 401 {
            break response;
        }
        wrong += 1;
        assert!(wrong < 1000, "no rate limit after 1000 requests");
    };
    assert_eq!(response.status(), 429);
    assert!(response.headers().contains_key("retry-after"));
    assert!(wrong >= 10, "{wrong}");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn workspace_files_are_written_read_archived_diffed_and_deleted() {
    let server = InProcessServer::start().await;
    let project = server.project("p").await;
    let workspace = server.default_workspace(&project).await;
    let (writer, reader) = (
        server.token(Scope::Write, Some(&project)).await,
        server.token(Scope::Read, Some(&project)).await,
    );
    let other = server.project("other").await;
    let foreign = server.token(Scope::Admin, Some(&other)).await;
    let url = |path: &str| format!("{}/api/workspaces/{workspace}/{path}", server.url);
    let put = |token: &str, path: &str, body: &'static str| {
        let request = server.http.put(url(path)).bearer_auth(token).body(body);
        async move { request.send().await.unwrap().status().as_u16() }
    };
    let get = |token: &str, path: &str| {
        let request = server.http.get(url(path)).bearer_auth(token);
        async move {
            let response = request.send().await.unwrap();
            (response.status().as_u16(), response.bytes().await.unwrap())
        }
    };
    assert_eq!(put(&reader, "files/a.txt", "x").await, 403);
    assert_eq!(put(&foreign, "files/a.txt", "x").await, 404);
    assert_eq!(put(&writer, "files/src/a%20b.txt", "hello").await, 200);
    assert_eq!(put(&writer, "files/%2e%2e/x", "x").await / 100, 4);
    assert_eq!(put(&writer, "files/..%2f..%2fx", "x").await, 400);
    assert_eq!(get(&reader, "files/src/a%20b.txt").await, (200, "hello".into()));
    assert_eq!(get(&foreign, "files/src/a%20b.txt").await.0, 404);
    assert_eq!(get(&reader, "files/none").await.0, 404);
    let (status, listing) = get(&reader, "files/").await;
    let listing: Value = serde_json::from_slice(&listing).unwrap();
    assert_eq!(
        (
            status,
            &listing["entries"][0]["name"],
            &listing["entries"][0]["type"]
        ),
        (200, &json!("src"), &json!("directory"))
    );
    let response = server
        .http
        .get(url("files/src/a%20b.txt"))
        .bearer_auth(&reader)
        .send()
        .await
        .unwrap();
    assert_eq!(response.headers()["content-type"], "application/octet-stream");
    assert_eq!(response.headers()["x-content-type-options"], "nosniff");
    assert!(
        response.headers()["content-security-policy"]
            .to_str()
            .unwrap()
            .contains("sandbox")
    );
    let (_, archive) = get(&reader, "archive").await;
    let mut tar = tar::Archive::new(flate2::read::GzDecoder::new(&archive[..]));
    let mut entries = tar.entries().unwrap().map(|e| {
        let mut e = e.unwrap();
        let mut text = String::new();
        e.read_to_string(&mut text).unwrap();
        (e.path().unwrap().display().to_string(), text)
    });
    assert!(entries.any(|e| e == ("src/a b.txt".to_owned(), "hello".to_owned())));
    let (_, diff) = server
        .tool(&reader, "workspace_diff", json!({ "workspace_id": workspace }))
        .await;
    assert!(diff["diff"].as_str().unwrap().contains("+hello"), "{diff}");
    let delete = server
        .http
        .delete(url("files/src/a%20b.txt"))
        .bearer_auth(&writer);
    assert_eq!(delete.send().await.unwrap().status(), 200);
    assert_eq!(get(&reader, "files/src/a%20b.txt").await.0, 404);
    let (_, log) = server
        .tool(
            &server.admin,
            "audit_list",
            json!({ "action": "workspace_file_put" }),
        )
        .await;
    assert!(
        log["entries"]
            .as_array()
            .unwrap()
            .iter()
            .any(|e| e["outcome"] == "ok" && e["project_id"] == json!(project)),
        "{log}"
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_sessions_events_are_replayed_then_live() {
    let server = InProcessServer::start().await;
    let project = server.project("p").await;
    let session = server.session(&project, None).await;
    let events = server.app.store.events();
    let status = |status| EventBody::Status { status, reason: None };
    events
        .append(
            &session,
            vec![status(SessionStatus::Starting), status(SessionStatus::Running)],
        )
        .await
        .unwrap();
    let path = format!("/api/sessions/{session}/events");
    let reader = server.token(Scope::Read, Some(&project)).await;
    let mut stream = SseReader::new(server.get(&path).bearer_auth(&reader).send().await.unwrap());
    for index in 0..2 {
        let frame = stream.next().await.unwrap();
        assert_eq!(
            (frame.id, &frame.data["index"]),
            (Some(index.to_string()), &json!(index))
        );
    }
    events
        .append(&session, vec![status(SessionStatus::Idle)])
        .await
        .unwrap();
    let live = stream.next().await.unwrap();
    assert_eq!(
        (live.event.as_deref(), &live.data["status"]),
        (None, &json!("idle"))
    );
    let mut resumed = SseReader::new(
        server
            .get(&path)
            .bearer_auth(&reader)
            .header("last-event-id", "1")
            .send()
            .await
            .unwrap(),
    );
    assert_eq!(resumed.next().await.unwrap().data["index"], 2);
    let mut since = SseReader::new(
        server
            .get(&format!("{path}?since_index=0"))
            .bearer_auth(&reader)
            .send()
            .await
            .unwrap(),
    );
    assert_eq!(since.next().await.unwrap().data["index"], 1);
    let bad = server
        .get(&format!("{path}?since=0"))
        .bearer_auth(&reader)
        .send()
        .await
        .unwrap();
    assert_eq!(bad.status(), 400);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_stream_ends_with_its_token() {
    let server = InProcessServer::start().await;
    let project = server.project("p").await;
    let session = server.session(&project, None).await;
    let (_, made) = server
        .tool(
            &server.admin,
            "token_create",
            json!({ "name": "n", "scope": "read" }),
        )
        .await;
    let path = format!("/api/sessions/{session}/events");
    let token = made["token"].as_str().unwrap();
    let mut stream = SseReader::new(server.get(&path).bearer_auth(token).send().await.unwrap());
    server
        .tool(
            &server.admin,
            "token_revoke",
            json!({ "token_id": made["token_id"] }),
        )
        .await;
    assert_eq!(stream.next().await, None);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_debugger_streams_only_what_a_token_may_see() {
    let server = InProcessServer::start().await;
    let (here, there) = (server.project("here").await, server.project("there").await);
    let (ours, theirs) = (
        server.session(&here, None).await,
        server.session(&there, None).await,
    );
    let reader = server.token(Scope::Read, Some(&here)).await;
    let debugger = server.app.store.debugger();
    for session in [&theirs, &ours] {
        debugger.record(Some(session.clone()), None, DebugBody::TeardownStarted {});
    }
    let mut stream = SseReader::new(
        server
            .get("/api/debugger")
            .bearer_auth(&reader)
            .send()
            .await
            .unwrap(),
    );
    assert_eq!(stream.next().await.unwrap().data["session_id"], json!(ours));
    let (_, polled) = server
        .tool(
            &reader,
            "debugger_events",
            json!({ "kinds": ["teardown_started"] }),
        )
        .await;
    assert_eq!(polled["events"].as_array().unwrap().len(), 1, "{polled}");
    assert_eq!(polled["last_index"], polled["events"][0]["index"]);
    let foreign = server
        .get(&format!("/api/debugger?session_id={theirs}"))
        .bearer_auth(&reader)
        .send()
        .await
        .unwrap();
    assert_eq!(foreign.status(), 404);
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn env_is_masked_wherever_it_is_shown() {
    let server = InProcessServer::start().await;
    let (_, project) = server
        .tool(
            &server.admin,
            "project_create",
            json!({ "name": "p", "env": { "KEY": "hush" } }),
        )
        .await;
    let id = &project["project_id"];
    let workspace = json!({ "project_id": id, "env": { "KEY": "hush" } });
    let agent = json!({ "slug": "quiet", "definition": { "name": "Q", "prompt": "p", "env": { "KEY": "hush", "REF": "${env:HOME}" } } });
    for (tool, arguments) in [
        ("workspace_create", workspace),
        ("project_get", json!({ "project_id": id })),
        ("project_list", json!({})),
        ("workspace_list", json!({ "project_id": id })),
        ("agent_put", agent),
        ("agent_get", json!({ "slug": "quiet" })),
        ("agent_list", json!({})),
        ("audit_list", json!({})),
    ] {
        let (status, body) = server.tool(&server.admin, tool, arguments).await;
        assert_eq!(status, 200, "{tool}: {body}");
        assert!(!body.to_string().contains("hush"), "{tool}: {body}");
    }
    // Putting the masked definition back keeps the stored value.
    let (_, shown) = server
        .tool(&server.admin, "agent_get", json!({ "slug": "quiet" }))
        .await;
    server
        .tool(
            &server.admin,
            "agent_put",
            json!({ "slug": "quiet", "definition": shown["definition"] }),
        )
        .await;
    let kept = server.app.library.agent(&"quiet".parse().unwrap()).unwrap();
    assert_eq!(kept.definition.env["KEY"], "hush");
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_count_actions_by_outcome() {
    let server = InProcessServer::start().await;
    server.tool(&server.admin, "project_list", json!({})).await;
    let text = server
        .get("/metrics")
        .bearer_auth(&server.admin)
        .send()
        .await
        .unwrap()
        .text()
        .await
        .unwrap();
    assert!(
        text.contains("oubliette_actions_total{action=\"project_list\",outcome=\"ok\"} 1"),
        "{text}"
    );
    server.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lists_are_paged() {
    let server = InProcessServer::start().await;
    for n in 0..5 {
        server.project(&format!("paged {n}")).await;
    }
    let (mut seen, mut cursor) = (Vec::new(), Value::Null);
    loop {
        let mut arguments = json!({ "limit": 2, "name_contains": "paged" });
        if !cursor.is_null() {
            arguments["cursor"] = cursor;
        }
        let (_, page) = server.tool(&server.admin, "project_list", arguments).await;
        seen.extend(
            page["projects"]
                .as_array()
                .unwrap()
                .iter()
                .map(|p| p["name"].as_str().unwrap().to_owned()),
        );
        cursor = page["next_cursor"].clone();
        if cursor.is_null() {
            break;
        }
    }
    seen.sort();
    assert_eq!(seen, ["paged 0", "paged 1", "paged 2", "paged 3", "paged 4"]);
    let (status, _) = server
        .tool(&server.admin, "project_list", json!({ "cursor": "rubbish" }))
        .await;
    assert_eq!(status, 400);
    server.stop().await;
}
