//! The size limit of a workspace for what the server itself writes there: the sandbox's own limit applies only
//! to processes in the sandbox.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use oubliette_os::disk_usage;
use oubliette_protocol::{Error, Result};
use parking_lot::Mutex;

/// How long a measured size is reused: processes in the sandbox write there too.
const FRESH: Duration = Duration::from_secs(2);

/// The size limit of one workspace, with the last measured size.
#[derive(Debug, Default)]
pub(super) struct WorkspaceQuota {
    /// In bytes; `None`: unlimited.
    cap: Option<u64>,
    /// When the size was measured, and the size in bytes with what was admitted since.
    counted: Mutex<Option<(Instant, u64)>>,
}

impl WorkspaceQuota {
    pub(super) fn new(cap_mb: Option<u64>) -> Self {
        Self {
            cap: cap_mb.map(|mb| mb.saturating_mul(1024 * 1024)),
            counted: Mutex::new(None),
        }
    }

    /// Fails when writing so many bytes would exceed the limit. Measuring a workspace is slow, so a measured size
    /// is reused for [`FRESH`], with what was admitted since added to it.
    pub(super) fn admit(&self, workspace: &Path, bytes: usize) -> Result<()> {
        let Some(cap) = self.cap else { return Ok(()) };
        let bytes = u64::try_from(bytes).unwrap_or(u64::MAX);
        let mut counted = self.counted.lock();
        let held = match *counted {
            Some((at, held)) if at.elapsed() < FRESH && held.saturating_add(bytes) <= cap => held,
            _ => {
                let held = disk_usage(workspace, cap).bytes;
                *counted = Some((Instant::now(), held));
                held
            }
        };
        if held.saturating_add(bytes) > cap {
            let mib = cap >> 20;
            return Err(Error::limit_exceeded(format!(
                "the workspace may hold {mib} MiB, and this would be more; remove something first"
            )));
        }
        if let Some((_, held)) = counted.as_mut() {
            *held += bytes;
        }
        Ok(())
    }
}
