//! Tests of the caller relay with a real store and a real clock.

use std::{sync::Arc, time::Duration};

use futures::TryStreamExt as _;
use oubliette_protocol::{
    ErrorCode, Principal, Scope, SessionId, Slug, TokenId, WorkspaceId,
    caller::{CallerContext, LentTool},
    event::{CallerToolOutcome, EventBody, SessionStatus},
};
use oubliette_store::{DebugFilter, ProjectRow, SessionRow, Store, WorkspaceRow};
use oubliette_tools::{CallContext, CallerTools};
use serde_json::{Value, json};

use super::{CallerRelay, HoldKind, PresenceKey, RelayLimits, presence_tracker::PresenceTracker};

struct CallerRelayFixture {
    relay: Arc<CallerRelay>,
    presence: Arc<PresenceTracker>,
    store: Store,
    caller: Principal,
    _dir: tempfile::TempDir,
}

fn principal() -> Principal {
    Principal {
        token_id: Some(TokenId::generate()),
        scope: Scope::Write,
        project: None,
        inside: None,
    }
}

async fn fixture(limits: RelayLimits) -> CallerRelayFixture {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("db")).await.unwrap();
    let session = SessionId::generate();
    insert(&store, &session).await;
    let presence = Arc::new(PresenceTracker::default());
    let relay = CallerRelay::new(session, store.clone(), presence.clone(), limits);
    CallerRelayFixture {
        relay,
        presence,
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
        workspaces: oubliette_protocol::WorkspacePolicy::Shared,
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
        status: SessionStatus::Idle,
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
        images: None,
    };
    store.session_insert(row).await.unwrap();
}

impl CallerRelayFixture {
    async fn lend(
        &self,
        who: &Principal,
        mcp: Option<&str>,
        tools: &[&str],
    ) -> oubliette_protocol::Result<()> {
        let tools: Vec<Value> = tools.iter().map(|name| json!({ "name": name })).collect();
        let context = json!({ "caller_id": "myapp", "caller_tools": tools });
        let declaration = serde_json::from_value::<CallerContext>(context)
            .unwrap()
            .check()
            .unwrap();
        self.relay
            .declare(who, mcp.map(str::to_owned), declaration, |_| None)
            .await
    }

    fn tool(&self, name: &str) -> LentTool {
        let lent = self.relay.declarations();
        lent[0].tools.iter().find(|t| t.name == name).unwrap().clone()
    }

    fn call(&self, name: &str) -> tokio::task::JoinHandle<oubliette_protocol::Result<Value>> {
        let (relay, tool) = (self.relay.clone(), self.tool(name));
        let caller = "myapp".parse().unwrap();
        tokio::spawn(async move {
            relay
                .call_lent_tool(&caller, &tool, json!({}), &CallContext::default())
                .await
        })
    }

    async fn next_request(&self, since: i64) -> (i64, String) {
        let mut since = since;
        loop {
            let found = self
                .store
                .events()
                .poll(self.relay.session(), since, 1, Duration::from_secs(60))
                .await
                .unwrap();
            let event = &found[0];
            since = event.index;
            if let EventBody::CallerToolRequest { request_id, .. } = &event.body {
                return (event.index, request_id.to_string());
            }
        }
    }

    async fn outcomes(&self) -> Vec<CallerToolOutcome> {
        // `append` returns when everything appended before it is in the log too.
        let last = EventBody::Delta { text: "mark".into() };
        self.store
            .events()
            .append(self.relay.session(), vec![last])
            .await
            .unwrap();
        let log = self
            .store
            .events()
            .read(self.relay.session(), -1, 10_000)
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
            session: Some(self.relay.session().clone()),
            mcp_session: None,
        }
    }
}

