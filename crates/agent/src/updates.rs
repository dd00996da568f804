//! The `session/update` notifications of a running turn: text, reasoning, tool calls, token usage.
//!
//! They share one queue with the response to the prompt, so none can arrive after it. Sending errors are
//! ignored: when the host has gone, stdin closes next and this process ends.

use agent_client_protocol::{
    Client,
    v1::{
        ConnectionTo,
        schema::{
            ContentBlock, ContentChunk, SessionId, SessionNotification, SessionUpdate, ToolCall,
            ToolCallContent, ToolCallStatus, ToolCallUpdate, ToolCallUpdateFields, UsageUpdate,
        },
    },
};
use oubliette_protocol::{JsonObject, tool::CallResult};

use crate::call_report;

/// Sends the updates of one session.
#[derive(Clone)]
pub(crate) struct UpdateSender {
    connection: ConnectionTo<Client>,
    session_id: SessionId,
}

impl UpdateSender {
    pub(crate) fn new(connection: ConnectionTo<Client>, session_id: SessionId) -> Self {
        Self {
            connection,
            session_id,
        }
    }

    /// Sends a piece of the agent's answer.
    pub(crate) fn send_text(&self, text: impl Into<String>) {
        self.send(SessionUpdate::AgentMessageChunk(chunk(text)));
    }

    /// Sends a piece of the model's reasoning.
    pub(crate) fn send_thought(&self, text: impl Into<String>) {
        self.send(SessionUpdate::AgentThoughtChunk(chunk(text)));
    }

    /// Reports that a tool call has started.
    pub(crate) fn send_call_started(&self, id: &str, tool: &str, arguments: &JsonObject) {
        let call = ToolCall::new(id.to_owned(), tool)
            .name(tool.to_owned())
            .status(ToolCallStatus::InProgress)
            .raw_input(call_report::bounded_arguments(arguments));
        self.send(SessionUpdate::ToolCall(call));
    }

    /// Reports the result of a tool call.
    pub(crate) fn send_call_result(&self, id: &str, result: &CallResult) {
        let status = if result.is_error {
            ToolCallStatus::Failed
        } else {
            ToolCallStatus::Completed
        };
        let result = call_report::bounded_result(result);
        // ACP uses MCP's content blocks. A kind this version does not know is still in the raw output.
        let content = result.content.iter().filter_map(|block| {
            let block: ContentBlock = serde_json::from_value(block.clone()).ok()?;
            Some(ToolCallContent::from(block))
        });
        let fields = ToolCallUpdateFields::new()
            .status(status)
            .content(content.collect::<Vec<_>>())
            .raw_output(serde_json::to_value(&*result).ok());
        self.send(SessionUpdate::ToolCallUpdate(ToolCallUpdate::new(
            id.to_owned(),
            fields,
        )));
    }

    /// Reports how many tokens the conversation takes (`used`) of the model's context window (`size`).
    pub(crate) fn send_usage(&self, used: u64, size: u64, details: JsonObject) {
        self.send(SessionUpdate::UsageUpdate(
            UsageUpdate::new(used, size).meta(details),
        ));
    }

    fn send(&self, update: SessionUpdate) {
        let _gone = self
            .connection
            .send_notification(SessionNotification::new(self.session_id.clone(), update));
    }
}

fn chunk(text: impl Into<String>) -> ContentChunk {
    ContentChunk::new(ContentBlock::from(text.into()))
}
