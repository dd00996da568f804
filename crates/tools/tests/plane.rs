//! The gate: calls of every source, what it blocks, and what the debugger records.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod plane_support;

use oubliette_protocol::{
    Error, ErrorCode, Principal, Scope, TokenId,
    tool::{ToolAddress, ToolSource},
};
use oubliette_tools::{CallContext, CallOrigin, RequestedTool};
use plane_support::{PlaneFixture, from_agent, reader, within_timeout};
use serde_json::{Value, json};

fn other_token() -> CallOrigin {
    CallOrigin::Outside(Principal {
        token_id: Some(TokenId::generate()),
        scope: Scope::Write,
        project: None,
        inside: None,
    })
}

async fn fixture(tools: Value) -> PlaneFixture {
    let fixture = PlaneFixture::new();
    fixture.file("f", "content");
    fixture.lenders.declare(json!({"caller_id":"myapp","caller_tools":[
        {"name":"send","inputSchema":{"type":"object","properties":{"n":{"type":"integer"}},"required":["n"]}},
        {"name":"both"}, {"name":"wait"}, {"name":"deaf"}]}));
    fixture
        .lenders
        .declare(json!({"caller_id":"other-app","caller_tools":[{"name":"both"}]}));
    fixture.install(tools, &[reader("files"), reader("notes")]).await;
    fixture
}

#[tokio::test]
async fn every_source_answers_through_the_gate() {
    let fixture = fixture(json!({"use":["files"],"aliases":{"read":"@files/fs_read"}})).await;
    for called in ["read", "@files/fs_read", "files_fs_read"] {
        assert_eq!(
            fixture
                .call(called, json!({"path":"f"}))
                .await
                .unwrap()
                .joined_text(),
            "content"
        );
    }
    let lent = fixture
        .call("myapp_send", json!({"n":1}))
        .await
        .unwrap()
        .structured_content
        .unwrap();
    assert_eq!(
        (&lent["caller"], &lent["canonical"]),
        (&json!("myapp"), &json!("myapp_send"))
    );
    let own = fixture
        .call("oubliette_session_list", json!({"a":1}))
        .await
        .unwrap()
        .structured_content
        .unwrap();
    assert_eq!(
        (&own["own"], &own["canonical"]),
        (&json!("session_list"), &json!("oubliette_session_list"))
    );
    let base = fixture
        .call("session_events", json!({}))
        .await
        .unwrap()
        .structured_content
        .unwrap();
    assert_eq!(base, json!({"base":"session_events"}));

    let calls = fixture.recorder.of("tool_call");
    let seen: Vec<(&str, &str, &str)> = calls
        .iter()
        .map(|c| {
            (
                c["tool"].as_str().unwrap(),
                c["canonical"].as_str().unwrap(),
                c["source"].as_str().unwrap(),
            )
        })
        .collect();
    assert_eq!(
        seen,
        [
            ("read", "@files/fs_read", "catalog"),
            ("@files/fs_read", "@files/fs_read", "catalog"),
            ("files_fs_read", "@files/fs_read", "catalog"),
            ("myapp_send", "myapp_send", "caller"),
            ("oubliette_session_list", "oubliette_session_list", "oubliette"),
            ("session_events", "session_events", "base"),
        ]
    );
    assert!(
        calls
            .iter()
            .all(|c| c["ok"] == true && c["duration_ms"].as_f64().unwrap() >= 0.0)
    );
    assert_eq!(calls[0]["arguments"], json!({"path":"f"}));
    assert_eq!(calls[0]["result"]["structuredContent"]["content"], "content");
}

