//! `[programs]`: the bounds of installations.

use std::time::Duration;

use oubliette_programs::InstallLimits;
use oubliette_protocol::Result;

use super::{field_error, raw::RawPrograms};

pub(super) fn resolve(raw: RawPrograms) -> Result<InstallLimits> {
    let default = InstallLimits::default();
    let timeout = raw.install_timeout.map_or(default.timeout, |given| given.0);
    if !(Duration::from_secs(1)..=Duration::from_secs(86_400)).contains(&timeout) {
        return Err(field_error("programs.install_timeout", "must be 1s to 1d"));
    }
    let disk_mb = raw.install_mb.unwrap_or(default.disk_mb);
    if !(1..=1024 * 1024).contains(&disk_mb) {
        return Err(field_error("programs.install_mb", "must be 1 to 1048576"));
    }
    Ok(InstallLimits { timeout, disk_mb })
}
