//! [`TurnRecorder`]: converts what an agent reports during a turn into events of the log.
//!
//! It does no I/O: updates and the time are passed in, events are returned. Chunks of text are combined, so that
//! an agent that streams byte by byte does not cause an event for each byte. Text and events of a turn are
//! bounded.

use std::{collections::HashMap, time::Instant};

use agent_client_protocol::v1::schema::{
    ContentBlock, ContentChunk, SessionUpdate, ToolCall, ToolCallStatus, ToolCallUpdate,
};
use oubliette_protocol::event::{EventBody, MessageRole};
use serde_json::{Value, json};

use crate::config::AgentOutputLimits;

/// The largest tool arguments or result stored in an event, in bytes of JSON.
const MAX_VALUE_BYTES: usize = 1024 * 1024;
/// The most tool calls recorded in one turn; later ones are ignored.
const MAX_TOOL_CALLS: usize = 10_000;

/// An agent reported more in one turn than its limits allow.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the agent wrote more than {0} in one turn")]
pub(crate) struct TurnLimitExceeded(String);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TextKind {
    Message,
    Thought,
}

/// A tool call the agent has reported in this turn.
struct ReportedToolCall {
    tool: String,
    /// The arguments, until `tool_call` is returned.
    arguments: Option<Value>,
    /// Whether `tool_call` was returned.
    announced: bool,
    /// Whether `tool_result` was returned.
    over: bool,
}

/// The state of one turn's recording.
pub(crate) struct TurnRecorder {
    limits: AgentOutputLimits,
    /// Text not yet returned in an event, its kind, and since when it waits.
    pending_text: Option<(TextKind, String, Instant)>,
    last_delta: Option<Instant>,
    /// The text of the current message so far.
    message: String,
    message_id: Option<String>,
    /// The completed messages of the turn.
    messages: Vec<String>,
    calls: HashMap<String, ReportedToolCall>,
    text_bytes: usize,
    event_count: usize,
}

impl TurnRecorder {
    pub(crate) fn new(limits: AgentOutputLimits) -> Self {
        Self {
            limits,
            pending_text: None,
            last_delta: None,
            message: String::new(),
            message_id: None,
            messages: Vec::new(),
            calls: HashMap::new(),
            text_bytes: 0,
            event_count: 0,
        }
    }

    /// Records an update and returns the events it causes.
    pub(crate) fn record(
        &mut self,
        update: SessionUpdate,
        now: Instant,
    ) -> Result<Vec<EventBody>, TurnLimitExceeded> {
        let mut events = Vec::new();
        match update {
            SessionUpdate::AgentMessageChunk(chunk) => {
                self.record_text(TextKind::Message, &chunk, now, &mut events)?
            }
            SessionUpdate::AgentThoughtChunk(chunk) => {
                self.record_text(TextKind::Thought, &chunk, now, &mut events)?
            }
            SessionUpdate::ToolCall(call) => {
                self.end_message(&mut events);
                self.begin_call(call, &mut events);
            }
            SessionUpdate::ToolCallUpdate(update) => {
                self.end_message(&mut events);
                self.update_call(update, &mut events);
            }
            SessionUpdate::Plan(plan) => {
                self.end_message(&mut events);
                events.push(EventBody::Plan {
                    entries: json!(plan.entries),
                });
            }
            SessionUpdate::UsageUpdate(usage) => {
                if let Ok(Value::Object(usage)) = serde_json::to_value(usage) {
                    events.push(EventBody::Usage { usage });
                }
            }
            // Echoes of the user's message, and updates meant for editors.
            _ => {}
        }
        self.event_count += events.len();
        match self.event_count > self.limits.turn_events {
            true => Err(TurnLimitExceeded(format!("{} events", self.limits.turn_events))),
            false => Ok(events),
        }
    }

    /// When pending text has to be flushed; `None` when there is none.
    pub(crate) fn flush_due(&self) -> Option<Instant> {
        self.pending_text
            .as_ref()
            .map(|(_, _, since)| *since + self.limits.delta_interval)
    }

    /// Returns pending text as an event.
    pub(crate) fn flush(&mut self, now: Instant) -> Option<EventBody> {
        let (kind, text, _) = self.pending_text.take()?;
        self.last_delta = Some(now);
        Some(match kind {
            TextKind::Message => EventBody::Delta { text },
            TextKind::Thought => EventBody::Thought { text },
        })
    }

    /// Ends the recording: returns the remaining events and all message text of the turn.
    pub(crate) fn finish(mut self) -> (Vec<EventBody>, String) {
        let mut events = Vec::new();
        self.end_message(&mut events);
        (events, self.messages.join("\n"))
    }

