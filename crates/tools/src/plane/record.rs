//! One call in the debugger: recorded when it ends, even if whoever asked is gone by then.

use std::{sync::Arc, time::Instant};

use oubliette_protocol::{
    Object, Result,
    debug::{DebugBody, kept},
    tool::Source,
};
use serde_json::Value;

use crate::{Context, Wanted, secret};

use super::{Answer, Plane, gate::Pass, shown};

/// A call that has begun.
pub(super) struct Record<'a> {
    plane: &'a Plane,
    context: Arc<Context>,
    started: Instant,
    call: Option<Call>,
}

struct Call {
    tool: String,
    canonical: String,
    source: Source,
    server: Option<String>,
    arguments: Value,
    turn: Option<u64>,
}

impl<'a> Record<'a> {
    pub(super) fn begin(
        plane: &'a Plane,
        context: &Arc<Context>,
        wanted: &Wanted,
        pass: &Pass,
        arguments: &Object,
        turn: Option<u64>,
    ) -> Self {
        let call = Call {
            tool: shown(wanted.name()),
            canonical: pass.permit.canonical().to_owned(),
            source: pass.permit.source(),
            server: pass.server.clone(),
            arguments: Value::Object(arguments.clone()),
            turn,
        };
        Self {
            plane,
            context: context.clone(),
            started: Instant::now(),
            call: Some(call),
        }
    }

    pub(super) fn end(mut self, result: &Result<Answer>) {
        let (ok, value, error) = match result {
            Ok(Answer::Result(result)) => (
                !result.is_error,
                serde_json::to_value(result).ok(),
                result.is_error.then(|| result.joined_text()),
            ),
            Ok(Answer::Lent(value) | Answer::Object(value)) => (true, Some(value.clone()), None),
            Err(error) => (false, None, Some(error.message.clone())),
        };
        self.write(ok, value, error);
    }

    fn write(&mut self, ok: bool, mut result: Option<Value>, error: Option<String>) {
        let Some(mut call) = self.call.take() else { return };
        if call.source == Source::Oubliette {
            secret::mask_own(&mut call.arguments);
            result.iter_mut().for_each(secret::mask_own);
        }
        const LONGEST_ERROR: usize = 4_096;
        let error = error.map(|text| {
            let text = self.plane.masked(&self.context, &text);
            text.chars().take(LONGEST_ERROR).collect()
        });
        let body = DebugBody::ToolCall {
            tool: call.tool,
            canonical: call.canonical,
            source: call.source,
            arguments: self.keep(call.arguments),
            ok,
            duration_ms: self.started.elapsed().as_secs_f64() * 1_000.0,
            server: call.server,
            turn: call.turn,
            result: result.map(|value| self.keep(value)),
            error,
        };
        self.plane.parts.debug.record(Some(self.context.agent()), body);
    }

    /// Secrets go before the value is cut: half a secret would not be recognised.
    fn keep(&self, mut value: Value) -> Value {
        self.plane.secrets.mask(&mut value);
        self.context.secrets().mask(&mut value);
        kept(value)
    }
}

impl Drop for Record<'_> {
    fn drop(&mut self) {
        self.write(false, None, Some("given up before it ended".into()));
    }
}
