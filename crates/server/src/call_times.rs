//! Durations of tool calls, calls of callers' tools and model requests, read from the debugger's log so that no call waits
//! for them to be counted.

use std::{sync::Arc, time::Duration};

use futures::StreamExt as _;
use oubliette_protocol::{debug::DebugBody, tool::ToolSource};
use oubliette_store::DebugFilter;

use crate::{app::App, histogram::DurationHistogram};

/// The histograms of calls.
#[derive(Debug)]
pub(crate) struct CallTimes {
    tools: DurationHistogram<3>,
    callers: DurationHistogram<1>,
    models: DurationHistogram<2>,
}

impl Default for CallTimes {
    fn default() -> Self {
        Self {
            tools: DurationHistogram::new(
                "oubliette_tool_call_duration_seconds",
                "Duration of tool calls, by source, server of the catalog and outcome.",
                ["source", "server", "outcome"],
            ),
            callers: DurationHistogram::new(
                "oubliette_relay_call_duration_seconds",
                "Duration of calls of tools that callers lend, by outcome.",
                ["outcome"],
            ),
            models: DurationHistogram::new(
                "oubliette_model_request_duration_seconds",
                "Duration of requests to model providers, by provider and outcome.",
                ["provider", "outcome"],
            ),
        }
    }
}

impl CallTimes {
    /// Counts one event of the debugger.
    fn count(&self, body: &DebugBody) {
        let outcome = |ok: bool| if ok { "ok" } else { "error" };
        match body {
            DebugBody::ToolCall {
                source,
                server,
                ok,
                duration_ms,
                ..
            } => {
                let seconds = duration_ms / 1000.0;
                if *source == ToolSource::Caller {
                    self.callers.observe([outcome(*ok)], seconds);
                }
                let server = server.as_deref().unwrap_or_default();
                self.tools
                    .observe([source_name(*source), server, outcome(*ok)], seconds);
            }
            DebugBody::ModelRequest {
                provider,
                status,
                duration_ms,
                ..
            } => {
                let outcome = outcome((200..300).contains(status));
                self.models.observe([provider, outcome], duration_ms / 1000.0);
            }
            _ => {}
        }
    }

    /// Counts a call of each kind, so that a text made of this shows all labels.
    pub(crate) fn count_one_each(&self) {
        self.tools.observe(["catalog", "example", "ok"], 0.0);
        self.callers.observe(["ok"], 0.0);
        self.models.observe(["example", "ok"], 0.0);
    }

    /// Appends all of them in Prometheus text format.
    pub(crate) fn write_to(&self, out: &mut String) {
        self.tools.write_to(out);
        self.callers.write_to(out);
        self.models.write_to(out);
    }
}

fn source_name(source: ToolSource) -> &'static str {
    match source {
        ToolSource::Caller => "caller",
        ToolSource::Oubliette => "oubliette",
        ToolSource::Catalog => "catalog",
        ToolSource::Base => "base",
    }
}

/// Counts what happens from now on, until the server stops.
pub(crate) async fn run(app: Arc<App>) {
    let filter = DebugFilter {
        kinds: Some(vec!["tool_call".into(), "model_request".into()]),
        ..DebugFilter::default()
    };
    let Ok(last) = app.store.debugger().last_index().await else {
        return;
    };
    let mut events = app.store.debugger().follow(filter, last);
    loop {
        tokio::select! {
            () = app.stopping.cancelled() => return,
            event = events.next() => match event {
                Some(Ok(event)) => app.metrics.calls.count(&event.body),
                Some(Err(_)) => tokio::time::sleep(Duration::from_secs(1)).await,
                None => return,
            },
        }
    }
}
