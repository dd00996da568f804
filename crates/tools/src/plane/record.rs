//! One call in the debugger: recorded when it ends, even if whoever asked is gone by then.

use std::time::Instant;

use oubliette_protocol::{
    Error, Object,
    debug::{DebugBody, KEEP_BYTES, kept},
    tool::{CallResult, Source},
};
use serde::Serialize;
use serde_json::{Value, value::RawValue};

use crate::{Context, Secrets, Wanted, secret};

use super::{Answer, Plane, flight::Flight, gate::Pass, shown};

/// The kind of these events.
const TOOL_CALL: &str = "tool_call";

/// A call that has begun.
pub(super) struct Record<'a> {
    plane: &'a Plane,
    context: &'a Context,
    started: Instant,
    arguments: Object,
    call: Option<Call>,
    /// Under way until it is recorded.
    flight: Flight<'a>,
}

struct Call {
    tool: String,
    canonical: String,
    source: Source,
    server: Option<String>,
    turn: Option<u64>,
}

/// How it ended.
pub(super) enum End {
    Answer(Answer),
    Error(String),
}

impl<'a> Record<'a> {
    pub(super) fn begin(
        plane: &'a Plane,
        context: &'a Context,
        wanted: &Wanted,
        pass: &Pass,
        arguments: Object,
        turn: Option<u64>,
        flight: Flight<'a>,
    ) -> Self {
        let call = Call {
            tool: shown(wanted.name()),
            canonical: pass.permit.canonical().to_owned(),
            source: pass.permit.source(),
            server: pass.server.clone(),
            turn,
        };
        Self {
            plane,
            context,
            started: Instant::now(),
            arguments,
            call: Some(call),
            flight,
        }
    }
}

impl Record<'_> {
    pub(super) fn flight(&self) -> &Flight<'_> {
        &self.flight
    }

    /// What it was called with.
    pub(super) fn arguments(&self) -> &Object {
        &self.arguments
    }

    pub(super) fn end(mut self, end: End) {
        self.write(end);
    }

    /// It ended with this error, which is given back.
    pub(super) fn failed(self, error: Error) -> Error {
        self.end(End::Error(error.message.clone()));
        error
    }

    fn write(&mut self, end: End) {
        let Some(call) = self.call.take() else { return };
        let duration_ms = self.started.elapsed().as_secs_f64() * 1_000.0;
        let arguments = std::mem::take(&mut self.arguments);
        let secrets = [&self.plane.secrets, self.context.secrets()];
        let (debug, agent) = (&self.plane.parts.debug, Some(self.context.agent()));
        match call.plainly(&arguments, &end, duration_ms, secrets) {
            Some(text) => debug.record_text(agent, TOOL_CALL, text),
            None => debug.record(agent, call.carefully(arguments, end, duration_ms, secrets)),
        }
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        self.write(End::Error("given up before it ended".into()));
    }
}

