//! The sandbox driver: looked at in the background, so that the server is up meanwhile.

use std::sync::OnceLock;

use oubliette_sandbox::{Level, Report};

/// What is known of the sandbox driver.
#[derive(Debug, Default)]
pub struct Walls {
    report: OnceLock<Report>,
}

impl Walls {
    /// Keeps what the driver found.
    pub fn found(&self, report: Report) {
        let _ = self.report.set(report);
    }

    /// What the driver found, once it has.
    pub fn report(&self) -> Option<&Report> {
        self.report.get()
    }

    /// The level sandboxes reach.
    pub fn level(&self) -> Option<Level> {
        self.report().map(|r| r.level)
    }
}