#[tokio::test]
async fn call_raw_returns_the_sources_own_value() {
    let fixture = fixture(json!({"use":["files"]})).await;
    let value = |address: ToolAddress, arguments: Value| {
        let arguments = arguments.as_object().unwrap().clone();
        let call = fixture
            .plane
            .call_raw(address, arguments, from_agent(), CallContext::default());
        async {
            call.await
                .map_err(Error::from)
                .map(|(_, raw)| serde_json::from_str::<Value>(raw.get()).unwrap())
        }
    };
    let send = ToolAddress::Caller {
        tool: "send".into(),
        caller_id: None,
    };
    assert_eq!(value(send.clone(), json!({"n":1})).await.unwrap()["tool"], "send");
    assert_eq!(
        value(send, json!({"n":"1"})).await.unwrap_err().code,
        ErrorCode::InvalidArgument,
        "the schema is obeyed"
    );
    let both = |id: Option<&str>| ToolAddress::Caller {
        tool: "both".into(),
        caller_id: id.map(|i| i.parse().unwrap()),
    };
    let ambiguous = value(both(None), json!({})).await.unwrap_err();
    assert_eq!(ambiguous.code.rpc_code(), -32602);
    assert_eq!(
        value(both(Some("other-app")), json!({})).await.unwrap()["caller"],
        "other-app"
    );
    assert_eq!(
        value(both(Some("nobody")), json!({})).await.unwrap_err().code,
        ErrorCode::NotFound
    );
    assert_eq!(
        value(ToolAddress::Oubliette("x".into()), json!({}))
            .await
            .unwrap()["own"],
        "x"
    );
    assert_eq!(
        value(ToolAddress::Base("project_list".into()), json!({}))
            .await
            .unwrap(),
        json!({"base":"project_list"})
    );
    assert_eq!(
        value(ToolAddress::Base("project_delete".into()), json!({}))
            .await
            .unwrap_err()
            .code,
        ErrorCode::NotFound
    );
    let catalog = value(ToolAddress::Catalog("files_fs_read".into()), json!({"path":"f"}))
        .await
        .unwrap();
    assert_eq!(catalog["isError"], false);
}

#[tokio::test]
async fn a_lent_tool_is_looked_up_once_per_call() {
    let fixture = fixture(json!({"use":["files"]})).await;
    let address = ToolAddress::Caller {
        tool: "send".into(),
        caller_id: Some("myapp".parse().unwrap()),
    };
    for tool in [RequestedTool::ByName("myapp_send".into()), address.into()] {
        let before = fixture.lenders.lookups();
        let arguments = json!({"n":1}).as_object().unwrap().clone();
        let called = fixture
            .plane
            .call_raw(tool, arguments, from_agent(), CallContext::default());
        let (source, _) = within_timeout("the call", called).await.unwrap();
        assert_eq!(source, ToolSource::Caller);
        assert_eq!(fixture.lenders.lookups(), before + 1);
    }
}

#[tokio::test]
async fn blocked_tool_invoked() {
    let fixture = fixture(json!({"use":["files","notes"],"allowed":["@files/*"]})).await;
    let blocked = [
        ("@notes/fs_read", Some("@notes/fs_read")),
        ("notes_fs_read", Some("@notes/fs_read")),
        ("@other/x", Some("@other/x")),
        ("other_x", None),
    ];
    for (tool, canonical) in blocked {
        let error = fixture.call(tool, json!({})).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::NotAllowed, "{tool}");
        assert!(
            error.message.contains(tool) && error.message.contains("writer"),
            "{}",
            error.message
        );
        let event = fixture.recorder.of("tool_blocked").pop().unwrap();
        assert_eq!(
            (
                event["tool"].as_str(),
                event.get("canonical").and_then(Value::as_str)
            ),
            (Some(tool), canonical)
        );
    }
    for unknown in ["nope", "files_fs_raed", "@files/none", &"x".repeat(10_000)] {
        let error = fixture.call(unknown, json!({})).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::NotFound, "{}", error.message);
        assert!(error.message.len() < 500);
    }
    let hint = fixture.call("files_fs_raed", json!({})).await.unwrap_err();
    assert!(
        hint.message.contains("Did you mean files_fs_read?"),
        "{}",
        hint.message
    );
    assert_eq!(fixture.recorder.of("tool_blocked").len(), 9);
    assert!(
        fixture.recorder.of("tool_call").is_empty(),
        "nothing reached a source"
    );
    assert_eq!(fixture.plane.in_flight(), 0);
}

#[tokio::test]
async fn allowed_tool_invoked_and_wildcard_allow_all() {
    for allowed in [
        json!([]),
        json!(["*"]),
        json!(["@files/*"]),
        json!(["files_fs_read"]),
    ] {
        let fixture = fixture(json!({"use":["files"],"allowed":allowed})).await;
        assert!(fixture.call("@files/fs_read", json!({"path":"f"})).await.is_ok());
        assert_eq!(fixture.recorder.of("tool_call").len(), 1);
    }
}

