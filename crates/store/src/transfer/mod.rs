//! All rows of a database, out of it and into an empty one: for backups, for restoring them, and for moving between SQLite
//! and PostgreSQL.
//!
//! Rows travel as lines of JSON, an array of whole numbers, texts and nulls each, so they are the same whichever database they
//! come from. The tables are found in the database, not listed here: one that a migration adds is not forgotten.
//!
//! - [`shape`]: the tables of a database and their columns.
//! - [`digest`]: the count and hash of a table's rows, which do not depend on their order.
//! - [`snapshot`]: reads all rows as they are at one moment, while others write.
//! - [`loader`]: writes rows into an empty database, all of them or none.

mod digest;
mod loader;
mod shape;
mod snapshot;

use std::path::Path;

use oubliette_protocol::{Error, Result};
use tokio::sync::mpsc;

pub use digest::{RowDigest, TableDigest};
pub use loader::StoreLoader;
pub use shape::{ColumnShape, TableShape};
pub use snapshot::StoreSnapshot;

pub use crate::db::value::ColumnType;
use crate::{
    db::sqlite,
    open::{OpenError, StoreLocation, StoreOptions},
    store::Store,
};

/// Rows of one table, as lines of JSON.
#[derive(Debug)]
pub struct RowChunk {
    /// The table's name.
    pub table: String,
    /// How many rows of the table came before.
    pub rows_before: u64,
    /// How many rows it holds.
    pub rows: u64,
    /// A line for each row.
    pub lines: Vec<u8>,
}

/// The largest chunk, in bytes. Larger rows cannot be read back.
pub const MAX_CHUNK_BYTES: usize = 128 << 20;
/// A chunk is sent when it has this many bytes.
const CHUNK_BYTES: usize = 1 << 20;
/// Chunks that wait to be written, while the next one is read.
const CHUNKS_AHEAD: usize = 2;

/// The version of this program's schema.
pub fn newest_schema() -> i64 {
    sqlite::newest_migration()
}

/// The lock of a SQLite database's file, or of a home whose database is elsewhere: no server starts while it is held.
#[derive(Debug)]
pub struct DatabaseLock(std::fs::File);

impl DatabaseLock {
    /// Takes the lock of this file; an error if an Oubliette has it.
    pub async fn take(database: &Path) -> Result<Self, OpenError> {
        Ok(Self(sqlite::lock_database(database).await?))
    }
}

impl Drop for DatabaseLock {
    fn drop(&mut self) {
        let _ = self.0.unlock();
    }
}

/// Copies everything from one database into another, which must be empty, and compares what arrived. No server may run on
/// either; the caller holds the lock of a target that is a file. `progress` is told the table and how many of its rows
/// are copied.
pub async fn copy_store(
    from: &StoreLocation,
    options: &StoreOptions,
    to: &StoreLocation,
    progress: impl Fn(&str, u64),
) -> Result<Vec<TableDigest>> {
    // Held while it is copied, so that no server starts and writes what would not be copied; also migrates it.
    let source = Store::open_at(from, options).await?;
    let copied = Box::pin(copy_rows(from, to, progress)).await;
    source.close().await;
    copied
}

async fn copy_rows(
    from: &StoreLocation,
    to: &StoreLocation,
    progress: impl Fn(&str, u64),
) -> Result<Vec<TableDigest>> {
    let mut snapshot = StoreSnapshot::open(from).await?;
    let mut loader = StoreLoader::create(to, snapshot.schema()).await?;
    let (chunks, arriving) = mpsc::channel::<RowChunk>(CHUNKS_AHEAD);
    let reading = async {
        let digests = snapshot.read_all(&chunks).await;
        drop(chunks);
        digests
    };
    let writing = async {
        // Dropped at the end, also of an error: it wakes a reader that waits to send.
        let mut arriving = arriving;
        while let Some(chunk) = arriving.recv().await {
            progress(&chunk.table, chunk.rows_before + chunk.rows);
            loader.insert(&chunk.table, &chunk.lines).await?;
        }
        Ok::<_, Error>(())
    };
    let (read, written) = tokio::join!(reading, writing);
    // The error of the writing side first: the reading side only finds that nobody takes its rows any more.
    written?;
    let expected = read?;
    progress("comparing", 0);
    loader.compare(&expected).await?;
    loader.publish().await?;
    Ok(expected)
}
