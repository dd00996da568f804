//! Whether an agent's tools can be called: a call waits for a context that is being built.

use std::sync::Arc;

use oubliette_protocol::Error;
use tokio_util::sync::CancellationToken;

use crate::AgentContext;

use super::ToolPlane;

/// Why a call has no result.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ToolCallError {
    /// No context is installed and none is being built. The call was not dispatched, so it can be repeated.
    #[error("the agent's tools are not ready: its context is not built")]
    NotReady,
    /// The call was cancelled or blocked, or its tool failed.
    #[error(transparent)]
    Failed(#[from] Error),
}

impl From<ToolCallError> for Error {
    fn from(error: ToolCallError) -> Self {
        match error {
            ToolCallError::NotReady => Error::unavailable(error.to_string()),
            ToolCallError::Failed(error) => error,
        }
    }
}

/// Marks that a context is being built for a plane, until it is dropped. Calls made meanwhile wait.
#[must_use = "calls wait only as long as this exists"]
pub struct ContextBuilding {
    plane: Arc<ToolPlane>,
}

impl Drop for ContextBuilding {
    fn drop(&mut self) {
        self.plane.builds.send_modify(|builds| *builds -= 1);
    }
}

impl ToolPlane {
    /// Announces that a context is about to be built. Drop the result after the context was installed, or when the
    /// build failed.
    pub fn begin_build(self: &Arc<Self>) -> ContextBuilding {
        self.builds.send_modify(|builds| *builds += 1);
        ContextBuilding { plane: self.clone() }
    }

    /// The installed context, or the one that is being built as soon as it is installed.
    pub async fn ready_context(
        &self,
        cancel: &CancellationToken,
    ) -> Result<Arc<AgentContext>, ToolCallError> {
        match self.context() {
            Some(context) => Ok(context),
            // Boxed to keep the futures of the other calls small.
            None => Box::pin(self.wait_for_context(cancel)).await,
        }
    }

    async fn wait_for_context(&self, cancel: &CancellationToken) -> Result<Arc<AgentContext>, ToolCallError> {
        let mut builds = self.builds.subscribe();
        loop {
            // Read before the context: a build installs its context before it ends.
            let building = *builds.borrow_and_update() > 0;
            match self.context() {
                Some(context) => return Ok(context),
                None if !building => return Err(ToolCallError::NotReady),
                None => {}
            }
            tokio::select! {
                () = cancel.cancelled() => {
                    let error = Error::unavailable("the call was cancelled while it waited for the agent's tools");
                    return Err(error.into());
                }
                // The sender lives as long as `self`, so waiting cannot fail.
                _ = builds.changed() => {}
            }
        }
    }
}
