//! The debugger event of one call: recorded when the call ends, also when it is dropped before that.

use std::time::Instant;

use jiff::Timestamp;
use oubliette_protocol::{
    Error, JsonObject,
    debug::{DebugBody, MAX_RECORDED_BYTES, truncate_recorded},
    tool::{CallResult, ToolSource},
};
use serde::Serialize;
use serde_json::{Value, value::RawValue};

use crate::{AgentContext, RequestedTool, Secrets, secret};

use super::{SourceAnswer, ToolPlane, gate::AdmittedCall, in_flight::InFlightCall, truncate_name};

/// The kind of a [`DebugBody::ToolCall`].
const TOOL_CALL: &str = "tool_call";

/// A call that has begun and is recorded when it ends or is dropped.
pub(super) struct CallRecord<'a> {
    plane: &'a ToolPlane,
    context: &'a AgentContext,
    started: Instant,
    source: ToolSource,
    arguments: JsonObject,
    call: Option<RecordedCall>,
    /// Counts as in progress until the event is recorded.
    in_flight_call: InFlightCall<'a>,
}

/// The fields of the event that are known when the call begins.
pub(super) struct RecordedCall {
    tool: String,
    canonical: String,
    source: ToolSource,
    server: Option<String>,
    turn: Option<u64>,
    started: Timestamp,
}

impl RecordedCall {
    pub(super) fn new(
        requested: &RequestedTool,
        admitted: &AdmittedCall,
        turn: Option<u64>,
        started: Timestamp,
    ) -> Self {
        Self {
            tool: truncate_name(requested.name()),
            canonical: admitted.permit.canonical().to_owned(),
            source: admitted.permit.source(),
            server: admitted.server.clone(),
            turn,
            started,
        }
    }
}

/// How a call ended.
pub(super) enum CallOutcome {
    Answer(SourceAnswer),
    Error(String),
}

impl<'a> CallRecord<'a> {
    pub(super) fn begin(
        plane: &'a ToolPlane,
        context: &'a AgentContext,
        call: RecordedCall,
        arguments: JsonObject,
        in_flight_call: InFlightCall<'a>,
    ) -> Self {
        Self {
            plane,
            context,
            started: Instant::now(),
            source: call.source,
            arguments,
            call: Some(call),
            in_flight_call,
        }
    }
}

impl CallRecord<'_> {
    pub(super) fn in_flight_call(&self) -> &InFlightCall<'_> {
        &self.in_flight_call
    }

    /// The source of the called tool.
    pub(super) fn source(&self) -> ToolSource {
        self.source
    }

    /// The call's arguments.
    pub(super) fn arguments(&self) -> &JsonObject {
        &self.arguments
    }

    pub(super) fn end(mut self, end: CallOutcome) {
        self.record_outcome(end);
    }

    /// Records that the call ended with this error, and returns the error.
    pub(super) fn end_with_error(self, error: Error) -> Error {
        self.end(CallOutcome::Error(error.message.clone()));
        error
    }

    fn record_outcome(&mut self, end: CallOutcome) {
        let Some(call) = self.call.take() else { return };
        let duration_ms = self.started.elapsed().as_secs_f64() * 1_000.0;
        let arguments = std::mem::take(&mut self.arguments);
        let secrets = [&self.plane.secrets, self.context.secrets()];
        let (debug, agent) = (&self.plane.parts.debug, Some(self.context.agent()));
        match call.encode_verbatim(&arguments, &end, duration_ms, secrets) {
            Some(text) => debug.record_text(agent, TOOL_CALL, text),
            None => debug.record(agent, call.encode_masked(arguments, end, duration_ms, secrets)),
        }
    }
}

impl Drop for CallRecord<'_> {
    fn drop(&mut self) {
        self.record_outcome(CallOutcome::Error("dropped before it ended".into()));
    }
}

