//! Rules that look at the arguments of a call, at the gate.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod plane_support;

use std::sync::atomic::Ordering;

use oubliette_protocol::{ErrorCode, tool::ToolAddress};
use oubliette_tools::{CallContext, RequestedTool};
use plane_support::{PlaneFixture, from_agent, reader};
use serde_json::{Value, json};

async fn fixture(tools: Value) -> PlaneFixture {
    let fixture = PlaneFixture::new();
    for file in ["f", "secret", "notes/n"] {
        fixture.file(file, "content");
    }
    fixture
        .lenders
        .declare(json!({"caller_id":"myapp","caller_tools":[{"name":"send"}]}));
    fixture.install(tools, &[reader("files"), reader("notes")]).await;
    fixture
}

fn path_is(pattern: &str) -> Value {
    json!({"properties":{"path":{"type":"string","pattern":pattern}},"required":["path"]})
}

#[tokio::test]
async fn an_entry_with_when_holds_for_calls_with_fitting_arguments_alone() {
    let fixture = fixture(
        json!({"use":["files","notes"],"aliases":{"read":"@files/fs_read"},
        "allowed":[{"tool":"read","when":path_is("^(f|secret)$")},"@notes/*"],
        "denied":[{"tool":"*fs_read","when":path_is("secret")}]}),
    )
    .await;
    for called in ["read", "@files/fs_read", "files_fs_read"] {
        let read = fixture.call(called, json!({"path":"f"})).await.unwrap();
        assert_eq!(read.joined_text(), "content", "{called}");
        let blocked = fixture.call(called, json!({"path":"secret"})).await.unwrap_err();
        assert_eq!(blocked.code, ErrorCode::NotAllowed);
        assert!(
            blocked.message.contains("tools.denied") && blocked.message.contains(called),
            "{blocked}"
        );
        let unlisted = fixture.call(called, json!({"path":"notes/n"})).await.unwrap_err();
        assert_eq!(unlisted.code, ErrorCode::NotAllowed);
        assert!(unlisted.message.contains("tools.allowed"), "{unlisted}");
    }
    // `denied` wins over a plain entry of `allowed`, of the other server too.
    assert!(
        fixture
            .call("notes_fs_read", json!({"path":"notes/n"}))
            .await
            .is_ok()
    );
    let blocked = fixture
        .call("notes_fs_read", json!({"path":"secret"}))
        .await
        .unwrap_err();
    assert_eq!(blocked.code, ErrorCode::NotAllowed);
    let events = fixture.recorder.of("tool_blocked");
    assert_eq!(events.len(), 7);
    assert_eq!(events[0]["canonical"], "@files/fs_read");
    assert_eq!(fixture.recorder.of("tool_call").len(), 4);
    let row = fixture.row("read");
    assert!(row.allowed, "with some arguments it may be called");
    let rules = serde_json::to_value(&row.rules).unwrap();
    assert_eq!(
        rules,
        json!([{"list":"denied","entry":{"tool":"*fs_read","when":path_is("secret")}},
               {"list":"allowed","entry":{"tool":"read","when":path_is("^(f|secret)$")}}])
    );
}

#[tokio::test]
async fn a_denied_entry_with_when_governs_every_source() {
    let fixture = fixture(json!({"use":["files"],"denied":[
        {"tool":"*","when":{"required":["forbidden"]}}]}))
    .await;
    for tool in [
        "files_fs_read",
        "myapp_send",
        "oubliette_session_list",
        "session_events",
    ] {
        let blocked = fixture
            .call(tool, json!({"forbidden":1,"path":"f"}))
            .await
            .unwrap_err();
        assert_eq!(blocked.code, ErrorCode::NotAllowed, "{tool}");
        assert!(fixture.call(tool, json!({"path":"f"})).await.is_ok(), "{tool}");
    }
    let address = ToolAddress::Caller {
        tool: "send".into(),
        caller_id: None,
    };
    let arguments = json!({"forbidden":1}).as_object().unwrap().clone();
    let called = fixture.plane.call(
        RequestedTool::At(address),
        arguments,
        from_agent(),
        CallContext::default(),
    );
    assert!(called.await.is_err(), "an unprefixed name passes no rule by");
}

