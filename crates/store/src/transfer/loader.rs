//! Writes rows into an empty database: all of them or none.
//!
//! SQLite's file is made beside its place and moved there when it is whole. On PostgreSQL everything is one transaction, so a
//! process that is killed in the middle leaves empty tables.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, ErrorCode, Result};

use super::{
    digest::TableDigest,
    shape::{TableShape, read_shapes},
    snapshot::{StoreSnapshot, read_table, used_table},
};
use crate::{
    db::{
        DbConnection, QueryBuilder, postgres,
        sqlite::{self, with_suffix},
        value::{ColumnType, DbValue},
    },
    db_error::read_error,
    open::{DatabaseUrl, OpenError, StoreLocation},
};

/// How many rows a statement inserts: the largest first, few enough that all statements stay prepared.
const BATCH_ROWS: [usize; 3] = [128, 16, 1];
/// What is appended to the name of a file that is being made.
const UNFINISHED_SUFFIX: &str = ".loading";

/// An empty database that is being filled.
pub struct StoreLoader {
    db: DbConnection,
    tables: Vec<TableShape>,
    target: LoadTarget,
}

/// What is filled.
enum LoadTarget {
    File(UnfinishedFile),
    Postgres(DatabaseUrl),
}

impl std::fmt::Debug for StoreLoader {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StoreLoader")
    }
}

/// A database file that is not in its place yet. It is removed when this is dropped.
struct UnfinishedFile {
    place: PathBuf,
    made_at: PathBuf,
}

impl Drop for UnfinishedFile {
    fn drop(&mut self) {
        for suffix in ["", "-journal", "-wal", "-shm"] {
            let _ = std::fs::remove_file(with_suffix(&self.made_at, suffix));
        }
    }
}

impl StoreLoader {
    /// Begins to fill a database, which must be empty or absent, with rows of this schema version. The caller holds the
    /// [`DatabaseLock`](super::DatabaseLock) of a file; a PostgreSQL database is locked here.
    pub async fn create(location: &StoreLocation, schema: i64) -> Result<Self> {
        let newest = sqlite::newest_migration();
        if schema > newest {
            return Err(Error::invalid(format!(
                "the rows are of a newer oubliette (schema {schema}; this one knows {newest}): use that version"
            )));
        }
        if !sqlite::is_migration(schema) {
            return Err(Error::invalid(format!("there is no schema {schema}")));
        }
        let (mut db, target) = match location {
            StoreLocation::File(place) => {
                let file = UnfinishedFile {
                    place: place.clone(),
                    made_at: with_suffix(place, UNFINISHED_SUFFIX),
                };
                // What is left of one that was killed.
                for suffix in ["", "-journal"] {
                    let _ = std::fs::remove_file(with_suffix(&file.made_at, suffix));
                }
                let db = sqlite::open_for_loading(&file.made_at, schema).await?;
                (DbConnection::Sqlite(db), LoadTarget::File(file))
            }
            StoreLocation::Postgres(url) => {
                let db = postgres::open::open_for_loading(url, schema)
                    .await
                    .map_err(OpenError::from)?;
                (
                    DbConnection::Postgres(Box::new(db)),
                    LoadTarget::Postgres(url.clone()),
                )
            }
        };
        check_unused(location).await?;
        let tables = read_shapes(&mut db).await?;
        match used_table(&mut db, &tables).await? {
            None => {}
            Some(table) => return Err(not_empty(location, &table)),
        }
        db.run("BEGIN").await.map_err(read_error)?;
        // Numbers that a server took at its first start; nothing refers to them.
        db.run("DELETE FROM counters").await.map_err(read_error)?;
        Ok(Self { db, tables, target })
    }

    /// Inserts rows of a table: a JSON array for each line.
    pub async fn insert(&mut self, table: &str, lines: &[u8]) -> Result<()> {
        let Some(shape) = self.tables.iter().find(|shape| shape.name == table) else {
            return Err(Error::invalid(format!(
                "there is no table {table} in this schema"
            )));
        };
        let lines = lines.split(|b| *b == b'\n').filter(|line| !line.is_empty());
        let rows: Vec<Vec<DbValue<'_>>> = lines.map(|line| decode_row(line, shape)).collect::<Result<_>>()?;
        let insert = format!("INSERT INTO \"{}\" ({}) VALUES ", shape.name, shape.column_list());
        let mut rows = rows.into_iter();
        while rows.len() > 0 {
            let left = rows.len();
            let size = BATCH_ROWS.into_iter().find(|size| *size <= left).unwrap_or(1);
            let mut statement = QueryBuilder::new(insert.as_str());
            for (number, row) in rows.by_ref().take(size).enumerate() {
                statement.push(if number == 0 { "(" } else { ",(" });
                for (column, value) in row.into_iter().enumerate() {
                    if column > 0 {
                        statement.push(",");
                    }
                    statement.push_bind(value);
                }
                statement.push(")");
            }
            statement
                .build()
                .execute(&mut self.db)
                .await
                .map_err(read_error)?;
        }
        Ok(())
    }

