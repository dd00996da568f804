//! The connection to the server: its address, the token, and single calls.

use std::{sync::Arc, time::Duration};

use reqwest::{
    Response, StatusCode, Url,
    header::{ACCEPT, AUTHORIZATION, HeaderMap, HeaderValue},
};
use serde::Deserialize;
use serde_json::Value;

use crate::{Error, Lend};

/// A client for one server, with one token. Cheap to clone.
#[derive(Clone)]
pub struct Oubliette(Arc<ClientShared>);

struct ClientShared {
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
    /// A client for the server at this address (`http://127.0.0.1:8080`), with this token. Nothing is sent yet.
    pub fn connect(address: &str, token: impl AsRef<str>) -> Result<Self, Error> {
        // Fails when the program has installed a TLS provider already; then that one is used.
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
        Ok(Self(Arc::new(ClientShared { http, base })))
    }

    /// Begins a declaration of tools under this caller id: the agent sees `<caller_id>_<tool>`.
    pub fn lend(&self, caller_id: impl Into<String>) -> Lend {
        Lend::new(self.clone(), caller_id.into())
    }

    /// Calls one of the server's own tools (`session_message`, `project_list`, …) and returns its result object.
    pub async fn call(&self, tool: &str, arguments: &Value) -> Result<Value, Error> {
        let url = self.join_url(&format!("api/tools/{tool}"))?;
        let response = self
            .0
            .http
            .post(url)
            .json(arguments)
            .send()
            .await
            .map_err(unreachable_error)?;
        let response = check_response(response).await?;
        response
            .json()
            .await
            .map_err(|why| Error::Unexpected(why.to_string()))
    }

    /// Opens a session's event stream; the first event is the one after index `since` (-1: the first of all).
    pub(crate) async fn open_event_stream(
        &self,
        session: &str,
        caller: &str,
        since: i64,
    ) -> Result<Response, Error> {
        let path = format!("api/sessions/{session}/events?since_index={since}&caller_id={caller}");
        let mut request = self
            .0
            .http
            .get(self.join_url(&path)?)
            .header(ACCEPT, "text/event-stream");
        if since >= 0 {
            request = request.header("Last-Event-ID", since);
        }
        check_response(request.send().await.map_err(unreachable_error)?).await
    }

    fn join_url(&self, path: &str) -> Result<Url, Error> {
        self.0
            .base
            .join(path)
            .map_err(|why| Error::Invalid(format!("bad name in {path:?}: {why}")))
    }
}

async fn check_response(response: Response) -> Result<Response, Error> {
    #[derive(Deserialize)]
    struct ErrorBody {
        error: ErrorDetail,
    }
    #[derive(Deserialize)]
    struct ErrorDetail {
        code: String,
        message: String,
    }
    let status = response.status();
    if status.is_success() {
        return Ok(response);
    }
    let text = response.text().await.unwrap_or_default();
    Err(match serde_json::from_str::<ErrorBody>(&text) {
        Ok(ErrorBody { error }) => Error::Refused {
            code: error.code,
            message: error.message,
        },
        // Without our error body it most likely comes from a proxy in between.
        Err(_) if status.is_server_error() => Error::Unreachable(format!("HTTP {status}")),
        Err(_) if status == StatusCode::UNAUTHORIZED => Error::Refused {
            code: "unauthenticated".into(),
            message: "the token is not valid".into(),
        },
        Err(_) => Error::Unexpected(format!("HTTP {status}")),
    })
}

pub(crate) fn unreachable_error(why: reqwest::Error) -> Error {
    // The innermost cause says what happened; the outer ones only that the request failed.
    let mut cause: &dyn std::error::Error = &why;
    while let Some(deeper) = cause.source() {
        cause = deeper;
    }
    Error::Unreachable(cause.to_string())
}
