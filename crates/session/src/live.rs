//! [`LiveSession`]: the handle of a session in memory, shared by everyone but its own task.

use std::sync::Arc;

use oubliette_protocol::{Error, Result, Slug, event::SessionStatus};
use oubliette_sandbox::SandboxGroup;
use oubliette_store::SessionRow;
use oubliette_tools::{DebugSink, ToolPlane};
use tokio::sync::{mpsc, oneshot, watch};

use crate::{
    agent_plan::AgentPlan, approvals::SessionApprovals, callers::CallerRelay, request::SwitchReply,
    shown_tools::ShownTools,
};

/// The parts of a session's row that change while it is in memory.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct LiveState {
    pub(crate) status: SessionStatus,
    pub(crate) agent: Slug,
    /// The last turn that was begun.
    pub(crate) turn: u64,
    /// Why the session's log cannot be written, while it cannot.
    pub(crate) log_error: Option<String>,
    /// Whether the status `switching` is being written. Others can read it from the log before `status` has it here.
    pub(crate) switch_beginning: bool,
}

/// A session in memory: its tool plane, its caller relay, and the channel to its task.
pub(crate) struct LiveSession {
    /// The row as it was loaded; what changes is in `state`.
    pub(crate) row: SessionRow,
    pub(crate) plane: Arc<ToolPlane>,
    pub(crate) callers: Arc<CallerRelay>,
    pub(crate) approvals: Arc<SessionApprovals>,
    pub(crate) debug: Arc<dyn DebugSink>,
    pub(crate) shown_tools: Arc<ShownTools>,
    pub(crate) state: watch::Sender<LiveState>,
    pub(crate) commands: mpsc::Sender<TaskCommand>,
    /// Everything that runs for the session.
    pub(crate) sandbox_group: SandboxGroup,
}

impl LiveSession {
    pub(crate) fn status(&self) -> SessionStatus {
        self.state.borrow().status
    }

    /// Sends a command to the task and waits for its reply. `conflict` when the task has ended.
    pub(crate) async fn send_command<T>(
        &self,
        command: impl FnOnce(oneshot::Sender<T>) -> TaskCommand,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let over = || Error::conflict(format!("session {} is over", self.row.session_id));
        self.commands.send(command(reply)).await.map_err(|_| over())?;
        answer.await.map_err(|_| over())
    }

    /// Waits until no switch of agents is running.
    pub(crate) async fn wait_for_switch(&self) {
        let mut now = self.state.subscribe();
        // The sender lives as long as `self`, so waiting cannot fail.
        let is_over = |now: &LiveState| now.status != SessionStatus::Switching && !now.switch_beginning;
        let _ = now.wait_for(is_over).await;
    }
}

/// A command to a session's task, with the channel for its reply.
pub(crate) enum TaskCommand {
    /// Queue a message; its turn runs after those already queued.
    Message(SubmittedMessage),
    /// Remove the message that waits for this turn.
    RemoveQueued(u64, oneshot::Sender<Result<()>>),
    /// Cancel the running turn. The reply is the running or last turn, and whether one was running.
    Cancel(oneshot::Sender<(u64, bool)>),
    /// End the session and stop everything it started.
    End(oneshot::Sender<Result<()>>),
    /// Replace the agent.
    Switch(Box<AgentPlan>, oneshot::Sender<Result<SwitchReply>>),
    /// Start the tool servers if they are not running; the agent is not needed for that.
    PrepareTools(oneshot::Sender<Result<()>>),
    /// Apply edits: an agent or a catalog entry has changed in the library.
    ApplyEdits,
    /// Stop everything because the server stops; the session is resumed after its next start.
    Stop(oneshot::Sender<()>),
}

/// A message on its way to the task's queue.
pub(crate) struct SubmittedMessage {
    pub(crate) text: String,
    /// Gets the number of the message's turn and the session's status, once the message is stored.
    pub(crate) accepted: oneshot::Sender<Result<(u64, SessionStatus)>>,
    /// Gets the turn's text when the turn has ended; `None` when the sender does not wait.
    pub(crate) turn_result: Option<oneshot::Sender<Result<String>>>,
}
