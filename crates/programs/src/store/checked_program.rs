//! The check of an installed program against its lock, which precedes every use of it.

use std::sync::Arc;

use oubliette_protocol::{Error, Result};
use sha2::{Digest as _, Sha256};

use super::{ProgramStore, read_bounded};
use crate::{
    lock::{ProgramLock, TreeStamps},
    manifest::{ProgramId, ProgramManifest},
};

/// Maximum size of a lock.json, in bytes.
const MAX_LOCK_BYTES: u64 = 128 << 20;

/// A program whose files were found as its lock has them.
pub(super) struct CheckedProgram {
    pub(super) manifest: ProgramManifest,
    pub(super) stamps: TreeStamps,
}

impl ProgramStore {
    pub(super) async fn check_locked(self: &Arc<Self>, id: &ProgramId) -> Result<Arc<CheckedProgram>> {
        if let Some(checked) = self.still_checked(id) {
            return Ok(checked);
        }
        let lock = self.lock_of(id);
        let _held = lock.lock().await;
        self.check(id).await
    }

    /// What was found at the last check, if no file changed since.
    fn still_checked(&self, id: &ProgramId) -> Option<Arc<CheckedProgram>> {
        let checked = self.checked.lock().get(id).cloned()?;
        checked.stamps.unchanged().then_some(checked)
    }

    /// Checks a program against its lock, unless that was done and nothing changed since.
    pub(super) async fn check(self: &Arc<Self>, id: &ProgramId) -> Result<Arc<CheckedProgram>> {
        if let Some(checked) = self.still_checked(id) {
            return Ok(checked);
        }
        self.checked.lock().remove(id);
        let (store, program) = (self.clone(), id.clone());
        let checked = tokio::task::spawn_blocking(move || store.hash_and_compare(&program))
            .await
            .map_err(Error::internal)??;
        let checked = Arc::new(checked);
        self.checked.lock().insert(id.clone(), checked.clone());
        Ok(checked)
    }

    fn hash_and_compare(&self, id: &ProgramId) -> Result<CheckedProgram> {
        let manifest = self.read_manifest(id)?;
        let changed = |what: &str| {
            let scripts = if manifest.scripts { " --scripts" } else { "" };
            Error::unavailable(format!(
                "{what} of the program {} was changed after it was installed, so it is not run; install it anew with \
                 `oubliette program install {}{scripts}`",
                manifest.program_id, manifest.package
            ))
        };
        let lock = read_bounded(&self.program_dir(id).join("lock.json"), MAX_LOCK_BYTES);
        let lock = lock.map_err(|error| changed("lock.json").with_cause(error))?;
        if hex::encode(Sha256::digest(&lock)) != manifest.lock_sha256 {
            return Err(changed("lock.json"));
        }
        let lock: ProgramLock =
            serde_json::from_slice(&lock).map_err(|error| changed("lock.json").with_cause(error))?;
        let read = ProgramLock::read_tree(&self.tree(id), self.max_tree_bytes().max(manifest.bytes))
            .map_err(|error| changed("A file").with_cause(error.message))?;
        match lock.first_difference(&read.lock) {
            Some(path) => Err(changed(&format!("the file {}", path.display()))),
            None => Ok(CheckedProgram {
                manifest,
                stamps: read.stamps,
            }),
        }
    }
}
