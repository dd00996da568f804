//! [`ReportedCalls`]: the tool calls an agent reports in one turn, as `tool_call` and `tool_result` events.
//!
//! An agent may report the arguments of a call piece by piece. `tool_call` is returned when the call runs, or when its
//! arguments have not changed for a moment; if they change after that, it is returned again with the last ones.

use std::{
    collections::{HashMap, VecDeque},
    time::{Duration, Instant},
};

use agent_client_protocol::v1::schema::{Meta, ToolCall, ToolCallStatus, ToolCallUpdate, ToolKind};
use oubliette_protocol::event::EventBody;
use serde_json::{Value, json};

use super::{
    event_bounds::{MAX_TEXT_BYTES, bounded_id, bounded_value, truncate_text},
    terminal_escapes::{strip_escapes, strip_escapes_in},
    tool_name::CallDescription,
};

/// The most tool calls recorded in one turn; later ones are ignored.
const MAX_TOOL_CALLS: usize = 10_000;
/// The longest name of a tool that is kept, in bytes: ten thousand of them are kept at once.
const MAX_TOOL_BYTES: usize = MAX_TEXT_BYTES / 8;
/// How many calls may wait to be returned at once: their arguments are kept until then.
const MAX_WAITING_CALLS: usize = 16;
/// The most terminal output that is kept for all calls of a turn, in bytes.
const MAX_TERMINAL_BYTES: usize = 1024 * 1024;

/// A tool call the agent has reported in this turn.
#[derive(Default)]
struct ReportedToolCall {
    tool: String,
    /// Whether the name is from a field meant for it, and no longer changes.
    named: bool,
    kind: Option<ToolKind>,
    /// The last arguments, until they are returned in `tool_call`.
    arguments: Option<Value>,
    /// A hash of the arguments that were last returned in `tool_call`.
    announced: Option<u64>,
    /// When `tool_call` is due; `None` when nothing waits to be returned.
    due: Option<Instant>,
    /// Output that came as terminal updates.
    terminal: String,
    /// Whether `tool_result` was returned.
    over: bool,
}

/// The tool calls of one turn.
pub(crate) struct ReportedCalls {
    calls: HashMap<String, ReportedToolCall>,
    /// Ids of calls that may be due, in the order they were reported.
    waiting: VecDeque<String>,
    terminal_bytes: usize,
    /// How long the arguments of a call that does not run yet must not have changed.
    interval: Duration,
}

/// What one report of the agent says about a call.
struct CallProgress {
    input: Option<Value>,
    status: Option<ToolCallStatus>,
    output: Option<Value>,
    content: Value,
}

impl ReportedCalls {
    pub(crate) fn new(interval: Duration) -> Self {
        Self {
            calls: HashMap::new(),
            waiting: VecDeque::new(),
            terminal_bytes: 0,
            interval,
        }
    }

    /// Records a call the agent announces.
    pub(crate) fn begin(&mut self, call: ToolCall, now: Instant, events: &mut Vec<EventBody>) {
        let id = bounded_id(&call.tool_call_id.0).into_owned();
        if !self.describe(&id, CallDescription::from(&call)) {
            return;
        }
        self.add_terminal_output(&id, call.meta.as_ref());
        let progress = CallProgress {
            status: Some(call.status),
            content: json!(call.content),
            input: call.raw_input,
            output: call.raw_output,
        };
        self.advance(&id, progress, now, events);
    }

    /// Records what the agent says later about a call.
    pub(crate) fn update(&mut self, update: ToolCallUpdate, now: Instant, events: &mut Vec<EventBody>) {
        let id = bounded_id(&update.tool_call_id.0).into_owned();
        if !self.describe(&id, CallDescription::from(&update)) {
            return;
        }
        self.add_terminal_output(&id, update.meta.as_ref());
        let fields = update.fields;
        let progress = CallProgress {
            input: fields.raw_input,
            status: fields.status,
            output: fields.raw_output,
            content: fields.content.map_or(Value::Null, |content| json!(content)),
        };
        self.advance(&id, progress, now, events);
    }

    /// When `tool_call` of some call is due; `None` when none waits.
    pub(crate) fn due(&self) -> Option<Instant> {
        let waiting = self.waiting.iter().filter_map(|id| self.calls.get(id)?.due);
        waiting.min()
    }

    /// Returns `tool_call` for the calls that are due; for all that wait when `now` is `None`.
    pub(crate) fn announce_due(&mut self, now: Option<Instant>, events: &mut Vec<EventBody>) {
        let mut later = VecDeque::new();
        for id in std::mem::take(&mut self.waiting) {
            let Some(call) = self.calls.get_mut(&id) else {
                continue;
            };
            match (call.due, now) {
                (Some(due), Some(now)) if due > now => later.push_back(id),
                (Some(_), _) => events.extend(call.announce(&id)),
                (None, _) => {}
            }
        }
        self.waiting = later;
    }

