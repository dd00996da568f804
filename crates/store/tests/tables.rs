//! Tokens, projects, workspaces, sessions, memory and audit: stored, listed in pages, kept apart.
#![allow(clippy::unwrap_used, clippy::disallowed_types)]

mod common;

use std::collections::HashSet;

use common::{StoreFixture, delta, project, session};
use oubliette_protocol::{
    ErrorCode, ProjectId, Scope, SessionId, Slug, TokenId, WorkspaceId, event::SessionStatus,
};
use oubliette_store::{
    AuditEntry, AuditFilter, AuditPrincipal, DebugFilter, NewToken, PageRequest, ProjectFilter,
    QueuedMessage, SessionFilter, SessionPatch, TokenFilter, WorkspaceRow, now,
};
use serde_json::json;
use sqlx::{ConnectOptions, Row, sqlite::SqliteConnectOptions};

fn token(name: &str, hash: u8) -> NewToken {
    NewToken {
        token_id: TokenId::generate(),
        name: name.into(),
        scope: Scope::Write,
        project_id: None,
        expires_at: Some(now()),
        hash: [hash; 32],
        session_id: None,
    }
}

#[tokio::test]
async fn a_token_is_found_by_its_hash_until_it_is_revoked() {
    let mut fixture = StoreFixture::new().await;
    let kept = token("ci", 1);
    fixture.store.token_insert(kept.clone()).await.unwrap();
    assert_eq!(
        fixture
            .store
            .token_insert(token("same hash", 1))
            .await
            .unwrap_err()
            .code,
        ErrorCode::Conflict
    );
    fixture.reopen().await;
    let store = &fixture.store;
    let found = store.token_by_hash(&[1; 32]).await.unwrap().unwrap();
    assert_eq!(
        (found.token_id.clone(), found.scope),
        (kept.token_id.clone(), Scope::Write)
    );
    assert_eq!(found.expires_at, kept.expires_at);
    assert_eq!(store.token_by_hash(&[2; 32]).await.unwrap(), None);
    assert!(store.token_revoke(&kept.token_id).await.unwrap());
    assert!(!store.token_revoke(&kept.token_id).await.unwrap());
    assert_eq!(store.token_by_hash(&[1; 32]).await.unwrap(), None);
    assert!(
        store
            .token_get(&kept.token_id)
            .await
            .unwrap()
            .unwrap()
            .revoked_at
            .is_some()
    );
    if fixture.schema.is_none() {
        let bytes = std::fs::read(fixture.path()).unwrap();
        assert!(
            !bytes.windows(32).any(|window| window == [1; 32]),
            "only as text, only the hash"
        );
    }
}

#[tokio::test]
async fn session_tokens_are_deleted_with_the_session_and_listed_on_demand() {
    let fixture = StoreFixture::new().await;
    let (store, of) = (&fixture.store, SessionId::generate());
    store
        .token_insert(NewToken {
            session_id: Some(of.clone()),
            ..token("session", 1)
        })
        .await
        .unwrap();
    store.token_insert(token("person", 2)).await.unwrap();
    let gone = token("gone", 3);
    store.token_insert(gone.clone()).await.unwrap();
    store.token_revoke(&gone.token_id).await.unwrap();
    let names = |page: oubliette_store::ListPage<oubliette_store::TokenRow>| {
        page.items.into_iter().map(|t| t.name).collect::<Vec<_>>()
    };
    assert_eq!(
        names(
            store
                .token_list(TokenFilter::default(), PageRequest::default())
                .await
                .unwrap()
        ),
        ["person"]
    );
    let all = TokenFilter {
        include_revoked: true,
        ..Default::default()
    };
    assert_eq!(
        names(store.token_list(all, PageRequest::default()).await.unwrap()).len(),
        2
    );
    let with_sessions = TokenFilter {
        include_sessions: true,
        ..Default::default()
    };
    let listed = store
        .token_list(with_sessions.clone(), PageRequest::default())
        .await
        .unwrap();
    assert!(
        listed
            .items
            .iter()
            .any(|row| row.name == "session" && row.session_id.as_ref() == Some(&of))
    );
    assert_eq!(store.tokens_revoke_of_session(&of).await.unwrap(), 1);
    let listed = store
        .token_list(with_sessions, PageRequest::default())
        .await
        .unwrap();
    assert_eq!(names(listed), ["person"]);
    assert_eq!(store.token_by_hash(&[1; 32]).await.unwrap(), None);
    assert!(store.token_by_hash(&[2; 32]).await.unwrap().is_some());
}

