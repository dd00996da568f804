//! The sandbox driver and the report of its last probe, which runs in the background so that it does not delay the start.

use std::{sync::Arc, time::Duration};

use oubliette_sandbox::{IsolationLevel, SandboxDriver, SandboxReport};
use parking_lot::RwLock;

/// How often a driver is probed that depends on an engine: that may go away and come back.
const REPROBE: Duration = Duration::from_secs(10);

/// The sandbox driver, and its probe report once there is one.
pub struct SandboxStatus {
    driver: Arc<dyn SandboxDriver>,
    report: RwLock<Option<Arc<SandboxReport>>>,
}

impl SandboxStatus {
    /// Of a driver that is not probed yet.
    pub fn new(driver: Arc<dyn SandboxDriver>) -> Self {
        Self {
            driver,
            report: RwLock::default(),
        }
    }

    /// Probes what the driver can do on this machine. The report is kept.
    pub async fn probe(&self) -> Arc<SandboxReport> {
        let report = Arc::new(self.driver.probe().await);
        *self.report.write() = Some(report.clone());
        report
    }

    /// Probes the driver, and again and again if what it can do may change; logs what was found when that changes.
    pub(crate) async fn watch(&self) {
        let mut known = None;
        loop {
            let report = self.probe().await;
            if known.replace(report.ok) != Some(report.ok) {
                match report.ok {
                    true => {
                        tracing::info!(driver = report.driver, isolation = %report.level, "sandbox probed")
                    }
                    false => tracing::error!(
                        driver = report.driver,
                        "no sandbox can be started; `oubliette doctor` says why"
                    ),
                }
            }
            if !self.driver.has_images() {
                return;
            }
            tokio::time::sleep(REPROBE).await;
        }
    }

    /// The driver.
    pub(crate) fn driver(&self) -> &Arc<dyn SandboxDriver> {
        &self.driver
    }

    /// The last probe's report; `None` before the first finished.
    pub fn report(&self) -> Option<Arc<SandboxReport>> {
        self.report.read().clone()
    }

    /// The isolation level sandboxes reach: as probed, else as the driver assumes.
    pub fn level(&self) -> IsolationLevel {
        self.report()
            .map_or_else(|| self.driver.level(), |report| report.level)
    }
}
