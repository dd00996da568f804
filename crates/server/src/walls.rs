//! The sandbox driver: looked at in the background, so that the server is up meanwhile.

use std::sync::{Arc, OnceLock};

use oubliette_sandbox::{Level, Report, Sandbox};

/// The sandbox driver and what is known of it.
pub struct Walls {
    driver: Arc<dyn Sandbox>,
    report: OnceLock<Report>,
}

impl Walls {
    /// Around a driver that was not looked at yet.
    pub fn new(driver: Arc<dyn Sandbox>) -> Self {
        Self {
            driver,
            report: OnceLock::new(),
        }
    }

    /// Looks at what the driver can do here, once.
    pub async fn look(&self) -> &Report {
        let report = self.driver.probe().await;
        self.report.get_or_init(|| report)
    }

    /// What was found, if it was looked at.
    pub fn report(&self) -> Option<&Report> {
        self.report.get()
    }

    /// The level sandboxes reach.
    pub fn level(&self) -> Level {
        self.report()
            .map_or_else(|| self.driver.level(), |report| report.level)
    }
}