#[tokio::test]
async fn a_message_is_queued_until_it_is_in_the_log() {
    let mut fixture = StoreFixture::new().await;
    let project = fixture.project("p").await;
    let row = session(&project);
    let id = row.session_id.clone();
    fixture.store.session_insert(row).await.unwrap();
    let message = |turn, text: &str| QueuedMessage {
        turn,
        text: text.into(),
    };
    for (turn, text) in [(10, "ten"), (9, "nine")] {
        fixture.store.queue_push(&id, message(turn, text)).await.unwrap();
    }
    let taken = fixture
        .store
        .queue_push(&id, message(9, "again"))
        .await
        .unwrap_err();
    assert_eq!(taken.code, ErrorCode::Conflict);
    fixture.reopen().await;
    let store = &fixture.store;
    assert_eq!(store.queue_sessions().await.unwrap(), std::slice::from_ref(&id));
    assert_eq!(
        store.queue_list(&id).await.unwrap(),
        [message(9, "nine"), message(10, "ten")]
    );
    let dequeue = SessionPatch {
        dequeue_turn: Some(9),
        ..SessionPatch::default()
    };
    store
        .events()
        .append_with_patch(&id, Vec::new(), dequeue)
        .await
        .unwrap();
    assert_eq!(store.queue_list(&id).await.unwrap(), [message(10, "ten")]);
    let ended = SessionPatch::status(SessionStatus::Ended, None);
    store.session_update(&id, ended).await.unwrap();
    assert!(store.project_delete(&project.project_id).await.unwrap());
    assert!(store.queue_sessions().await.unwrap().is_empty());
}

#[tokio::test]
async fn a_project_is_read_back_as_it_was_stored() {
    let mut fixture = StoreFixture::new().await;
    let mut kept = fixture.project("Ünïcode % _ \\ name").await;
    fixture.reopen().await;
    let store = &fixture.store;
    assert_eq!(store.project_get(&kept.project_id).await.unwrap().unwrap(), kept);
    kept.name = "other".into();
    kept.agent = None;
    kept.env.clear();
    store.project_update(kept.clone()).await.unwrap();
    assert_eq!(store.project_get(&kept.project_id).await.unwrap().unwrap(), kept);
    let error = store.project_update(project("x").0).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
}

#[tokio::test]
async fn name_search_ignores_case_and_escapes_wildcards() {
    let fixture = StoreFixture::new().await;
    for name in [
        "Alpha",
        "ALPHABET",
        "beta 100%",
        "beta 100x",
        "under_score",
        "underXscore",
        "Äpfel",
    ] {
        fixture.project(name).await;
    }
    let find = async |needle: &str| {
        let filter = ProjectFilter {
            name_contains: Some(needle.into()),
            ..Default::default()
        };
        let found = fixture
            .store
            .project_list(filter, PageRequest::default())
            .await
            .unwrap();
        let mut names: Vec<_> = found.items.into_iter().map(|p| p.name).collect();
        names.sort();
        names
    };
    assert_eq!(find("alpha").await, ["ALPHABET", "Alpha"]);
    assert_eq!(find("100%").await, ["beta 100%"]);
    assert_eq!(find("R_S").await, ["under_score"]);
    assert_eq!(find("äPF").await, ["Äpfel"]);
    assert_eq!(find("").await.len(), 7);
    assert!(find("\\").await.is_empty());
    let long = ProjectFilter {
        name_contains: Some("x".repeat(100_000)),
        ..Default::default()
    };
    let error = fixture
        .store
        .project_list(long, PageRequest::default())
        .await
        .unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidArgument);
}

