//! The size limit of a workspace for what the server itself writes there: the sandbox's own limit applies only
//! to processes in the sandbox.

use std::{path::Path, sync::Arc};

use oubliette_os::{AdmittedWrite, DiskQuota};
use oubliette_protocol::{Error, Result};

/// The size limit of one workspace.
#[derive(Debug, Default)]
pub(super) struct WorkspaceQuota {
    /// In bytes; `None`: unlimited.
    cap: Option<u64>,
    quota: Arc<DiskQuota>,
}

impl WorkspaceQuota {
    pub(super) fn new(cap_mb: Option<u64>) -> Self {
        Self {
            cap: cap_mb.map(|mb| mb.saturating_mul(1024 * 1024)),
            quota: Arc::default(),
        }
    }

    /// Admits writing so many bytes; fails when that would exceed the limit. What it returns is held until they are written.
    pub(super) fn admit(&self, workspace: &Path, bytes: usize) -> Result<Option<AdmittedWrite>> {
        let Some(cap) = self.cap else { return Ok(None) };
        match self.quota.admit(workspace, cap, bytes, 0) {
            Some(admitted) => Ok(Some(admitted)),
            None => Err(Error::limit_exceeded(format!(
                "the workspace may hold {} MiB, and this would be more; remove something first",
                cap >> 20
            ))),
        }
    }
}
