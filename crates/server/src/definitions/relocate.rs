//! Definitions that are in the other place when a server starts: files of the home for a database that never had any, or rows
//! of a SQLite database that was copied or restored from PostgreSQL. Nothing that is there is overwritten.

use oubliette_home::{DefinitionLibrary, HomeDir, LibraryDir, safe_fs};
use oubliette_protocol::{
    Error, Result,
    library::{DefinitionKey, LibraryChange},
};
use oubliette_store::Store;

use super::{home_files, library_copy::LibraryCopy};
use crate::actions::run_blocking;

/// Maximum size of all files that are brought into a database at once, in bytes.
const MAX_IMPORT_BYTES: usize = 128 * 1024 * 1024;

/// Files of the home that have no effect, because definitions are in the database.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct UnusedFiles {
    /// How many definitions they are, valid or not.
    pub(crate) count: usize,
    /// One that is not as in the database; none if all are.
    pub(crate) differing: Option<String>,
}

/// Brings the definitions of the home's files into a database that never had any.
pub(super) async fn import(home: &HomeDir, copy: &LibraryCopy) -> Result<()> {
    if copy.sync().await? != 0 {
        return Ok(());
    }
    let files = home_files(home);
    let change = run_blocking(move || {
        let mut change = LibraryChange::default();
        let mut bytes = 0;
        for key in files.keys()? {
            let definition = files.read(&key)?;
            bytes += definition
                .files
                .iter()
                .map(|file| file.content.len())
                .sum::<usize>();
            if bytes > MAX_IMPORT_BYTES {
                return Err(Error::limit_exceeded(format!(
                    "the files of all definitions have more than {} MiB",
                    MAX_IMPORT_BYTES >> 20
                )));
            }
            change.puts.push(definition);
        }
        Ok(change)
    })
    .await?;
    let count = change.puts.len();
    if count == 0 {
        return Ok(());
    }
    // Of two servers that start at once only one does it: see `LibraryCopy::change`.
    copy.change(move |library| match library.dir().keys()?.is_empty() {
        true => Ok(change.clone()),
        false => Ok(LibraryChange::default()),
    })
    .await?;
    tracing::info!(
        count,
        "the home's agents and catalog entries are in the database now; its files have no effect any more"
    );
    Ok(())
}

/// Writes the rows that a SQLite database holds as files of the home, where they belong, and removes the rows.
pub(super) async fn write_out(home: &HomeDir, store: &Store) -> Result<()> {
    let listed = store.definition_list().await?;
    if listed.is_empty() {
        return Ok(());
    }
    move_away(home)?;
    let files = home_files(home);
    for row in listed {
        let Some((_, definition)) = store.definition_files(&row.key).await? else {
            continue;
        };
        let files = files.clone();
        run_blocking(move || files.stage(&definition)?.publish()).await?;
    }
    run_blocking(move || files.sync()).await?;
    // Last: until then they are written out again at the next start.
    store.library_clear().await?;
    tracing::info!(home = %home.root().display(), "agents and catalog entries of the database are files of the home now");
    Ok(())
}

/// Moves definitions that the home has as files into a folder of it, so that they are not mixed with others.
fn move_away(home: &HomeDir) -> Result<()> {
    let folders = [home.agents_dir(), home.tools_dir()];
    let is_used =
        |dir: &std::path::PathBuf| std::fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
    if !folders.iter().any(is_used) {
        return Ok(());
    }
    let time = oubliette_store::now().strftime("%Y%m%dT%H%M%SZ");
    let kept = home.root().join(format!("replaced-{time}"));
    safe_fs::create_private_dir(&kept)?;
    for dir in folders.iter().filter(|dir| is_used(dir)) {
        let name = dir.file_name().unwrap_or_default();
        std::fs::rename(dir, kept.join(name)).map_err(|e| safe_fs::io_error("move", dir, e))?;
    }
    tracing::warn!(moved_to = %kept.display(), "the home had other agents or catalog entries as files; they were moved away");
    Ok(())
}

/// Says in the log that files of the home have no effect.
pub(super) fn warn_of_unused(home: &HomeDir, library: &DefinitionLibrary) {
    if let Some(UnusedFiles {
        differing: Some(one), ..
    }) = find_unused(home, library.dir(), |key| library.has(key))
    {
        tracing::warn!(
            example = %one,
            "files under agents/ and tools/ of the home have no effect: with [store] url definitions are in the database; \
             `oubliette library push {}` brings them in",
            home.root().display()
        );
    }
}

/// The definitions that a home has as files, compared with the copy of the database; `is_known` tells which of the copy are
/// in the database.
pub(super) fn find_unused(
    home: &HomeDir,
    copy: &LibraryDir,
    is_known: impl Fn(&DefinitionKey) -> bool,
) -> Option<UnusedFiles> {
    let files = home_files(home);
    let keys = match files.keys() {
        Ok(keys) if keys.is_empty() => return None,
        Ok(keys) => keys,
        Err(error) => {
            return Some(UnusedFiles {
                count: 1,
                differing: Some(error.message),
            });
        }
    };
    let differs = |key: &&DefinitionKey| match (files.read(key), copy.read(key)) {
        (Ok(file), Ok(copied)) => file != copied || !is_known(key),
        _ => true,
    };
    Some(UnusedFiles {
        count: keys.len(),
        differing: keys.iter().find(differs).map(ToString::to_string),
    })
}