#[tokio::test]
async fn pages_contain_each_row_exactly_once() {
    let fixture = StoreFixture::new().await;
    for i in 0..57 {
        fixture.project(&format!("p{i}")).await;
    }
    let (mut seen, mut cursor, mut pages) = (HashSet::new(), None, 0);
    loop {
        let page = PageRequest {
            limit: Some(10),
            cursor,
        };
        let paged = fixture
            .store
            .project_list(ProjectFilter::default(), page)
            .await
            .unwrap();
        assert!(
            paged.items.iter().all(|p| seen.insert(p.project_id.clone())),
            "no repeats"
        );
        pages += 1;
        cursor = paged.next_cursor;
        // A row added meanwhile does not disturb the paging.
        fixture.project("meanwhile").await;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!((seen.len(), pages), (57, 6));
    for bad in ["", "rubbish", "cHJvamVjdHM6eA", "../../etc"] {
        let page = PageRequest {
            limit: None,
            cursor: Some(bad.into()),
        };
        let error = fixture
            .store
            .project_list(ProjectFilter::default(), page)
            .await
            .unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument, "{bad}");
    }
    let only = seen.into_iter().next().unwrap();
    let filter = ProjectFilter {
        project: Some(only.clone()),
        ..Default::default()
    };
    let one = fixture
        .store
        .project_list(filter, PageRequest::default())
        .await
        .unwrap();
    assert_eq!(
        one.items.iter().map(|p| &p.project_id).collect::<Vec<_>>(),
        [&only]
    );
}

#[tokio::test]
async fn workspaces_are_listed_oldest_first() {
    let fixture = StoreFixture::new().await;
    let (owner, other) = (fixture.project("p").await, fixture.project("q").await);
    // Later than the project's default workspace.
    let at = now() + std::time::Duration::from_millis(1);
    for i in 0..5 {
        // All in the same millisecond: the id decides the order, and the cursor still works.
        let row = WorkspaceRow {
            workspace_id: WorkspaceId::generate(),
            project_id: owner.project_id.clone(),
            name: format!("w{i}"),
            env: Default::default(),
            source: Some(json!({"git": "x"})),
            created_at: at,
        };
        fixture.store.workspace_insert(row.clone()).await.unwrap();
        assert_eq!(
            fixture
                .store
                .workspace_get(&row.workspace_id)
                .await
                .unwrap()
                .unwrap(),
            row
        );
    }
    let (mut all, mut cursor) = (Vec::new(), None);
    loop {
        let page = PageRequest {
            limit: Some(2),
            cursor,
        };
        let paged = fixture
            .store
            .workspace_list(&owner.project_id, page)
            .await
            .unwrap();
        all.extend(paged.items);
        cursor = paged.next_cursor;
        if cursor.is_none() {
            break;
        }
    }
    assert_eq!(all.len(), 6);
    assert_eq!(all[0].name, "default");
    assert_eq!(
        all.iter().map(|w| &w.workspace_id).collect::<HashSet<_>>().len(),
        6
    );
    let mut renamed = all[1].clone();
    renamed.name = "renamed".into();
    fixture.store.workspace_update(renamed.clone()).await.unwrap();
    assert_eq!(
        fixture
            .store
            .workspace_get(&renamed.workspace_id)
            .await
            .unwrap()
            .unwrap(),
        renamed
    );
    assert!(
        fixture
            .store
            .workspace_delete(&renamed.workspace_id)
            .await
            .unwrap()
    );
    assert!(
        !fixture
            .store
            .workspace_delete(&renamed.workspace_id)
            .await
            .unwrap()
    );
    assert_eq!(
        fixture
            .store
            .workspace_list(&other.project_id, PageRequest::default())
            .await
            .unwrap()
            .items
            .len(),
        1
    );
    let orphan = WorkspaceRow {
        project_id: ProjectId::generate(),
        ..renamed
    };
    assert_eq!(
        fixture.store.workspace_insert(orphan).await.unwrap_err().code,
        ErrorCode::NotFound
    );
}