    /// Notes name and kind of a call. Returns false when the turn has too many calls.
    fn describe(&mut self, id: &str, description: CallDescription<'_>) -> bool {
        if self.calls.len() >= MAX_TOOL_CALLS && !self.calls.contains_key(id) {
            return false;
        }
        let call = self.calls.entry(id.to_owned()).or_default();
        call.kind = description.kind().or(call.kind);
        let description = description.with_kind(call.kind);
        let may_change = call.tool.is_empty() || (!call.named && call.announced.is_none());
        if let Some(tool) = description.tool().filter(|_| may_change) {
            call.named = description.is_named();
            call.tool = truncate_text(strip_escapes(&tool).into_owned(), MAX_TOOL_BYTES);
        }
        true
    }

    /// Keeps output of a terminal, which agents send in `_meta` as it appears.
    fn add_terminal_output(&mut self, id: &str, meta: Option<&Meta>) {
        let data = ["terminal_output", "terminal_output_delta"]
            .iter()
            .find_map(|field| meta?.get(*field)?.get("data")?.as_str());
        let (Some(data), Some(call)) = (data, self.calls.get_mut(id)) else {
            return;
        };
        let room = MAX_TERMINAL_BYTES.saturating_sub(self.terminal_bytes);
        let room = room.min(MAX_TEXT_BYTES.saturating_sub(call.terminal.len()));
        let kept = &data[..data.floor_char_boundary(room)];
        self.terminal_bytes += kept.len();
        call.terminal.push_str(kept);
    }

    fn advance(&mut self, id: &str, progress: CallProgress, now: Instant, events: &mut Vec<EventBody>) {
        let Some(call) = self.calls.get_mut(id) else {
            return;
        };
        let empty = |v: &Value| v.as_object().is_some_and(serde_json::Map::is_empty);
        if let Some(mut input) = progress.input.filter(|input| !input.is_null() && !call.over) {
            strip_escapes_in(&mut input);
            // An empty object does not replace arguments that are known.
            if !empty(&input) || (call.arguments.is_none() && call.announced.is_none()) {
                call.arguments = Some(bounded_value(input));
            }
        }
        let status = progress.status.unwrap_or(ToolCallStatus::Pending);
        let arguments_known = call.arguments.as_ref().is_some_and(|a| !empty(a));
        let ended = matches!(status, ToolCallStatus::Completed | ToolCallStatus::Failed);
        let runs = ended || status == ToolCallStatus::InProgress;
        if (ended && !call.over) || (runs && arguments_known && call.announced.is_none()) {
            events.extend(call.announce(id));
        } else if !call.over && (arguments_known || (runs && call.announced.is_none())) {
            call.due = Some(now + self.interval);
            if !self.waiting.iter().any(|waiting| waiting == id) {
                self.waiting.push_back(id.to_owned());
            }
        }
        if self.waiting.len() > MAX_WAITING_CALLS
            && let Some(oldest) = self.waiting.pop_front()
        {
            let oldest_call = self.calls.get_mut(&oldest).filter(|call| call.due.is_some());
            events.extend(oldest_call.and_then(|call| call.announce(&oldest)));
        }
        let Some(call) = self.calls.get_mut(id) else {
            return;
        };
        if ended && !call.over {
            call.over = true;
            self.terminal_bytes -= call.terminal.len();
            events.push(EventBody::ToolResult {
                tool_call_id: id.to_owned(),
                ok: status == ToolCallStatus::Completed,
                result: call.take_result(progress.output, progress.content),
            });
        }
    }
}

impl ReportedToolCall {
    /// The event `tool_call`, unless it was returned with the same arguments before.
    fn announce(&mut self, id: &str) -> Option<EventBody> {
        self.due = None;
        let arguments = match (self.arguments.take(), self.announced) {
            (None, Some(_)) => return None,
            (arguments, _) => arguments.unwrap_or_else(|| json!({})),
        };
        let hash = oubliette_os::fnv1a(arguments.to_string().as_bytes());
        if self.announced.replace(hash) == Some(hash) {
            return None;
        }
        Some(EventBody::ToolCall {
            tool_call_id: id.to_owned(),
            tool: self.tool.clone(),
            arguments,
        })
    }

    /// The result of a call that has ended: what the agent gives as its output, with what came as terminal updates.
    fn take_result(&mut self, output: Option<Value>, content: Value) -> Value {
        let terminal = std::mem::take(&mut self.terminal);
        let given = output.filter(|output| !output.is_null());
        let mut result = given.unwrap_or_else(|| match is_without_text(&content) {
            true => Value::Null,
            false => content,
        });
        match &mut result {
            _ if terminal.is_empty() => {}
            Value::Object(fields) => {
                fields.entry("output").or_insert_with(|| json!(terminal));
            }
            Value::Null => result = json!(terminal),
            _ => {}
        }
        strip_escapes_in(&mut result);
        bounded_value(result)
    }
}

/// Whether the content of a call is empty, or only refers to terminals.
fn is_without_text(content: &Value) -> bool {
    match content {
        Value::Array(blocks) => blocks.iter().all(|block| block["type"] == "terminal"),
        other => other.is_null(),
    }
}
