//! How much a workspace may hold, for what the server itself writes there: the sandbox's own limit does not
//! bind it.

use std::{
    path::Path,
    time::{Duration, Instant},
};

use oubliette_protocol::{Error, Result};
use oubliette_sandbox::disk_usage;
use parking_lot::Mutex;

/// How long a count is good for: others write there too.
const FRESH: Duration = Duration::from_secs(2);

/// Room left in one workspace.
#[derive(Debug, Default)]
pub(super) struct Room {
    /// In bytes; none: as much as there is.
    cap: Option<u64>,
    counted: Mutex<Option<(Instant, u64)>>,
}

impl Room {
    pub(super) fn new(cap_mb: Option<u64>) -> Self {
        Self {
            cap: cap_mb.map(|mb| mb.saturating_mul(1024 * 1024)),
            counted: Mutex::new(None),
        }
    }

    /// Refuses what would fill the workspace past its limit. Counting a workspace takes its time, so a count
    /// is kept for a moment, with what was let in since added to it.
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