#[tokio::test]
async fn sessions_are_updated_partially_and_filtered() {
    let mut fixture = StoreFixture::new().await;
    let (p, q) = (fixture.project("p").await, fixture.project("q").await);
    let root = fixture.session(&p).await;
    let mut child = session(&p);
    (child.parent_id, child.root_id, child.depth) =
        (Some(root.session_id.clone()), root.session_id.clone(), 1);
    fixture.store.session_insert(child.clone()).await.unwrap();
    let other = fixture.session(&q).await;
    let patch = SessionPatch {
        status: Some(SessionStatus::Idle),
        reason: Some(Some("because".into())),
        turn: Some(3),
        agent: Some("editor".parse().unwrap()),
        agent_session: Some(Some("acp-1".into())),
        ..Default::default()
    };
    fixture
        .store
        .session_update(&root.session_id, patch)
        .await
        .unwrap();
    fixture
        .store
        .session_update(
            &root.session_id,
            SessionPatch::status(SessionStatus::Running, None),
        )
        .await
        .unwrap();
    fixture
        .store
        .session_update(
            &other.session_id,
            SessionPatch::status(SessionStatus::Ended, None),
        )
        .await
        .unwrap();
    fixture.reopen().await;
    let store = &fixture.store;
    let kept = store.session_get(&root.session_id).await.unwrap().unwrap();
    assert_eq!(
        (kept.status, kept.reason.clone(), kept.turn),
        (SessionStatus::Running, None, 3)
    );
    assert_eq!(
        (kept.agent.as_str(), kept.agent_session.as_deref()),
        ("editor", Some("acp-1"))
    );
    assert_eq!(kept.created_at, root.created_at);

    let ids = async |filter: SessionFilter| {
        let found = store.session_list(filter, PageRequest::default()).await.unwrap();
        found
            .items
            .into_iter()
            .map(|s| s.session_id)
            .collect::<HashSet<_>>()
    };
    let (r, c, o) = (&root.session_id, &child.session_id, &other.session_id);
    let set = |ids: &[&SessionId]| ids.iter().map(|id| (*id).clone()).collect::<HashSet<_>>();
    assert_eq!(ids(SessionFilter::default()).await, set(&[r, c, o]));
    let project = Some(p.project_id.clone());
    assert_eq!(
        ids(SessionFilter {
            project,
            ..Default::default()
        })
        .await,
        set(&[r, c])
    );
    assert_eq!(
        ids(SessionFilter {
            status: Some(SessionStatus::Ended),
            ..Default::default()
        })
        .await,
        set(&[o])
    );
    assert_eq!(
        ids(SessionFilter {
            parent: Some(r.clone()),
            ..Default::default()
        })
        .await,
        set(&[c])
    );
    assert_eq!(
        ids(SessionFilter {
            active_only: true,
            ..Default::default()
        })
        .await,
        set(&[r, c])
    );
    assert_eq!(store.session_children(r).await.unwrap(), [child.clone()]);
    assert_eq!(store.session_tree(r).await.unwrap().len(), 2);
    assert_eq!(store.session_count_active(Some(&p.project_id)).await.unwrap(), 2);
    assert_eq!(store.session_count_active(Some(&q.project_id)).await.unwrap(), 0);
    assert_eq!(store.session_count_active(None).await.unwrap(), 2);
    assert_eq!(store.sessions_interrupted().await.unwrap().len(), 2);
    let missing = store
        .session_update(&SessionId::generate(), SessionPatch::default())
        .await
        .unwrap_err();
    assert_eq!(missing.code, ErrorCode::NotFound);
}

