//! A PostgreSQL of the tests' own (`tests/postgres/serve.sh`), and a schema of it for each test.

use std::{
    io::{BufRead, BufReader},
    path::{Path, PathBuf},
    process::{ChildStdin, Command, Stdio},
    str::FromStr,
    sync::{
        OnceLock,
        atomic::{AtomicU32, Ordering},
    },
};

use oubliette_store::DatabaseUrl;
use sqlx::{AssertSqlSafe, ConnectOptions, PgConnection, postgres::PgConnectOptions};

/// Which database the tests run on: `postgres`, or SQLite if it is not set.
const STORE_VAR: &str = "OUBLIETTE_TEST_STORE";
/// The socket's directory of a server that somebody else started.
const SERVER_VAR: &str = "OUBLIETTE_TEST_POSTGRES";

pub struct TestServer {
    pub socket_dir: PathBuf,
    /// The server ends when this is closed, with this process.
    _stdin: Option<ChildStdin>,
}

/// Whether the tests run on PostgreSQL.
pub fn is_selected() -> bool {
    std::env::var_os(STORE_VAR).is_some_and(|store| store == "postgres")
}

/// The socket's directory, from which a server is started that all tests of this process share.
pub fn socket_dir() -> &'static PathBuf {
    static SERVER: OnceLock<TestServer> = OnceLock::new();
    &SERVER
        .get_or_init(|| match std::env::var_os(SERVER_VAR) {
            Some(dir) => TestServer {
                socket_dir: dir.into(),
                _stdin: None,
            },
            None => start(),
        })
        .socket_dir
}

/// Starts a server that nobody shares.
#[allow(
    clippy::zombie_processes,
    reason = "it ends after its input is closed, which may be as this process ends"
)]
pub fn start() -> TestServer {
    let script = concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/postgres/serve.sh");
    let mut child = Command::new(script)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut line = String::new();
    BufReader::new(child.stdout.take().unwrap())
        .read_line(&mut line)
        .unwrap();
    let socket_dir = line
        .trim()
        .strip_prefix("ready ")
        .unwrap_or_else(|| panic!("no PostgreSQL for the tests: {line}"))
        .into();
    TestServer {
        socket_dir,
        _stdin: child.stdin.take(),
    }
}

/// The address of a schema.
pub fn url_text(schema: &str) -> String {
    url_text_on(socket_dir(), schema)
}

pub fn url_text_on(socket_dir: &Path, schema: &str) -> String {
    let dir = socket_dir.display();
    format!("postgres://oubliette@localhost/postgres?host={dir}&options[search_path]={schema}")
}

pub fn url(schema: &str) -> DatabaseUrl {
    url_text(schema).parse().unwrap()
}

pub fn url_on(socket_dir: &Path, schema: &str) -> DatabaseUrl {
    url_text_on(socket_dir, schema).parse().unwrap()
}

/// A connection of a test's own to a schema.
pub async fn connect(schema: &str) -> PgConnection {
    connect_to(&url_text(schema)).await
}

pub async fn connect_to(url: &str) -> PgConnection {
    let options = PgConnectOptions::from_str(url).unwrap();
    options.connect().await.unwrap()
}

pub async fn run(db: &mut PgConnection, sql: impl Into<String>) {
    sqlx::raw_sql(AssertSqlSafe(sql.into()))
        .execute(db)
        .await
        .unwrap();
}

/// The number that a query returns.
pub async fn number(db: &mut PgConnection, sql: &str) -> i64 {
    sqlx::query_scalar(AssertSqlSafe(sql.to_owned()))
        .fetch_one(db)
        .await
        .unwrap()
}

/// A new, empty schema.
pub async fn new_schema() -> String {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    // Of several runs on one server none meets the schema of another.
    let now = oubliette_store::now().as_nanosecond();
    let schema = format!("t{}_{number}_{now}", std::process::id());
    let mut db = connect("public").await;
    run(&mut db, format!("CREATE SCHEMA {schema}")).await;
    schema
}
