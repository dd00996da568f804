//! Graceful shutdown of a tool server.

use std::time::Duration;

use tokio::process::ChildStdin;

use crate::{SandboxExit, SandboxHandle};

/// How long each step of [`stop`] waits.
#[derive(Debug, Clone, Copy)]
pub struct StopTimeouts {
    /// Wait after closing stdin, before SIGTERM. Default 500 ms.
    pub close: Duration,
    /// Wait after SIGTERM, before SIGKILL. Default 500 ms.
    pub terminate: Duration,
}

impl Default for StopTimeouts {
    fn default() -> Self {
        Self {
            close: Duration::from_millis(500),
            terminate: Duration::from_millis(500),
        }
    }
}

/// Closes stdin, waits; sends SIGTERM, waits; kills. When it returns, the whole process tree is gone.
///
/// MCP prescribes this order for clients that start a stdio server. Whenever the program itself ends, the
/// processes it left behind are killed.
pub async fn stop(stdin: Option<ChildStdin>, handle: &SandboxHandle, grace: StopTimeouts) -> SandboxExit {
    drop(stdin);
    if let Ok(exit) = tokio::time::timeout(grace.close, handle.wait()).await {
        return exit;
    }
    handle.terminate();
    if let Ok(exit) = tokio::time::timeout(grace.terminate, handle.wait()).await {
        return exit;
    }
    handle.kill();
    handle.wait().await
}
