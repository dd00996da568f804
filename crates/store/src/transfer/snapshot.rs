//! Reads all rows of a database as they are at one moment, while others write: one transaction, in SQLite's write-ahead
//! log as in PostgreSQL.

use std::{borrow::Cow, io::Write as _, path::Path};

use futures::TryStreamExt as _;
use oubliette_protocol::{Error, Result};
use tokio::sync::mpsc;

use super::{
    CHUNK_BYTES, MAX_CHUNK_BYTES, RowChunk,
    digest::{RowDigest, TableDigest},
    shape::{TableShape, read_shapes},
};
use crate::{
    db::{DbConnection, DbRow, QueryBuilder, postgres, query_scalar, sqlite, value::ColumnType},
    db_error::read_error,
    open::{OpenError, StoreLocation},
};

/// The tables whose rows do not make a database a used one: numbers that a server takes at its first start.
const UNCOUNTED_TABLES: [&str; 1] = ["counters"];

/// All rows of a database at one moment.
pub struct StoreSnapshot {
    db: DbConnection,
    schema: i64,
    tables: Vec<TableShape>,
}

impl std::fmt::Debug for StoreSnapshot {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("StoreSnapshot")
    }
}

impl StoreSnapshot {
    /// Opens a database for reading, beside a server that writes it.
    pub async fn open(location: &StoreLocation) -> Result<Self> {
        let mut db = match location {
            StoreLocation::File(path) => DbConnection::Sqlite(sqlite::open_snapshot(path).await?),
            StoreLocation::Postgres(url) => {
                let db = postgres::open::open_snapshot(url)
                    .await
                    .map_err(OpenError::from)?;
                DbConnection::Postgres(Box::new(db))
            }
        };
        let schema = query_scalar("SELECT MAX(version) FROM _sqlx_migrations")
            .fetch_one::<Option<i64>>(&mut db)
            .await
            .map_err(|error| match location {
                StoreLocation::File(path) => no_store(path),
                StoreLocation::Postgres(_) => read_error(error),
            })?;
        let tables = read_shapes(&mut db).await?;
        Ok(Self {
            db,
            schema: schema.unwrap_or(0),
            tables,
        })
    }

    /// The version of its schema.
    pub fn schema(&self) -> i64 {
        self.schema
    }

    /// A table that has rows; none if the database has not been used.
    pub async fn used_table(&mut self) -> Result<Option<String>> {
        used_table(&mut self.db, &self.tables).await
    }

    /// Sends all rows of all tables. Returns their counts and hashes.
    pub async fn read_all(&mut self, chunks: &mpsc::Sender<RowChunk>) -> Result<Vec<TableDigest>> {
        let mut digests = Vec::with_capacity(self.tables.len());
        for table in &self.tables {
            digests.push(read_table(&mut self.db, table, Some(chunks)).await?);
        }
        Ok(digests)
    }
}

fn no_store(path: &Path) -> Error {
    Error::unavailable(format!(
        "{} is not a database of oubliette's: name the home that has one with --home",
        path.display()
    ))
}

/// The first table that has rows.
pub(super) async fn used_table(db: &mut DbConnection, tables: &[TableShape]) -> Result<Option<String>> {
    for table in tables {
        if UNCOUNTED_TABLES.contains(&table.name.as_str()) {
            continue;
        }
        let sql = format!("SELECT 1 FROM \"{}\" LIMIT 1", table.name);
        let row = QueryBuilder::new(sql).build().fetch_optional(&mut *db).await;
        if row.map_err(read_error)?.is_some() {
            return Ok(Some(table.name.clone()));
        }
    }
    Ok(None)
}

/// Reads a table's rows, sends them if somebody takes them, and returns their count and hash.
pub(super) async fn read_table(
    db: &mut DbConnection,
    table: &TableShape,
    chunks: Option<&mpsc::Sender<RowChunk>>,
) -> Result<TableDigest> {
    let sql = format!("SELECT {} FROM \"{}\"", table.column_list(), table.name);
    let mut rows = QueryBuilder::new(sql).build().fetch(db);
    let mut digest = RowDigest::default();
    let (mut lines, mut rows_before) = (Vec::new(), 0);
    while let Some(row) = rows.try_next().await.map_err(read_error)? {
        let begin = lines.len();
        encode_row(&mut lines, &row, table).map_err(read_error)?;
        if lines.len() - begin > MAX_CHUNK_BYTES {
            let message = format!(
                "a row of table {} is larger than {} MiB: it cannot be copied",
                table.name,
                MAX_CHUNK_BYTES >> 20
            );
            return Err(Error::limit_exceeded(message));
        }
        digest.add(&lines[begin..]);
        lines.push(b'\n');
        if chunks.is_none() {
            lines.clear();
        } else if lines.len() >= CHUNK_BYTES {
            // The last row may be too much for one chunk with those before it.
            let last = match begin > 0 && lines.len() > MAX_CHUNK_BYTES {
                true => lines.split_off(begin),
                false => Vec::new(),
            };
            let in_chunk = digest.rows() - rows_before - u64::from(!last.is_empty());
            send(
                chunks,
                table,
                &mut rows_before,
                in_chunk,
                std::mem::replace(&mut lines, last),
            )
            .await?;
        }
    }
    if !lines.is_empty() {
        let in_chunk = digest.rows() - rows_before;
        send(chunks, table, &mut rows_before, in_chunk, lines).await?;
    }
    Ok(TableDigest::new(table.clone(), &digest))
}

async fn send(
    chunks: Option<&mpsc::Sender<RowChunk>>,
    table: &TableShape,
    rows_before: &mut u64,
    rows: u64,
    lines: Vec<u8>,
) -> Result<()> {
    let Some(chunks) = chunks else { return Ok(()) };
    let chunk = RowChunk {
        table: table.name.clone(),
        rows_before: *rows_before,
        rows,
        lines,
    };
    *rows_before += rows;
    chunks
        .send(chunk)
        .await
        .map_err(|_| Error::unavailable("the rows that were read could not be written"))
}

/// Appends a row as a line of JSON, without its newline.
fn encode_row(line: &mut Vec<u8>, row: &DbRow, table: &TableShape) -> Result<(), sqlx::Error> {
    let encoded = |error: serde_json::Error| sqlx::Error::Encode(error.into());
    line.push(b'[');
    for (number, column) in table.columns.iter().enumerate() {
        if number > 0 {
            line.push(b',');
        }
        match column.column_type {
            ColumnType::Number => match row.try_get::<Option<i64>>(number)? {
                Some(value) => write!(line, "{value}")?,
                None => line.extend_from_slice(b"null"),
            },
            ColumnType::Text => match row.try_get::<Option<Cow<'_, str>>>(number)? {
                Some(text) => serde_json::to_writer(&mut *line, &*text).map_err(encoded)?,
                None => line.extend_from_slice(b"null"),
            },
        }
    }
    line.push(b']');
    Ok(())
}
