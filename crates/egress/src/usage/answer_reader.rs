//! One answer of a model, from its first byte to its end.

use std::sync::Arc;

use http::{HeaderMap, header};
use oubliette_protocol::usage::RequestUsage;

use super::{
    ModelApi, RequestReader, bounded_model_name, estimate_tokens,
    event_lines::{EventLines, EventPiece},
    field_scanner::{FieldScanner, ScannedFields},
    token_counts::TokenCounts,
};

/// Whether an answer has said all it will say about its usage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum AnswerState {
    /// More may come.
    Open,
    /// Its last event or its closing bracket has been read.
    Finished,
}

/// How an answer is encoded.
#[derive(Debug)]
enum AnswerFormat {
    Json,
    Events(EventLines),
    /// Compressed although that was not asked for, or something else: only its length is known.
    Opaque,
}

/// Reads what an answer used while its bytes pass.
#[derive(Debug)]
pub(crate) struct AnswerReader {
    api: ModelApi,
    request: Arc<RequestReader>,
    format: AnswerFormat,
    scanner: FieldScanner,
    /// The first bytes of the current event's data, which tell its end mark from JSON.
    event_start: Vec<u8>,
    counts: TokenCounts,
    model: Option<String>,
    bytes: u64,
    text_bytes: u64,
    delta_bytes: u64,
    /// Whether a Gemini answer has said why it ends.
    has_finish_reason: bool,
    /// Whether the counts are the last ones.
    counts_are_final: bool,
    state: AnswerState,
}

/// The data of the event that ends a stream of chat completions.
const DONE_MARK: &[u8] = b"[DONE]";

impl AnswerReader {
    /// For an answer with these headers.
    pub(crate) fn new(api: ModelApi, request: Arc<RequestReader>, headers: &HeaderMap) -> Self {
        let value = |name| headers.get(name).and_then(|value| value.to_str().ok());
        let encoded = value(header::CONTENT_ENCODING).is_some_and(|coding| coding != "identity");
        let format = match value(header::CONTENT_TYPE).unwrap_or_default() {
            _ if encoded => AnswerFormat::Opaque,
            kind if kind.starts_with("text/event-stream") => AnswerFormat::Events(EventLines::default()),
            _ => AnswerFormat::Json,
        };
        Self {
            api,
            request,
            format,
            scanner: FieldScanner::default(),
            event_start: Vec::new(),
            counts: TokenCounts::default(),
            model: None,
            bytes: 0,
            text_bytes: 0,
            delta_bytes: 0,
            has_finish_reason: false,
            counts_are_final: false,
            state: AnswerState::Open,
        }
    }

    /// Reads a chunk that is about to be passed on.
    pub(crate) fn feed(&mut self, chunk: &[u8]) -> AnswerState {
        self.bytes += chunk.len() as u64;
        match std::mem::replace(&mut self.format, AnswerFormat::Opaque) {
            AnswerFormat::Opaque => {}
            AnswerFormat::Json => {
                self.format = AnswerFormat::Json;
                self.scanner.feed(chunk);
                if self.scanner.is_complete() {
                    self.end_text();
                    self.counts_are_final = true;
                    self.state = AnswerState::Finished;
                }
            }
            AnswerFormat::Events(mut lines) => {
                lines.feed(chunk, |piece| match piece {
                    EventPiece::Data(data) => {
                        let room = (DONE_MARK.len() + 1).saturating_sub(self.event_start.len());
                        self.event_start.extend_from_slice(&data[..data.len().min(room)]);
                        self.scanner.feed(data);
                    }
                    EventPiece::End => self.end_event(),
                });
                self.format = AnswerFormat::Events(lines);
            }
        }
        self.state
    }

    /// Notes that the answer's last byte has been read.
    pub(crate) fn end(&mut self) {
        if self.state == AnswerState::Open {
            self.end_text();
            // What has an end mark and ends without it was cut, in whatever way the connection was closed.
            let is_cut = match (&self.format, self.api) {
                // It would be finished at its closing bracket.
                (AnswerFormat::Json, _) => true,
                (AnswerFormat::Events(_), ModelApi::Messages | ModelApi::Responses) => true,
                (AnswerFormat::Events(_), ModelApi::Gemini) => !self.has_finish_reason,
                (AnswerFormat::Events(_), ModelApi::Chat | ModelApi::Other) | (AnswerFormat::Opaque, _) => {
                    false
                }
            };
            self.counts_are_final |= !is_cut;
            self.state = AnswerState::Finished;
        }
    }

