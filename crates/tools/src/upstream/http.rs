//! MCP over streamable HTTP.
//!
//! The MCP library implements the protocol (sessions, streams, resumption, the headers of each revision); the
//! requests are made here, so that no response is read beyond the size limit and results are kept verbatim.

use std::{collections::HashMap, sync::Arc, time::Duration};

use futures::stream::BoxStream;
use http::{HeaderMap, HeaderName, HeaderValue, StatusCode, header};
use oubliette_protocol::budget::UNCHARGED;
use reqwest::{Response, redirect};
use rmcp::{
    RoleClient,
    model::{ClientJsonRpcMessage, ClientRequest, ErrorData, RequestId, ServerJsonRpcMessage},
    transport::{
        StreamableHttpClientTransport, Transport,
        streamable_http_client::{
            AuthRequiredError, HttpStatusError, SseError, StreamableHttpClient,
            StreamableHttpClientTransportConfig, StreamableHttpError, StreamableHttpPostResponse,
        },
    },
};
use sse_stream::Sse;

use super::{
    fault::{UpstreamFault, error_chain, truncate_error},
    http_response::{ResponseReader, unexpected_response},
    limits, tls,
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
            responses: ResponseReader::new(self.url.clone(), self.traffic.clone()),
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
    responses: ResponseReader,
}

impl BoundedHttpClient {
    /// Turns a response with an error status into the JSON-RPC message or error the library expects.
    async fn handle_error_status(
        &self,
        message: &ClientJsonRpcMessage,
        response: Response,
    ) -> Result<StreamableHttpPostResponse, HttpError> {
        let status = response.status();
        let denied = is_denied(status);
        let status_error = status_error(&response);
        if status == StatusCode::TOO_MANY_REQUESTS
            || matches!(status_error, StreamableHttpError::AuthRequired(_))
        {
            return Err(status_error);
        }
        let body = self.responses.read_body(response).await?;
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
            None if status.is_server_error() => Err(status_error),
            None => Err(unexpected_response(format!(
                "HTTP {status}: {}",
                truncate_error(&String::from_utf8_lossy(&body))
            ))),
        }
    }
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
        let body = serde_json::to_vec(&message)?;
        // It is kept until the server has read it.
        let charge = match body.len() > UNCHARGED {
            true => Some(self.responses.charge_request(body.len())?),
            false => None,
        };
        let response = request
            .header(header::CONTENT_TYPE, "application/json")
            .body(body)
            .send()
            .await
            .map_err(|error| self.responses.connection_lost(error))?;
        drop(charge);
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
                self.responses.read_events(response, most, request_id(&message)),
                new_session,
            )),
            Some(kind) if kind.starts_with("application/json") => {
                let body = match self.responses.read_body(response).await {
                    Ok(body) => body,
                    Err(failure) => {
                        let answered = self
                            .responses
                            .fail_request(request_id(&message).as_ref(), failure)?;
                        return Ok(StreamableHttpPostResponse::Json(answered, new_session));
                    }
                };
                if let Some(answered) = self.responses.traffic.intercept_http_response(&body) {
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
        _auth_header: Option<String>,
        headers: HashMap<HeaderName, HeaderValue>,
        most: usize,
    ) -> Result<BoxStream<'static, Result<Sse, SseError>>, HttpError> {
        let mut request = self
            .client
            .get(uri.as_ref())
            .headers(headers.into_iter().collect());
        request = request.header(header::ACCEPT, "text/event-stream");
        if let Some(id) = &session_id {
            request = request.header("Mcp-Session-Id", id.as_ref());
        }
        if let Some(id) = last_event_id {
            request = request.header("Last-Event-ID", id);
        }
        let response = request.send().await.map_err(|error| match error.is_connect() {
            // The library reopens the stream when it breaks, so a failing connect here is how a dead server is
            // noticed between calls. A stream that merely ends is no sign of that.
            true => self.responses.connection_lost(error),
            false => StreamableHttpError::Client(error.without_url()),
        })?;
        let status = response.status();
        if status == StatusCode::METHOD_NOT_ALLOWED {
            return Err(StreamableHttpError::ServerDoesNotSupportSse);
        }
        if !status.is_success() {
            return Err(status_error(&response));
        }
        let kind = response.headers().get(header::CONTENT_TYPE);
        let kind = kind.map(|kind| String::from_utf8_lossy(kind.as_bytes()).into_owned());
        match kind.as_deref() {
            Some(kind) if kind.starts_with("text/event-stream") => {
                Ok(self.responses.read_events(response, most, None))
            }
            _ => Err(StreamableHttpError::UnexpectedContentType(kind)),
        }
    }
}

fn is_denied(status: StatusCode) -> bool {
    matches!(status, StatusCode::UNAUTHORIZED | StatusCode::FORBIDDEN)
}

/// The library's error for a response with an error status.
fn status_error(response: &Response) -> HttpError {
    let status = response.status();
    let text = |name: &HeaderName| response.headers().get(name).map(|value| value.as_bytes());
    if is_denied(status)
        && let Some(challenge) = text(&header::WWW_AUTHENTICATE)
    {
        let challenge = String::from_utf8_lossy(challenge).into_owned();
        return StreamableHttpError::AuthRequired(AuthRequiredError::new(challenge));
    }
    let retry_after = text(&header::RETRY_AFTER).and_then(|value| std::str::from_utf8(value).ok());
    HttpStatusError::new(status.as_u16(), retry_after.map(str::to_owned)).into()
}

/// The id of a request; none of other messages.
fn request_id(message: &ClientJsonRpcMessage) -> Option<RequestId> {
    match message {
        ClientJsonRpcMessage::Request(request) => Some(request.id.clone()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
