//! Calls while no context is installed: they wait for one that is being built, and fail when none is.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod plane_support;

use oubliette_protocol::{ErrorCode, tool::CallResult};
use oubliette_tools::{CallContext, RequestedTool, ToolCallError};
use plane_support::{PlaneFixture, from_agent, reader, within_timeout};
use serde_json::json;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;

/// A plane with the built-in `@files/fs_read` installed, and a file `f` to read.
async fn fixture() -> PlaneFixture {
    let fixture = PlaneFixture::new();
    fixture.file("f", "content");
    fixture
        .lenders
        .declare(json!({"caller_id":"myapp","caller_tools":[{"name":"send"}]}));
    fixture
        .install(json!({"use":["files"]}), &[reader("files")])
        .await;
    fixture
}

#[tokio::test]
async fn without_a_context_nothing_can_be_called() {
    let fixture = fixture().await;
    let changes = fixture.plane.changes();
    let context = fixture.plane.uninstall().unwrap();
    assert!(changes.has_changed().unwrap());
    for tool in ["files_fs_read", "myapp_send", "session_events", "oubliette_x"] {
        assert_eq!(
            fixture.call(tool, json!({})).await.unwrap_err().code,
            ErrorCode::Unavailable
        );
    }
    assert!(fixture.listed().is_empty() && fixture.plane.base_tools().is_empty());
    context.teardown().await;
    fixture.plane.install(context);
    assert!(
        fixture.call("files_fs_read", json!({"path":"f"})).await.is_err(),
        "a torn down context stays closed"
    );
}

/// Starts a call of `@files/fs_read` on `f` and waits until it waits for a context.
async fn waiting_call(
    fixture: &PlaneFixture,
    cancel: &CancellationToken,
) -> JoinHandle<Result<CallResult, ToolCallError>> {
    let plane = fixture.plane.clone();
    let ctx = CallContext {
        cancel: cancel.clone(),
        ..CallContext::default()
    };
    let arguments = json!({"path":"f"}).as_object().unwrap().clone();
    let tool = RequestedTool::ByName("files_fs_read".into());
    let call = tokio::spawn(async move { plane.call(tool, arguments, from_agent(), ctx).await });
    // The test's runtime has one thread: after this the call has run as far as it can.
    tokio::task::yield_now().await;
    assert!(!call.is_finished(), "the call waits");
    call
}

#[tokio::test]
async fn a_call_made_while_a_context_is_built_runs_in_that_context() {
    let fixture = fixture().await;
    let context = fixture.plane.uninstall().unwrap();
    let building = fixture.plane.begin_build();
    let call = waiting_call(&fixture, &CancellationToken::new()).await;
    fixture.plane.install(context);
    drop(building);
    let result = within_timeout("the call", call).await.unwrap().unwrap();
    assert_eq!(result.structured_content.unwrap()["content"], "content");
}

#[tokio::test]
async fn a_call_that_waits_for_a_context_ends_with_the_build_or_its_own_cancellation() {
    let fixture = fixture().await;
    fixture.plane.uninstall().unwrap();
    let (first, second) = (fixture.plane.begin_build(), fixture.plane.begin_build());
    let cancel = CancellationToken::new();
    let cancelled = waiting_call(&fixture, &cancel).await;
    let left = waiting_call(&fixture, &CancellationToken::new()).await;
    cancel.cancel();
    let error = within_timeout("the cancelled call", cancelled)
        .await
        .unwrap()
        .unwrap_err();
    assert!(
        matches!(&error, ToolCallError::Failed(error) if error.message.contains("cancelled")),
        "{error}"
    );
    drop(first);
    tokio::task::yield_now().await;
    assert!(!left.is_finished(), "another build is in progress");
    drop(second);
    let error = within_timeout("the other call", left).await.unwrap().unwrap_err();
    assert_eq!(error, ToolCallError::NotReady);
    assert_eq!(fixture.plane.in_flight(), 0);
}