#[tokio::test]
async fn denied_governs_every_source() {
    let fixture = fixture(json!({"use":["files"],"aliases":{"r":"@files/fs_read"},
        "denied":["@files/*","myapp_*","session_message","oubliette_session_*"]}))
    .await;
    for tool in [
        "r",
        "@files/fs_read",
        "myapp_send",
        "session_message",
        "oubliette_session_list",
        "@files/none",
    ] {
        let error = fixture.call(tool, json!({"n":1})).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::NotAllowed, "{tool}: {}", error.message);
    }
    let send = ToolAddress::Caller {
        tool: "send".into(),
        caller_id: None,
    };
    assert_eq!(
        fixture
            .call_as(send, json!({"n":1}), from_agent())
            .await
            .unwrap_err()
            .code,
        ErrorCode::NotAllowed
    );
    let own = fixture
        .call_as(
            ToolAddress::Oubliette("session_get".into()),
            json!({}),
            from_agent(),
        )
        .await;
    assert_eq!(own.unwrap_err().code, ErrorCode::NotAllowed);
    for tool in ["other-app_both", "session_events", "oubliette_project_list"] {
        assert!(fixture.call(tool, json!({})).await.is_ok(), "{tool}");
    }
    assert_eq!(fixture.plane.base_tools().len(), 2);
    assert!(fixture.listed().is_empty());
    assert_eq!(
        fixture
            .plane
            .list_own("good")
            .await
            .unwrap()
            .iter()
            .filter(|row| row.allowed)
            .count(),
        1
    );
}

#[tokio::test]
async fn another_token_may_not_call_a_callers_tool() {
    let fixture = fixture(json!({"use":[]})).await;
    let any = RequestedTool::ByName("myapp_send".into());
    let error = fixture
        .call_as(any, json!({"n":1}), other_token())
        .await
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::PermissionDenied);
    assert_eq!(fixture.recorder.of("tool_blocked").len(), 1);
}

#[tokio::test]
async fn tool_list_explains_every_tool() {
    let fixture = fixture(json!({"use":["files","notes"],"allowed":["read"],"aliases":{"read":"@files/fs_read","gone":"@notes/none"}})).await;
    let read = fixture.row("read");
    assert_eq!(
        (read.canonical.as_str(), read.source, read.allowed, read.available),
        ("@files/fs_read", ToolSource::Catalog, true, true)
    );
    assert_eq!(read.aliases, ["files_fs_read"]);
    assert!(read.reason.to_string().contains("\"read\" in tools.allowed"));
    let notes = fixture.row("@notes/fs_read");
    assert!(!notes.allowed && notes.reason.to_string().contains("not named in tools.allowed"));
    assert!(!fixture.row("gone").available);
    assert_eq!(fixture.row("myapp_send").source, ToolSource::Caller);
    assert_eq!(fixture.row("session_message").source, ToolSource::Base);
    assert_eq!(fixture.plane.list().servers.len(), 2);
    assert_eq!(fixture.listed(), ["read"]);
}

#[tokio::test]
async fn a_lent_name_is_not_listed_twice() {
    let fixture = fixture(json!({"use":["files"],"aliases":{"myapp_send":"@files/fs_read"}})).await;
    assert!(fixture.listed().is_empty());
    let rows: Vec<_> = fixture
        .plane
        .list()
        .tools
        .into_iter()
        .filter(|row| row.name == "myapp_send" && row.available)
        .collect();
    assert_eq!(rows.len(), 1);
    assert_eq!(rows[0].source, ToolSource::Caller);
    fixture.lenders.declared.lock().clear();
    assert_eq!(fixture.listed(), ["myapp_send"]);
    assert!(
        fixture
            .plane
            .name_conflict("myapp_send")
            .unwrap()
            .contains("@files/fs_read")
    );
    assert!(
        fixture.plane.name_conflict("session_message").is_some()
            && fixture.plane.name_conflict("myapp_x").is_none()
    );
}

#[tokio::test]
async fn secrets_never_reach_the_debugger_and_values_are_kept_to_a_size() {
    let fixture = fixture(json!({"use":["files"]})).await;
    fixture.plane.hide_secret("oub_thekey");
    (0..10_000).for_each(|n| fixture.plane.hide_secret(&format!("made-up-{n}")));
    fixture.file("big", "x".repeat(200_000));
    let send = json!({"n":1,"note":"the key is oub_thekey"});
    let answer = fixture.call("myapp_send", send).await.unwrap();
    assert!(
        answer.joined_text().contains("oub_thekey"),
        "the tool itself gets what it was sent"
    );
    fixture
        .call("files_fs_read", json!({"path":"oub_thekey"}))
        .await
        .unwrap_err();
    fixture
        .call("files_fs_read", json!({"path":"big"}))
        .await
        .unwrap();
    let text = json!(fixture.recorder.all()).to_string();
    assert!(!text.contains("oub_thekey"), "{text}");
    let big = fixture.recorder.of("tool_call").pop().unwrap();
    assert_eq!(big["result"]["truncated"], true);
    assert!(big.to_string().len() < 2 * 64 * 1024);
}