#[tokio::test]
async fn arguments_too_large_to_be_judged_at_once_are_judged_all_the_same() {
    let fixture = fixture(json!({"use":["files"],"denied":[
        {"tool":"myapp_*","when":{"properties":{"items":{"contains":{"const":"bad"}}},"required":["items"]}}]}))
    .await;
    let mut items = vec![json!("good"); 100_000];
    assert!(fixture.call("myapp_send", json!({"items":items})).await.is_ok());
    items.push(json!("bad"));
    let blocked = fixture
        .call("myapp_send", json!({"items":items}))
        .await
        .unwrap_err();
    assert_eq!(blocked.code, ErrorCode::NotAllowed);
}

#[tokio::test]
async fn an_edit_of_a_condition_holds_at_once() {
    let tools =
        |pattern: &str| json!({"use":["files"],"denied":[{"tool":"@files/*","when":path_is(pattern)}]});
    let fixture = PlaneFixture::new();
    fixture.file("f", "content");
    let context = fixture.install(tools("^x"), &[reader("files")]).await;
    assert!(fixture.call("files_fs_read", json!({"path":"f"})).await.is_ok());
    fixture
        .edit(&context, tools("^f"), &[reader("files")])
        .await
        .unwrap();
    assert!(fixture.call("files_fs_read", json!({"path":"f"})).await.is_err());
}

#[tokio::test]
async fn a_call_under_ask_waits_and_counts_as_in_flight() {
    let rule = json!({"tool":"*fs_read","when":path_is("secret")});
    let fixture = fixture(json!({"use":["files"],"ask":[rule, "myapp_*"]})).await;
    assert!(fixture.call("files_fs_read", json!({"path":"f"})).await.is_ok());
    assert!(
        fixture.approver.asked.lock().is_empty(),
        "other arguments ask nobody"
    );
    let waiting = fixture.call("files_fs_read", json!({"path":"secret"}));
    let allow = async {
        let mut drained = std::pin::pin!(fixture.plane.wait_drained());
        assert!(futures::poll!(drained.as_mut()).is_pending());
        assert_eq!(fixture.plane.in_flight(), 1);
        fixture.approver.answers.send_replace(Some(Ok(())));
    };
    let (read, ()) = tokio::join!(waiting, allow);
    assert_eq!(read.unwrap().joined_text(), "content");
    let asked = fixture.approver.asked.lock()[0].clone();
    assert_eq!(
        (asked.tool.as_str(), asked.canonical.as_str()),
        ("files_fs_read", "@files/fs_read")
    );
    assert_eq!(
        (asked.arguments, asked.rules),
        (json!({"path":"secret"}), vec![rule])
    );
    let refusal = oubliette_protocol::Error::not_allowed("a person denied it: no");
    fixture.approver.answers.send_replace(Some(Err(refusal)));
    let denied = fixture.call("myapp_send", json!({})).await.unwrap_err();
    assert_eq!(denied.code, ErrorCode::NotAllowed);
    assert_eq!(fixture.recorder.of("tool_blocked").len(), 1);
    assert_eq!(fixture.plane.in_flight(), 0);
}

#[tokio::test]
async fn nobody_is_asked_about_a_call_whose_arguments_are_denied_or_not_allowed() {
    let fixture = fixture(json!({"use":["files"],"ask":["@files/*"],
        "allowed":[{"tool":"@files/*","when":path_is("^(f|secret)$")}],
        "denied":[{"tool":"@files/*","when":path_is("secret")}]}))
    .await;
    fixture.approver.answers.send_replace(Some(Ok(())));
    for path in ["secret", "notes/n"] {
        let blocked = fixture
            .call("files_fs_read", json!({"path":path}))
            .await
            .unwrap_err();
        assert_eq!(blocked.code, ErrorCode::NotAllowed, "{path}");
    }
    assert!(fixture.approver.asked.lock().is_empty());
    assert!(fixture.call("files_fs_read", json!({"path":"f"})).await.is_ok());
    assert_eq!(fixture.approver.asked.lock().len(), 1);
}

