//! The two databases behind one interface. Everything above this module is written once; what differs between SQLite and
//! PostgreSQL is in here.
//!
//! - [`value`]: what statements bind: whole numbers and text, the only types the schema has.
//! - [`mod@query`]: statements, with the few methods of sqlx's own that the tables use.
//! - [`row`]: rows, and their columns by number or name.
//! - [`connection`]: a connection and a pool of either kind, and how a transaction begins and ends on it.
//! - [`batch`]: many rows in one statement: `VALUES` lists on SQLite, arrays on PostgreSQL.
//! - [`schema_version`]: whether a database that a newer version has migrated can be used.
//! - [`sqlite`]: opening the file, its lock and its settings.
//! - [`postgres`]: opening the database, the lease that lets one server write, notifications.

pub(crate) mod batch;
pub(crate) mod connection;
pub(crate) mod postgres;
pub(crate) mod query;
pub(crate) mod row;
pub(crate) mod schema_version;
pub(crate) mod sqlite;
pub(crate) mod value;

pub(crate) use connection::{DbConnection, DbPool};
pub(crate) use query::{QueryBuilder, query, query_scalar};
pub(crate) use row::DbRow;
