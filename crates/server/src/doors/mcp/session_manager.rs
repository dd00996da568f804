//! Wraps rmcp's session manager. Adds to it: GET streams with events from the durable log, the detection of clients
//! that disconnect before their response, and a notice to the session crate when an MCP session closes.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use rmcp::{
    model::{
        ClientJsonRpcMessage, ClientRequest, Implementation, JsonRpcMessage, ProtocolVersion,
        ServerJsonRpcMessage, ServerResult,
    },
    transport::streamable_http_server::session::{
        ServerSseMessage, SessionId, SessionManager,
        local::{LocalSessionManager, LocalSessionManagerError, SessionConfig},
    },
};
use tokio_util::sync::CancellationToken;

use super::{
    event_stream::{self, StreamPositions},
    mcp_sessions::McpSessionGuard,
};
use crate::app::App;

/// An extension of a request: cancelled when its client disconnects before the response.
#[derive(Debug, Clone)]
pub(crate) struct ClientGone(pub CancellationToken);

/// How long clients are told to wait before they reconnect a stream (`retry` of SSE).
const SSE_RETRY: Duration = Duration::from_secs(1);

/// How much of each text of a client's description of itself is kept, in characters.
const MAX_CLIENT_INFO_CHARS: usize = 256;
/// Maximum size of the experimental capabilities, and of the extensions, that are kept, as bytes of JSON.
const MAX_CAPABILITY_BYTES: usize = 4 * 1024;

/// Manages the stateful sessions of `/mcp`.
pub(crate) struct McpSessionManager {
    inner: LocalSessionManager,
    app: Arc<App>,
}

impl McpSessionManager {
    /// The session manager of a server.
    pub(crate) fn new(app: Arc<App>) -> Self {
        let mut inner = LocalSessionManager::default();
        let mut config = SessionConfig::default();
        // rmcp would end a session that only has a GET stream open; idle ones are closed by `close_idle_sessions`.
        config.keep_alive = None;
        config.sse_retry = Some(SSE_RETRY);
        inner.session_config = config;
        Self { inner, app }
    }

    /// Closes an MCP session.
    pub(crate) async fn end_session(&self, id: &SessionId) {
        if let Err(error) = self.close_session(id).await {
            tracing::debug!(%error, "closing an MCP session failed");
        }
    }

    /// Closes MCP sessions that were idle for `mcp_session_idle`, until the server stops.
    pub(crate) async fn close_idle_sessions(self: Arc<Self>) {
        let every =
            (self.app.config.mcp_session_idle / 4).clamp(Duration::from_millis(100), Duration::from_secs(60));
        loop {
            tokio::select! {
                () = self.app.stopping.cancelled() => return,
                () = tokio::time::sleep(every) => {}
            }
            for id in self
                .app
                .mcp_sessions
                .idle_longer_than(self.app.config.mcp_session_idle)
            {
                tracing::debug!(session = %id, "closing an idle MCP session");
                self.end_session(&id).await;
            }
        }
    }
}

impl SessionManager for McpSessionManager {
    type Error = LocalSessionManagerError;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), Self::Error> {
        let made = self.inner.create_session().await?;
        self.app.mcp_sessions.register(&made.0);
        Ok(made)
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        mut message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, Self::Error> {
        bound_client_info(&mut message);
        let answer = self.inner.initialize_session(id, message).await?;
        if let JsonRpcMessage::Response(response) = &answer
            && let ServerResult::InitializeResult(result) = &response.result
            && let Some(mcp_session) = self.app.mcp_sessions.get(id)
        {
            let _ = mcp_session.version.set(result.protocol_version.to_string());
        }
        Ok(answer)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.inner.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        if let Some(mcp_session) = self.app.mcp_sessions.remove(id) {
            self.app.sessions.mcp_session_closed(id);
            if let Some(hop) = &self.app.hop {
                for peer in mcp_session.peers() {
                    hop.tell_mcp_session_closed(peer, id.to_string());
                }
            }
        }
        self.inner.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        mut message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let gone = CancellationToken::new();
        message.insert_extension(ClientGone(gone.clone()));
        let mcp_session = self.app.mcp_sessions.get(id);
        let priming = mcp_session.as_ref().is_some_and(|l| l.supports_priming());
        let guard = mcp_session.map(|l| l.keep_open());
        let inner = self.inner.create_stream(id, message).await?;
        // Clients of older revisions treat an event without data as a malformed message.
        let inner = inner.filter(move |frame| std::future::ready(priming || frame.message.is_some()));
        Ok(ResponseStream {
            inner: Box::pin(inner),
            gone: Some(gone),
            _guard: guard,
        })
    }

    async fn accept_message(&self, id: &SessionId, message: ClientJsonRpcMessage) -> Result<(), Self::Error> {
        self.inner.accept_message(id, message).await
    }

    async fn create_standalone_stream(
        &self,
        id: &SessionId,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let inner = self.inner.create_standalone_stream(id).await?;
        self.open_get_stream(id, inner.boxed(), StreamPositions::default())
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        match StreamPositions::parse(&last_event_id) {
            Some(positions) => {
                let inner = self.inner.create_standalone_stream(id).await?;
                self.open_get_stream(id, inner.boxed(), positions)
            }
            // `<n>/<request>` resumes the response stream of a request, which carries no session events.
            None if last_event_id.contains('/') => {
                let inner = self.inner.resume(id, last_event_id).await?;
                Ok(GetStream {
                    inner: Some(parking_lot::Mutex::new(inner.boxed())),
                    frames: None,
                })
            }
            None => {
                let inner = self.inner.create_standalone_stream(id).await?;
                self.open_get_stream(id, inner.boxed(), StreamPositions::default())
            }
        }
    }
}