    fn end_event(&mut self) {
        let is_done = self.event_start.trim_ascii_end() == DONE_MARK;
        self.event_start.clear();
        let ends_with_usage = {
            let found = self.scanner.found();
            found.has_finish_reason && found.usage.is_some()
        };
        let kind = self.end_text();
        match (self.api, kind.as_deref()) {
            _ if is_done => self.state = AnswerState::Finished,
            // Some clients read no further.
            (ModelApi::Gemini, _) if ends_with_usage => self.state = AnswerState::Finished,
            (ModelApi::Messages, Some("message_delta")) => self.counts_are_final = true,
            (ModelApi::Messages, Some("message_stop")) => self.state = AnswerState::Finished,
            (ModelApi::Responses, Some("response.completed" | "response.incomplete" | "response.failed")) => {
                self.counts_are_final = true;
                self.state = AnswerState::Finished;
            }
            _ => {}
        }
        self.counts_are_final |= self.state == AnswerState::Finished;
    }

    /// Takes over what was found in one JSON text; returns its `type`.
    fn end_text(&mut self) -> Option<String> {
        let ScannedFields {
            usage,
            model,
            kind,
            has_finish_reason,
            text_bytes,
            delta_bytes,
        } = self.scanner.reset();
        if let Some(usage) = usage {
            self.counts.merge(&usage);
            // These report it once, when they have it all.
            self.counts_are_final |=
                matches!(self.api, ModelApi::Chat | ModelApi::Responses | ModelApi::Other);
        }
        self.has_finish_reason |= has_finish_reason;
        self.model = model.or(self.model.take());
        self.text_bytes += text_bytes;
        self.delta_bytes += delta_bytes;
        kind
    }

    /// What the answer used, as far as it came. Counts it did not report, or not to their end, are estimates.
    pub(crate) fn usage(&self) -> Option<RequestUsage> {
        let (input, output) = (self.counts.input(), self.counts.output());
        if self.api == ModelApi::Other && input.is_none() && output.is_none() {
            return None;
        }
        // Of an event that was cut, too.
        let cut = self.scanner.found();
        let (whole, deltas) = (
            self.text_bytes + cut.text_bytes,
            self.delta_bytes + cut.delta_bytes,
        );
        let text = match &self.format {
            AnswerFormat::Opaque => self.bytes,
            AnswerFormat::Json | AnswerFormat::Events(_) if deltas > 0 => deltas,
            AnswerFormat::Json | AnswerFormat::Events(_) => whole,
        };
        let estimated_output = estimate_tokens(text);
        let is_whole = self.counts_are_final && input.is_some() && output.is_some();
        Some(RequestUsage {
            model: self.model_name(),
            input_tokens: input.unwrap_or_else(|| self.request.estimated_tokens()),
            output_tokens: match output {
                Some(output) if self.counts_are_final => output,
                output => output.unwrap_or(0).max(estimated_output),
            },
            cached_tokens: self.counts.cached(),
            cost_usd: None,
            estimated: !is_whole,
        })
    }

    /// The requested model, under whose name it is configured and priced; else the one that answered.
    fn model_name(&self) -> String {
        let answered = || self.model.as_deref().map(bounded_model_name);
        self.request.model().or_else(answered).unwrap_or_default()
    }
}

impl RequestReader {
    /// What a request used that the provider answered with an error: nothing.
    pub(crate) fn usage_of_error(&self) -> RequestUsage {
        self.usage(0, false)
    }

    /// What a request used that was given up before its answer began: its input, about.
    pub(crate) fn usage_without_answer(&self) -> RequestUsage {
        self.usage(self.estimated_tokens(), true)
    }

    fn usage(&self, input_tokens: u64, estimated: bool) -> RequestUsage {
        RequestUsage {
            model: self.model().unwrap_or_default(),
            input_tokens,
            output_tokens: 0,
            cached_tokens: 0,
            cost_usd: None,
            estimated,
        }
    }
}

#[cfg(test)]
#[path = "answer_reader_tests.rs"]
mod tests;