#[tokio::test]
async fn a_call_is_requested_answered_once_and_wrong_answers_are_refused() {
    let fixture = fixture(RelayLimits::default()).await;
    fixture.lend(&fixture.caller, None, &["send"]).await.unwrap();
    let call = fixture.call("send");
    let (_, id) = fixture.next_request(-1).await;
    let stranger = principal();
    let refused = |who: &Principal, id: &str, both: bool| {
        let (relay, who, id) = (fixture.relay.clone(), who.clone(), id.to_owned());
        async move {
            relay
                .answer(&who, &id, Some(json!(1)), both.then(|| "x".into()))
                .await
                .unwrap_err()
                .code
        }
    };
    assert_eq!(
        refused(&fixture.caller, &id, true).await,
        ErrorCode::InvalidArgument
    );
    assert_eq!(refused(&stranger, &id, false).await, ErrorCode::PermissionDenied);
    assert_eq!(
        refused(&fixture.caller, "no-such-thing", false).await,
        ErrorCode::NotFound
    );
    fixture
        .relay
        .answer(&fixture.caller, &id, Some(json!({"status":"sent"})), None)
        .await
        .unwrap();
    assert_eq!(call.await.unwrap().unwrap(), json!({"status":"sent"}));
    assert_eq!(refused(&fixture.caller, &id, false).await, ErrorCode::Conflict);
    assert_eq!(refused(&stranger, &id, false).await, ErrorCode::PermissionDenied);
    assert_eq!(fixture.outcomes().await, [CallerToolOutcome::Answered]);
    fixture.store.debugger().flush().await;
    let filter = DebugFilter {
        session: Some(fixture.relay.session().clone()),
        ..DebugFilter::default()
    };
    let refusals = fixture.store.debugger().read(&filter, -1, 100).await.unwrap();
    assert_eq!(
        refusals
            .iter()
            .filter(|e| e.body.kind() == "answer_refused")
            .count(),
        5
    );
}

#[tokio::test]
async fn an_error_a_null_result_and_a_timeout_reach_the_agent_as_such() {
    let answering = fixture(RelayLimits::default()).await;
    answering.lend(&answering.caller, None, &["t"]).await.unwrap();
    let failing = answering.call("t");
    let (at, id) = answering.next_request(-1).await;
    let why = Some("recipient not found".into());
    answering
        .relay
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
        .relay
        .answer(&answering.caller, &id, None, None)
        .await
        .unwrap();
    assert_eq!(nothing.await.unwrap().unwrap(), Value::Null);
    assert_eq!(
        answering.outcomes().await,
        [CallerToolOutcome::Error, CallerToolOutcome::Answered]
    );
    let silent = fixture(RelayLimits {
        call_timeout: Duration::from_millis(200),
        ..RelayLimits::default()
    })
    .await;
    silent.lend(&silent.caller, None, &["t"]).await.unwrap();
    let late = silent.call("t");
    let (_, id) = silent.next_request(-1).await;
    assert_eq!(late.await.unwrap().unwrap_err().code, ErrorCode::Timeout);
    let refused = silent
        .relay
        .answer(&silent.caller, &id, Some(json!(1)), None)
        .await
        .unwrap_err();
    assert_eq!(refused.code, ErrorCode::NotFound, "late is as good as unknown");
    assert_eq!(silent.outcomes().await, [CallerToolOutcome::Timeout]);
}

