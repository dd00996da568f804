//! How many archives are transferred at once: each holds files open, takes a thread from time to time, and has its part on
//! disk.

use std::{collections::HashMap, sync::Arc};

use oubliette_protocol::{Error, Result, WorkspaceId};
use parking_lot::Mutex;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

/// Archives at once, of all workspaces.
pub(super) const MAX_TRANSFERS: usize = 32;
/// Archives at once, of one workspace.
pub(super) const MAX_WORKSPACE_TRANSFERS: usize = 4;

/// The archives that are transferred in one direction. Clones share one count.
#[derive(Clone)]
pub(crate) struct TransferPlaces {
    all: Arc<Semaphore>,
    by_workspace: Arc<Mutex<HashMap<WorkspaceId, usize>>>,
    /// What is done with the archives, for errors: "read" or "written".
    done: &'static str,
}

impl TransferPlaces {
    pub(crate) fn new(done: &'static str) -> Self {
        Self {
            all: Arc::new(Semaphore::new(MAX_TRANSFERS)),
            by_workspace: Arc::default(),
            done,
        }
    }

    #[cfg(test)]
    pub(super) fn has_no_workspace(&self) -> bool {
        self.by_workspace.lock().is_empty()
    }

    #[cfg(test)]
    pub(super) fn available(&self) -> usize {
        self.all.available_permits()
    }

    /// Takes a place; `limit_exceeded` if there is none.
    pub(crate) fn take_place(&self, workspace: &WorkspaceId) -> Result<TransferPlace> {
        let too_many = |limit: usize, what: &str| {
            let done = self.done;
            Error::limit_exceeded(format!(
                "{limit} archives {what} are being {done} already; try again when one of them is done"
            ))
        };
        let all = self.all.clone().try_acquire_owned();
        let all = all.map_err(|_| too_many(MAX_TRANSFERS, "on this server"))?;
        let mut counts = self.by_workspace.lock();
        let count = counts.entry(workspace.clone()).or_default();
        if *count >= MAX_WORKSPACE_TRANSFERS {
            return Err(too_many(MAX_WORKSPACE_TRANSFERS, "of this workspace"));
        }
        *count += 1;
        Ok(TransferPlace {
            workspace: workspace.clone(),
            by_workspace: self.by_workspace.clone(),
            _all: all,
        })
    }
}

/// A place among the transfers, given back when it is dropped.
pub(crate) struct TransferPlace {
    workspace: WorkspaceId,
    by_workspace: Arc<Mutex<HashMap<WorkspaceId, usize>>>,
    _all: OwnedSemaphorePermit,
}

impl Drop for TransferPlace {
    fn drop(&mut self) {
        let mut counts = self.by_workspace.lock();
        if let Some(count) = counts.get_mut(&self.workspace) {
            *count -= 1;
            if *count == 0 {
                counts.remove(&self.workspace);
            }
        }
    }
}
