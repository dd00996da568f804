//! [`TurnRecorder`]: converts what an agent reports during a turn into events of the log.
//!
//! It does no I/O: updates and the time are passed in, events are returned. Chunks of text are combined, so that
//! an agent that streams byte by byte does not cause an event for each byte; of plans and usage reports that follow
//! closely only the last is returned. Text, events and tool calls of a turn are bounded, and so is each event.

use std::time::{Duration, Instant};

use agent_client_protocol::v1::schema::{ContentBlock, ContentChunk, SessionUpdate};
use oubliette_protocol::{
    ByteBudget, ByteCharge, OverBudget,
    event::{EventBody, MessageRole},
};
use serde_json::Value;

use super::{
    event_bounds::{bounded_plan, bounded_usage},
    reported_calls::ReportedCalls,
    terminal_escapes::EscapeFilter,
};
use crate::config::AgentOutputLimits;

/// Text of a turn up to this, in bytes, is not charged.
const UNCHARGED_BYTES: usize = 64 * 1024;

/// An agent reported more in one turn than its limits allow.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub(crate) enum TurnLimitExceeded {
    #[error("the agent wrote more than {0} in one turn")]
    TooMuch(String),
    #[error("the agent's text is too much: {0}")]
    OverBudget(#[from] OverBudget),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum TextKind {
    Message,
    Thought,
}

/// Events of which each replaces the one before, so that not all have to be logged.
#[derive(Default)]
struct ReplaceableEvents {
    /// The last one, if it was not returned yet.
    pending: Option<EventBody>,
    /// When one was last returned.
    last: Option<Instant>,
}

impl ReplaceableEvents {
    /// Returns an event if none was returned just before; else keeps it in place of an earlier one.
    fn add(&mut self, event: EventBody, now: Instant, interval: Duration) -> Option<EventBody> {
        self.pending = Some(event);
        match self.last {
            Some(last) if now < last + interval => None,
            _ => {
                self.last = Some(now);
                self.pending.take()
            }
        }
    }

    /// When the kept event has to be returned.
    fn due(&self, interval: Duration) -> Option<Instant> {
        self.pending.as_ref().and(self.last).map(|last| last + interval)
    }

    /// Returns the kept event if it is due.
    fn take_due(&mut self, now: Instant, interval: Duration) -> Option<EventBody> {
        if self.due(interval)? > now {
            return None;
        }
        self.last = Some(now);
        self.pending.take()
    }
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
    calls: ReportedCalls,
    /// Removes terminal escapes from the text of each kind.
    message_escapes: EscapeFilter,
    thought_escapes: EscapeFilter,
    plans: ReplaceableEvents,
    usage: ReplaceableEvents,
    text_bytes: usize,
    /// What the text is charged.
    text_charge: ByteCharge,
    event_count: usize,
}

impl TurnRecorder {
    pub(crate) fn new(limits: AgentOutputLimits, buffers: &ByteBudget) -> Self {
        Self {
            calls: ReportedCalls::new(limits.update_interval),
            limits,
            pending_text: None,
            last_delta: None,
            message: String::new(),
            message_id: None,
            messages: Vec::new(),
            message_escapes: EscapeFilter::default(),
            thought_escapes: EscapeFilter::default(),
            plans: ReplaceableEvents::default(),
            usage: ReplaceableEvents::default(),
            text_bytes: 0,
            text_charge: buffers.empty_charge(),
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
                self.calls.begin(call, now, &mut events);
            }
            SessionUpdate::ToolCallUpdate(update) => {
                self.end_message(&mut events);
                self.calls.update(update, now, &mut events);
            }
            SessionUpdate::Plan(plan) => {
                self.end_message(&mut events);
                let entries = bounded_plan(plan.entries);
                let plan = EventBody::Plan { entries };
                events.extend(self.plans.add(plan, now, self.limits.update_interval));
            }
            SessionUpdate::UsageUpdate(usage) => {
                if let Ok(Value::Object(usage)) = serde_json::to_value(usage) {
                    let usage = EventBody::Usage {
                        usage: bounded_usage(usage),
                    };
                    events.extend(self.usage.add(usage, now, self.limits.update_interval));
                }
            }
            // Echoes of the user's message, and updates meant for editors.
            _ => {}
        }
        self.event_count += events.len();
        match self.event_count > self.limits.turn_events {
            true => Err(TurnLimitExceeded::TooMuch(format!(
                "{} events",
                self.limits.turn_events
            ))),
            false => Ok(events),
        }
    }

    /// When something pending has to be flushed; `None` when there is nothing.
    pub(crate) fn flush_due(&self) -> Option<Instant> {
        let text = self.pending_text.as_ref();
        let text = text.map(|(_, _, since)| *since + self.limits.delta_interval);
        let updates = [&self.plans, &self.usage].map(|events| events.due(self.limits.update_interval));
        updates
            .into_iter()
            .chain([text, self.calls.due()])
            .flatten()
            .min()
    }

    /// Returns what is pending and due.
    pub(crate) fn flush(&mut self, now: Instant) -> Vec<EventBody> {
        let since = self.pending_text.as_ref().map(|(_, _, since)| *since);
        let mut events = Vec::new();
        if since.is_some_and(|since| since + self.limits.delta_interval <= now) {
            events.extend(self.flush_text(now));
        }
        self.calls.announce_due(Some(now), &mut events);
        events.extend(self.plans.take_due(now, self.limits.update_interval));
        events.extend(self.usage.take_due(now, self.limits.update_interval));
        self.event_count += events.len();
        events
    }

    /// Returns pending text as an event.
    fn flush_text(&mut self, now: Instant) -> Option<EventBody> {
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
        self.calls.announce_due(None, &mut events);
        events.extend(self.plans.pending.take());
        events.extend(self.usage.pending.take());
        (events, self.messages.join("\n"))
    }

    fn record_text(
        &mut self,
        kind: TextKind,
        chunk: &ContentChunk,
        now: Instant,
        events: &mut Vec<EventBody>,
    ) -> Result<(), TurnLimitExceeded> {
        let escapes = match kind {
            TextKind::Message => &mut self.message_escapes,
            TextKind::Thought => &mut self.thought_escapes,
        };
        let text = escapes.strip(text_of(&chunk.content)).into_owned();
        if text.is_empty() {
            return Ok(());
        }
        // The agent goes on: the arguments of its calls are complete.
        self.calls.announce_due(None, events);
        self.text_bytes += text.len();
        if self.text_bytes > self.limits.turn_text_bytes {
            return Err(TurnLimitExceeded::TooMuch(format!(
                "{} bytes of text",
                self.limits.turn_text_bytes
            )));
        }
        if self.text_bytes > UNCHARGED_BYTES {
            self.text_charge.resize(self.text_bytes)?;
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
            events.extend(self.flush_text(now));
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
            events.extend(self.flush_text(now));
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
}

fn text_of(content: &ContentBlock) -> &str {
    match content {
        ContentBlock::Text(text) => &text.text,
        ContentBlock::ResourceLink(link) => &link.uri,
        _ => "",
    }
}
