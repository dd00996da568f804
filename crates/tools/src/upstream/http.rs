//! MCP over streamable HTTP.
//!
//! The protocol (sessions, streams, resuming, the headers of each revision) is the MCP client's; the
//! requests are made here, so that no answer is read past the limit and results pass as they stand.

use std::{borrow::Cow, collections::HashMap, io, sync::Arc, time::Duration};

use bytes::Bytes;
use futures::{StreamExt, TryStreamExt, stream::BoxStream};
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use reqwest::{Response, redirect};
use rmcp::{
    RoleClient,
    model::{ClientJsonRpcMessage, ClientRequest, ErrorData, ServerJsonRpcMessage},
    transport::{
        StreamableHttpClientTransport, Transport,
        streamable_http_client::{
            AuthRequiredError, HttpStatusError, SseError, StreamableHttpClient,
            StreamableHttpClientTransportConfig, StreamableHttpError, StreamableHttpPostResponse,
        },
    },
};
use sse_stream::{Sse, SseStream};

use super::{
    fault::{Fault, bounded, chain},
    limits,
    lines::too_long,
    tls,
    traffic::{Ending, Traffic},
};

/// What went wrong with a request, as the MCP client hands it on.
pub(super) type HttpError = StreamableHttpError<reqwest::Error>;

/// Everything needed to talk to one endpoint. No connection is made before the first message.
#[derive(Clone)]
pub(super) struct Endpoint {
    url: Arc<str>,
    client: reqwest::Client,
    headers: HashMap<HeaderName, HeaderValue>,
    traffic: Arc<Traffic>,
}

impl Endpoint {
    /// An endpoint with the headers of every request.
    pub(super) fn new(url: &str, headers: HeaderMap, traffic: Arc<Traffic>) -> Result<Self, Fault> {
        let broken = |what: String| Fault::new(format!("cannot connect to {url}: {what}"));
        let tls = tls::client().map_err(|error| broken(error.to_string()))?;
        let mut builder = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .redirect(redirect::Policy::custom(follow))
            .tcp_nodelay(true)
            .pool_idle_timeout(Duration::from_secs(60));
        if is_loopback(url) {
            // A proxy of the host could not reach what listens here.
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|error| broken(chain(&error)))?;
        let headers = headers
            .into_iter()
            .filter_map(|(name, value)| Some((name?, value)));
        let headers = headers
            .filter(|(name, _)| !OWN.contains(&name.as_str()))
            .collect();
        Ok(Self {
            url: url.into(),
            client,
            headers,
            traffic,
        })
    }

    /// A fresh transport; one serves one handshake.
    pub(super) fn transport(&self) -> Tapped {
        let config = StreamableHttpClientTransportConfig::with_uri(self.url.clone())
            .custom_headers(self.headers.clone())
            .max_sse_event_size(limits::MESSAGE_BYTES)
            // One slow answer must not hold up the others.
            .max_concurrent_requests(256);
        let client = Client {
            client: self.client.clone(),
            url: self.url.clone(),
            traffic: self.traffic.clone(),
        };
        Tapped {
            inner: StreamableHttpClientTransport::with_client(client, config),
            traffic: self.traffic.clone(),
        }
    }
}

/// Headers that the protocol sets itself.
const OWN: [&str; 4] = ["accept", "content-type", "mcp-session-id", "last-event-id"];

/// Follows what a router does to a trailing slash, and nothing that would carry our headers elsewhere.
fn follow(attempt: redirect::Attempt<'_>) -> redirect::Action {
    let kept = matches!(
        attempt.status(),
        StatusCode::TEMPORARY_REDIRECT | StatusCode::PERMANENT_REDIRECT
    );
    let home = attempt.previous().first().map(|url| url.origin()) == Some(attempt.url().origin());
    match kept && home && attempt.previous().len() <= 5 {
        true => attempt.follow(),
        false => attempt.stop(),
    }
}

fn is_loopback(url: &str) -> bool {
    let uri: Option<http::Uri> = url.parse().ok();
    uri.as_ref().and_then(|uri| uri.host()).is_some_and(|host| {
        let host = host.trim_matches(['[', ']']);
        host == "localhost" || host.parse::<std::net::IpAddr>().is_ok_and(|ip| ip.is_loopback())
    })
}

/// The client's transport with [`Traffic`] in between.
pub(super) struct Tapped {
    inner: StreamableHttpClientTransport<Client>,
    traffic: Arc<Traffic>,
}

impl Transport<RoleClient> for Tapped {
    type Error = HttpError;

