//! Who holds a lease, as it is written down beside it: for whoever is refused.

use std::fmt;

use jiff::Timestamp;
use sqlx::{PgConnection, Row};

/// The server that holds a lease.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LeaseHolder {
    /// The name of its host.
    pub host: String,
    /// The boot and process namespace that its process id belongs to.
    pub(super) machine: String,
    /// Its process id.
    pub pid: i64,
    /// Its version.
    pub version: String,
    /// Since when it holds the lease.
    pub since: Option<Timestamp>,
}

impl LeaseHolder {
    /// This process.
    pub(crate) fn this_process() -> Self {
        let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
        let namespace = std::fs::read_link("/proc/self/ns/pid").unwrap_or_default();
        Self {
            host: rustix::system::uname().nodename().to_string_lossy().into_owned(),
            machine: format!("{} {}", boot.trim(), namespace.display()),
            pid: i64::from(std::process::id()),
            version: env!("CARGO_PKG_VERSION").to_owned(),
            since: None,
        }
    }

    /// Whether its process is on this machine.
    pub(super) fn is_of_this_machine(&self) -> bool {
        self.machine == Self::this_process().machine
    }

    /// Whether it is known to run: in doubt it is not, and its lock is waited for.
    pub(super) fn runs(&self) -> bool {
        self.machine == Self::this_process().machine
            && i32::try_from(self.pid).is_ok_and(oubliette_os::process_runs)
    }
}

impl fmt::Display for LeaseHolder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "oubliette {} on {} (process {}",
            self.version, self.host, self.pid
        )?;
        match self.since {
            Some(since) => write!(f, ", since {since:.0})"),
            None => write!(f, ")"),
        }
    }
}

/// The servers of a cluster, the oldest first.
pub(super) async fn read_members(db: &mut PgConnection) -> Result<Vec<LeaseHolder>, sqlx::Error> {
    let rows = sqlx::query("SELECT host, machine, pid, version, started_at FROM servers ORDER BY server_id")
        .fetch_all(db)
        .await?;
    rows.into_iter().map(|row| holder_of(&row)).collect()
}

/// The server that a row describes.
pub(super) fn holder_of(row: &sqlx::postgres::PgRow) -> Result<LeaseHolder, sqlx::Error> {
    Ok(LeaseHolder {
        host: row.try_get(0)?,
        machine: row.try_get(1)?,
        pid: row.try_get(2)?,
        version: row.try_get(3)?,
        since: Timestamp::from_millisecond(row.try_get(4)?).ok(),
    })
}

/// Who holds the lease, or held it last.
pub(crate) async fn read_holder(db: &mut PgConnection) -> Result<Option<LeaseHolder>, sqlx::Error> {
    let exists: bool = sqlx::query_scalar("SELECT to_regclass('server_lease') IS NOT NULL")
        .fetch_one(&mut *db)
        .await?;
    if !exists {
        return Ok(None);
    }
    let row =
        sqlx::query("SELECT host, machine, pid, version, taken_at FROM server_lease WHERE name = 'writer'")
            .fetch_optional(db)
            .await?;
    row.map(|row| holder_of(&row)).transpose()
}
