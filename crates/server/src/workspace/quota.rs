//! The size limit of a workspace for what clients upload into it. What sandboxes write there is watched by the session.

use std::{collections::HashMap, path::Path, sync::Arc};

use oubliette_os::{AdmittedWrite, DiskQuota};
use oubliette_protocol::{Error, ProjectId, Result, WorkspaceId};
use parking_lot::Mutex;

use crate::app::App;

/// How many workspaces' sizes are kept.
const MAX_KNOWN: usize = 1024;

/// The sizes of workspaces into which something was uploaded lately.
#[derive(Default)]
pub(crate) struct WorkspaceSizes {
    known: Mutex<HashMap<WorkspaceId, Arc<DiskQuota>>>,
}

impl WorkspaceSizes {
    /// Admits a file of this size, in the place of one that takes `replaced` bytes on disk; fails when it would exceed `cap`
    /// bytes. What it returns is held until the file is written. Measures the workspace if need be, which blocks the
    /// thread.
    pub(crate) fn admit(
        &self,
        id: &WorkspaceId,
        dir: &Path,
        cap: u64,
        size: usize,
        replaced: u64,
    ) -> Result<AdmittedWrite> {
        let quota = {
            let mut known = self.known.lock();
            if known.len() >= MAX_KNOWN && !known.contains_key(id) {
                known.clear();
            }
            known.entry(id.clone()).or_default().clone()
        };
        quota.admit(dir, cap, size, replaced).ok_or_else(|| {
            Error::limit_exceeded(format!(
                "the workspace may hold {} MiB, and this would be more; remove something first",
                cap >> 20
            ))
        })
    }

    /// Measures the workspace anew at the next upload, because something was removed.
    pub(crate) fn forget(&self, id: &WorkspaceId) {
        self.known.lock().remove(id);
    }
}

/// How many bytes a workspace of this project may hold: the project's limit, else the server's.
pub(crate) async fn workspace_cap(app: &App, project: &ProjectId) -> Result<u64> {
    let row = app.store.project_get(project).await?;
    let own = row.and_then(|row| {
        row.sandbox
            .get("workspace_mb")
            .and_then(serde_json::Value::as_u64)
    });
    let mb = own.unwrap_or(app.config.sandbox.workspace_mb);
    Ok(mb.saturating_mul(1024 * 1024))
}
