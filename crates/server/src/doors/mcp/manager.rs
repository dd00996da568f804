//! rmcp's session manager with ours around it: streams that come from the durable log, requests whose
//! breaking off is seen, and an end that is told to sessions.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures::{Stream, StreamExt as _};
use rmcp::{
    model::{ClientJsonRpcMessage, JsonRpcMessage, ServerJsonRpcMessage, ServerResult},
    transport::streamable_http_server::session::{
        ServerSseMessage, SessionId, SessionManager,
        local::{LocalSessionManager, LocalSessionManagerError, SessionConfig},
    },
};
use tokio_util::sync::CancellationToken;

use super::{
    listeners::Open,
    push::{self, Places},
};
use crate::app::App;

/// Cancelled when a client lets go of a request before its answer. Travels with the request.
#[derive(Debug, Clone)]
pub struct Gone(pub CancellationToken);

/// What clients are told to wait before they come back.
const RETRY: Duration = Duration::from_secs(1);

/// The manager.
pub struct Manager {
    inner: LocalSessionManager,
    app: Arc<App>,
}

impl Manager {
    /// Over a server.
    pub fn new(app: Arc<App>) -> Self {
        let mut inner = LocalSessionManager::default();
        let mut config = SessionConfig::default();
        // rmcp would end a session that only listens; idle ones are ended by `reap`.
        config.keep_alive = None;
        config.sse_retry = Some(RETRY);
        inner.session_config = config;
        Self { inner, app }
    }

    /// Ends a session.
    pub async fn end(&self, id: &SessionId) {
        if let Err(error) = self.close_session(id).await {
            tracing::debug!(%error, "an MCP session could not be closed");
        }
    }

    /// Ends sessions that nobody uses, until the server stops.
    pub async fn reap(self: Arc<Self>) {
        let every =
            (self.app.config.mcp_session_idle / 4).clamp(Duration::from_millis(100), Duration::from_secs(60));
        loop {
            tokio::select! {
                () = self.app.stopping.cancelled() => return,
                () = tokio::time::sleep(every) => {}
            }
            for id in self.app.listeners.idle(self.app.config.mcp_session_idle) {
                tracing::debug!(session = %id, "an idle MCP session ends");
                self.end(&id).await;
            }
        }
    }
}

impl SessionManager for Manager {
    type Error = LocalSessionManagerError;
    type Transport = <LocalSessionManager as SessionManager>::Transport;

    async fn create_session(&self) -> Result<(SessionId, Self::Transport), Self::Error> {
        let made = self.inner.create_session().await?;
        self.app.listeners.open(&made.0);
        Ok(made)
    }

    async fn initialize_session(
        &self,
        id: &SessionId,
        message: ClientJsonRpcMessage,
    ) -> Result<ServerJsonRpcMessage, Self::Error> {
        let answer = self.inner.initialize_session(id, message).await?;
        if let JsonRpcMessage::Response(response) = &answer
            && let ServerResult::InitializeResult(result) = &response.result
            && let Some(listener) = self.app.listeners.get(id)
        {
            let _ = listener.version.set(result.protocol_version.to_string());
        }
        Ok(answer)
    }

    async fn has_session(&self, id: &SessionId) -> Result<bool, Self::Error> {
        self.inner.has_session(id).await
    }

    async fn close_session(&self, id: &SessionId) -> Result<(), Self::Error> {
        if self.app.listeners.close(id).is_some() {
            self.app.sessions.mcp_session_closed(id);
        }
        self.inner.close_session(id).await
    }

    async fn create_stream(
        &self,
        id: &SessionId,
        mut message: ClientJsonRpcMessage,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        let gone = CancellationToken::new();
        message.insert_extension(Gone(gone.clone()));
        let listener = self.app.listeners.get(id);
        let priming = listener.as_ref().is_some_and(|l| l.knows_priming());
        let open = listener.map(|l| l.hold());
        let inner = self.inner.create_stream(id, message).await?;
        // Clients of older revisions take an event without data for a broken message.
        let inner = inner.filter(move |frame| std::future::ready(priming || frame.message.is_some()));
        Ok(Watched {
            inner: Box::pin(inner),
            gone: Some(gone),
            _open: open,
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
        self.listening(id, inner.boxed(), Places::default())
    }

    async fn resume(
        &self,
        id: &SessionId,
        last_event_id: String,
    ) -> Result<impl Stream<Item = ServerSseMessage> + Send + Sync + 'static, Self::Error> {
        match Places::parse(&last_event_id) {
            Some(places) => {
                let inner = self.inner.create_standalone_stream(id).await?;
                self.listening(id, inner.boxed(), places)
            }
            // `<n>/<request>` is the rest of a request's own answer, which carries no events of ours.
            None if last_event_id.contains('/') => {
                let inner = self.inner.resume(id, last_event_id).await?;
                Ok(Listening {
                    inner: Some(parking_lot::Mutex::new(inner.boxed())),
                    frames: None,
                })
            }
            None => {
                let inner = self.inner.create_standalone_stream(id).await?;
                self.listening(id, inner.boxed(), Places::default())
            }
        }
    }
}

impl Manager {
    /// rmcp's own frames and ours, as one stream.
    fn listening(
        &self,
        id: &SessionId,
        inner: futures::stream::BoxStream<'static, ServerSseMessage>,
        places: Places,
    ) -> Result<Listening, LocalSessionManagerError> {
        let listener = self.app.listeners.get(id);
        let listener = listener.ok_or_else(|| LocalSessionManagerError::SessionNotFound(id.clone()))?;
        // The first frame says that the stream is open: a client need not wait for the first event.
        let priming = listener.knows_priming().then(|| match &places {
            none if *none == Places::default() => ServerSseMessage::priming("0", RETRY),
            known => ServerSseMessage::priming(known.to_string(), RETRY),
        });
        let frames = futures::stream::iter(priming).chain(push::frames(self.app.clone(), listener, places));
        Ok(Listening {
            inner: Some(parking_lot::Mutex::new(inner)),
            frames: Some(Box::pin(frames)),
        })
    }
}

/// A GET stream.
pub struct Listening {
    /// rmcp's own frames. Locked never: a mutex only makes it shareable.
    inner: Option<parking_lot::Mutex<futures::stream::BoxStream<'static, ServerSseMessage>>>,
    frames: Option<Pin<Box<dyn Stream<Item = ServerSseMessage> + Send + Sync>>>,
}

impl Stream for Listening {
    type Item = ServerSseMessage;

    fn poll_next(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        if let Some(inner) = &mut self.inner
            && let Poll::Ready(frame) = inner.get_mut().poll_next_unpin(cx)
        {
            match frame {
                Some(frame) => return Poll::Ready(Some(frame)),
                // The session's worker is gone, so the session is.
                None => return Poll::Ready(None),
            }
        }
        match &mut self.frames {
            Some(frames) => frames.as_mut().poll_next(cx),
            None => Poll::Pending,
        }
    }
}

/// A request's answer. Dropped before it came, it says that the client left.
struct Watched<S> {
    inner: Pin<Box<S>>,
    gone: Option<CancellationToken>,
    _open: Option<Open>,
}

impl<S: Stream<Item = ServerSseMessage>> Stream for Watched<S> {
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

impl<S> Drop for Watched<S> {
    fn drop(&mut self) {
        if let Some(gone) = self.gone.take() {
            gone.cancel();
        }
    }
}
