//! The caller book with a real store and a real clock.

use std::{sync::Arc, time::Duration};

use futures::TryStreamExt as _;
use oubliette_protocol::{
    ErrorCode, Principal, Scope, SessionId, Slug, TokenId, WorkspaceId,
    caller::{Context, LentTool},
    event::{EventBody, Outcome, Status},
};
use oubliette_store::{DebugFilter, ProjectRow, SessionRow, Store, WorkspaceRow};
use oubliette_tools::{CallContext, Callers};
use serde_json::{Value, json};

use super::{CallerBook, Kind, PresenceKey, Rules, board::Board};

struct Desk {
    book: Arc<CallerBook>,
    board: Arc<Board>,
    store: Store,
    caller: Principal,
    _dir: tempfile::TempDir,
}

fn principal() -> Principal {
    Principal {
        token_id: Some(TokenId::generate()),
        scope: Scope::Write,
        project: None,
    }
}

async fn desk(rules: Rules) -> Desk {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("db")).await.unwrap();
    let session = SessionId::generate();
    insert(&store, &session).await;
    let board = Arc::new(Board::default());
    let book = CallerBook::new(session, store.clone(), board.clone(), rules);
    Desk {
        book,
        board,
        store,
        caller: principal(),
        _dir: dir,
    }
}

async fn insert(store: &Store, session: &SessionId) {
    let now = oubliette_store::now();
    let project_id = oubliette_protocol::ProjectId::generate();
    let workspace_id = WorkspaceId::generate();
    let agent: Slug = "a".parse().unwrap();
    let project = ProjectRow {
        project_id: project_id.clone(),
        name: "p".into(),
        description: String::new(),
        agent: None,
        env: Default::default(),
        api_key_scope: None,
        sandbox: json!({}),
        limits: json!({}),
        default_workspace: workspace_id.clone(),
        created_at: now,
        updated_at: now,
    };
    let workspace = WorkspaceRow {
        workspace_id: workspace_id.clone(),
        project_id: project_id.clone(),
        name: "w".into(),
        env: Default::default(),
        source: None,
        created_at: now,
    };
    store.project_create(project, workspace).await.unwrap();
    let row = SessionRow {
        session_id: session.clone(),
        project_id,
        workspace_id,
        agent,
        status: Status::Idle,
        reason: None,
        parent_id: None,
        root_id: session.clone(),
        depth: 0,
        turn: 0,
        created_at: now,
        updated_at: now,
        created_by: None,
        title: None,
        agent_session: None,
        isolation: None,
    };
    store.session_insert(row).await.unwrap();
}

impl Desk {
    async fn lend(
        &self,
        who: &Principal,
        mcp: Option<&str>,
        tools: &[&str],
    ) -> oubliette_protocol::Result<()> {
        let tools: Vec<Value> = tools.iter().map(|name| json!({ "name": name })).collect();
        let context = json!({ "caller_id": "myapp", "caller_tools": tools });
        let declaration = serde_json::from_value::<Context>(context)
            .unwrap()
            .check()
            .unwrap();
        self.book
            .declare(who, mcp.map(str::to_owned), declaration, |_| None)
            .await
    }

    fn tool(&self, name: &str) -> LentTool {
        let lent = self.book.declarations();
        lent[0].tools.iter().find(|t| t.name == name).unwrap().clone()
    }

    fn call(&self, name: &str) -> tokio::task::JoinHandle<oubliette_protocol::Result<Value>> {
        let (book, tool) = (self.book.clone(), self.tool(name));
        let caller = "myapp".parse().unwrap();
        tokio::spawn(async move {
            book.relay(&caller, &tool, json!({}), &CallContext::default())
                .await
        })
    }

    async fn next_request(&self, since: i64) -> (i64, String) {
        let mut since = since;
        loop {
            let found = self
                .store
                .events()
                .poll(self.book.session(), since, 1, Duration::from_secs(60))
                .await
                .unwrap();
            let event = &found[0];
            since = event.index;
            if let EventBody::CallerToolRequest { request_id, .. } = &event.body {
                return (event.index, request_id.to_string());
            }
        }
    }