#[tokio::test]
async fn closing_the_stream_disconnects_a_caller_and_open_requests_are_redelivered_on_reconnect() {
    let limits = RelayLimits {
        reconnect_grace: Duration::from_millis(100),
        ..RelayLimits::default()
    };
    let fixture = fixture(limits).await;
    fixture.lend(&fixture.caller, None, &["t"]).await.unwrap();
    let stream = fixture.presence.register_hold(fixture.key(), HoldKind::Stream);
    let lost = fixture.call("t");
    let (at, _) = fixture.next_request(-1).await;
    drop(stream);
    assert_eq!(
        lost.await.unwrap().unwrap_err().code,
        ErrorCode::CallerDisconnected
    );
    // A call made while the caller is absent ends the same way, and the log has it.
    let absent = fixture.call("t");
    assert_eq!(
        absent.await.unwrap().unwrap_err().code,
        ErrorCode::CallerDisconnected
    );
    assert_eq!(
        fixture.outcomes().await,
        [CallerToolOutcome::Disconnected, CallerToolOutcome::Disconnected]
    );
    let back = fixture.presence.register_hold(fixture.key(), HoldKind::Stream);
    let (at, _) = fixture.next_request(at).await;
    let kept = fixture.call("t");
    let (_, id) = fixture.next_request(at).await;
    let open: Vec<_> = fixture
        .relay
        .open_requests(&fixture.key())
        .try_collect()
        .await
        .unwrap();
    assert!(
        matches!(&open[..], [event] if matches!(&event.body, EventBody::CallerToolRequest { request_id, .. } if request_id.as_str() == id))
    );
    fixture
        .relay
        .answer(&fixture.caller, &id, Some(json!("back")), None)
        .await
        .unwrap();
    assert_eq!(kept.await.unwrap().unwrap(), json!("back"));
    back.answered();
    assert!(
        fixture.relay.is_present(&"myapp".parse().unwrap()),
        "an answered poll counts for a while"
    );
}

#[tokio::test]
async fn on_stateful_mcp_only_the_declaring_mcp_session_counts_as_presence() {
    let fixture = fixture(RelayLimits {
        linger: Duration::ZERO,
        ..RelayLimits::default()
    })
    .await;
    let app = "myapp".parse().unwrap();
    let stream = |mcp: &str| {
        let key = PresenceKey {
            session: None,
            mcp_session: Some(mcp.into()),
            ..fixture.key()
        };
        fixture.presence.register_hold(key, HoldKind::Stream)
    };
    let other = stream("two");
    let before = stream("one");
    fixture.lend(&fixture.caller, Some("one"), &["t"]).await.unwrap();
    assert!(
        fixture.relay.is_present(&app),
        "a stream opened before the declaration speaks for it"
    );
    drop(before);
    assert!(
        !fixture.relay.is_present(&app),
        "another MCP session of the same token does not"
    );
    let again = stream("one");
    assert!(fixture.relay.is_present(&app));
    fixture
        .presence
        .mark_left(|declarer| declarer.mcp_session.as_deref() == Some("one"));
    assert!(
        !fixture.relay.is_present(&app),
        "closing the MCP session is leaving"
    );
    drop((again, other));
}

#[tokio::test]
async fn a_caller_id_belongs_to_its_first_live_principal() {
    let fixture = fixture(RelayLimits {
        reconnect_grace: Duration::ZERO,
        ..RelayLimits::default()
    })
    .await;
    let stranger = principal();
    fixture
        .store
        .token_insert(oubliette_store::NewToken {
            token_id: fixture.caller.token_id.clone().unwrap(),
            name: "t".into(),
            scope: Scope::Write,
            project_id: None,
            expires_at: None,
            hash: [1; 32],
            session_id: None,
        })
        .await
        .unwrap();
    fixture.lend(&fixture.caller, None, &["t"]).await.unwrap();
    assert_eq!(
        fixture.lend(&stranger, None, &["t"]).await.unwrap_err().code,
        ErrorCode::Conflict
    );
    fixture.lend(&fixture.caller, None, &[]).await.unwrap();
    fixture.lend(&stranger, None, &["t"]).await.unwrap();
    fixture.lend(&stranger, None, &[]).await.unwrap();
    fixture.lend(&fixture.caller, None, &["t"]).await.unwrap();
    let open = fixture.call("t");
    fixture.next_request(-1).await;
    fixture
        .store
        .token_revoke(fixture.caller.token_id.as_ref().unwrap())
        .await
        .unwrap();
    fixture.lend(&stranger, None, &["u"]).await.unwrap();
    assert_eq!(
        open.await.unwrap().unwrap_err().code,
        ErrorCode::CallerDisconnected
    );
}

