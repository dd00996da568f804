//! Requests to a server elsewhere, over HTTP with a token.

use std::time::Duration;

use bytes::Bytes;
use oubliette_protocol::{Error, ErrorCode, Result};
use secrecy::{ExposeSecret as _, SecretString};

use super::client::error_from_body;

/// How long connecting may take.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(10);
/// Maximum size of an answer that is read whole, in bytes.
const MAX_ANSWER_BYTES: usize = 64 * 1024 * 1024;

/// A server elsewhere and the token for it.
#[derive(Debug, Clone)]
pub struct RemoteServer {
    url: String,
    token: SecretString,
    http: reqwest::Client,
}

impl RemoteServer {
    /// A server by its base URL, as [`super::contexts::check_server_url`] returns it.
    pub(crate) fn new(url: String, token: SecretString) -> Result<Self> {
        // A second call finds it installed already.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let http = reqwest::Client::builder()
            .connect_timeout(CONNECT_TIMEOUT)
            // The token goes to this server only.
            .redirect(reqwest::redirect::Policy::none())
            .user_agent(concat!("oubliette/", env!("CARGO_PKG_VERSION")))
            .build()
            .map_err(Error::internal)?;
        Ok(Self { url, token, http })
    }

    /// The base URL.
    pub(crate) fn url(&self) -> &str {
        &self.url
    }

    /// Starts a request to a path of the server.
    pub(crate) fn request(&self, method: reqwest::Method, path: &str) -> reqwest::RequestBuilder {
        self.http
            .request(method, format!("{}{path}", self.url))
            .bearer_auth(self.token.expose_secret())
    }

    /// Sends a request. An answer that is no success is an error.
    pub(crate) async fn send(&self, request: reqwest::RequestBuilder) -> Result<reqwest::Response> {
        let response = request.send().await.map_err(|error| self.no_answer(error))?;
        let status = response.status();
        if status.is_success() {
            return Ok(response);
        }
        if status.is_redirection() {
            return Err(Error::invalid(format!(
                "{} answers with a redirect; give the URL it leads to",
                self.url
            )));
        }
        let error = error_from_body(&self.read(response).await?);
        match error.code {
            ErrorCode::Unauthenticated => Err(Error::unauthenticated(format!(
                "{} refused the token: it was revoked, has expired or is of another server; get a new one and run \
                 `oubliette login {}`",
                self.url, self.url
            ))),
            ErrorCode::Internal if status != reqwest::StatusCode::INTERNAL_SERVER_ERROR => {
                Err(Error::unavailable(format!(
                    "{} answered {status}: is it an Oubliette server?",
                    self.url
                )))
            }
            _ => Err(error),
        }
    }

    /// Reads an answer whole.
    pub(crate) async fn read(&self, mut response: reqwest::Response) -> Result<Bytes> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.no_answer(error))? {
            body.extend_from_slice(&chunk);
            if body.len() > MAX_ANSWER_BYTES {
                return Err(Error::limit_exceeded(format!(
                    "{} answered with more than {} MiB",
                    self.url,
                    MAX_ANSWER_BYTES / 1024 / 1024
                )));
            }
        }
        Ok(body.into())
    }

    /// The error of a server that cannot be reached or broke off.
    pub(crate) fn no_answer(&self, error: reqwest::Error) -> Error {
        let said = if error.is_connect() {
            "cannot be reached"
        } else {
            "did not answer"
        };
        Error::unavailable(format!(
            "{} {said}; check the URL and that the server runs",
            self.url
        ))
        .with_cause(error.without_url())
    }
}