    async fn outcomes(&self) -> Vec<Outcome> {
        // Whatever was appended before this is in the log after it.
        let last = EventBody::Delta { text: "mark".into() };
        self.store
            .events()
            .append(self.book.session(), vec![last])
            .await
            .unwrap();
        let log = self
            .store
            .events()
            .read(self.book.session(), -1, 10_000)
            .await
            .unwrap();
        let outcome = |body: &EventBody| {
            if let EventBody::CallerToolDone { outcome, .. } = body {
                Some(*outcome)
            } else {
                None
            }
        };
        log.iter().filter_map(|e| outcome(&e.body)).collect()
    }

    fn key(&self) -> PresenceKey {
        PresenceKey {
            principal: self.caller.token_id.clone(),
            caller_id: None,
            session: Some(self.book.session().clone()),
            mcp_session: None,
        }
    }
}

#[tokio::test]
async fn a_call_is_asked_answered_and_over() {
    let desk = desk(Rules::default()).await;
    desk.lend(&desk.caller, None, &["send"]).await.unwrap();
    let call = desk.call("send");
    let (_, id) = desk.next_request(-1).await;
    let stranger = principal();
    let refused = |who: &Principal, id: &str, both: bool| {
        let (book, who, id) = (desk.book.clone(), who.clone(), id.to_owned());
        async move {
            book.answer(&who, &id, Some(json!(1)), both.then(|| "x".into()))
                .await
                .unwrap_err()
                .code
        }
    };
    assert_eq!(refused(&desk.caller, &id, true).await, ErrorCode::InvalidArgument);
    assert_eq!(refused(&stranger, &id, false).await, ErrorCode::PermissionDenied);
    assert_eq!(
        refused(&desk.caller, "no-such-thing", false).await,
        ErrorCode::NotFound
    );
    desk.book
        .answer(&desk.caller, &id, Some(json!({"status":"sent"})), None)
        .await
        .unwrap();
    assert_eq!(call.await.unwrap().unwrap(), json!({"status":"sent"}));
    assert_eq!(refused(&desk.caller, &id, false).await, ErrorCode::Conflict);
    assert_eq!(refused(&stranger, &id, false).await, ErrorCode::PermissionDenied);
    assert_eq!(desk.outcomes().await, [Outcome::Answered]);
    desk.store.debugger().flush().await;
    let filter = DebugFilter {
        session: Some(desk.book.session().clone()),
        ..DebugFilter::default()
    };
    let refusals = desk.store.debugger().read(&filter, -1, 100).await.unwrap();
    assert_eq!(
        refusals
            .iter()
            .filter(|e| e.body.kind() == "answer_refused")
            .count(),
        5
    );
}

#[tokio::test]
async fn an_error_a_null_and_a_timeout_reach_the_agent_as_what_they_are() {
    let answering = desk(Rules::default()).await;
    answering.lend(&answering.caller, None, &["t"]).await.unwrap();
    let failing = answering.call("t");
    let (at, id) = answering.next_request(-1).await;
    let why = Some("recipient not found".into());
    answering
        .book
        .answer(&answering.caller, &id, Some(Value::Null), why)
        .await
        .unwrap();
    let error = failing.await.unwrap().unwrap_err();
    assert_eq!(
        (error.code, error.message.as_str()),
        (ErrorCode::ToolError, "recipient not found")
    );
    let nothing = answering.call("t");
    let (_, id) = answering.next_request(at).await;
    answering
        .book
        .answer(&answering.caller, &id, None, None)
        .await
        .unwrap();
    assert_eq!(nothing.await.unwrap().unwrap(), Value::Null);
    assert_eq!(answering.outcomes().await, [Outcome::Error, Outcome::Answered]);
    let silent = desk(Rules {
        timeout: Duration::from_millis(200),
        ..Rules::default()
    })
    .await;
    silent.lend(&silent.caller, None, &["t"]).await.unwrap();
    let late = silent.call("t");
    let (_, id) = silent.next_request(-1).await;
    assert_eq!(late.await.unwrap().unwrap_err().code, ErrorCode::Timeout);
    let refused = silent
        .book
        .answer(&silent.caller, &id, Some(json!(1)), None)
        .await
        .unwrap_err();
    assert_eq!(refused.code, ErrorCode::NotFound, "late is as good as unknown");
    assert_eq!(silent.outcomes().await, [Outcome::Timeout]);
}

