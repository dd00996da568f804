//! A caller that lends one tool and answers each call at once: one event stream, one connection to answer on.

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tokio::task::JoinHandle;

use crate::{
    home::{Rest, Server},
    http::Events,
};

/// What it lends: `bench_echo` to the agent.
pub(crate) fn lent() -> Value {
    json!({"caller_id": "bench", "caller_tools": [{"name": "echo", "inputSchema": {"type": "object"}}]})
}

/// A caller of one session.
pub(crate) struct Caller {
    session: String,
    events: Events,
    rest: Rest,
}

impl Caller {
    /// Listens from now on.
    pub(crate) async fn attend(server: &Server, session: &str) -> Result<Self> {
        let mut rest = server.rest().await?;
        let mut last = -1;
        loop {
            let query = json!({"session_id": session, "since_index": last, "max_events": 1000});
            let page = rest.tool("session_events", query).await?;
            match page["last_index"].as_i64() {
                Some(further) if further > last => last = further,
                _ => break,
            }
        }
        let path = format!("/api/sessions/{session}/events?caller_id=bench&since_index={last}");
        let events = server.rest().await?.0.listen(&path).await?;
        Ok(Self {
            session: session.to_owned(),
            events,
            rest,
        })
    }

    /// The id of the next request.
    pub(crate) async fn request(&mut self) -> Result<String> {
        loop {
            let event = self.events.next().await?;
            if !event.contains("\"caller_tool_request\"") {
                continue;
            }
            // Only the id is of interest: an answer does not depend on the rest.
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
        self.rest.call("caller_tool_response", &body).await
    }

    /// Answers whatever comes, until dropped.
    pub(crate) fn serve(mut self) -> Serving {
        Serving(tokio::spawn(async move {
            while let Ok(request) = self.request().await {
                if let Err(error) = self.answer(&request).await {
                    eprintln!("  a caller could not answer: {error:#}");
                    return;
                }
            }
        }))
    }
}

/// A caller at work.
pub(crate) struct Serving(JoinHandle<()>);

impl Drop for Serving {
    fn drop(&mut self) {
        self.0.abort();
    }
}