impl Call {
    /// The event's text, put together from what is text already: most calls need no more. None where something
    /// may have to be hidden or cut.
    fn plainly(
        &self,
        arguments: &Object,
        end: &End,
        duration_ms: f64,
        secrets: [&Secrets; 2],
    ) -> Option<String> {
        /// [`DebugBody::ToolCall`] as it is written.
        #[derive(Serialize)]
        struct ToolCall<'a> {
            kind: &'static str,
            tool: &'a str,
            canonical: &'a str,
            source: Source,
            arguments: &'a Object,
            ok: bool,
            duration_ms: f64,
            #[serde(skip_serializing_if = "Option::is_none")]
            server: Option<&'a str>,
            #[serde(skip_serializing_if = "Option::is_none")]
            turn: Option<u64>,
            result: &'a RawValue,
        }
        let End::Answer(Answer::Text(result)) = end else {
            return None;
        };
        if result.is_error() || self.source == Source::Oubliette {
            return None;
        }
        let event = ToolCall {
            kind: TOOL_CALL,
            tool: &self.tool,
            canonical: &self.canonical,
            source: self.source,
            arguments,
            ok: true,
            duration_ms,
            server: self.server.as_deref(),
            turn: self.turn,
            result: result.raw(),
        };
        let text = match result.raw().get().len() <= KEEP_BYTES {
            true => serde_json::to_string(&event).ok()?,
            false => return None,
        };
        (text.len() <= KEEP_BYTES && secrets.iter().all(|secrets| secrets.spare(&text))).then_some(text)
    }

    /// The event with every secret taken out, cut to what is kept.
    fn carefully(self, arguments: Object, end: End, duration_ms: f64, secrets: [&Secrets; 2]) -> DebugBody {
        let read = |result: CallResult| {
            let error = result.is_error.then(|| result.joined_text());
            (!result.is_error, serde_json::to_value(result).ok(), error)
        };
        let (ok, mut result, error) = match end {
            End::Answer(Answer::Text(text)) => read(text.read()),
            End::Answer(Answer::Result(result)) => read(result),
            End::Answer(Answer::Lent(value) | Answer::Object(value)) => (true, Some(value), None),
            End::Error(error) => (false, None, Some(error)),
        };
        let mut arguments = Value::Object(arguments);
        if self.source == Source::Oubliette {
            secret::mask_own(&mut arguments);
            result.iter_mut().for_each(secret::mask_own);
        }
        // Secrets go before a value is cut: half a secret would not be recognised.
        let keep = |mut value: Value| {
            secrets.iter().for_each(|secrets| secrets.mask(&mut value));
            kept(value)
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
    use crate::call::ResultText;

    fn call() -> Call {
        Call {
            tool: "echo".into(),
            canonical: "@srv/echo".into(),
            source: Source::Catalog,
            server: Some("srv".into()),
            turn: Some(3),
        }
    }

    fn arguments() -> Object {
        Object::from_iter([("text".to_owned(), json!("hi"))])
    }

    fn answer(text: &str) -> End {
        End::Answer(Answer::Text(ResultText::of(text.as_bytes()).unwrap()))
    }

    const PLAIN: &str = r#"{"content":[{"type":"text","text":"hi"}],"isError":false}"#;

    #[test]
    fn an_event_put_together_is_the_one_that_is_made() {
        let none = Secrets::new();
        let text = call()
            .plainly(&arguments(), &answer(PLAIN), 1.5, [&none, &none])
            .unwrap();
        let made = call().carefully(arguments(), answer(PLAIN), 1.5, [&none, &none]);
        assert_eq!(serde_json::from_str::<DebugBody>(&text).unwrap(), made);
        assert_eq!(made.kind(), TOOL_CALL);
    }

    #[test]
    fn what_may_hold_a_secret_or_is_to_be_cut_is_made_with_care() {
        let (none, secrets) = (Secrets::new(), Secrets::new());
        secrets.hide("s3cret-value");
        let said =
            |text: &str| format!(r#"{{"content":[{{"type":"text","text":"{text}"}}],"isError":false}}"#);
        // Where nothing is escaped it is seen whether a secret is there.
        assert!(
            call()
                .plainly(&arguments(), &answer(PLAIN), 0.0, [&secrets, &none])
                .is_some()
        );
        for text in ["a s3cret-value b", "a \\u0073\\u0033cret-value b"] {
            let end = answer(&said(text));
            assert!(
                call()
                    .plainly(&arguments(), &end, 0.0, [&none, &secrets])
                    .is_none(),
                "{text}"
            );
            let made =
                serde_json::to_string(&call().carefully(arguments(), end, 0.0, [&none, &secrets])).unwrap();
            assert!(!made.contains("s3cret") && made.contains("a ••• b"), "{made}");
        }
        let large = answer(&said(&"x".repeat(KEEP_BYTES)));
        assert!(
            call()
                .plainly(&arguments(), &large, 0.0, [&none, &none])
                .is_none()
        );
        let failed = answer(r#"{"content":[{"type":"text","text":"no"}],"isError":true}"#);
        assert!(
            call()
                .plainly(&arguments(), &failed, 0.0, [&none, &none])
                .is_none()
        );
        let DebugBody::ToolCall { ok, error, .. } =
            call().carefully(arguments(), failed, 0.0, [&none, &none])
        else {
            panic!()
        };
        assert_eq!((ok, error.as_deref()), (false, Some("no")));
    }
}