#[tokio::test]
async fn a_call_whose_waiter_is_dropped_is_cancelled_and_logged() {
    let fixture = fixture(RelayLimits::default()).await;
    fixture.lend(&fixture.caller, None, &["t"]).await.unwrap();
    let dropped = fixture.call("t");
    let (at, id) = fixture.next_request(-1).await;
    dropped.abort();
    assert!(dropped.await.unwrap_err().is_cancelled());
    let found = fixture
        .store
        .events()
        .poll(fixture.relay.session(), at, 1, Duration::from_secs(60))
        .await
        .unwrap();
    assert!(matches!(
        &found[0].body,
        EventBody::CallerToolDone {
            outcome: CallerToolOutcome::Cancelled,
            ..
        }
    ));
    assert_eq!(fixture.relay.open_calls(), 0);
    let late = fixture
        .relay
        .answer(&fixture.caller, &id, Some(json!(1)), None)
        .await
        .unwrap_err();
    assert_eq!(late.code, ErrorCode::NotFound);
}

#[tokio::test(flavor = "multi_thread")]
async fn ten_thousand_calls_wait_at_once_and_each_gets_its_own_answer() {
    let fixture = fixture(RelayLimits {
        call_timeout: Duration::from_secs(3600),
        ..RelayLimits::default()
    })
    .await;
    fixture.lend(&fixture.caller, None, &["t"]).await.unwrap();
    let tool = fixture.tool("t");
    let caller: oubliette_protocol::CallerId = "myapp".parse().unwrap();
    let calls: Vec<_> = (0..10_000)
        .map(|n| {
            let (relay, tool, caller) = (fixture.relay.clone(), tool.clone(), caller.clone());
            let ctx = CallContext::default();
            tokio::spawn(async move {
                relay
                    .call_lent_tool(&caller, &tool, json!({ "n": n }), &ctx)
                    .await
            })
        })
        .collect();
    let mut asked = Vec::new();
    let mut since = -1;
    while asked.len() < 10_000 {
        let page = fixture
            .store
            .events()
            .poll(fixture.relay.session(), since, 1000, Duration::from_secs(60))
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
    assert_eq!(fixture.relay.open_calls(), 10_000);
    // All of them are redelivered in the order of the log, whatever the order they were opened in.
    let again: Vec<_> = fixture
        .relay
        .open_requests(&fixture.key())
        .try_collect()
        .await
        .unwrap();
    assert_eq!(again.len(), 10_000);
    assert!(again.is_sorted_by_key(|event| event.index));
    for (id, arguments) in asked.into_iter().rev() {
        fixture
            .relay
            .answer(&fixture.caller, id.as_str(), Some(arguments), None)
            .await
            .unwrap();
    }
    for (n, call) in calls.into_iter().enumerate() {
        assert_eq!(call.await.unwrap().unwrap(), json!({ "n": n }));
    }
}

#[tokio::test]
async fn an_answer_is_delivered_even_if_the_answering_request_is_dropped() {
    use futures::FutureExt as _;
    let fixture = fixture(RelayLimits::default()).await;
    fixture.lend(&fixture.caller, None, &["send"]).await.unwrap();
    let call = fixture.call("send");
    let (_, id) = fixture.next_request(-1).await;
    // Fill the writer's queue. Nothing drains it until this test awaits, because the runtime has one thread.
    let full = || {
        let body = EventBody::Delta { text: "x".into() };
        let log = fixture.store.events().clone();
        let session = fixture.relay.session().clone();
        async move { log.append_soon(&session, body).await }
    };
    while full().now_or_never().is_some() {}
    let answer = fixture
        .relay
        .answer(&fixture.caller, &id, Some(json!("kept")), None);
    assert!(
        answer.now_or_never().is_none(),
        "the answer was broken off half-way"
    );
    assert_eq!(call.await.unwrap().unwrap(), json!("kept"));
    assert_eq!(fixture.outcomes().await, [CallerToolOutcome::Answered]);
}