    fn send(
        &mut self,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), HttpError>> + Send + 'static {
        self.traffic.outgoing(&message);
        self.inner.send(message)
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        loop {
            self.traffic.unhurried().await;
            let Some(message) = self.inner.receive().await else {
                self.traffic.ended.set(Ending::Closed);
                return None;
            };
            if let Some(message) = self.traffic.sift(message, 0) {
                return Some(message);
            }
        }
    }

    async fn close(&mut self) -> Result<(), HttpError> {
        self.inner.close().await
    }
}

/// The requests themselves.
#[derive(Clone)]
struct Client {
    client: reqwest::Client,
    url: Arc<str>,
    traffic: Arc<Traffic>,
}

impl Client {
    /// An error of the connection: the server is gone until it answers again.
    fn lost(&self, error: reqwest::Error) -> HttpError {
        let error = error.without_url();
        if error.is_connect() || error.is_request() || error.is_body() {
            self.fail(format!("{} cannot be reached: {}", self.url, chain(&error)));
        }
        StreamableHttpError::Client(error)
    }

    fn fail(&self, reason: String) {
        self.traffic.ended.set(Ending::Fault(reason.into()));
    }

    /// Reads a body that may not be larger than a message.
    async fn body(&self, mut response: Response) -> Result<Bytes, HttpError> {
        let mut body = Vec::new();
        while let Some(chunk) = response.chunk().await.map_err(|error| self.lost(error))? {
            if body.len() + chunk.len() > limits::MESSAGE_BYTES {
                self.fail(too_long());
                return Err(unexpected(too_long()));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body.into())
    }

    fn events(&self, response: Response, most: usize) -> BoxStream<'static, Result<Sse, SseError>> {
        let traffic = self.traffic.clone();
        let mut event = EventSize::default();
        let bytes = response
            .bytes_stream()
            .map_err(io::Error::other)
            .map(move |chunk| {
                let chunk: Bytes = chunk?;
                match event.add(&chunk, most) {
                    true => Ok(chunk),
                    false => {
                        traffic.ended.set(Ending::Fault(too_long().into()));
                        Err(io::Error::other(too_long()))
                    }
                }
            });
        let traffic = self.traffic.clone();
        let answered = move |mut event: Sse| {
            // The answer to a call is taken out here; the client gets an empty one in its place.
            if let Some(data) = event.data.take() {
                let data = Bytes::from(data);
                let answered = traffic
                    .answered(&data)
                    .and_then(|message| serde_json::to_string(&message).ok());
                event.data = Some(answered.unwrap_or_else(|| String::from_utf8_lossy(&data).into_owned()));
            }
            event
        };
        SseStream::from_bytes_stream(bytes).map_ok(answered).boxed()
    }

    /// What an answer that is no success means.
    async fn refused(
        &self,
        message: &ClientJsonRpcMessage,
        response: Response,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let status = response.status();
        let retry_after = response
            .headers()
            .get(header::RETRY_AFTER)
            .and_then(|value| value.to_str().ok());
        let status_error = HttpStatusError::new(status.as_u16(), retry_after.map(str::to_owned));
        let denied = matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN);
        if denied && let Some(challenge) = response.headers().get(header::WWW_AUTHENTICATE) {
            let challenge = String::from_utf8_lossy(challenge.as_bytes()).into_owned();
            return Err(StreamableHttpError::AuthRequired(AuthRequiredError::new(
                challenge,
            )));
        }
        if status == StatusCode::TOO_MANY_REQUESTS {
            return Err(status_error.into());
        }
        let body = self.body(response).await?;
        let error = match serde_json::from_slice(&body) {
            Ok(ServerJsonRpcMessage::Error(error)) if !denied => Some(error),
            _ => None,
        };
        // A handshake that is refused means the other lifecycle, if the refusal can be matched to it: a
        // router that knows nothing of the message cannot name its id.
        if let ClientJsonRpcMessage::Request(request) = message
            && matches!(
                request.request,
                ClientRequest::DiscoverRequest(_) | ClientRequest::InitializeRequest(_)
            )
            && status.is_client_error()
            && !denied
        {
            let text = String::from_utf8_lossy(&body);
            let data = error.map_or_else(
                || ErrorData::invalid_request(format!("HTTP {status}: {}", bounded(&text)), None),
                |error| error.error,
            );
            let answer = ServerJsonRpcMessage::error(data, Some(request.id.clone()));
            return Ok(StreamableHttpPostResponse::Json(answer, None));
        }
        match error {
            Some(error) => Ok(StreamableHttpPostResponse::Json(
                ServerJsonRpcMessage::Error(error),
                None,
            )),
            None if status.is_server_error() => Err(status_error.into()),
            None => Err(unexpected(format!(
                "HTTP {status}: {}",
                bounded(&String::from_utf8_lossy(&body))
            ))),
        }
    }
}

