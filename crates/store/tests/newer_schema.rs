//! A database that a newer version has migrated: this program goes on using it, unless the tables say that it cannot.
#![allow(clippy::expect_used, clippy::unwrap_used, clippy::disallowed_types)]

mod common;

use common::{StoreFixture, delta, postgres, project, session};
use oubliette_protocol::Scope;
use oubliette_store::{
    ApprovalFilter, AuditEntry, AuditFilter, AuditPrincipal, ClusterOptions, NewToken, OpenError,
    PageRequest, PostgresOpenError, ProjectFilter, SessionFilter, Store, StoreLocation, StoreOptions,
    TokenFilter,
};
use sqlx::{AssertSqlSafe, ConnectOptions, sqlite::SqliteConnectOptions};

/// Stands for an empty string of bytes, which each database writes its own way.
const NO_BYTES: &str = "NO_BYTES";

/// Every table that rows are read from by name, and a migration of a version to come that adds to each.
const TABLES: [&str; 8] = [
    "sessions",
    "projects",
    "workspaces",
    "tokens",
    "approvals",
    "audit",
    "events",
    "session_usage",
];

/// The statements of a migration of tomorrow.
fn newer_migration() -> Vec<String> {
    let mut sql: Vec<String> = Vec::new();
    for table in TABLES {
        sql.push(format!("ALTER TABLE {table} ADD COLUMN of_tomorrow TEXT"));
        sql.push(format!(
            "ALTER TABLE {table} ADD COLUMN with_default BIGINT NOT NULL DEFAULT 7"
        ));
    }
    sql.push("CREATE TABLE of_tomorrow (id TEXT NOT NULL PRIMARY KEY, value BIGINT NOT NULL)".to_owned());
    sql.push("INSERT INTO of_tomorrow (id, value) VALUES ('a', 1)".to_owned());
    sql.push(
        "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (9000, 'of tomorrow', true, NO_BYTES, 0)"
            .to_owned(),
    );
    sql
}

async fn apply(fixture: &StoreFixture, statements: &[String]) {
    match &fixture.schema {
        Some(schema) => {
            let mut db = postgres::connect(schema).await;
            for sql in statements {
                postgres::run(&mut db, sql.replace(NO_BYTES, "''")).await;
            }
        }
        None => {
            let options = SqliteConnectOptions::new().filename(fixture.path());
            let mut db = options.connect().await.unwrap();
            for sql in statements {
                sqlx::raw_sql(AssertSqlSafe(sql.replace(NO_BYTES, "x''")))
                    .execute(&mut db)
                    .await
                    .unwrap();
            }
        }
    }
}

/// Writes and reads what a server does all day.
async fn use_store(store: &Store, name: &str) {
    let (row, workspace) = project(name);
    store
        .project_create(row.clone(), workspace.clone())
        .await
        .unwrap();
    let session = session(&row);
    let log = store.events();
    log.append_first(session.clone(), vec![delta("0")], Some(9))
        .await
        .unwrap();
    let appended = log.append(&session.session_id, vec![delta("1")]).await.unwrap();
    assert_eq!(appended[0].index, 1);
    let hash: [u8; 32] = std::array::from_fn(|at| name.as_bytes()[at % name.len()]);
    store
        .token_insert(NewToken {
            token_id: oubliette_protocol::TokenId::generate(),
            name: name.to_owned(),
            scope: Scope::Read,
            project_id: None,
            session_id: None,
            hash,
            expires_at: None,
        })
        .await
        .unwrap();
    store
        .audit_append(AuditEntry {
            principal: AuditPrincipal::Owner,
            session_id: None,
            project_id: Some(row.project_id.clone()),
            action: "project_create".to_owned(),
            target: None,
            outcome: "ok".to_owned(),
            detail: None,
        })
        .await
        .unwrap();
    read_store(store, name).await;
    assert_eq!(
        store.project_get(&row.project_id).await.unwrap().unwrap().name,
        name
    );
    assert_eq!(
        store.workspace_get(&workspace.workspace_id).await.unwrap(),
        Some(workspace)
    );
    assert!(store.session_get(&session.session_id).await.unwrap().is_some());
    assert_eq!(store.session_tree(&session.root_id).await.unwrap().len(), 1);
    assert!(store.token_by_hash(&hash).await.unwrap().is_some());
    let sessions = [session.session_id];
    assert!(store.usage_of_sessions(&sessions).await.unwrap().is_empty());
}

