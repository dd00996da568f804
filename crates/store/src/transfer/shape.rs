//! The tables of a database and their columns.

use oubliette_protocol::{Error, Result};
use serde::{Deserialize, Serialize};

use crate::{
    db::{DbConnection, query, value::ColumnType},
    db_error::read_error,
};

/// Tables that belong to one database and not to what it holds.
const OWN_TABLES: [&str; 7] = [
    "_sqlx_migrations",
    "server_lease",
    "servers",
    "server_leases",
    "session_owners",
    "cluster_key",
    "schema_compatibility",
];

/// A table and its columns.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TableShape {
    /// Its name.
    pub name: String,
    /// Its columns, in their order in a row.
    pub columns: Vec<ColumnShape>,
}

/// A column.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ColumnShape {
    /// Its name.
    pub name: String,
    /// What it holds.
    #[serde(rename = "type")]
    pub column_type: ColumnType,
}

impl TableShape {
    /// Its columns for a statement: quoted, because a name may be a keyword of one of the databases.
    pub(super) fn column_list(&self) -> String {
        let quoted = self.columns.iter().map(|column| format!("\"{}\"", column.name));
        quoted.collect::<Vec<_>>().join(", ")
    }
}

/// The tables, in the order in which they were made: one that refers to another comes after it.
pub(super) async fn read_shapes(db: &mut DbConnection) -> Result<Vec<TableShape>> {
    let sql = match db {
        DbConnection::Sqlite(_) => {
            "SELECT m.name, c.name, c.type FROM sqlite_master m JOIN pragma_table_info(m.name) c
             WHERE m.type = 'table' AND m.name NOT LIKE 'sqlite%' ORDER BY m.rowid, c.cid"
        }
        DbConnection::Postgres(_) => {
            "SELECT t.relname::text, c.attname::text, format_type(c.atttypid, NULL)::text
             FROM pg_class t JOIN pg_namespace n ON n.oid = t.relnamespace JOIN pg_attribute c ON c.attrelid = t.oid
             WHERE n.nspname = current_schema() AND t.relkind = 'r' AND c.attnum > 0 AND NOT c.attisdropped
             ORDER BY t.oid, c.attnum"
        }
    };
    let mut shapes: Vec<TableShape> = Vec::new();
    for row in query(sql).fetch_all(db).await.map_err(read_error)? {
        let text = |number: usize| row.try_get::<String>(number).map_err(read_error);
        let (table, name, stored_as) = (text(0)?, text(1)?, text(2)?);
        if OWN_TABLES.contains(&table.as_str()) {
            continue;
        }
        let column_type = match stored_as.to_ascii_lowercase().as_str() {
            "bigint" => ColumnType::Number,
            "text" => ColumnType::Text,
            other => {
                let message =
                    format!("column {name} of table {table} is of type {other}, which cannot be copied");
                return Err(Error::internal(message));
            }
        };
        let is_plain = |name: &str| name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
        if !is_plain(&table) || !is_plain(&name) {
            return Err(Error::internal(format!(
                "table {table} was not made by this program"
            )));
        }
        let column = ColumnShape { name, column_type };
        match shapes.last_mut() {
            Some(shape) if shape.name == table => shape.columns.push(column),
            _ => shapes.push(TableShape {
                name: table,
                columns: vec![column],
            }),
        }
    }
    Ok(shapes)
}
