//! Definitions of agents and catalog entries, with their files, where servers share a database.
//!
//! A definition changes whole, in one transaction, and only if nothing changed since the writer last read: the change names
//! the version of all definitions that it was made from. So whatever was checked before the write holds when it is committed,
//! also when another server writes at the same time.

use base64::{Engine as _, prelude::BASE64_STANDARD};
use oubliette_protocol::{
    Error, ErrorCode, Result,
    library::{DefinitionFiles, DefinitionKey, LibraryChange, LibraryFile, MAX_LIBRARY_DEFINITIONS},
};
use tokio::sync::watch;

use super::row::{number, parsed, text};
use crate::{
    db::{DbRow, query, query_scalar},
    db_error::{WriteError, read_error},
    store::Store,
    writer::{SequenceCounter, StoreWrite, Survives, WriteTx},
};

/// A definition and the number of the change that made it what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefinitionVersion {
    /// Which definition.
    pub key: DefinitionKey,
    /// The number of its last change.
    pub version: i64,
}

/// What became of a change.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LibraryChangeOutcome {
    /// It is stored; the number of the change.
    Stored(i64),
    /// Something else was changed since the version that it was made from; nothing is stored.
    Stale,
}

impl Store {
    /// The number of the last change of any definition; 0 if there was none.
    pub async fn library_version(&self) -> Result<i64> {
        let value = query_scalar("SELECT value FROM counters WHERE name = $1")
            .bind(SequenceCounter::Definitions.name())
            .fetch_optional::<i64>(self.readers())
            .await;
        Ok(value.map_err(read_error)?.unwrap_or(0))
    }

    /// All definitions with their versions.
    pub async fn definition_list(&self) -> Result<Vec<DefinitionVersion>> {
        let rows = query("SELECT kind, id, version FROM definitions ORDER BY kind, id LIMIT $1")
            .bind(MAX_LIBRARY_DEFINITIONS as i64)
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        // A row that was not written by this program must not keep all others from being used.
        let readable = |row| match version_from_row(row) {
            Ok(version) => Some(version),
            Err(error) => {
                tracing::error!(error = %error.for_log(), "a row of table definitions cannot be used and is left out");
                None
            }
        };
        Ok(rows.iter().filter_map(readable).collect())
    }

    /// The files of a definition, as one change left them; none if there is no such definition.
    pub async fn definition_files(
        &self,
        key: &DefinitionKey,
    ) -> Result<Option<(DefinitionVersion, DefinitionFiles)>> {
        // One statement, so that all files are of one version.
        let rows = query(
            "SELECT d.version, f.path, f.mode, f.content FROM definitions d
             JOIN definition_files f ON f.kind = d.kind AND f.id = d.id
             WHERE d.kind = $1 AND d.id = $2 ORDER BY f.path",
        )
        .bind(key.kind.as_str())
        .bind(key.id())
        .fetch_all(self.readers())
        .await
        .map_err(read_error)?;
        let Some(first) = rows.first() else {
            return Ok(None);
        };
        let version = DefinitionVersion {
            key: key.clone(),
            version: number(first, "version")?,
        };
        let files = rows.iter().map(file_from_row).collect::<Result<_>>()?;
        let found = DefinitionFiles {
            key: key.clone(),
            files,
        };
        // Somebody else may have written the row: a path that leads out must not become a file.
        found.check()?;
        Ok(Some((version, found)))
    }

    /// Puts and deletes definitions, all of them or none, if nothing changed since version `made_from`.
    pub async fn library_change(
        &self,
        made_from: i64,
        change: LibraryChange,
    ) -> Result<LibraryChangeOutcome> {
        for put in &change.puts {
            put.check()?;
        }
        match self.write(ChangeLibrary { made_from, change }).await {
            // The only conflict there can be: see `ChangeLibrary`.
            Err(error) if error.code == ErrorCode::Conflict => Ok(LibraryChangeOutcome::Stale),
            version => version.map(LibraryChangeOutcome::Stored),
        }
    }

