//! Whose tool calls and turns are whose, when a turn has several models.

use oubliette_egress::ModelRequest;
use oubliette_protocol::{
    Principal, Scope, WorkspaceId,
    event::SessionStatus,
    usage::{RequestUsage, UsdNanos},
};
use oubliette_store::{ProjectRow, UsageFilter, UsageGroup, UsageReport, WorkspaceRow};
use serde_json::json;

use super::*;

struct MeterFixture {
    meter: Arc<SessionMeter>,
    sink: SessionModelSink,
    store: Store,
    _dir: tempfile::TempDir,
}

impl MeterFixture {
    async fn new() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let store = Store::open(&dir.path().join("db")).await.unwrap();
        let row = insert_session(&store).await;
        let ledger = UsageLedger::new(store.clone(), crate::SessionConfig::default().into());
        let meter = SessionMeter::new(ledger, store.clone(), &row);
        let sink = SessionModelSink {
            meter: meter.clone(),
            debug: Arc::new(oubliette_tools::DiscardDebug),
            agent: row.agent,
        };
        Self {
            meter,
            sink,
            store,
            _dir: dir,
        }
    }

    async fn ask(&self, model: &str, status: u16) {
        self.sink.admit().await.unwrap();
        let usage = RequestUsage {
            model: model.into(),
            input_tokens: 10,
            output_tokens: 1,
            cached_tokens: 0,
            cost_usd: Some(UsdNanos(0)),
            estimated: false,
        };
        self.sink.model_request(ModelRequest {
            provider: "p".into(),
            path: "/v1/messages".into(),
            status,
            started: oubliette_protocol::now(),
            duration: Duration::ZERO,
            admitted: true,
            usage: Some(usage),
        });
    }

    fn call(&self, origin: &CallOrigin, times: u64) {
        for _ in 0..times {
            self.meter.clone().reserve_call(origin).unwrap();
            self.meter.count_call(origin);
        }
    }

    async fn report(&self, group: UsageGroup) -> UsageReport {
        self.meter.ledger.settle().await.unwrap();
        let everything = UsageFilter::default();
        self.store.usage_report(&everything, group, 100).await.unwrap()
    }
}

async fn insert_session(store: &Store) -> SessionRow {
    let (project_id, workspace_id, session) = (
        ProjectId::generate(),
        WorkspaceId::generate(),
        SessionId::generate(),
    );
    let now = oubliette_store::now();
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
        agent: "a".parse().unwrap(),
        status: SessionStatus::Idle,
        reason: None,
        parent_id: None,
        root_id: session,
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
    store.session_insert(row.clone()).await.unwrap();
    row
}

fn inside() -> CallOrigin {
    CallOrigin::Inside { api_key: None }
}

fn outside() -> CallOrigin {
    CallOrigin::Outside(Principal {
        token_id: None,
        scope: Scope::Admin,
        project: None,
        inside: None,
    })
}

/// Requests, tool calls and turns by model, and in all.
fn counts(report: &UsageReport) -> Vec<(&str, [u64; 3])> {
    let rows = report.rows.iter().map(|(key, sum)| (key.as_str(), sum));
    rows.chain([("total", &report.total)])
        .map(|(key, sum)| (key, [sum.totals.requests, sum.tool_calls, sum.turns]))
        .collect()
}

#[tokio::test]
async fn a_turn_counts_for_each_of_its_models_and_a_call_for_the_one_that_made_it() {
    let fixture = MeterFixture::new().await;
    let meter = &fixture.meter;
    meter.begin_turn().await.unwrap();
    // Called while the first answer is still being streamed: it is that model's too.
    fixture.call(&inside(), 1);
    fixture.ask("big", 200).await;
    fixture.call(&inside(), 2);
    fixture.ask("small", 200).await;
    fixture.call(&inside(), 3);
    // Written in the middle of the turn.
    fixture.report(UsageGroup::Model).await;
    fixture.call(&inside(), 4);
    fixture.call(&outside(), 5);
    fixture.ask("big", 200).await;
    // One that does not answer makes no calls and has no turn.
    fixture.ask("broken", 500).await;
    fixture.call(&inside(), 10);
    assert_eq!(meter.end_turn().await.unwrap().requests, 4);
    // A turn without a model, as scripted agents have them: its calls are no model's, whichever answered before.
    meter.begin_turn().await.unwrap();
    fixture.call(&inside(), 100);
    meter.end_turn().await.unwrap();
    let by_model = fixture.report(UsageGroup::Model).await;
    assert_eq!(
        counts(&by_model),
        [
            ("p/big", [2, 13, 1]),
            ("p/broken", [1, 0, 0]),
            ("p/small", [1, 7, 1]),
            ("total", [4, 125, 2]),
        ]
    );
    let by_agent = fixture.report(UsageGroup::Agent).await;
    assert_eq!(counts(&by_agent), [("a", [4, 125, 2]), ("total", [4, 125, 2])]);
    assert_eq!(by_model.total, by_agent.total);
}

#[tokio::test]
async fn a_refused_tool_call_is_in_the_log_before_its_turn_ends() {
    let fixture = MeterFixture::new().await;
    let meter = &fixture.meter;
    meter.begin_turn().await.unwrap();
    meter.max_turn_calls.store(1, Ordering::Relaxed);
    fixture.call(&inside(), 1);
    for _ in 0..2 {
        let refused = meter.clone().reserve_call(&inside()).unwrap_err();
        assert!(
            refused
                .message
                .starts_with("the budget tool_calls_per_turn is used up"),
            "{refused}"
        );
        assert!(refused.message.contains("1 call in this turn"), "{refused}");
    }
    meter.end_turn().await.unwrap();
    let logged = fixture.store.events().read(&meter.session, -1, 10).await.unwrap();
    let [event] = logged.as_slice() else {
        panic!("once a turn: {logged:?}");
    };
    assert!(
        matches!(
            event.body,
            EventBody::Error {
                budget: Some(BudgetName::ToolCallsPerTurn),
                ..
            }
        ),
        "{event:?}"
    );
}

#[tokio::test]
async fn an_agent_that_asks_on_after_refusals_is_stopped_unless_a_model_answers() {
    let fixture = MeterFixture::new().await;
    let (meter, error) = (&fixture.meter, Error::unavailable("nobody listens there"));
    meter.begin_turn().await.unwrap();
    for count in 1..MAX_REFUSED {
        assert_eq!(fixture.sink.count_refused(&error).await, count);
    }
    fixture.ask("m", 200).await;
    assert_eq!(fixture.sink.count_refused(&error).await, 1);
    assert!(meter.exhausted.borrow().is_none());
    for _ in 1..=MAX_REFUSED {
        fixture.sink.count_refused(&error).await;
    }
    let stopped = meter.exhausted.borrow().clone();
    assert_eq!(stopped.expect("the turn is stopped").message, error.message);
    let logged = fixture.store.events().read(&meter.session, -1, 10).await.unwrap();
    assert_eq!(logged.len(), 1, "said once");
    meter.begin_turn().await.unwrap();
    assert_eq!(fixture.sink.count_refused(&error).await, 1);
}