    /// Compares the rows that are there with what they should be. An error if they differ; then this is to be dropped, and
    /// the database is as empty as before.
    pub async fn compare(&mut self, expected: &[TableDigest]) -> Result<()> {
        let expected_shapes: Vec<_> = expected.iter().map(|digest| &digest.table).collect();
        if expected_shapes != self.tables.iter().collect::<Vec<_>>() {
            return Err(Error::invalid("the tables are not those of their schema version"));
        }
        for digest in expected {
            let found = read_table(&mut self.db, &digest.table, None).await?;
            if found != *digest {
                return Err(Error::new(
                    ErrorCode::Internal,
                    format!(
                        "table {} has {} rows with the hash {} instead of {} with {}: nothing was kept",
                        digest.table.name, found.rows, found.sha256, digest.rows, digest.sha256
                    ),
                ));
            }
        }
        Ok(())
    }

    /// Commits, migrates to the newest schema and, of a file, puts it in its place.
    pub async fn publish(mut self) -> Result<()> {
        self.db.run("COMMIT").await.map_err(read_error)?;
        match (self.db, self.target) {
            (DbConnection::Postgres(db), LoadTarget::Postgres(url)) => {
                postgres::open::finish_loading(&url, *db)
                    .await
                    .map_err(OpenError::from)?;
                Ok(())
            }
            (DbConnection::Sqlite(db), LoadTarget::File(file)) => {
                sqlite::finish_loading(&file.made_at, db).await?;
                put_in_place(&file).map_err(|error| {
                    Error::unavailable(format!("cannot write {}: {error}", file.place.display()))
                })
            }
            _ => Err(Error::internal("a connection of another database")),
        }
    }
}

/// Moves a finished file to its place, over an empty one that may be there.
fn put_in_place(file: &UnfinishedFile) -> std::io::Result<()> {
    File::open(&file.made_at)?.sync_all()?;
    for suffix in ["-wal", "-shm"] {
        match std::fs::remove_file(with_suffix(&file.place, suffix)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(error),
            _ => {}
        }
    }
    std::fs::rename(&file.made_at, &file.place)?;
    match file.place.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => File::open(dir)?.sync_all(),
        _ => Ok(()),
    }
}

/// An error if there is a file with rows.
async fn check_unused(location: &StoreLocation) -> Result<()> {
    let StoreLocation::File(path) = location else {
        return Ok(());
    };
    if !Path::new(path).try_exists().unwrap_or(true) {
        return Ok(());
    }
    match StoreSnapshot::open(location).await?.used_table().await? {
        None => Ok(()),
        Some(table) => Err(not_empty(location, &table)),
    }
}

fn not_empty(location: &StoreLocation, table: &str) -> Error {
    let remedy = match location {
        StoreLocation::File(_) => "name a file that does not exist, or move this one away",
        StoreLocation::Postgres(_) => "name an empty database or schema",
    };
    Error::conflict(format!(
        "{location} is not empty (table {table} has rows): {remedy}"
    ))
}

fn decode_row(line: &[u8], table: &TableShape) -> Result<Vec<DbValue<'static>>> {
    let bad = |why: &str| Error::invalid(format!("a row of table {} {why}", table.name));
    let cells: Vec<serde_json::Value> =
        serde_json::from_slice(line).map_err(|_| bad("is not an array in JSON"))?;
    if cells.len() != table.columns.len() {
        return Err(bad("has not as many values as the table has columns"));
    }
    let values = cells.into_iter().zip(&table.columns).map(|(cell, column)| {
        Ok(match (column.column_type, cell) {
            (ColumnType::Number, serde_json::Value::Null) => DbValue::Number(None),
            (ColumnType::Text, serde_json::Value::Null) => DbValue::Text(None),
            (ColumnType::Text, serde_json::Value::String(text)) => DbValue::Text(Some(text.into())),
            (ColumnType::Number, serde_json::Value::Number(number)) => {
                let number = number.as_i64();
                DbValue::Number(Some(number.ok_or_else(|| bad("has a number that is not whole"))?))
            }
            _ => return Err(bad("has a value of another type than its column")),
        })
    });
    values.collect()
}
