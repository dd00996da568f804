//! How far an installation is, for whoever waits for it.

use std::sync::Arc;

use parking_lot::Mutex;
use schemars::JsonSchema;
use serde::Serialize;

use crate::manifest::ProgramId;

/// An installation under way.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct InstallProgress {
    /// The program's id.
    pub program_id: ProgramId,
    /// The package.
    pub package: String,
    /// What is being done now.
    pub step: String,
    /// How many files were fetched from registries.
    pub fetched: u64,
    /// When it began.
    pub started_at: jiff::Timestamp,
}

/// The progress of one installation, which its steps update.
#[derive(Clone)]
pub(crate) struct ProgressHandle(Arc<Mutex<InstallProgress>>);

impl ProgressHandle {
    pub(crate) fn new(program_id: ProgramId, package: String) -> Self {
        Self(Arc::new(Mutex::new(InstallProgress {
            program_id,
            package,
            step: "waiting for its turn".into(),
            fetched: 0,
            started_at: oubliette_protocol::now(),
        })))
    }

    pub(crate) fn begin(&self, step: impl Into<String>) {
        self.0.lock().step = step.into();
    }

    /// Takes a line that npm or pip printed.
    pub(crate) fn read_line(&self, line: &str) {
        let fetched =
            line.starts_with("npm http fetch GET 200") || line.trim_start().starts_with("Downloading ");
        if fetched {
            self.0.lock().fetched += 1;
        }
    }

    pub(crate) fn snapshot(&self) -> InstallProgress {
        self.0.lock().clone()
    }
}
