//! Budgets over midnight, over restarts and with a database that cannot be written.

use std::sync::atomic::{AtomicI64, Ordering};

use oubliette_protocol::SessionId;

use super::*;

static NOW_MILLIS: AtomicI64 = AtomicI64::new(0);

fn clock() -> Timestamp {
    Timestamp::from_millisecond(NOW_MILLIS.load(Ordering::SeqCst)).unwrap()
}

fn set_clock(text: &str) {
    NOW_MILLIS.store(
        text.parse::<Timestamp>().unwrap().as_millisecond(),
        Ordering::SeqCst,
    );
}

fn record(project: &ProjectId, tokens: u64) -> UsageRecord {
    UsageRecord {
        usage_id: uuid::Uuid::new_v4().to_string(),
        ts: clock(),
        session_id: SessionId::generate(),
        project_id: project.clone(),
        charged_above: Vec::new(),
        agent: "a".parse().unwrap(),
        token_id: None,
        model: Some("p/m".into()),
        totals: UsageTotals {
            requests: 1,
            input_tokens: tokens,
            ..UsageTotals::default()
        },
        tool_calls: 0,
        turns: 0,
        model_turns: 0,
    }
}

#[tokio::test]
async fn a_budget_holds_over_midnight_jumps_of_the_clock_restarts_and_write_failures() {
    let dir = tempfile::tempdir().unwrap();
    let store = Store::open(&dir.path().join("db")).await.unwrap();
    let open = || UsageLedger::with_clock(store.clone(), SessionConfig::default().into(), clock);
    let project = ProjectId::generate();
    let budget = DayBudget {
        tokens: Some(100),
        cost_usd: None,
    };
    let budgets = [(project.clone(), budget)];
    let (evening, morning) = ("2026-06-01T23:59:59.500Z", "2026-06-02T00:00:00Z");

    set_clock(evening);
    let ledger = open();
    // Charged before anybody asked: it is not written yet when the day is added up.
    ledger.charge(Some("p"), record(&project, 60));
    assert!(ledger.check(&budgets).await.is_ok());
    ledger.charge(Some("p"), record(&project, 40));
    let error = ledger.check(&budgets).await.unwrap_err().error;
    assert!(
        error.message.contains("100 of 100") && error.message.contains(morning),
        "{error}"
    );

    set_clock(morning);
    assert!(ledger.check(&budgets).await.is_ok());
    ledger.charge(Some("p"), record(&project, 99));
    assert!(ledger.check(&budgets).await.is_ok());
    // The clock is set back over midnight, and forward again.
    set_clock(evening);
    assert!(ledger.check(&budgets).await.is_err());
    set_clock(morning);
    assert!(ledger.check(&budgets).await.is_ok());

    // While nothing can be written nothing is forgotten, and each is written once.
    store.set_write_fault(true);
    ledger.charge(Some("p"), record(&project, 1));
    assert!(ledger.flush().await.is_err() && ledger.flush().await.is_err());
    assert!(ledger.check(&budgets).await.is_err());
    store.set_write_fault(false);
    ledger.flush().await.unwrap();
    ledger.flush().await.unwrap();

    let restarted = open();
    assert!(restarted.check(&budgets).await.is_err());
    set_clock(evening);
    assert!(restarted.check(&budgets).await.is_err());
    let all = store
        .usage_charged(Timestamp::UNIX_EPOCH, Timestamp::MAX)
        .await
        .unwrap();
    assert_eq!(all.iter().map(|sum| sum.tokens).sum::<u64>(), 200);
}
