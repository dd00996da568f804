//! The sandbox driver and the report of its probe, which runs in the background so that it does not delay the start.

use std::sync::{Arc, OnceLock};

use oubliette_sandbox::{IsolationLevel, SandboxDriver, SandboxReport};

/// The sandbox driver, and its probe report once there is one.
pub struct SandboxStatus {
    driver: Arc<dyn SandboxDriver>,
    report: OnceLock<SandboxReport>,
}

impl SandboxStatus {
    /// Of a driver that is not probed yet.
    pub fn new(driver: Arc<dyn SandboxDriver>) -> Self {
        Self {
            driver,
            report: OnceLock::new(),
        }
    }

    /// Probes what the driver can do on this machine. The first report is kept.
    pub async fn probe(&self) -> &SandboxReport {
        let report = self.driver.probe().await;
        self.report.get_or_init(|| report)
    }

    /// The probe's report; `None` before it finished.
    pub fn report(&self) -> Option<&SandboxReport> {
        self.report.get()
    }

    /// The isolation level sandboxes reach: as probed, else as the driver assumes.
    pub fn level(&self) -> IsolationLevel {
        self.report()
            .map_or_else(|| self.driver.level(), |report| report.level)
    }
}