#[tokio::test]
async fn a_caller_that_breaks_off_its_stream_has_left_and_one_that_returns_is_told_again() {
    let rules = Rules {
        grace: Duration::from_millis(100),
        ..Rules::default()
    };
    let desk = desk(rules).await;
    desk.lend(&desk.caller, None, &["t"]).await.unwrap();
    let stream = desk.board.hold(desk.key(), Kind::Stream);
    let lost = desk.call("t");
    let (at, _) = desk.next_request(-1).await;
    drop(stream);
    assert_eq!(
        lost.await.unwrap().unwrap_err().code,
        ErrorCode::CallerDisconnected
    );
    // Nobody is there: the same, and the log says so.
    let absent = desk.call("t");
    assert_eq!(
        absent.await.unwrap().unwrap_err().code,
        ErrorCode::CallerDisconnected
    );
    assert_eq!(
        desk.outcomes().await,
        [Outcome::Disconnected, Outcome::Disconnected]
    );
    let back = desk.board.hold(desk.key(), Kind::Stream);
    let (at, _) = desk.next_request(at).await;
    let kept = desk.call("t");
    let (_, id) = desk.next_request(at).await;
    let open: Vec<_> = desk.book.open_requests(&desk.key()).try_collect().await.unwrap();
    assert!(
        matches!(&open[..], [event] if matches!(&event.body, EventBody::CallerToolRequest { request_id, .. } if request_id.as_str() == id))
    );
    desk.book
        .answer(&desk.caller, &id, Some(json!("back")), None)
        .await
        .unwrap();
    assert_eq!(kept.await.unwrap().unwrap(), json!("back"));
    back.answered();
    assert!(
        desk.book.is_present(&"myapp".parse().unwrap()),
        "an answered poll counts for a while"
    );
}

#[tokio::test]
async fn on_stateful_mcp_only_the_declaring_session_counts() {
    let desk = desk(Rules {
        linger: Duration::ZERO,
        ..Rules::default()
    })
    .await;
    let app = "myapp".parse().unwrap();
    let stream = |mcp: &str| {
        let key = PresenceKey {
            session: None,
            mcp_session: Some(mcp.into()),
            ..desk.key()
        };
        desk.board.hold(key, Kind::Stream)
    };
    let other = stream("two");
    let before = stream("one");
    desk.lend(&desk.caller, Some("one"), &["t"]).await.unwrap();
    assert!(
        desk.book.is_present(&app),
        "a stream opened before the declaration speaks for it"
    );
    drop(before);
    assert!(
        !desk.book.is_present(&app),
        "another MCP session of the same token does not"
    );
    let again = stream("one");
    assert!(desk.book.is_present(&app));
    desk.board
        .leave(|declarer| declarer.mcp_session.as_deref() == Some("one"));
    assert!(!desk.book.is_present(&app), "closing the MCP session is leaving");
    drop((again, other));
}

#[tokio::test]
async fn a_caller_id_belongs_to_its_first_live_principal() {
    let desk = desk(Rules {
        grace: Duration::ZERO,
        ..Rules::default()
    })
    .await;
    let stranger = principal();
    desk.store
        .token_insert(oubliette_store::NewToken {
            token_id: desk.caller.token_id.clone().unwrap(),
            name: "t".into(),
            scope: Scope::Write,
            project_id: None,
            expires_at: None,
            hash: [1; 32],
            session_id: None,
        })
        .await
        .unwrap();
    desk.lend(&desk.caller, None, &["t"]).await.unwrap();
    assert_eq!(
        desk.lend(&stranger, None, &["t"]).await.unwrap_err().code,
        ErrorCode::Conflict
    );
    desk.lend(&desk.caller, None, &[]).await.unwrap();
    desk.lend(&stranger, None, &["t"]).await.unwrap();
    desk.lend(&stranger, None, &[]).await.unwrap();
    desk.lend(&desk.caller, None, &["t"]).await.unwrap();
    let open = desk.call("t");
    desk.next_request(-1).await;
    desk.store
        .token_revoke(desk.caller.token_id.as_ref().unwrap())
        .await
        .unwrap();
    desk.lend(&stranger, None, &["u"]).await.unwrap();
    assert_eq!(
        open.await.unwrap().unwrap_err().code,
        ErrorCode::CallerDisconnected
    );
}