#[tokio::test]
async fn deleting_a_project_deletes_everything_of_it_and_nothing_else() {
    let fixture = StoreFixture::new().await;
    let store = &fixture.store;
    let (doomed, spared) = (fixture.project("doomed").await, fixture.project("spared").await);
    let (old, kept) = (
        fixture.session(&doomed).await.session_id,
        fixture.session(&spared).await.session_id,
    );
    let writer: Slug = "writer".parse().unwrap();
    for id in [&old, &kept] {
        store
            .events()
            .append(id, (0..2500).map(|i| delta(i.to_string())).collect())
            .await
            .unwrap();
        store.memory_append(id, &writer, vec![json!(1)]).await.unwrap();
        let body = oubliette_protocol::debug::DebugBody::TeardownStarted {};
        store
            .debugger()
            .record_durable(Some(id.clone()), None, body)
            .await
            .unwrap();
    }
    let bound = NewToken {
        project_id: Some(doomed.project_id.clone()),
        ..token("bound", 1)
    };
    store.token_insert(bound).await.unwrap();

    let error = store.project_delete(&doomed.project_id).await.unwrap_err();
    assert_eq!(error.code, ErrorCode::Conflict, "a session is active");
    assert!(error.message.contains(old.as_str()), "{error}");
    assert!(
        store.token_by_hash(&[1; 32]).await.unwrap().is_some(),
        "nothing was done"
    );
    store
        .session_update(&old, SessionPatch::status(SessionStatus::Ended, None))
        .await
        .unwrap();
    assert!(store.project_delete(&doomed.project_id).await.unwrap());
    assert!(!store.project_delete(&doomed.project_id).await.unwrap());

    assert_eq!(store.session_get(&old).await.unwrap(), None);
    assert_eq!(store.events().last_index(&old).await.unwrap(), -1);
    assert!(store.memory_load(&old, &writer).await.unwrap().is_empty());
    assert_eq!(store.token_by_hash(&[1; 32]).await.unwrap(), None);
    assert_eq!(
        store.workspace_get(&doomed.default_workspace).await.unwrap(),
        None
    );
    assert_eq!(store.events().last_index(&kept).await.unwrap(), 2499);
    assert_eq!(store.memory_len(&kept, &writer).await.unwrap(), 1);

    // The rest is purged in chunks.
    let of_doomed = DebugFilter {
        project: Some(doomed.project_id.clone()),
        ..Default::default()
    };
    while !store.debugger().read(&of_doomed, -1, 1).await.unwrap().is_empty() {
        tokio::task::yield_now().await;
    }
    store.close().await;
    assert_eq!(fixture.count("SELECT COUNT(*) FROM events").await, 2500);
    assert_eq!(fixture.count("SELECT COUNT(*) FROM purge_events").await, 0);
    assert_eq!(fixture.count("SELECT COUNT(*) FROM debug_events").await, 1);
}

#[tokio::test]
async fn any_text_is_read_as_it_was_written() {
    let fixture = StoreFixture::new().await;
    let text = "a\0b\u{fffe}c\u{10ffff}\u{0}".to_owned();
    let (mut row, workspace) = project(&text);
    row.description.clone_from(&text);
    row.env.insert(text.clone(), text.clone());
    fixture
        .store
        .project_create(row.clone(), workspace)
        .await
        .unwrap();
    let stored = fixture.store.project_get(&row.project_id).await.unwrap().unwrap();
    assert_eq!(
        (stored.name, stored.description, stored.env),
        (text.clone(), text.clone(), row.env)
    );
    let of_name = ProjectFilter {
        name_contains: Some("\0B".into()),
        ..ProjectFilter::default()
    };
    let found = fixture
        .store
        .project_list(of_name, PageRequest::default())
        .await
        .unwrap();
    assert_eq!(found.items.len(), 1);
    let session = SessionId::generate();
    let message = QueuedMessage {
        turn: 1,
        text: text.clone(),
    };
    fixture.store.queue_push(&session, message.clone()).await.unwrap();
    assert_eq!(fixture.store.queue_list(&session).await.unwrap(), [message]);
    fixture
        .store
        .events()
        .append(&session, vec![delta(&text)])
        .await
        .unwrap();
    let events = fixture.store.events().read(&session, -1, 1).await.unwrap();
    assert_eq!(common::text_of(&events[0]), text);
}