impl McpSessionManager {
    /// Joins rmcp's own frames and session events in one GET stream, which starts after `positions`.
    fn open_get_stream(
        &self,
        id: &SessionId,
        inner: futures::stream::BoxStream<'static, ServerSseMessage>,
        positions: StreamPositions,
    ) -> Result<GetStream, LocalSessionManagerError> {
        let mcp_session = self.app.mcp_sessions.get(id);
        let mcp_session = mcp_session.ok_or_else(|| LocalSessionManagerError::SessionNotFound(id.clone()))?;
        // A first frame without data tells the client that the stream is open, before there is an event.
        let priming = mcp_session.supports_priming().then(|| match &positions {
            none if *none == StreamPositions::default() => ServerSseMessage::priming("0", SSE_RETRY),
            known => ServerSseMessage::priming(known.to_string(), SSE_RETRY),
        });
        let frames = futures::stream::iter(priming).chain(event_stream::event_frames(
            self.app.clone(),
            mcp_session,
            positions,
        ));
        Ok(GetStream {
            inner: Some(parking_lot::Mutex::new(inner)),
            frames: Some(Box::pin(frames)),
        })
    }
}

/// Bounds what rmcp keeps of an `initialize` request as long as the MCP session lives. Nothing here reads it, and a client
/// could otherwise have megabytes kept with each of its MCP sessions.
fn bound_client_info(message: &mut ClientJsonRpcMessage) {
    let JsonRpcMessage::Request(request) = message else {
        return;
    };
    let ClientRequest::InitializeRequest(initialize) = &mut request.request else {
        return;
    };
    let params = &mut initialize.params;
    let given = std::mem::replace(
        &mut params.client_info,
        Implementation::new(String::new(), String::new()),
    );
    params.client_info = Implementation::new(truncate(&given.name), truncate(&given.version));
    params.client_info.title = given.title.as_deref().map(truncate);
    if params.protocol_version.as_str().len() > MAX_CLIENT_INFO_CHARS {
        // No revision that exists; the server answers with one it has.
        params.protocol_version = ProtocolVersion::V_2024_11_05;
    }
    params.meta = None;
    let capabilities = &mut params.capabilities;
    if let Some(sampling) = &mut capabilities.sampling {
        // That they are there says all.
        sampling.tools.iter_mut().for_each(|tools| tools.clear());
        sampling.context.iter_mut().for_each(|context| context.clear());
    }
    let is_large =
        |value: serde_json::Result<Vec<u8>>| !value.is_ok_and(|text| text.len() <= MAX_CAPABILITY_BYTES);
    if is_large(serde_json::to_vec(&capabilities.experimental)) {
        capabilities.experimental = None;
    }
    if is_large(serde_json::to_vec(&capabilities.extensions)) {
        capabilities.extensions = None;
    }
}

fn truncate(text: &str) -> String {
    text.chars().take(MAX_CLIENT_INFO_CHARS).collect()
}

/// A GET stream: rmcp's own frames and session events.
pub(crate) struct GetStream {
    /// rmcp's own frames. Never locked: the mutex only makes the stream `Sync`, which rmcp demands.
    inner: Option<parking_lot::Mutex<futures::stream::BoxStream<'static, ServerSseMessage>>>,
    frames: Option<Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>>,
}

impl Stream for GetStream {
    type Item = ServerSseMessage;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(inner) = &mut self.inner
            && let Poll::Ready(frame) = inner.get_mut().poll_next_unpin(cx)
        {
            match frame {
                Some(frame) => return Poll::Ready(Some(frame)),
                // rmcp's worker ended, so the MCP session is closed.
                None => return Poll::Ready(None),
            }
        }
        match &mut self.frames {
            Some(frames) => frames.as_mut().poll_next(cx),
            None => Poll::Pending,
        }
    }
}

/// The response stream of a request. Dropped before the response was sent, it cancels `gone`: the client disconnected.
struct ResponseStream<S> {
    inner: Pin<Box<S>>,
    gone: Option<CancellationToken>,
    _guard: Option<McpSessionGuard>,
}

impl<S: Stream<Item = ServerSseMessage>> Stream for ResponseStream<S> {
    type Item = ServerSseMessage;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        let frame = self.inner.as_mut().poll_next(cx);
        if let Poll::Ready(Some(frame)) = &frame
            && let Some(JsonRpcMessage::Response(_) | JsonRpcMessage::Error(_)) = frame.message.as_deref()
        {
            self.gone = None;
        }
        frame
    }
}

impl<S> Drop for ResponseStream<S> {
    fn drop(&mut self) {
        if let Some(gone) = self.gone.take() {
            gone.cancel();
        }
    }
}