#[tokio::test]
async fn a_call_that_nobody_waits_for_is_cancelled_and_said_so() {
    let desk = desk(Rules::default()).await;
    desk.lend(&desk.caller, None, &["t"]).await.unwrap();
    let dropped = desk.call("t");
    let (at, id) = desk.next_request(-1).await;
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    let found = desk
        .store
        .events()
        .poll(desk.book.session(), at, 1, Duration::from_secs(60))
        .await
        .unwrap();
    assert!(matches!(
        &found[0].body,
        EventBody::CallerToolDone {
            outcome: Outcome::Cancelled,
            ..
        }
    ));
    assert_eq!(desk.book.open_calls(), 0);
    let late = desk
        .book
        .answer(&desk.caller, &id, Some(json!(1)), None)
        .await
        .unwrap_err();
    assert_eq!(late.code, ErrorCode::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_calls_wait_at_once_and_each_gets_its_own_answer() {
    let desk = desk(Rules {
        timeout: Duration::from_secs(3600),
        ..Rules::default()
    })
    .await;
    desk.lend(&desk.caller, None, &["t"]).await.unwrap();
    let tool = desk.tool("t");
    let caller: oubliette_protocol::CallerId = "myapp".parse().unwrap();
    let calls: Vec<_> = (0..10_000)
        .map(|n| {
            let (book, tool, caller) = (desk.book.clone(), tool.clone(), caller.clone());
            let ctx = CallContext::default();
            tokio::spawn(async move { book.relay(&caller, &tool, json!({ "n": n }), &ctx).await })
        })
        .collect();
    let mut asked = Vec::new();
    let mut since = -1;
    while asked.len() < 10_000 {
        let page = desk
            .store
            .events()
            .poll(desk.book.session(), since, 1000, Duration::from_secs(60))
            .await
            .unwrap();
        since = page.last().unwrap().index;
        asked.extend(page.iter().filter_map(|e| match &e.body {
            EventBody::CallerToolRequest {
                request_id,
                arguments,
                ..
            } => Some((request_id.clone(), arguments.clone())),
            _ => None,
        }));
    }
    assert_eq!(desk.book.open_calls(), 10_000);
    // All of them are told again, in the order of the log, whatever the order they were opened in.
    let again: Vec<_> = desk.book.open_requests(&desk.key()).try_collect().await.unwrap();
    assert_eq!(again.len(), 10_000);
    assert!(again.is_sorted_by_key(|event| event.index));
    for (id, arguments) in asked.into_iter().rev() {
        desk.book
            .answer(&desk.caller, id.as_str(), Some(arguments), None)
            .await
            .unwrap();
    }
    for (n, call) in calls.into_iter().enumerate() {
        assert_eq!(call.await.unwrap().unwrap(), json!({ "n": n }));
    }
}

#[tokio::test]
async fn an_end_is_not_lost_with_whoever_brought_it() {
    use futures::FutureExt as _;
    let desk = desk(Rules::default()).await;
    desk.lend(&desk.caller, None, &["send"]).await.unwrap();
    let call = desk.call("send");
    let (_, id) = desk.next_request(-1).await;
    // The log takes nothing more at the moment: nobody else runs until this test waits.
    let full = || {
        let body = EventBody::Delta { text: "x".into() };
        let log = desk.store.events().clone();
        let session = desk.book.session().clone();
        async move { log.append_soon(&session, body).await }
    };
    while full().now_or_never().is_some() {}
    let answer = desk.book.answer(&desk.caller, &id, Some(json!("kept")), None);
    assert!(
        answer.now_or_never().is_none(),
        "the answer was broken off half-way"
    );
    assert_eq!(call.await.unwrap().unwrap(), json!("kept"));
    assert_eq!(desk.outcomes().await, [Outcome::Answered]);
}
