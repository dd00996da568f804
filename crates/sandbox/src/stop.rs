//! Ending a tool server politely.

use std::time::Duration;

use tokio::process::ChildStdin;

use crate::{Exit, Handle};

/// How long each step of [`stop`] waits.
#[derive(Debug, Clone, Copy)]
pub struct Grace {
    /// After closing stdin.
    pub close: Duration,
    /// After SIGTERM.
    pub terminate: Duration,
}

impl Default for Grace {
    fn default() -> Self {
        Self {
            close: Duration::from_millis(500),
            terminate: Duration::from_millis(500),
        }
    }
}

/// Closes stdin, waits; sends SIGTERM, waits; kills. When it returns the whole tree is gone.
///
/// This is the order MCP asks of whoever starts a stdio server. Whatever outlives the program itself is
/// killed at every step.
pub async fn stop(stdin: Option<ChildStdin>, handle: &Handle, grace: Grace) -> Exit {
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
