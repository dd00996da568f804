//! Everything the agent says while a turn runs, as `session/update` notifications.
//!
//! They share one queue with the prompt's answer, so none can arrive after it. A client that has
//! gone is no reason to fail: its stdin closes next, and with it this process ends.

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
use oubliette_protocol::{Object, tool::CallResult};

use crate::report;

/// Speaks for one session.
#[derive(Clone)]
pub(crate) struct Voice {
    connection: ConnectionTo<Client>,
    session_id: SessionId,
}

impl Voice {
    pub(crate) fn new(connection: ConnectionTo<Client>, session_id: SessionId) -> Self {
        Self {
            connection,
            session_id,
        }
    }

    /// Text for whoever asked.
    pub(crate) fn say(&self, text: impl Into<String>) {
        self.send(SessionUpdate::AgentMessageChunk(chunk(text)));
    }

    /// Reasoning, where the model shows it.
    pub(crate) fn think(&self, text: impl Into<String>) {
        self.send(SessionUpdate::AgentThoughtChunk(chunk(text)));
    }

    /// A tool is being called.
    pub(crate) fn calling(&self, id: &str, tool: &str, arguments: &Object) {
        let call = ToolCall::new(id.to_owned(), tool)
            .name(tool.to_owned())
            .status(ToolCallStatus::InProgress)
            .raw_input(report::asked(arguments));
        self.send(SessionUpdate::ToolCall(call));
    }

    /// It answered.
    pub(crate) fn called(&self, id: &str, result: &CallResult) {
        let status = if result.is_error {
            ToolCallStatus::Failed
        } else {
            ToolCallStatus::Completed
        };
        let result = report::told(result);
        // ACP's content blocks are MCP's; one this version does not know is still in the raw output.
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

    /// How many tokens the conversation takes now.
    pub(crate) fn usage(&self, used: u64, size: u64, details: Object) {
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
