//! The server's address and the token; plain calls.

use std::{sync::Arc, time::Duration};

use reqwest::{
    Response, StatusCode, Url,
    header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue},
};
use serde::Deserialize;
use serde_json::Value;

use crate::{Error, Lend};

/// A server and a token for it. Cheap to clone.
#[derive(Clone)]
pub struct Oubliette(Arc<Inner>);

struct Inner {
    http: reqwest::Client,
    base: Url,
}

impl std::fmt::Debug for Oubliette {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Oubliette")
            .field("base", &self.0.base.as_str())
            .finish_non_exhaustive()
    }
}

impl Oubliette {
    /// The server at this address (`http://127.0.0.1:8080`), under this token. Nothing is sent yet.
    pub fn connect(address: &str, token: impl AsRef<str>) -> Result<Self, Error> {
        // Fails when the program has chosen a provider already; then that one is used.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let mut base = Url::parse(address).map_err(|why| Error::Invalid(format!("bad address: {why}")))?;
        if !matches!(base.scheme(), "http" | "https") {
            return Err(Error::Invalid(
                "the address must start with http:// or https://".into(),
            ));
        }
        if !base.path().ends_with('/') {
            base.set_path(&format!("{}/", base.path()));
        }
        let mut bearer = HeaderValue::from_str(&format!("Bearer {}", token.as_ref()))
            .map_err(|_| Error::Invalid("the token holds characters a token cannot have".into()))?;
        bearer.set_sensitive(true);
        let http = reqwest::Client::builder()
            .default_headers(HeaderMap::from_iter([(AUTHORIZATION, bearer)]))
            .connect_timeout(Duration::from_secs(10))
            .build()
            .map_err(|why| Error::Invalid(format!("cannot make an HTTP client: {why}")))?;
        Ok(Self(Arc::new(Inner { http, base })))
    }

    /// Begins to lend tools under this name: the agent sees `<caller_id>_<tool>`.
    pub fn lend(&self, caller_id: impl Into<String>) -> Lend {
        Lend::new(self.clone(), caller_id.into())
    }

    /// Calls any of the server's tools by name: arguments in, the result object out.
    pub async fn call(&self, tool: &str, arguments: &Value) -> Result<Value, Error> {
        let url = self.url(&format!("api/tools/{tool}"))?;
        let response = self
            .0
            .http
            .post(url)
            .json(arguments)
            .send()
            .await
            .map_err(unreachable)?;
        let response = accepted(response).await?;
        response
            .json()
            .await
            .map_err(|why| Error::Unexpected(why.to_string()))
    }

    /// Opens a session's event stream after this index.
    pub(crate) async fn events(&self, session: &str, caller: &str, since: i64) -> Result<Response, Error> {
        let path = format!("api/sessions/{session}/events?since_index={since}&caller_id={caller}");
        let mut request = self
            .0
            .http
            .get(self.url(&path)?)
            .header(ACCEPT, "text/event-stream");
        if since >= 0 {
            request = request.header("Last-Event-ID", since);
        }
        accepted(request.send().await.map_err(unreachable)?).await
    }

    fn url(&self, path: &str) -> Result<Url, Error> {
        self.0
            .base
            .join(path)
            .map_err(|why| Error::Invalid(format!("bad name in {path:?}: {why}")))
    }
}

async fn accepted(response: Response) -> Result<Response, Error> {
    #[derive(Deserialize)]
    struct Body {
        error: Said,
    }
    #[derive(Deserialize)]
    struct Said {
        code: String,
        message: String,
    }
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let text = response.text().await.unwrap_or_default();
    Err(match serde_json::from_str::<Body>(&text) {
        Ok(Body { error }) => Error::Refused {
            code: error.code,
            message: error.message,
        },
        // Something between us and the server, most likely.
        Err(_) if status.is_server_error() => Error::Unreachable(format!("HTTP {status}")),
        Err(_) if status == StatusCode::UNAUTHORIZED => Error::Refused {
            code: "unauthenticated".into(),
            message: "the token is not valid".into(),
        },
        Err(_) => Error::Unexpected(format!("HTTP {status}")),
    })
}

pub(crate) fn unreachable(why: reqwest::Error) -> Error {
    // The source says what happened; the top only that something did.
    let mut cause: &dyn std::error::Error = &why;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    Error::Unreachable(cause.to_string())
}
