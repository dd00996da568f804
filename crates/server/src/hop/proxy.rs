//! Requests that are passed on whole, with their response: event streams that mark a caller as present, to the server
//! that runs the session; stateful MCP sessions, to the server that has them.

use std::sync::Arc;

use axum::{body::Body, response::Response};
use bytes::Bytes;
use futures::StreamExt as _;
use http::{HeaderMap, HeaderName, Method, StatusCode, header};
use oubliette_protocol::{CallerId, Error, Result, SessionId};
use oubliette_store::PeerServer;
use tokio_util::sync::CancellationToken;

use super::{
    ClusterHop, IfUnowned, OwnedTarget,
    client::{PeerFailure, PeerRequest},
    pass_on::{ActionRoute, IfUnreachable, RetryPolicy, RetrySafety, TAKEOVER_WAIT},
    signature::is_passed_on,
    wire::CallerStream,
};
use crate::{app::App, auth::Grant};

/// The headers of a response that its client gets.
const RESPONSE_HEADERS: [HeaderName; 9] = [
    header::ALLOW,
    header::CACHE_CONTROL,
    header::CONTENT_TYPE,
    header::RETRY_AFTER,
    header::WWW_AUTHENTICATE,
    HeaderName::from_static("mcp-protocol-version"),
    HeaderName::from_static("mcp-session-id"),
    HeaderName::from_static("x-accel-buffering"),
    header::CONTENT_SECURITY_POLICY,
];

/// What became of a request for a stateful MCP session of another server.
pub(crate) enum ProxiedMcp {
    /// Its response.
    Response(Response),
    /// That server has ended, and its MCP sessions with it.
    Ended,
    /// It cannot be reached now.
    Unavailable(Error),
}

impl ClusterHop {
    /// Passes a caller's event stream on to the server that runs its session; `None` if that is this one.
    pub(crate) async fn proxy_caller_stream(
        self: &Arc<Self>,
        app: &Arc<App>,
        grant: &Grant,
        session: &SessionId,
        caller: &CallerId,
        since: i64,
    ) -> Result<Option<Response>> {
        let stream = CallerStream {
            session_id: session.clone(),
            caller_id: caller.clone(),
            since,
        };
        let request = PeerRequest::post("/internal/caller-stream", &stream)?.for_grant(grant)?;
        let route = ActionRoute {
            target: OwnedTarget::Session(session),
            unowned: IfUnowned::Claim,
            unreachable: IfUnreachable::Wait,
        };
        let cancelled = CancellationToken::new();
        let retries = RetryPolicy {
            waiting: TAKEOVER_WAIT,
            repeatable: RetrySafety::Yes,
            cancelled: &cancelled,
        };
        self.at_owner(app, grant, route, retries, |peer| {
            let (me, app, request) = (self.clone(), app.clone(), request.clone());
            async move { me.proxy(&app, &peer, &request).await }
        })
        .await
    }

    /// Passes a request of a stateful MCP session on to the server that has it.
    pub(crate) async fn proxy_mcp(
        self: &Arc<Self>,
        app: &Arc<App>,
        peer: &PeerServer,
        grant: &Grant,
        method: Method,
        headers: &HeaderMap,
        body: Bytes,
    ) -> ProxiedMcp {
        let request = PeerRequest {
            method,
            path: "/internal/mcp".into(),
            headers: passed_on_headers(headers),
            body,
            // A call is answered when it is done.
            head_timeout: None,
        };
        let sent = match request.for_grant(grant) {
            Ok(request) => self.proxy(app, peer, &request).await,
            Err(error) => return ProxiedMcp::Unavailable(error),
        };
        match sent {
            Ok(response) => ProxiedMcp::Response(response),
            // Started again, with no memory of its MCP sessions.
            Err(PeerFailure::Moved) => ProxiedMcp::Ended,
            Err(PeerFailure::NotTaken(error) | PeerFailure::Unanswered(error)) => {
                match self.read_servers().await {
                    Ok(servers) if !servers.contains_key(&peer.server_id) => ProxiedMcp::Ended,
                    Ok(_) | Err(_) => ProxiedMcp::Unavailable(error),
                }
            }
        }
    }

    /// Sends a request and returns the response as its client gets it. When the client leaves, the request to the other server
    /// is dropped; when that server is gone, or this one stops, the response ends.
    async fn proxy(
        self: &Arc<Self>,
        app: &Arc<App>,
        peer: &PeerServer,
        request: &PeerRequest,
    ) -> Result<Response, PeerFailure> {
        let answer = self.peers.send(peer, request).await?;
        let status = StatusCode::from_u16(answer.status().as_u16()).unwrap_or(StatusCode::BAD_GATEWAY);
        let headers: Vec<_> = RESPONSE_HEADERS
            .iter()
            .filter_map(|name| Some((name.clone(), answer.headers().get(name)?.clone())))
            .collect();
        let is_stream = answer
            .headers()
            .get(header::CONTENT_TYPE)
            .is_some_and(|media_type| media_type.as_bytes().starts_with(b"text/event-stream"));
        let (me, id, stopping) = (self.clone(), peer.server_id.clone(), app.stopping.clone());
        let over = async move {
            tokio::select! {
                () = me.peers.gone(&id) => {}
                // A stream ends when this server stops; what is not one ends by itself.
                () = stopping.cancelled(), if is_stream => {}
            }
        };
        let mut response = Response::new(Body::from_stream(
            answer.bytes_stream().take_until(Box::pin(over)),
        ));
        *response.status_mut() = status;
        response.headers_mut().extend(headers);
        Ok(response)
    }
}

fn passed_on_headers(headers: &HeaderMap) -> HeaderMap {
    let passed_on = headers.iter().filter(|(name, _)| is_passed_on(name));
    passed_on
        .map(|(name, value)| (name.clone(), value.clone()))
        .collect()
}
