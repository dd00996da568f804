//! MCP over streamable HTTP.
//!
//! The MCP library implements the protocol (sessions, streams, resumption, the headers of each revision); the
//! requests are made here, so that no response is read beyond the size limit and results are kept verbatim.

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
    fault::{UpstreamFault, error_chain, truncate_error},
    limits,
    lines::message_too_large,
    tls,
    traffic::{ConnectionEnd, TrafficFilter},
};

/// The MCP library's error of an HTTP request.
pub(super) type HttpError = StreamableHttpError<reqwest::Error>;

/// URL, HTTP client and headers of one endpoint. No connection is made before the first message.
#[derive(Clone)]
pub(super) struct HttpEndpoint {
    url: Arc<str>,
    client: reqwest::Client,
    headers: HashMap<HeaderName, HeaderValue>,
    traffic: Arc<TrafficFilter>,
}

impl HttpEndpoint {
    /// An endpoint; `headers` are sent with every request.
    pub(super) fn new(
        url: &str,
        headers: HeaderMap,
        traffic: Arc<TrafficFilter>,
    ) -> Result<Self, UpstreamFault> {
        let broken = |what: String| UpstreamFault::new(format!("cannot connect to {url}: {what}"));
        let tls = tls::client_config().map_err(|error| broken(error.to_string()))?;
        let mut builder = reqwest::Client::builder()
            .tls_backend_preconfigured(tls)
            .redirect(redirect::Policy::custom(redirect_policy))
            .tcp_nodelay(true)
            .pool_idle_timeout(Duration::from_secs(60));
        if is_loopback(url) {
            // A proxy configured in the environment could not reach this host's loopback.
            builder = builder.no_proxy();
        }
        let client = builder.build().map_err(|error| broken(error_chain(&error)))?;
        let headers = headers
            .into_iter()
            .filter_map(|(name, value)| Some((name?, value)));
        let headers = headers
            .filter(|(name, _)| !PROTOCOL_HEADERS.contains(&name.as_str()))
            .collect();
        Ok(Self {
            url: url.into(),
            client,
            headers,
            traffic,
        })
    }

    /// A new transport; each handshake attempt needs its own.
    pub(super) fn transport(&self) -> FilteredHttpTransport {
        let config = StreamableHttpClientTransportConfig::with_uri(self.url.clone())
            .custom_headers(self.headers.clone())
            .max_sse_event_size(limits::MAX_MESSAGE_BYTES)
            // One slow response must not block other requests.
            .max_concurrent_requests(256);
        let client = BoundedHttpClient {
            client: self.client.clone(),
            url: self.url.clone(),
            traffic: self.traffic.clone(),
        };
        FilteredHttpTransport {
            inner: StreamableHttpClientTransport::with_client(client, config),
            traffic: self.traffic.clone(),
        }
    }
}

/// Headers the MCP library sets itself; those of the definition are ignored.
const PROTOCOL_HEADERS: [&str; 4] = ["accept", "content-type", "mcp-session-id", "last-event-id"];

/// Follows method-preserving redirects within the same origin, as routers use for a trailing slash. Others are
/// not followed: they would send the headers, and the credentials in them, elsewhere.
fn redirect_policy(attempt: redirect::Attempt<'_>) -> redirect::Action {
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

/// The library's HTTP transport with a [`TrafficFilter`] on both directions.
pub(super) struct FilteredHttpTransport {
    inner: StreamableHttpClientTransport<BoundedHttpClient>,
    traffic: Arc<TrafficFilter>,
}

impl Transport<RoleClient> for FilteredHttpTransport {
    type Error = HttpError;

    fn send(
        &mut self,
        message: ClientJsonRpcMessage,
    ) -> impl Future<Output = Result<(), HttpError>> + Send + 'static {
        self.traffic.register_outgoing(&message);
        self.inner.send(message)
    }

    async fn receive(&mut self) -> Option<ServerJsonRpcMessage> {
        loop {
            self.traffic.throttle().await;
            let Some(message) = self.inner.receive().await else {
                self.traffic.ended.set(ConnectionEnd::Closed);
                return None;
            };
            if let Some(message) = self.traffic.filter(message, 0) {
                return Some(message);
            }
        }
    }

    async fn close(&mut self) -> Result<(), HttpError> {
        self.inner.close().await
    }
}

/// Makes the library's HTTP requests with bounded response bodies.
#[derive(Clone)]
struct BoundedHttpClient {
    client: reqwest::Client,
    url: Arc<str>,
    traffic: Arc<TrafficFilter>,
}

impl BoundedHttpClient {
    /// Marks the connection as lost if the request failed at the connection rather than in its response.
    fn connection_lost(&self, error: reqwest::Error) -> HttpError {
        let error = error.without_url();
        if error.is_connect() || error.is_request() || error.is_body() {
            self.end_with_fault(format!("{} cannot be reached: {}", self.url, error_chain(&error)));
        }
        StreamableHttpError::Client(error)
    }

    fn end_with_fault(&self, reason: String) {
        self.traffic.ended.set(ConnectionEnd::Fault(reason.into()));
    }

