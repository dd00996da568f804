//! `oubliette backup` and `restore`: the database, the definitions and the files of a home in one archive, and back.
//!
//! A backup is a tar.gz. Its first entry, `backup.json`, says what made it; then come the rows of the database
//! (`database/TABLE/NUMBER.jsonl`, see [`oubliette_store::transfer`]) and the files of the home (`home/…`); the last entry,
//! `manifest.json`, has the count and hash of each table and each group of files. A file that was cut off has no manifest.
//! Because rows are not bound to a database, a backup of SQLite can be restored into PostgreSQL and the other way round.
//!
//! - [`manifest`]: what is said about the contents, and their hashes.
//! - [`home_path`]: which paths of a home a backup may hold.
//! - [`walk`]: the files of a home, none of which is trusted: agents write most of them.
//! - [`writer`]: makes the archive under a temporary name. [`create`]: a backup from beginning to end.
//! - [`reader`]: reads an archive that may be damaged or hostile.
//! - [`staging`]: files that are restored, beside their place and then in it. [`restore`]: from beginning to end.

pub(crate) mod create;
mod home_path;
mod manifest;
mod reader;
pub(crate) mod restore;
mod staging;
mod walk;
mod writer;

use std::sync::{
    Arc,
    atomic::{AtomicBool, Ordering},
};

use oubliette_protocol::{Error, Result};

/// Name of the first entry.
const HEADER_NAME: &str = "backup.json";
/// Name of the last entry.
const MANIFEST_NAME: &str = "manifest.json";
/// Folder of the database's rows.
const DATABASE_FOLDER: &str = "database";
/// Folder of the home's files.
const HOME_FOLDER: &str = "home";
/// The home's configuration.
const CONFIG_NAME: &str = "oubliette.toml";

/// Tells how far a backup or restore is: a sentence without a full stop.
pub(crate) type ReportProgress = Arc<dyn Fn(&str) + Send + Sync>;

/// Whether the work is to be given up. Clones share it. Dropping the guard that [`CancelFlag::guard`] makes sets it.
#[derive(Debug, Clone, Default)]
pub(crate) struct CancelFlag(Arc<AtomicBool>);

/// Sets a flag when it is dropped, so that a thread stops when nobody waits for its result any more.
pub(crate) struct CancelGuard(CancelFlag);

impl CancelFlag {
    /// An error if the work is to be given up.
    pub(crate) fn check(&self) -> Result<()> {
        match self.0.load(Ordering::Relaxed) {
            true => Err(Error::unavailable("it was cancelled")),
            false => Ok(()),
        }
    }

    pub(crate) fn guard(&self) -> CancelGuard {
        CancelGuard(self.clone())
    }
}

impl Drop for CancelGuard {
    fn drop(&mut self) {
        self.0.0.store(true, Ordering::Relaxed);
    }
}

fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}