fn unexpected(what: String) -> HttpError {
    StreamableHttpError::UnexpectedServerResponse(Cow::Owned(what))
}

impl StreamableHttpClient for Client {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let most = limits::MESSAGE_BYTES;
        self.post_message_with_max_sse_event_size(uri, message, session_id, auth_header, headers, most)
            .await
    }

    async fn post_message_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        _auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        most: usize,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let mut request = self
            .client
            .post(uri.as_ref())
            .headers(headers.into_iter().collect());
        request = request.header(header::ACCEPT, "application/json, text/event-stream");
        if let Some(id) = &session_id {
            request = request.header("Mcp-Session-Id", id.as_ref());
        }
        let response = request
            .json(&message)
            .send()
            .await
            .map_err(|error| self.lost(error))?;
        let status = response.status();
        if matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT) {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        if status == StatusCode::NOT_FOUND && session_id.is_some() {
            return Err(StreamableHttpError::SessionExpired);
        }
        if !status.is_success() {
            return self.refused(&message, response).await;
        }
        let wants_answer = matches!(message, ClientJsonRpcMessage::Request(_));
        let text = |name: &str| {
            response
                .headers()
                .get(name)
                .and_then(|value| value.to_str().ok())
                .map(str::to_owned)
        };
        let (kind, new_session) = (text("content-type"), text("mcp-session-id"));
        match kind.as_deref() {
            Some(kind) if kind.starts_with("text/event-stream") => Ok(StreamableHttpPostResponse::Sse(
                self.events(response, most),
                new_session,
            )),
            Some(kind) if kind.starts_with("application/json") => {
                let body = self.body(response).await?;
                if let Some(answered) = self.traffic.answered(&body) {
                    return Ok(StreamableHttpPostResponse::Json(answered, new_session));
                }
                match serde_json::from_slice(&body) {
                    Ok(message) => Ok(StreamableHttpPostResponse::Json(message, new_session)),
                    Err(_) if !wants_answer => Ok(StreamableHttpPostResponse::Accepted),
                    Err(error) => Err(unexpected(format!("its answer is no message: {error}"))),
                }
            }
            _ if !wants_answer => Ok(StreamableHttpPostResponse::Accepted),
            _ => Err(StreamableHttpError::UnexpectedContentType(kind)),
        }
    }

    async fn delete_session(
        &self,
        uri: Arc<str>,
        session_id: Arc<str>,
        auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<(), HttpError> {
        self.client
            .delete_session(uri, session_id, auth_header, headers)
            .await
    }

    async fn get_stream(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, HttpError> {
        let most = limits::MESSAGE_BYTES;
        self.get_stream_with_max_sse_event_size(uri, session_id, last_event_id, auth_header, headers, most)
            .await
    }

    async fn get_stream_with_max_sse_event_size(
        &self,
        uri: Arc<str>,
        session_id: Option<Arc<str>>,
        last_event_id: Option<String>,
        auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        most: usize,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, HttpError> {
        let stream = self.client.get_stream_with_max_sse_event_size(
            uri,
            session_id,
            last_event_id,
            auth_header,
            headers,
            most,
        );
        stream.await.map_err(|error| match error {
            // The stream is asked for again when it breaks, so this is how a dead server shows while
            // nobody calls it. A stream that is merely cut is no sign of it.
            StreamableHttpError::Client(error) if error.is_connect() => self.lost(error),
            other => other,
        })
    }
}

/// How large the event being read is.
#[derive(Default)]
struct EventSize {
    bytes: usize,
    line: usize,
}

impl EventSize {
    /// Adds what came in; false when an event is too large.
    fn add(&mut self, chunk: &[u8], most: usize) -> bool {
        for &byte in chunk {
            match byte {
                b'\n' if self.line == 0 => self.bytes = 0,
                b'\n' => self.line = 0,
                b'\r' => {}
                _ => self.line += 1,
            }
            self.bytes += 1;
            if self.bytes > most {
                return false;
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_event_is_measured_from_blank_line_to_blank_line() {
        let mut size = EventSize::default();
        assert!(size.add(b"data: 12345\r\n\r\ndata: 12345\n", 16));
        assert!(size.add(b"\ndata: 1234", 16));
        assert!(!size.add(b"567890", 16));
    }

    #[test]
    fn loopback_needs_no_proxy() {
        for (url, loopback) in [
            ("http://127.0.0.1:8/mcp", true),
            ("http://localhost/mcp", true),
            ("http://[::1]:9/", true),
            ("https://example.org/mcp", false),
            ("http://10.0.0.1/", false),
        ] {
            assert_eq!(is_loopback(url), loopback, "{url}");
        }
    }
}