    fn record_text(
        &mut self,
        kind: TextKind,
        chunk: &ContentChunk,
        now: Instant,
        events: &mut Vec<EventBody>,
    ) -> Result<(), TurnLimitExceeded> {
        let text = text_of(&chunk.content);
        if text.is_empty() {
            return Ok(());
        }
        self.text_bytes += text.len();
        if self.text_bytes > self.limits.turn_text_bytes {
            return Err(TurnLimitExceeded(format!(
                "{} bytes of text",
                self.limits.turn_text_bytes
            )));
        }
        let id = chunk.message_id.as_ref().map(|id| id.0.to_string());
        match kind {
            TextKind::Thought => self.end_message(events),
            TextKind::Message if id.is_some() && self.message_id.is_some() && id != self.message_id => {
                self.end_message(events);
            }
            TextKind::Message => {}
        }
        if self
            .pending_text
            .as_ref()
            .is_some_and(|(pending, ..)| *pending != kind)
        {
            events.extend(self.flush(now));
        }
        if kind == TextKind::Message {
            self.message.push_str(&text);
            self.message_id = id.or_else(|| self.message_id.take());
        }
        // The first chunk after a pause is returned at once; those that follow closely are combined.
        let since = self.last_delta.map_or(now, |last| last.min(now));
        let paused = self
            .last_delta
            .is_none_or(|last| now >= last + self.limits.delta_interval);
        let (_, pending, _) = self.pending_text.get_or_insert((kind, String::new(), since));
        pending.push_str(&text);
        if paused || pending.len() >= self.limits.delta_bytes {
            events.extend(self.flush(now));
        }
        Ok(())
    }

    fn end_message(&mut self, events: &mut Vec<EventBody>) {
        if let Some((kind, text, since)) = self.pending_text.take() {
            self.last_delta = Some(since);
            events.push(match kind {
                TextKind::Message => EventBody::Delta { text },
                TextKind::Thought => EventBody::Thought { text },
            });
        }
        self.message_id = None;
        if !self.message.is_empty() {
            let text = std::mem::take(&mut self.message);
            self.messages.push(text.clone());
            events.push(EventBody::Message {
                role: MessageRole::Assistant,
                text,
            });
        }
    }

    fn begin_call(&mut self, call: ToolCall, events: &mut Vec<EventBody>) {
        let id = call.tool_call_id.0.to_string();
        if self.calls.len() >= MAX_TOOL_CALLS && !self.calls.contains_key(&id) {
            return;
        }
        let tool = call.name.clone().unwrap_or_else(|| call.title.clone());
        let known = ReportedToolCall {
            tool,
            arguments: None,
            announced: false,
            over: false,
        };
        self.calls.entry(id.clone()).or_insert(known);
        let content = json!(call.content);
        self.advance_call(
            &id,
            call.raw_input,
            Some(call.status),
            call.raw_output,
            content,
            events,
        );
    }

    fn update_call(&mut self, update: ToolCallUpdate, events: &mut Vec<EventBody>) {
        let id = update.tool_call_id.0.to_string();
        let fields = update.fields;
        if self.calls.len() >= MAX_TOOL_CALLS && !self.calls.contains_key(&id) {
            return;
        }
        let name = fields.name.or(fields.title);
        let call = self.calls.entry(id.clone()).or_insert_with(|| ReportedToolCall {
            tool: String::new(),
            arguments: None,
            announced: false,
            over: false,
        });
        if let Some(name) = name
            && (call.tool.is_empty() || !call.announced)
        {
            call.tool = name;
        }
        let content = fields.content.map_or(Value::Null, |content| json!(content));
        self.advance_call(
            &id,
            fields.raw_input,
            fields.status,
            fields.raw_output,
            content,
            events,
        );
    }

    /// Returns `tool_call` once, as soon as the call's arguments are known or it runs, and `tool_result` once.
    fn advance_call(
        &mut self,
        id: &str,
        input: Option<Value>,
        status: Option<ToolCallStatus>,
        output: Option<Value>,
        content: Value,
        events: &mut Vec<EventBody>,
    ) {
        let Some(call) = self.calls.get_mut(id) else {
            return;
        };
        if let Some(input) = input.filter(|input| !input.is_null()) {
            call.arguments = Some(input);
        }
        let empty = |v: &Value| v.as_object().is_some_and(serde_json::Map::is_empty);
        let arguments_known = call.arguments.as_ref().is_some_and(|a| !empty(a));
        let runs = status.is_some_and(|s| s != ToolCallStatus::Pending);
        if !call.announced && (arguments_known || runs) {
            call.announced = true;
            events.push(EventBody::ToolCall {
                tool_call_id: id.to_owned(),
                tool: call.tool.clone(),
                arguments: truncate_large(call.arguments.take().unwrap_or_else(|| json!({}))),
            });
        }
        let ok = match status {
            Some(ToolCallStatus::Completed) => true,
            Some(ToolCallStatus::Failed) => false,
            _ => return,
        };
        if !call.over {
            call.over = true;
            let result = output.filter(|o| !o.is_null()).unwrap_or(content);
            let result = if result.as_array().is_some_and(Vec::is_empty) {
                Value::Null
            } else {
                truncate_large(result)
            };
            events.push(EventBody::ToolResult {
                tool_call_id: id.to_owned(),
                ok,
                result,
            });
        }
    }
}

fn text_of(content: &ContentBlock) -> String {
    match content {
        ContentBlock::Text(text) => text.text.clone(),
        ContentBlock::ResourceLink(link) => link.uri.clone(),
        _ => String::new(),
    }
}

fn truncate_large(value: Value) -> Value {
    let text = value.to_string();
    if text.len() <= MAX_VALUE_BYTES {
        return value;
    }
    let end = (0..=MAX_VALUE_BYTES)
        .rev()
        .find(|&i| text.is_char_boundary(i))
        .unwrap_or(0);
    json!({ "truncated": true, "bytes": text.len(), "start": &text[..end] })
}