#[tokio::test]
async fn memory_belongs_to_one_agent_in_one_session() {
    let mut fixture = StoreFixture::new().await;
    let (one, two) = (SessionId::generate(), SessionId::generate());
    let (writer, editor): (Slug, Slug) = ("writer".parse().unwrap(), "editor".parse().unwrap());
    let store = &fixture.store;
    store
        .memory_append(&one, &writer, vec![json!("a"), json!({"b": 1})])
        .await
        .unwrap();
    store
        .memory_append(&one, &editor, vec![json!("secret")])
        .await
        .unwrap();
    store
        .memory_append(&one, &writer, vec![json!(null)])
        .await
        .unwrap();
    fixture.reopen().await;
    let store = &fixture.store;
    assert_eq!(
        store.memory_load(&one, &writer).await.unwrap(),
        [json!("a"), json!({"b": 1}), json!(null)]
    );
    assert_eq!(store.memory_len(&one, &writer).await.unwrap(), 3);
    assert!(store.memory_load(&two, &writer).await.unwrap().is_empty());
    store
        .memory_replace(&one, &writer, vec![json!("short")])
        .await
        .unwrap();
    store
        .memory_append(&one, &writer, vec![json!("more")])
        .await
        .unwrap();
    assert_eq!(
        store.memory_load(&one, &writer).await.unwrap(),
        [json!("short"), json!("more")]
    );
    assert_eq!(store.memory_load(&one, &editor).await.unwrap(), [json!("secret")]);
}

#[tokio::test]
async fn the_audit_log_is_append_only() {
    let mut fixture = StoreFixture::new().await;
    let by = TokenId::generate();
    for i in 0..5 {
        let entry = AuditEntry {
            principal: AuditPrincipal::of_grant((i % 2 == 0).then_some(&by)),
            session_id: None,
            project_id: None,
            action: format!("action_{i}"),
            target: Some("t".into()),
            outcome: if i == 4 { "conflict".into() } else { "ok".into() },
            detail: Some(json!({"i": i})),
        };
        assert_eq!(fixture.store.audit_append(entry).await.unwrap(), i);
    }
    fixture.reopen().await;
    let store = &fixture.store;
    let actions = async |filter: AuditFilter| {
        let found = store
            .audit_list(filter, PageRequest::default())
            .await
            .unwrap()
            .items;
        found.into_iter().map(|row| row.entry.action).collect::<Vec<_>>()
    };
    assert_eq!(
        actions(AuditFilter::default()).await[0],
        "action_4",
        "newest first"
    );
    assert_eq!(
        actions(AuditFilter {
            token: Some(by),
            ..Default::default()
        })
        .await
        .len(),
        3
    );
    assert_eq!(
        actions(AuditFilter {
            outcome: Some("conflict".into()),
            ..Default::default()
        })
        .await
        .len(),
        1
    );
    let first = store
        .audit_list(AuditFilter::default(), PageRequest::first(2))
        .await
        .unwrap();
    let next = PageRequest {
        limit: Some(10),
        cursor: first.next_cursor,
    };
    let rest = store.audit_list(AuditFilter::default(), next).await.unwrap();
    assert_eq!(
        rest.items.iter().map(|row| row.index).collect::<Vec<_>>(),
        [2, 1, 0]
    );
    store.close().await;
    for sql in [
        "UPDATE audit SET outcome = 'ok'",
        "DELETE FROM audit",
        "DELETE FROM audit WHERE idx = 0",
    ] {
        let error = fixture.error_of(sql).await;
        assert!(error.to_string().contains("append only"), "{error}");
    }
}

#[tokio::test]
async fn database_files_are_accessible_to_their_owner_only() {
    use std::os::unix::fs::PermissionsExt;
    let fixture = StoreFixture::new().await;
    fixture.project("p").await;
    for file in std::fs::read_dir(fixture.dir.path()).unwrap() {
        let file = file.unwrap();
        assert_eq!(
            file.metadata().unwrap().permissions().mode() & 0o077,
            0,
            "{:?}",
            file.path()
        );
    }
}