impl RecordedCall {
    /// Encodes the event with the result's JSON text as it is, which is enough for most calls. `None` where
    /// something may have to be masked or cut.
    fn encode_verbatim(
        &self,
        arguments: &JsonObject,
        end: &CallOutcome,
        duration_ms: f64,
        secrets: [&Secrets; 2],
    ) -> Option<String> {
        /// [`DebugBody::ToolCall`] as it is serialized.
        #[derive(Serialize)]
        struct ToolCallEvent<'a> {
            kind: &'static str,
            tool: &'a str,
            canonical: &'a str,
            source: ToolSource,
            arguments: &'a JsonObject,
            ok: bool,
            duration_ms: f64,
            started: Timestamp,
            #[serde(skip_serializing_if = "Option::is_none")]
            server: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            turn: Option<u64>,
            result: &'a RawValue,
        }
        let CallOutcome::Answer(SourceAnswer::Text(result)) = end else {
            return None;
        };
        if result.is_error() || self.source == ToolSource::Oubliette {
            return None;
        }
        let event = ToolCallEvent {
            kind: TOOL_CALL,
            tool: &self.tool,
            canonical: &self.canonical,
            source: self.source,
            arguments,
            ok: true,
            duration_ms,
            started: self.started,
            server: self.server.as_deref(),
            turn: self.turn,
            result: result.raw(),
        };
        let text = match result.raw().get().len() <= MAX_RECORDED_BYTES {
            true => serde_json::to_string(&event).ok()?,
            false => return None,
        };
        (text.len() <= MAX_RECORDED_BYTES && secrets.iter().all(|secrets| secrets.is_free_of_secrets(&text)))
            .then_some(text)
    }

    /// Builds the event with every secret masked and large values cut.
    fn encode_masked(
        self,
        arguments: JsonObject,
        end: CallOutcome,
        duration_ms: f64,
        secrets: [&Secrets; 2],
    ) -> DebugBody {
        let read = |result: CallResult| {
            let error = result.is_error.then(|| result.joined_text());
            (!result.is_error, serde_json::to_value(result).ok(), error)
        };
        let (ok, mut result, error) = match end {
            CallOutcome::Answer(SourceAnswer::Text(text)) => read(text.parse()),
            CallOutcome::Answer(SourceAnswer::Result(result)) => read(result),
            CallOutcome::Answer(SourceAnswer::Lent(value) | SourceAnswer::Object(value)) => {
                (true, Some(value), None)
            }
            CallOutcome::Error(error) => (false, None, Some(error)),
        };
        let mut arguments = Value::Object(arguments);
        if self.source == ToolSource::Oubliette {
            secret::mask_own_tool_fields(&mut arguments);
            result.iter_mut().for_each(secret::mask_own_tool_fields);
        }
        // Secrets go before a value is cut: half a secret would not be recognised.
        let keep = |mut value: Value| {
            secrets.iter().for_each(|secrets| secrets.mask(&mut value));
            truncate_recorded(value)
        };
        const LONGEST_ERROR: usize = 4_096;
        let error = error.map(|text| {
            let mask = |text: String, secrets: &&Secrets| secrets.mask_text(&text);
            let text = secrets.iter().fold(text, mask);
            text.chars().take(LONGEST_ERROR).collect()
        });
        DebugBody::ToolCall {
            tool: self.tool,
            canonical: self.canonical,
            source: self.source,
            arguments: keep(arguments),
            ok,
            duration_ms,
            started: Some(self.started),
            server: self.server,
            turn: self.turn,
            result: result.map(keep),
            error,
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::call::RawCallResult;

    fn call() -> RecordedCall {
        RecordedCall {
            tool: "echo".into(),
            canonical: "@srv/echo".into(),
            source: ToolSource::Catalog,
            server: Some("srv".into()),
            turn: Some(3),
            started: Timestamp::from_millisecond(1_750_000_000_123).unwrap(),
        }
    }

    fn arguments() -> JsonObject {
        JsonObject::from_iter([("text".to_owned(), json!("hi"))])
    }

    fn answer(text: &str) -> CallOutcome {
        CallOutcome::Answer(SourceAnswer::Text(
            RawCallResult::validate(text.as_bytes()).unwrap(),
        ))
    }

    const PLAIN: &str = r#"{"content":[{"type":"text","text":"hi"}],"isError":false}"#;

    #[test]
    fn verbatim_and_masked_encodings_agree() {
        let none = Secrets::new();
        let text = call()
            .encode_verbatim(&arguments(), &answer(PLAIN), 1.5, [&none, &none])
            .unwrap();
        let made = call().encode_masked(arguments(), answer(PLAIN), 1.5, [&none, &none]);
        assert_eq!(serde_json::from_str::<DebugBody>(&text).unwrap(), made);
        assert_eq!(made.kind(), TOOL_CALL);
    }

    #[test]
    fn secrets_large_results_and_errors_are_not_encoded_verbatim() {
        let (none, secrets) = (Secrets::new(), Secrets::new());
        secrets.add("s3cret-value");
        let said =
            |text: &str| format!(r#"{{"content":[{{"type":"text","text":"{text}"}}],"isError":false}}"#);
        // In a text without escapes, searching it shows whether it contains a secret.
        assert!(
            call()
                .encode_verbatim(&arguments(), &answer(PLAIN), 0.0, [&secrets, &none])
                .is_some()
        );
        for text in ["a s3cret-value b", "a \\u0073\\u0033cret-value b"] {
            let end = answer(&said(text));
            assert!(
                call()
                    .encode_verbatim(&arguments(), &end, 0.0, [&none, &secrets])
                    .is_none(),
                "{text}"
            );
            let made = serde_json::to_string(&call().encode_masked(arguments(), end, 0.0, [&none, &secrets]))
                .unwrap();
            assert!(!made.contains("s3cret") && made.contains("a ••• b"), "{made}");
        }
        let large = answer(&said(&"x".repeat(MAX_RECORDED_BYTES)));
        assert!(
            call()
                .encode_verbatim(&arguments(), &large, 0.0, [&none, &none])
                .is_none()
        );
        let failed = answer(r#"{"content":[{"type":"text","text":"no"}],"isError":true}"#);
        assert!(
            call()
                .encode_verbatim(&arguments(), &failed, 0.0, [&none, &none])
                .is_none()
        );
        let DebugBody::ToolCall { ok, error, .. } =
            call().encode_masked(arguments(), failed, 0.0, [&none, &none])
        else {
            panic!()
        };
        assert_eq!((ok, error.as_deref()), (false, Some("no")));
    }
}
