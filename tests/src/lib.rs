//! Support for the end-to-end tests in Rust: the real `oubliette` server in a fresh home, and clients for it.
//!
//! No part of Oubliette is mocked. The Python and Node tests beside this crate use real SDKs, agents and a
//! browser; the tests here are those that need many connections at once.
//!
//! - [`server`]: the server process: start, kill, restart, and the resources it holds.
//! - [`api`]: its tools over REST; [`events`]: a session's event stream; [`raw`]: both with minimal clients, for very
//!   many requests.
//! - [`socket`]: a client of a session's relay socket.
//! - [`link`]: a TCP proxy in front of the server whose connections a test can cut.

#![cfg_attr(test, allow(clippy::unwrap_used, clippy::expect_used))]

pub mod api;
pub mod events;
pub mod link;
pub mod raw;
pub mod server;
pub mod socket;

use std::time::{Duration, Instant};

pub use api::{ToolApi, ToolError};
pub use events::SessionEventStream;
pub use link::CuttableProxy;
pub use server::{ServerFootprint, SpawnedServer};
pub use socket::{RelayAnswer, RelaySocketClient};

/// How long a test waits for anything before it fails. Never a measurement.
pub const DEADLINE: Duration = Duration::from_secs(60);

/// Awaits a future that must complete before [`DEADLINE`]; `what` names it in the error.
pub async fn within_deadline<T>(what: &str, future: impl Future<Output = T>) -> anyhow::Result<T> {
    tokio::time::timeout(DEADLINE, future)
        .await
        .map_err(|_| anyhow::anyhow!("waited {} s in vain for {what}", DEADLINE.as_secs()))
}

/// Polls until `check` succeeds, for states that no event announces (a process gone, a descriptor closed).
pub async fn wait_until<T, F>(what: &str, mut check: impl FnMut() -> F) -> anyhow::Result<T>
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

/// The seed of a random test: `OUBLIETTE_SEED`, or a new one. Printed, so that a failure can be reproduced.
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
