//! What an agent reports during a turn, as events of the log.
//!
//! Pure: updates and the time go in, events come out. Pieces of text are gathered, so that an agent
//! that streams a byte at a time does not cost an event a byte; text and events of a turn are bounded.

use std::{collections::HashMap, time::Instant};

use agent_client_protocol::v1::schema::{
    ContentBlock, ContentChunk, SessionUpdate, ToolCall, ToolCallStatus, ToolCallUpdate,
};
use oubliette_protocol::event::{EventBody, Role};
use serde_json::{Value, json};

use crate::config::Voice;

/// The largest arguments or result an event holds, in bytes of JSON.
const LARGEST: usize = 1024 * 1024;
/// Most tool calls of a turn that are followed.
const MOST_CALLS: usize = 10_000;

/// An agent said more in one turn than it may.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("the agent wrote more than {0} in one turn")]
pub(crate) struct TooMuch(String);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Piece {
    Message,
    Thought,
}

struct Call {
    tool: String,
    arguments: Option<Value>,
    announced: bool,
    over: bool,
}

/// One turn being written down.
pub(crate) struct Scribe {
    voice: Voice,
    /// Text not yet in an event, of what kind, since when.
    gathered: Option<(Piece, String, Instant)>,
    last_delta: Option<Instant>,
    /// The message being said.
    message: String,
    message_id: Option<String>,
    /// Messages said before it.
    messages: Vec<String>,
    calls: HashMap<String, Call>,
    bytes: usize,
    events: usize,
}

impl Scribe {
    pub(crate) fn new(voice: Voice) -> Self {
        Self {
            voice,
            gathered: None,
            last_delta: None,
            message: String::new(),
            message_id: None,
            messages: Vec::new(),
            calls: HashMap::new(),
            bytes: 0,
            events: 0,
        }
    }

    /// Writes an update down.
    pub(crate) fn take(&mut self, update: SessionUpdate, now: Instant) -> Result<Vec<EventBody>, TooMuch> {
        let mut events = Vec::new();
        match update {
            SessionUpdate::AgentMessageChunk(chunk) => self.say(Piece::Message, &chunk, now, &mut events)?,
            SessionUpdate::AgentThoughtChunk(chunk) => self.say(Piece::Thought, &chunk, now, &mut events)?,
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
            // Our own words back, and what concerns an editor alone.
            _ => {}
        }
        self.events += events.len();
        match self.events > self.voice.turn_events {
            true => Err(TooMuch(format!("{} events", self.voice.turn_events))),
            false => Ok(events),
        }
    }

    /// When the gathered text wants to be written, if nothing else comes.
    pub(crate) fn due(&self) -> Option<Instant> {
        self.gathered
            .as_ref()
            .map(|(_, _, since)| *since + self.voice.delta_time)
    }

    /// The gathered text.
    pub(crate) fn flush(&mut self, now: Instant) -> Option<EventBody> {
        let (piece, text, _) = self.gathered.take()?;
        self.last_delta = Some(now);
        Some(match piece {
            Piece::Message => EventBody::Delta { text },
            Piece::Thought => EventBody::Thought { text },
        })
    }

    /// The turn is over: what is left to write, and all of its message text.
    pub(crate) fn finish(mut self) -> (Vec<EventBody>, String) {
        let mut events = Vec::new();
        self.end_message(&mut events);
        (events, self.messages.join("\n"))
    }

    fn say(
        &mut self,
        piece: Piece,
        chunk: &ContentChunk,
        now: Instant,
        events: &mut Vec<EventBody>,
    ) -> Result<(), TooMuch> {
        let text = text_of(&chunk.content);
        if text.is_empty() {
            return Ok(());
        }
        self.bytes += text.len();
        if self.bytes > self.voice.turn_text {
            return Err(TooMuch(format!("{} bytes of text", self.voice.turn_text)));
        }
        let id = chunk.message_id.as_ref().map(|id| id.0.to_string());
        match piece {
            Piece::Thought => self.end_message(events),
            Piece::Message if id.is_some() && self.message_id.is_some() && id != self.message_id => {
                self.end_message(events);
            }
            Piece::Message => {}
        }
        if self.gathered.as_ref().is_some_and(|(kind, ..)| *kind != piece) {
            events.extend(self.flush(now));
        }
        if piece == Piece::Message {
            self.message.push_str(&text);
            self.message_id = id.or_else(|| self.message_id.take());
        }
        // The first piece after a pause is shown at once; what follows on its heels is gathered.
        let since = self.last_delta.map_or(now, |last| last.min(now));
        let paused = self
            .last_delta
            .is_none_or(|last| now >= last + self.voice.delta_time);
        let (_, gathered, _) = self.gathered.get_or_insert((piece, String::new(), since));
        gathered.push_str(&text);
        if paused || gathered.len() >= self.voice.delta_bytes {
            events.extend(self.flush(now));
        }
        Ok(())
    }

    fn end_message(&mut self, events: &mut Vec<EventBody>) {
        if let Some((piece, text, since)) = self.gathered.take() {
            self.last_delta = Some(since);
            events.push(match piece {
                Piece::Message => EventBody::Delta { text },
                Piece::Thought => EventBody::Thought { text },
            });
        }
        self.message_id = None;
        if !self.message.is_empty() {
            let text = std::mem::take(&mut self.message);
            self.messages.push(text.clone());
            events.push(EventBody::Message {
                role: Role::Assistant,
                text,
            });
        }
    }

    fn begin_call(&mut self, call: ToolCall, events: &mut Vec<EventBody>) {
        let id = call.tool_call_id.0.to_string();
        if self.calls.len() >= MOST_CALLS && !self.calls.contains_key(&id) {
            return;
        }
        let tool = call.name.clone().unwrap_or_else(|| call.title.clone());
        let known = Call {
            tool,
            arguments: None,
            announced: false,
            over: false,
        };
        self.calls.entry(id.clone()).or_insert(known);
        let content = json!(call.content);
        self.step_call(
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
        if self.calls.len() >= MOST_CALLS && !self.calls.contains_key(&id) {
            return;
        }
        let name = fields.name.or(fields.title);
        let call = self.calls.entry(id.clone()).or_insert_with(|| Call {
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
        self.step_call(
            &id,
            fields.raw_input,
            fields.status,
            fields.raw_output,
            content,
            events,
        );
    }

    /// A call is announced once, as soon as its arguments are known or it runs; it ends once.
    fn step_call(
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
        let told = call.arguments.as_ref().is_some_and(|a| !empty(a));
        let runs = status.is_some_and(|s| s != ToolCallStatus::Pending);
        if !call.announced && (told || runs) {
            call.announced = true;
            events.push(EventBody::ToolCall {
                tool_call_id: id.to_owned(),
                tool: call.tool.clone(),
                arguments: bounded(call.arguments.take().unwrap_or_else(|| json!({}))),
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
                bounded(result)
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

fn bounded(value: Value) -> Value {
    let text = value.to_string();
    if text.len() <= LARGEST {
        return value;
    }
    let end = (0..=LARGEST)
        .rev()
        .find(|&i| text.is_char_boundary(i))
        .unwrap_or(0);
    json!({ "truncated": true, "bytes": text.len(), "start": &text[..end] })
}
