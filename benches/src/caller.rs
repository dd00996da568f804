//! A caller that lends one tool and answers each call immediately, with one event stream and one connection for
//! answers.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::{
    home::{BenchServer, RestClient},
    http::SseEvents,
};

/// The `context` argument that lends the tool; the agent sees it as `bench_echo`.
pub(crate) fn lent_tool_context() -> Value {
    json!({"caller_id": "bench", "caller_tools": [{"name": "echo", "inputSchema": {"type": "object"}}]})
}

/// The caller of one session.
pub(crate) struct BenchCaller {
    session: String,
    events: SseEvents,
    rest_client: RestClient,
}

impl BenchCaller {
    /// Opens the session's event stream after its last event.
    pub(crate) async fn follow_session(server: &BenchServer, session: &str) -> Result<Self> {
        let mut rest = server.connect_rest().await?;
        let mut last = -1;
        loop {
            let query = json!({"session_id": session, "since_index": last, "max_events": 1000});
            let page = rest.call_tool("session_events", query).await?;
            match page["last_index"].as_i64() {
                Some(further) if further > last => last = further,
                _ => break,
            }
        }
        let path = format!("/api/sessions/{session}/events?caller_id=bench&since_index={last}");
        let events = server.connect_rest().await?.0.into_event_stream(&path).await?;
        Ok(Self {
            session: session.to_owned(),
            events,
            rest_client: rest,
        })
    }

    /// Waits for the next request and returns its id.
    pub(crate) async fn next_request(&mut self) -> Result<String> {
        loop {
            let event = self.events.next().await?;
            if !event.contains("\"caller_tool_request\"") {
                continue;
            }
            // Searched, not parsed: the answer needs only the id.
            let (_, rest) = event
                .split_once("\"request_id\":\"")
                .context("a request without id")?;
            let (id, _) = rest.split_once('"').context("a request without id")?;
            return Ok(id.to_owned());
        }
    }

    pub(crate) async fn answer(&mut self, request: &str) -> Result<()> {
        let body = format!(
            r#"{{"session_id":"{}","request_id":"{request}","result":"ok"}}"#,
            self.session
        );
        self.rest_client
            .call_unparsed("caller_tool_response", &body)
            .await
    }

    /// Answers all requests on a task of its own, until that is dropped.
    pub(crate) fn serve(mut self) -> CallerTask {
        CallerTask(tokio::spawn(async move {
            while let Ok(request) = self.next_request().await {
                if let Err(error) = self.answer(&request).await {
                    eprintln!("  the caller could not send its answer: {error:#}");
                    return;
                }
            }
        }))
    }
}

/// The task of a caller that answers requests; dropping it stops the caller.
pub(crate) struct CallerTask(JoinHandle<()>);

impl Drop for CallerTask {
    fn drop(&mut self) {
        self.0.abort();
    }
}