async fn read_store(store: &Store, name: &str) {
    let projects = store
        .project_list(ProjectFilter::default(), PageRequest::default())
        .await
        .unwrap();
    assert!(projects.items.iter().any(|project| project.name == name));
    let sessions = store
        .session_list(SessionFilter::default(), PageRequest::default())
        .await;
    assert!(!sessions.unwrap().items.is_empty());
    let tokens = store
        .token_list(TokenFilter::default(), PageRequest::default())
        .await;
    assert!(tokens.unwrap().items.iter().any(|token| token.name == name));
    let approvals = store
        .approval_list(ApprovalFilter::default(), PageRequest::default())
        .await;
    assert!(approvals.unwrap().items.is_empty());
    let audit = store
        .audit_list(AuditFilter::default(), PageRequest::default())
        .await;
    assert!(!audit.unwrap().items.is_empty());
}

#[tokio::test]
async fn a_store_works_on_tables_that_a_newer_version_has_added_to() {
    let mut fixture = StoreFixture::new().await;
    use_store(&fixture.store, "before").await;
    fixture.store.close().await;
    apply(&fixture, &newer_migration()).await;
    fixture.store = common::open(&fixture.location()).await;
    use_store(&fixture.store, "after").await;
    read_store(&fixture.store, "before").await;
    assert_eq!(
        fixture
            .count("SELECT COUNT(*) FROM projects WHERE with_default = 7")
            .await,
        2
    );
    assert_eq!(fixture.count("SELECT value FROM of_tomorrow").await, 1);
    fixture.store.close().await;

    let broken = ["UPDATE schema_compatibility SET min_schema = 9000".to_owned()];
    apply(&fixture, &broken).await;
    let error = Store::open_at(&fixture.location(), &StoreOptions::default())
        .await
        .unwrap_err();
    let said = error.to_string();
    assert!(
        said.contains("newer oubliette (schema 9000)") && said.contains("use that version"),
        "{said}"
    );
}

/// Of a migration that no version had, and that is older than this program's newest, nothing is known.
#[tokio::test]
async fn a_migration_that_no_version_had_is_refused() {
    let fixture = StoreFixture::new().await;
    fixture.store.close().await;
    let foreign = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time)
         VALUES (59, 'of nobody', true, NO_BYTES, 0)";
    apply(&fixture, &[foreign.to_owned()]).await;
    let error = Store::open_at(&fixture.location(), &StoreOptions::default())
        .await
        .unwrap_err();
    assert!(error.to_string().contains("migration 59"), "{error}");
}

async fn join(schema: &str) -> Result<Store, OpenError> {
    let options = StoreOptions {
        cluster: Some(ClusterOptions {
            address: "http://127.0.0.1:1".to_owned(),
            key_fingerprint: "key".to_owned(),
        }),
        ..StoreOptions::default()
    };
    Store::open_at(&StoreLocation::Postgres(postgres::url(schema)), &options).await
}

/// A newer server migrates while older ones run: their prepared statements stay valid. What would break them is refused.
#[tokio::test]
async fn servers_go_on_while_a_newer_one_adds_to_their_tables() {
    if !postgres::is_selected() {
        return;
    }
    let schema = postgres::new_schema().await;
    let one = join(&schema).await.unwrap();
    // All statements are prepared on the connections that are used again below.
    use_store(&one, "one").await;
    let mut db = postgres::connect(&schema).await;
    for sql in newer_migration() {
        postgres::run(&mut db, sql.replace(NO_BYTES, "''")).await;
    }
    use_store(&one, "one again").await;
    let two = join(&schema).await.unwrap();
    use_store(&two, "two").await;
    read_store(&one, "two").await;
    assert!(Store::observe(&postgres::url(&schema)).await.is_ok());

    let breaking = "UPDATE schema_compatibility SET min_schema = 9000";
    let error = sqlx::raw_sql(breaking).execute(&mut db).await.unwrap_err();
    let cause = error.as_database_error().unwrap();
    assert_eq!(cause.code().as_deref(), Some("OU001"));
    assert!(cause.message().contains("http://127.0.0.1:1"), "{cause}");
    use_store(&one, "one still").await;

    // One stops; the other is not heard of any more, and may not come back to tables that it does not know.
    one.close().await;
    let forget = async {
        let mut db = postgres::connect(&schema).await;
        loop {
            postgres::run(&mut db, "UPDATE servers SET last_seen = 0").await;
        }
    };
    let raise = async { while sqlx::raw_sql(breaking).execute(&mut db).await.is_err() {} };
    tokio::select! {
        () = raise => {}
        () = forget => {}
    }
    two.cluster().unwrap().wait_until_fenced().await;
    assert!(
        two.events()
            .append(&session(&project("p").0).session_id, vec![delta("0")])
            .await
            .is_err()
    );
    two.close().await;
    let error = join(&schema).await.unwrap_err();
    assert!(
        matches!(
            &error,
            OpenError::Postgres(PostgresOpenError::Newer { version: 9000, .. })
        ),
        "{error}"
    );
    assert!(Store::observe(&postgres::url(&schema)).await.is_err());
}
