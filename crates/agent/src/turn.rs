//! One running turn: tool calls, as scripts and models both make them, and the execution of a script.

use std::{
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use futures::future::join_all;
use oubliette_protocol::{JsonObject, tool::CallResult};
use tokio_util::sync::CancellationToken;

use crate::{
    script::{ScriptStep, ScriptedCall},
    tool_servers::ToolServers,
    updates::UpdateSender,
};

/// How a turn ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AgentTurnEnd {
    /// The model or the script finished.
    Completed,
    /// The host cancelled it.
    Cancelled,
    /// The model's answer was cut off at its output limit.
    OutputLimit,
    /// The turn reached its maximum number of requests to the model.
    RequestLimit,
    /// The model refused to answer.
    Refused,
}

/// What a turn needs: where to report, which tools to call, and its cancellation.
pub(crate) struct AgentTurn<'a> {
    /// Counted from 1 over the session, restarts of this process included.
    number: usize,
    update_sender: &'a UpdateSender,
    tools: &'a ToolServers,
    cancel: &'a CancellationToken,
    calls: AtomicUsize,
}

impl<'a> AgentTurn<'a> {
    pub(crate) fn new(
        number: usize,
        update_sender: &'a UpdateSender,
        tools: &'a ToolServers,
        cancel: &'a CancellationToken,
    ) -> Self {
        Self {
            number,
            update_sender,
            tools,
            cancel,
            calls: AtomicUsize::new(0),
        }
    }

    pub(crate) fn updates(&self) -> &'a UpdateSender {
        self.update_sender
    }

    pub(crate) fn tools(&self) -> &'a ToolServers {
        self.tools
    }

    pub(crate) fn is_cancelled(&self) -> bool {
        self.cancel.is_cancelled()
    }

    /// Runs `work`; `None` if the turn is cancelled first.
    pub(crate) async fn unless_cancelled<T>(&self, work: impl Future<Output = T>) -> Option<T> {
        tokio::select! {
            biased;
            () = self.cancel.cancelled() => None,
            done = work => Some(done),
        }
    }

    /// Calls a tool and reports the call and its result to the host.
    pub(crate) async fn call(&self, tool: &str, arguments: JsonObject) -> CallResult {
        let id = format!(
            "call_{}_{}",
            self.number,
            self.calls.fetch_add(1, Ordering::Relaxed) + 1
        );
        self.update_sender.send_call_started(&id, tool, &arguments);
        let result = self.tools.call(tool, arguments, self.cancel).await;
        self.update_sender.send_call_result(&id, &result);
        result
    }

    /// Reports a call whose arguments are invalid, with an error result; nothing is called.
    pub(crate) fn report_invalid_call(&self, tool: &str, why: String) -> CallResult {
        let id = self.next_call_id();
        let result = CallResult::error(&oubliette_protocol::Error::invalid(why));
        self.update_sender
            .send_call_started(&id, tool, &JsonObject::new());
        self.update_sender.send_call_result(&id, &result);
        result
    }

    /// An id that is unique in the session, across restarts too, because the turn's number is stored.
    fn next_call_id(&self) -> String {
        format!(
            "call_{}_{}",
            self.number,
            self.calls.fetch_add(1, Ordering::Relaxed) + 1
        )
    }

    /// Executes a script's steps. A failing call is reported and does not stop the script.
    pub(crate) async fn run_script(&self, steps: &[ScriptStep]) -> AgentTurnEnd {
        for step in steps {
            if self.is_cancelled() {
                return AgentTurnEnd::Cancelled;
            }
            match step {
                ScriptStep::Say(text) => self.update_sender.send_text(text.as_str()),
                ScriptStep::Call(ScriptedCall { tool, arguments }) => {
                    self.call(tool, arguments.clone()).await;
                }
                ScriptStep::Parallel(calls) => {
                    join_all(
                        calls
                            .iter()
                            .map(|ScriptedCall { tool, arguments }| self.call(tool, arguments.clone())),
                    )
                    .await;
                }
                ScriptStep::SleepMs(millis) => {
                    let _slept = self
                        .unless_cancelled(tokio::time::sleep(Duration::from_millis(*millis)))
                        .await;
                }
            }
        }
        if self.is_cancelled() {
            AgentTurnEnd::Cancelled
        } else {
            AgentTurnEnd::Completed
        }
    }
}
