//! Calls of the server's tools over REST, with one token.

use anyhow::{Context as _, Result, bail};
use serde_json::{Value, json};

use crate::SessionEventStream;

/// A REST client of a server with one token. Cheap to clone.
#[derive(Debug, Clone)]
pub struct ToolApi {
    http: reqwest::Client,
    url: String,
    token: String,
}

/// The error of a refused call.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ToolError {
    /// The error code: `not_found`, `permission_denied`, …
    pub code: String,
    /// The error text, for people.
    pub message: String,
}

impl std::fmt::Display for ToolError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}: {}", self.code, self.message)
    }
}

impl std::error::Error for ToolError {}

/// An HTTP client with a connection pool of its own.
pub(crate) fn http_client() -> reqwest::Client {
    // Fails when it is installed already.
    let _ = rustls::crypto::ring::default_provider().install_default();
    reqwest::Client::new()
}

impl ToolApi {
    /// A client with this token and a connection pool of its own.
    pub fn new(url: &str, token: &str) -> Self {
        Self {
            http: http_client(),
            url: url.to_owned(),
            token: token.to_owned(),
        }
    }

    /// The token.
    pub fn token(&self) -> &str {
        &self.token
    }

    /// Calls a tool; the inner result is the server's answer or its refusal.
    pub async fn try_call(&self, tool: &str, arguments: &Value) -> Result<Result<Value, ToolError>> {
        let url = format!("{}/api/tools/{tool}", self.url);
        let answer = self
            .http
            .post(url)
            .bearer_auth(&self.token)
            .json(arguments)
            .send()
            .await?;
        let good = answer.status().is_success();
        let body: Value = answer.json().await?;
        Ok(match good {
            true => Ok(body),
            false => Err(ToolError {
                code: body["error"]["code"].as_str().context("error.code")?.to_owned(),
                message: body["error"]["message"].as_str().unwrap_or_default().to_owned(),
            }),
        })
    }

    /// Calls a tool that must succeed.
    pub async fn call(&self, tool: &str, arguments: Value) -> Result<Value> {
        let outcome = self.try_call(tool, &arguments).await?;
        outcome.with_context(|| format!("{tool} {arguments}"))
    }

    /// Calls a tool that must be refused with this code.
    pub async fn expect_refusal(&self, tool: &str, arguments: Value, code: &str) -> Result<()> {
        match self.try_call(tool, &arguments).await? {
            Err(error) if error.code == code => Ok(()),
            Err(error) => bail!("{tool}: {error}, not {code}"),
            Ok(value) => bail!("{tool}: {value}, not {code}"),
        }
    }

    /// Creates a project that may have this many sessions; returns its id.
    pub async fn create_project(&self, max_sessions: u64) -> Result<String> {
        let limits = json!({ "max_sessions": max_sessions });
        let made = self
            .call("project_create", json!({ "name": "test", "limits": limits }))
            .await?;
        text_field(&made, "project_id")
    }

    /// Stores an agent with a script.
    pub async fn put_scripted_agent(&self, slug: &str, turns: Value) -> Result<()> {
        let definition =
            json!({ "name": slug, "prompt": "Follow the script.", "model": "script:script.json" });
        let files = json!({ "script.json": json!({ "turns": turns }).to_string() });
        let put = json!({ "slug": slug, "definition": definition, "files": files });
        self.call("agent_put", put).await.map(drop)
    }

    /// Starts a session with the agent `idle`, which does nothing, and lends it one tool (`echo` of the caller
    /// `app`); returns its id.
    pub async fn start_idle_session(&self, project: &str) -> Result<String> {
        let lent = json!({ "caller_id": "app", "caller_tools": [{ "name": "echo" }] });
        let message = json!({ "message": "go", "project_id": project, "agent": "idle", "context": lent,
            "wait": true });
        text_field(&self.call("session_message", message).await?, "session_id")
    }

    /// The path of a session's relay socket; needs an admin token.
    pub async fn relay_socket(&self, session: &str) -> Result<String> {
        let shown = self.call("session_get", json!({ "session_id": session })).await?;
        text_field(&shown, "relay_socket")
    }

    /// All events of a session's log.
    pub async fn all_events(&self, session: &str) -> Result<Vec<Value>> {
        let mut log: Vec<Value> = Vec::new();
        loop {
            let since = log
                .last()
                .map_or(-1, |event| event["index"].as_i64().unwrap_or(-1));
            let page = json!({ "session_id": session, "since_index": since, "max_events": 1000 });
            let page = self.call("session_events", page).await?;
            match page["events"].as_array().map(Vec::as_slice) {
                Some([]) | None => return Ok(log),
                Some(events) => log.extend_from_slice(events),
            }
        }
    }

    /// Opens a session's event stream; with `caller` it also makes that caller present.
    pub async fn open_events(
        &self,
        session: &str,
        caller: Option<&str>,
        since: i64,
    ) -> Result<SessionEventStream> {
        let caller = caller.map(|id| format!("&caller_id={id}")).unwrap_or_default();
        let url = format!(
            "{}/api/sessions/{session}/events?since_index={since}{caller}",
            self.url
        );
        let answer = self.http.get(url).bearer_auth(&self.token).send().await?;
        Ok(SessionEventStream::new(answer.error_for_status()?))
    }

    /// The server's metrics.
    pub async fn metrics(&self) -> Result<String> {
        let answer = self
            .http
            .get(format!("{}/metrics", self.url))
            .bearer_auth(&self.token)
            .send()
            .await?;
        Ok(answer.error_for_status()?.text().await?)
    }
}

/// A field that must be a string.
pub fn text_field(value: &Value, field: &str) -> Result<String> {
    let found = value[field]
        .as_str()
        .with_context(|| format!("no {field} in {value}"));
    found.map(str::to_owned)
}