#[tokio::test]
async fn ten_thousand_projects_are_listed_through_an_index() {
    let Some(fixture) = StoreFixture::of_file().await else {
        return;
    };
    fixture.store.close().await;
    let mut db = SqliteConnectOptions::new()
        .filename(fixture.path())
        .connect()
        .await
        .unwrap();
    let mut plan = async |sql: &'static str| {
        let rows = sqlx::query(sql).fetch_all(&mut db).await.unwrap();
        rows.iter()
            .map(|row| row.get::<String, _>("detail"))
            .collect::<Vec<_>>()
            .join("; ")
    };
    for sql in [
        "EXPLAIN QUERY PLAN SELECT * FROM projects WHERE 1 = 1 AND project_id < 'x' ORDER BY project_id DESC LIMIT 101",
        "EXPLAIN QUERY PLAN SELECT * FROM sessions WHERE 1 = 1 AND project_id = 'x' ORDER BY session_id DESC LIMIT 101",
        "EXPLAIN QUERY PLAN SELECT * FROM sessions WHERE 1 = 1 AND project_id = 'x' AND status NOT IN ('ended', 'failed') ORDER BY session_id DESC LIMIT 101",
        "EXPLAIN QUERY PLAN SELECT COUNT(*) FROM sessions WHERE project_id = 'x' AND status NOT IN ('ended', 'failed')",
        "EXPLAIN QUERY PLAN SELECT * FROM sessions WHERE status = 'idle' ORDER BY session_id DESC LIMIT 101",
        "EXPLAIN QUERY PLAN SELECT * FROM workspaces WHERE project_id = 'x' AND (created_at, workspace_id) > (1, 'x') ORDER BY created_at, workspace_id LIMIT 101",
        "EXPLAIN QUERY PLAN SELECT * FROM audit WHERE 1 = 1 AND project_id = 'x' ORDER BY idx DESC LIMIT 101",
        "EXPLAIN QUERY PLAN SELECT idx, ts, body FROM events WHERE log = (SELECT log FROM event_logs WHERE session_id = 'x') AND idx > 5 AND idx <= 9 ORDER BY idx LIMIT 9",
        "EXPLAIN QUERY PLAN SELECT * FROM debug_events WHERE idx > 1 AND idx <= 9 AND session_id = 'x' ORDER BY idx LIMIT 9",
        "EXPLAIN QUERY PLAN SELECT * FROM tokens WHERE hash = 'x' AND revoked_at IS NULL",
    ] {
        let plan = plan(sql).await;
        assert!(
            plan.contains("USING") && !plan.contains("TEMP B-TREE"),
            "{sql}: {plan}"
        );
    }
}

#[tokio::test]
async fn the_audit_log_tells_owner_token_and_anonymous_apart() {
    let fixture = StoreFixture::new().await;
    let principals = [
        AuditPrincipal::Owner,
        AuditPrincipal::Token(TokenId::generate()),
        AuditPrincipal::Anonymous,
    ];
    let entries = principals.clone().map(|principal| AuditEntry {
        principal,
        session_id: None,
        project_id: None,
        action: "token_create".into(),
        target: None,
        outcome: "ok".into(),
        detail: None,
    });
    fixture.store.audit_append_all(entries.to_vec()).await.unwrap();
    let listed = fixture
        .store
        .audit_list(AuditFilter::default(), PageRequest::default());
    let listed = listed.await.unwrap().items.into_iter().rev();
    let found: Vec<_> = listed.map(|row| row.entry.principal).collect();
    assert_eq!(found, principals);
}

#[tokio::test]
async fn audit_entries_appended_together_keep_their_order() {
    let fixture = StoreFixture::new().await;
    let entry = |n: usize| AuditEntry {
        principal: AuditPrincipal::Owner,
        session_id: None,
        project_id: None,
        action: format!("a{n}"),
        target: None,
        outcome: "ok".into(),
        detail: None,
    };
    let store = &fixture.store;
    assert_eq!(store.audit_append(entry(0)).await.unwrap(), 0);
    assert_eq!(
        store
            .audit_append_all((1..100).map(entry).collect())
            .await
            .unwrap(),
        1
    );
    let rows = store
        .audit_list(AuditFilter::default(), PageRequest::first(1000))
        .await
        .unwrap()
        .items;
    let seen: Vec<_> = rows
        .iter()
        .rev()
        .map(|row| (row.index, row.entry.action.clone()))
        .collect();
    let wanted: Vec<_> = (0..100).map(|n| (n as i64, format!("a{n}"))).collect();
    assert_eq!(seen, wanted);
}