    /// Removes all definitions and their version, after they were written out as files.
    pub async fn library_clear(&self) -> Result<()> {
        self.write(ClearLibrary).await
    }

    /// Tells when this process hears that definitions changed. One that does not hear everything has to look at
    /// [`Store::library_version`] as well.
    pub fn library_changes(&self) -> watch::Receiver<u64> {
        self.caches().library_changes.subscribe()
    }
}

fn version_from_row(row: &DbRow) -> Result<DefinitionVersion> {
    let id = text(row, "id")?;
    Ok(DefinitionVersion {
        key: DefinitionKey::parse(parsed(row, "kind")?, &id)?,
        version: number(row, "version")?,
    })
}

fn file_from_row(row: &DbRow) -> Result<LibraryFile> {
    let content = row.text("content").map_err(read_error)?;
    let content = BASE64_STANDARD
        .decode(content.as_bytes())
        .map_err(|error| Error::internal_during("reading column content of a stored row", error))?;
    Ok(LibraryFile {
        path: text(row, "path")?,
        mode: number(row, "mode")?,
        content,
    })
}

struct ChangeLibrary {
    made_from: i64,
    change: LibraryChange,
}

impl StoreWrite for ChangeLibrary {
    type Out = i64;
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut WriteTx) -> Result<i64, WriteError> {
        // Locks the counter's row: changes of several servers come one after the other.
        let before = tx.reserve_numbers(SequenceCounter::Definitions, 1).await?;
        if before != self.made_from {
            return Err(Error::conflict("definitions were changed meanwhile").into());
        }
        let version = before + 1;
        for key in &self.change.deletes {
            delete(tx, key).await?;
        }
        for put in &self.change.puts {
            insert(tx, put, version).await?;
        }
        let count = query_scalar("SELECT COUNT(*) FROM definitions")
            .fetch_one::<i64>(&mut tx.db)
            .await?;
        if count > MAX_LIBRARY_DEFINITIONS as i64 {
            let message = format!(
                "there may be {MAX_LIBRARY_DEFINITIONS} agents and catalog entries: delete some first"
            );
            return Err(Error::limit_exceeded(message).into());
        }
        tx.touched.definitions = true;
        Ok(version)
    }
}

async fn delete(tx: &mut WriteTx, key: &DefinitionKey) -> Result<(), WriteError> {
    // Its files go with it.
    query("DELETE FROM definitions WHERE kind = $1 AND id = $2")
        .bind(key.kind.as_str())
        .bind(key.id())
        .execute(&mut tx.db)
        .await?;
    Ok(())
}

async fn insert(tx: &mut WriteTx, put: &DefinitionFiles, version: i64) -> Result<(), WriteError> {
    delete(tx, &put.key).await?;
    query("INSERT INTO definitions (kind, id, version, updated_at) VALUES ($1, $2, $3, $4)")
        .bind(put.key.kind.as_str())
        .bind(put.key.id())
        .bind(version)
        .bind(tx.now_millis())
        .execute(&mut tx.db)
        .await?;
    for file in &put.files {
        query("INSERT INTO definition_files (kind, id, path, mode, content) VALUES ($1, $2, $3, $4, $5)")
            .bind(put.key.kind.as_str())
            .bind(put.key.id())
            .bind(&file.path)
            .bind(i64::from(file.mode))
            .bind(BASE64_STANDARD.encode(&file.content))
            .execute(&mut tx.db)
            .await?;
    }
    Ok(())
}

struct ClearLibrary;

impl StoreWrite for ClearLibrary {
    type Out = ();
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        query("DELETE FROM definitions").execute(&mut tx.db).await?;
        // With its number, so that a database these are copied to counts as one that never had any.
        query("DELETE FROM counters WHERE name = $1")
            .bind(SequenceCounter::Definitions.name())
            .execute(&mut tx.db)
            .await?;
        tx.touched.definitions = true;
        Ok(())
    }
}
