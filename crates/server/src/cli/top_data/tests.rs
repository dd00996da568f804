//! Tests of [`super`].

use super::*;

#[test]
fn calls_without_a_result_are_in_progress() {
    let mut log = TurnLog::default();
    let began: Timestamp = "2026-11-17T10:00:00Z".parse().unwrap();
    for event in [
        json!({"type": "message", "role": "user", "text": "go", "ts": "2026-11-17T09:59:50Z"}),
        json!({"type": "tool_call", "tool_call_id": "a", "tool": "one", "arguments": {"x": 1}, "ts": "2026-11-17T10:00:00Z"}),
        json!({"type": "tool_call", "tool_call_id": "b", "tool": "two", "arguments": {}, "ts": "2026-11-17T10:00:00Z"}),
        json!({"type": "tool_result", "tool_call_id": "b", "ok": true}),
    ] {
        log.observe(&event);
    }
    let session = TopSession::default();
    let later = began + jiff::SignedDuration::from_secs(7);
    let calls = log.calls(&session, later);
    assert_eq!(calls.len(), 1);
    assert_eq!((calls[0].tool.as_str(), calls[0].age_s), ("one", 7));
    assert_eq!(seconds_between(log.turn_began.unwrap(), later), 17);
    // A clock that is behind shows no negative ages.
    assert_eq!(
        log.calls(&session, began - jiff::SignedDuration::from_secs(60))[0].age_s,
        0
    );
    log.observe(&json!({"type": "turn_completed"}));
    assert!(log.calls(&session, later).is_empty() && log.turn_began.is_none());
}

#[test]
fn a_server_is_told_without_escapes_and_by_this_clock() {
    let now: Timestamp = "2026-11-17T10:00:00Z".parse().unwrap();
    let row = json!({ "server_id": "srv_a", "address": "http://a\u{1b}[2J", "version": "1", "sessions": 2,
        "since": "2026-11-17T09:59:00Z", "last_seen": "2026-11-17T10:00:09Z" });
    let row = member_row(&row, now);
    assert_eq!(
        (row.address.as_str(), row.sessions, row.age_s, row.seen_s),
        ("http://a[2J", 2, 60, 0)
    );
}

#[test]
fn a_tool_server_has_its_worst_light() {
    let servers = json!({ "servers": [
        { "id": "files", "status": "green" },
        { "id": "web", "status": "green" },
        { "id": "web", "status": "red", "error": "it\u{1b}[2J ended" },
    ] });
    let rows = group_servers(&servers);
    assert_eq!(
        (rows[0].id.as_str(), rows[0].status.as_str(), rows[0].sessions),
        ("web", "red", 2)
    );
    assert_eq!(rows[0].error.as_deref(), Some("it[2J ended"));
    assert_eq!((rows[1].id.as_str(), rows[1].sessions), ("files", 1));
}