#[tokio::test]
async fn what_is_in_flight_can_be_waited_for_and_cancelled() {
    let fixture = fixture(json!({"use":[]})).await;
    let call = |tool: &str| {
        let (plane, tool) = (fixture.plane.clone(), RequestedTool::ByName(tool.into()));
        tokio::spawn(async move {
            plane
                .call(tool, Default::default(), from_agent(), CallContext::default())
                .await
        })
    };
    let (polite, deaf) = (call("myapp_wait"), call("myapp_deaf"));
    within_timeout("both calls", async {
        while fixture.plane.in_flight() < 2 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    assert_eq!(fixture.plane.cancel_all("the agent is being switched"), 2);
    within_timeout("the drain", fixture.plane.wait_drained()).await;
    for ended in [polite, deaf] {
        let error = within_timeout("the end", ended).await.unwrap().unwrap_err();
        let error = Error::from(error);
        assert_eq!(
            (error.code, error.message.as_str()),
            (ErrorCode::Unavailable, "the agent is being switched")
        );
    }
    let calls = fixture.recorder.of("tool_call");
    assert!(calls.len() == 2 && calls.iter().all(|c| c["ok"] == false));
}

#[tokio::test]
async fn a_call_nobody_waits_for_is_still_recorded() {
    let fixture = fixture(json!({"use":[]})).await;
    let plane = fixture.plane.clone();
    let call = tokio::spawn(async move {
        plane
            .call(
                RequestedTool::ByName("myapp_deaf".into()),
                Default::default(),
                from_agent(),
                CallContext::default(),
            )
            .await
    });
    within_timeout("the call", async {
        while fixture.plane.in_flight() == 0 {
            tokio::task::yield_now().await;
        }
    })
    .await;
    call.abort();
    fixture
        .recorder
        .wait("its record", |event| {
            event["kind"] == "tool_call" && event["ok"] == false
        })
        .await;
    assert_eq!(fixture.plane.in_flight(), 0);
}

#[tokio::test]
async fn a_denied_tool_is_not_allowed_whatever_way_it_is_asked_for() {
    let fixture = fixture(json!({"use":["files"],
        "denied":["session_message","myapp_*","oubliette_*"]}))
    .await;
    // A client to which they were not listed asks for them as for any other name.
    for tool in ["session_message", "myapp_send", "oubliette_project_list"] {
        let asked = ToolAddress::Catalog(tool.into());
        let error = fixture.call_as(asked, json!({}), from_agent()).await.unwrap_err();
        assert_eq!(error.code, ErrorCode::NotAllowed, "{tool}: {error}");
        let text = error.to_string();
        assert!(text.contains(tool) && text.contains("writer"), "{text}");
    }
    let blocked = fixture.recorder.of("tool_blocked");
    assert_eq!(blocked.len(), 3);
    assert_eq!(blocked[0]["canonical"], "session_message");
    assert!(fixture.plane.denies("myapp_send") && !fixture.plane.denies("project_list"));
    // A name that no source has is not found, rather than not allowed.
    let nobody = fixture
        .call_as(ToolAddress::Catalog("nobodys".into()), json!({}), from_agent())
        .await;
    assert_eq!(nobody.unwrap_err().code, ErrorCode::NotFound);
}

#[tokio::test]
async fn secret_arguments_of_own_tools_are_not_in_the_debugger() {
    let fixture = fixture(json!({"use":["files"]})).await;
    let origin = CallOrigin::Inside {
        api_key: Some("good".into()),
    };
    let given = json!({"name":"p","env":{"DATABASE":"sesame"},"definition":{"headers":{"x":"poppy"}},"token":"oub_linseed"});
    fixture
        .call_as(ToolAddress::Oubliette("project_create".into()), given, origin)
        .await
        .unwrap();
    let calls = fixture.recorder.of("tool_call");
    let text = calls[0].to_string();
    for secret in ["sesame", "poppy", "linseed"] {
        assert!(!text.contains(secret), "{text}");
    }
    assert!(
        text.contains("DATABASE") && text.contains("project_create"),
        "{text}"
    );
}
