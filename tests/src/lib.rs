//! What end-to-end tests in Rust stand on: the real `oubliette` in a fresh home, and the ways to talk to it.
//!
//! Nothing here stands in for Oubliette. Tests in Python and Node beside this crate drive it with real SDKs,
//! agents and a browser; those here are for what needs many connections at once.
//!
//! - [`server`]: the process: started, killed, started again; what it holds of the system.
//! - [`api`]: its tools by plain JSON; [`events`]: a session's stream; [`raw`]: both as bytes, for very many.
//! - [`socket`]: a session's relay socket, line by line.
//! - [`link`]: a way to the server that can be cut.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod api;
pub mod events;
pub mod link;
pub mod raw;
pub mod server;
pub mod socket;

use std::time::{Duration, Instant};

pub use api::{Api, ToolError};
pub use events::Events;
pub use link::Link;
pub use server::{Footprint, Server};
pub use socket::{Answer, Socket};

/// How long anything is waited for before a test calls it lost. Never a measurement.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Waits for a future that must end.
pub async fn within<T>(what: &str, future: impl Future<Output = T>) -> anyhow::Result<T> {
    tokio::time::timeout(DEADLINE, future)
        .await
        .map_err(|_| anyhow::anyhow!("waited {} s in vain for {what}", DEADLINE.as_secs()))
}

/// Polls for a state that no event announces: a process gone, a descriptor closed.
pub async fn settles<T, F>(what: &str, mut check: impl FnMut() -> F) -> anyhow::Result<T>
where
    F: Future<Output = Result<T, String>>,
{
    let end = Instant::now() + DEADLINE;
    loop {
        match check().await {
            Ok(value) => return Ok(value),
            Err(why) if Instant::now() > end => {
                anyhow::bail!("{what}: {why}, after {} s", DEADLINE.as_secs())
            }
            Err(_) => tokio::time::sleep(Duration::from_millis(25)).await,
        }
    }
}

/// The seed of a random run: `OUBLIETTE_SEED`, or a new one. Printed, so that a failure can be had again.
pub fn seed() -> u64 {
    let given = std::env::var("OUBLIETTE_SEED")
        .ok()
        .and_then(|text| text.parse().ok());
    let seed = given.unwrap_or_else(|| {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
        now.map_or(0, |since| since.subsec_nanos().into())
    });
    println!("OUBLIETTE_SEED={seed}");
    seed
}
