//! The copy of what the database holds, in `HOME/library`, and changes of the database.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::Arc,
    time::Duration,
};

use oubliette_home::{DefinitionLibrary, StagedDefinition};
use oubliette_protocol::{
    Error, ErrorCode, Result,
    library::{DefinitionKey, LibraryChange},
};
use oubliette_store::{LibraryChangeOutcome, Store};
use tokio::sync::{Mutex, MutexGuard};

use crate::{actions::run_blocking, app::App};

/// How often the database is asked although nothing was heard.
const POLL_INTERVAL: Duration = Duration::from_secs(1);
/// How often a change is tried while others change definitions at the same time.
const CHANGE_ATTEMPTS: usize = 10;
/// How often the definitions are listed while they change.
const LIST_ATTEMPTS: usize = 5;

/// The copy of a database's definitions.
#[derive(Debug)]
pub(super) struct LibraryCopy {
    store: Store,
    library: Arc<DefinitionLibrary>,
    state: Mutex<CopiedVersions>,
}

/// What the copy holds.
#[derive(Debug, Default)]
struct CopiedVersions {
    /// The number of the last change that is in the copy; none if it was not compared with the database yet.
    version: Option<i64>,
    /// The version of each definition.
    of: BTreeMap<DefinitionKey, i64>,
}

impl LibraryCopy {
    /// Brings the copy up to date, whatever is in it.
    pub(super) async fn open(store: Store, library: Arc<DefinitionLibrary>) -> Result<Self> {
        let copy = Self {
            store,
            library,
            state: Mutex::default(),
        };
        copy.sync().await?;
        Ok(copy)
    }

    /// Brings the copy up to date with the database. Returns the number of the last change that is in it.
    pub(super) async fn sync(&self) -> Result<i64> {
        let mut state = self.state.lock().await;
        self.sync_locked(&mut state).await
    }

    async fn sync_locked(&self, state: &mut MutexGuard<'_, CopiedVersions>) -> Result<i64> {
        let mut version = self.store.library_version().await?;
        for _ in 0..LIST_ATTEMPTS {
            if state.version == Some(version) {
                break;
            }
            self.copy_changes(state).await?;
            state.version = Some(version);
            // Another change may have been committed while files were read; then some of them are of it.
            version = self.store.library_version().await?;
        }
        Ok(state.version.unwrap_or(version))
    }

    async fn copy_changes(&self, state: &mut CopiedVersions) -> Result<()> {
        let listed = self.store.definition_list().await?;
        let is_first = state.version.is_none();
        let mut present: BTreeSet<DefinitionKey> = state.of.keys().cloned().collect();
        if is_first {
            let dir = self.library.dir().clone();
            let kept: BTreeSet<DefinitionKey> = listed.iter().map(|row| row.key.clone()).collect();
            run_blocking(move || dir.remove_all_but(&kept)).await?;
            present.clear();
        }
        let mut staged: Vec<StagedDefinition> = Vec::new();
        let mut versions = BTreeMap::new();
        for row in listed {
            present.remove(&row.key);
            if state.of.get(&row.key) == Some(&row.version) {
                versions.insert(row.key, row.version);
                continue;
            }
            let (version, files) = match self.store.definition_files(&row.key).await {
                Ok(Some((version, files))) => (version.version, files),
                // Deleted since it was listed.
                Ok(None) => {
                    present.insert(row.key);
                    continue;
                }
                Err(error) if error.code == ErrorCode::InvalidArgument => {
                    tracing::error!(definition = %row.key, %error, "a definition in the database is invalid; the last copy of it stays in use");
                    versions.insert(row.key, row.version);
                    continue;
                }
                Err(error) => return Err(error),
            };
            let dir = self.library.dir().clone();
            let stage = move || {
                // At the start most are as they were.
                if is_first && dir.read(&files.key).is_ok_and(|copied| copied == files) {
                    return Ok(None);
                }
                dir.stage(&files).map(Some)
            };
            staged.extend(run_blocking(stage).await?);
            versions.insert(row.key, version);
        }
        let library = self.library.clone();
        let removed: Vec<DefinitionKey> = present.into_iter().collect();
        let replace = move || {
            library.replace(staged, &removed)?;
            if is_first {
                // What was there before it was compared is gone.
                library.reload();
            }
            Ok(())
        };
        let replaced = run_blocking(replace).await;
        state.of = match &replaced {
            Ok(()) => versions,
            // Some may be in place, others not: all are compared again.
            Err(_) => BTreeMap::new(),
        };
        if replaced.is_err() {
            state.version = None;
        }
        replaced
    }

    /// Makes the change that `plan` returns: in the database first, then in the copy. Everything that was checked holds when
    /// it is committed, because a change that was made from an older version is not stored but planned again.
    pub(super) async fn change(
        &self,
        plan: impl Fn(&DefinitionLibrary) -> Result<LibraryChange> + Send + Sync + 'static,
    ) -> Result<()> {
        let plan = Arc::new(plan);
        let mut state = self.state.lock().await;
        for _ in 0..CHANGE_ATTEMPTS {
            let made_from = self.sync_locked(&mut state).await?;
            let (library, plan) = (self.library.clone(), plan.clone());
            let change = run_blocking(move || {
                let change = plan(&library)?;
                library.check_change(&change)?;
                Ok(change)
            })
            .await?;
            if change.is_empty() {
                return Ok(());
            }
            match self.store.library_change(made_from, change).await? {
                LibraryChangeOutcome::Stale => continue,
                LibraryChangeOutcome::Stored(_) => {
                    let copied = self.sync_locked(&mut state).await;
                    return copied.map(drop).map_err(|error| {
                        let message = format!(
                            "the change is stored, but this server could not take it up yet and will try again: {}",
                            error.message
                        );
                        Error::unavailable(message).with_cause(error)
                    });
                }
            }
        }
        Err(Error::conflict(
            "definitions are being changed by others at the same time: try again",
        ))
    }
}

/// Takes up what other servers change, until the server stops: when it is heard, and every second what was not heard.
pub(crate) async fn follow_database(app: Arc<App>) {
    let Some(copy) = &app.definitions.copy else { return };
    let mut heard = app.store.library_changes();
    let mut is_failing = false;
    loop {
        tokio::select! {
            () = app.stopping.cancelled() => return,
            changed = heard.changed() => if changed.is_err() { return },
            () = tokio::time::sleep(POLL_INTERVAL) => {}
        }
        match copy.sync().await {
            Ok(_) if is_failing => {
                is_failing = false;
                tracing::info!("the definitions of the database are read again");
            }
            Err(error) if !is_failing => {
                is_failing = true;
                tracing::warn!(error = %error.for_log(), "reading the definitions of the database failed; trying again every second");
            }
            Ok(_) | Err(_) => {}
        }
    }
}