    /// Reads a body of at most [`limits::MAX_MESSAGE_BYTES`].
    async fn read_body(&self, mut response: Response) -> Result<Bytes, HttpError> {
        let mut body = Vec::new();
        while let Some(chunk) = response
            .chunk()
            .await
            .map_err(|error| self.connection_lost(error))?
        {
            if body.len() + chunk.len() > limits::MAX_MESSAGE_BYTES {
                self.end_with_fault(message_too_large());
                return Err(unexpected_response(message_too_large()));
            }
            body.extend_from_slice(&chunk);
        }
        Ok(body.into())
    }

    fn read_events(&self, response: Response, most: usize) -> BoxStream<'static, Result<Sse, SseError>> {
        let traffic = self.traffic.clone();
        let mut event = SseEventSize::default();
        let bytes = response
            .bytes_stream()
            .map_err(io::Error::other)
            .map(move |chunk| {
                let chunk: Bytes = chunk?;
                match event.add(&chunk, most) {
                    true => Ok(chunk),
                    false => {
                        traffic
                            .ended
                            .set(ConnectionEnd::Fault(message_too_large().into()));
                        Err(io::Error::other(message_too_large()))
                    }
                }
            });
        let traffic = self.traffic.clone();
        let answered = move |mut event: Sse| {
            // The result of a call is kept by the filter; the library gets an empty response in its place.
            if let Some(data) = event.data.take() {
                let data = Bytes::from(data);
                let answered = traffic
                    .intercept_http_response(&data)
                    .and_then(|message| serde_json::to_string(&message).ok());
                event.data = Some(answered.unwrap_or_else(|| String::from_utf8_lossy(&data).into_owned()));
            }
            event
        };
        SseStream::from_bytes_stream(bytes).map_ok(answered).boxed()
    }

    /// Turns a response with an error status into the JSON-RPC message or error the library expects.
    async fn handle_error_status(
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
        let body = self.read_body(response).await?;
        let error = match serde_json::from_slice(&body) {
            Ok(ServerJsonRpcMessage::Error(error)) if !denied => Some(error),
            _ => None,
        };
        // A refused handshake leads to the other lifecycle, which needs a JSON-RPC error with the request's id.
        // A router that rejects the request before any MCP code cannot give one, so it is made here.
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
                || ErrorData::invalid_request(format!("HTTP {status}: {}", truncate_error(&text)), None),
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
            None => Err(unexpected_response(format!(
                "HTTP {status}: {}",
                truncate_error(&String::from_utf8_lossy(&body))
            ))),
        }
    }
}

fn unexpected_response(what: String) -> HttpError {
    StreamableHttpError::UnexpectedServerResponse(Cow::Owned(what))
}

impl StreamableHttpClient for BoundedHttpClient {
    type Error = reqwest::Error;

    async fn post_message(
        &self,
        uri: Arc<str>,
        message: ClientJsonRpcMessage,
        session_id: Option<Arc<str>>,
        auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let most = limits::MAX_MESSAGE_BYTES;
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
            .map_err(|error| self.connection_lost(error))?;
        let status = response.status();
        if matches!(status, StatusCode::ACCEPTED | StatusCode::NO_CONTENT) {
            return Ok(StreamableHttpPostResponse::Accepted);
        }
        if status == StatusCode::NOT_FOUND && session_id.is_some() {
            return Err(StreamableHttpError::SessionExpired);
        }
        if !status.is_success() {
            return self.handle_error_status(&message, response).await;
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
                self.read_events(response, most),
                new_session,
            )),
            Some(kind) if kind.starts_with("application/json") => {
                let body = self.read_body(response).await?;
                if let Some(answered) = self.traffic.intercept_http_response(&body) {
                    return Ok(StreamableHttpPostResponse::Json(answered, new_session));
                }
                match serde_json::from_slice(&body) {
                    Ok(message) => Ok(StreamableHttpPostResponse::Json(message, new_session)),
                    Err(_) if !wants_answer => Ok(StreamableHttpPostResponse::Accepted),
                    Err(error) => Err(unexpected_response(format!(
                        "its response is no JSON-RPC message: {error}"
                    ))),
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
        let most = limits::MAX_MESSAGE_BYTES;
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
            // The library reopens the stream when it breaks, so a failing connect here is how a dead server is
            // noticed between calls. A stream that merely ends is no sign of that.
            StreamableHttpError::Client(error) if error.is_connect() => self.connection_lost(error),
            other => other,
        })
    }
}

/// Size of the SSE event being read, in bytes, to bound events before they are complete.
#[derive(Default)]
struct SseEventSize {
    bytes: usize,
    line_bytes: usize,
}

impl SseEventSize {
    /// Adds a chunk; returns false when an event exceeds `most` bytes.
    fn add(&mut self, chunk: &[u8], most: usize) -> bool {
        for &byte in chunk {
            match byte {
                b'\n' if self.line_bytes == 0 => self.bytes = 0,
                b'\n' => self.line_bytes = 0,
                b'\r' => {}
                _ => self.line_bytes += 1,
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
        let mut size = SseEventSize::default();
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