#[tokio::test]
async fn a_waiting_call_is_cancelled_with_its_plane_and_meets_rules_edited_meanwhile() {
    let tools = |denied: Value| json!({"use":["files"],"ask":["@files/*"],"denied":denied});
    let fixture = PlaneFixture::new();
    fixture.file("f", "content");
    let context = fixture.install(tools(json!([])), &[reader("files")]).await;
    let waiting = fixture.call("files_fs_read", json!({"path":"f"}));
    let cancel = async {
        assert_eq!(fixture.plane.cancel_all("the agent is switched"), 1);
    };
    let (cancelled, ()) = tokio::join!(waiting, cancel);
    assert_eq!(cancelled.unwrap_err().message, "the agent is switched");
    let waiting = fixture.call("files_fs_read", json!({"path":"f"}));
    let edit = async {
        fixture
            .edit(&context, tools(json!(["@files/*"])), &[reader("files")])
            .await
            .unwrap();
        fixture.approver.answers.send_replace(Some(Ok(())));
    };
    let (blocked, ()) = tokio::join!(waiting, edit);
    assert_eq!(
        blocked.unwrap_err().code,
        ErrorCode::NotAllowed,
        "denied now, whatever was approved"
    );
}

#[tokio::test]
async fn an_approval_of_one_tool_is_none_of_another_to_which_its_alias_was_moved_meanwhile() {
    let tools = |target: &str| json!({"use":["files","notes"],"ask":["*fs_read"],"aliases":{"read":target}});
    let servers = [reader("files"), reader("notes")];
    let fixture = PlaneFixture::new();
    fixture.file("f", "content");
    fixture.meter.places.store(1, Ordering::Relaxed);
    let context = fixture.install(tools("@files/fs_read"), &servers).await;
    let waiting = fixture.call("read", json!({"path":"f"}));
    let edit = async {
        let edited = fixture.edit(&context, tools("@notes/fs_read"), &servers).await;
        edited.unwrap();
        fixture.approver.answers.send_replace(Some(Ok(())));
    };
    let (read, ()) = tokio::join!(waiting, edit);
    assert_eq!(
        read.unwrap().joined_text(),
        "content",
        "it has one place in the budget"
    );
    let asked = fixture.approver.asked.lock();
    let asked: Vec<&str> = asked.iter().map(|call| call.canonical.as_str()).collect();
    assert_eq!(asked, ["@files/fs_read", "@notes/fs_read"]);
}

#[tokio::test]
async fn nobody_is_asked_about_a_call_that_the_budget_refuses_and_each_is_counted_once() {
    let fixture = fixture(json!({"use":["files"],"ask":["@files/*"],"denied":["notes_*"]})).await;
    let left = || fixture.meter.places.load(Ordering::Relaxed);
    let counted = || fixture.meter.counted.load(Ordering::Relaxed);
    fixture.meter.places.store(3, Ordering::Relaxed);
    // Three at once: the places are taken before anybody has decided.
    let waiting = || fixture.call("files_fs_read", json!({"path":"f"}));
    let decide = async {
        assert_eq!(
            (fixture.approver.asked.lock().len(), left(), counted()),
            (3, 0, 0)
        );
        let refused = fixture
            .call("files_fs_read", json!({"path":"f"}))
            .await
            .unwrap_err();
        assert_eq!(refused.code, ErrorCode::LimitExceeded);
        fixture.approver.answers.send_replace(Some(Ok(())));
    };
    let (one, two, three, ()) = tokio::join!(waiting(), waiting(), waiting(), decide);
    assert!(one.is_ok() && two.is_ok() && three.is_ok());
    assert_eq!((fixture.approver.asked.lock().len(), counted()), (3, 3));
    assert_eq!(fixture.recorder.of("tool_blocked").len(), 1);
    // One that a person denies keeps its place, and one that a rule denies takes none; neither is counted.
    fixture.meter.places.store(2, Ordering::Relaxed);
    let refusal = oubliette_protocol::Error::not_allowed("a person denied it");
    fixture.approver.answers.send_replace(Some(Err(refusal)));
    assert!(waiting().await.is_err());
    assert!(fixture.call("notes_fs_read", json!({"path":"f"})).await.is_err());
    assert_eq!((left(), counted()), (1, 3));
    // One that asks nobody takes a place too.
    assert!(fixture.call("myapp_send", json!({})).await.is_ok());
    assert_eq!((left(), counted()), (0, 4));
    let refused = fixture.call("myapp_send", json!({})).await.unwrap_err();
    assert_eq!((refused.code, counted()), (ErrorCode::LimitExceeded, 4));
}
