//! Server-sent events: a log is replayed and then followed, until the client disconnects.

use std::{convert::Infallible, sync::Arc, time::Duration};

use axum::{
    Extension,
    extract::{Path, Query, State},
    response::{
        IntoResponse as _, Response,
        sse::{Event as Frame, KeepAlive, Sse},
    },
};
use futures::{Stream, StreamExt as _, TryStreamExt as _};
use http::HeaderMap;
use oubliette_protocol::{CallerId, Error, Result, SessionId, Slug};
use oubliette_store::DebugFilter;
use serde::{Deserialize, Serialize};

use super::{
    DoorKind,
    access::{self, AcceptedCredentials},
    http::HttpDoors,
    reply,
};
use crate::{app::App, auth::Grant, presence::PresenceGuard, visible::parse_id};

/// How often a stream without events sends a comment, so that proxies keep it open and a dead client is noticed.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// The query of a session's event stream.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionStreamQuery {
    since_index: Option<i64>,
    caller_id: Option<CallerId>,
}

/// The query of the debugger's event stream.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct DebuggerStreamQuery {
    session_id: Option<SessionId>,
    agent: Option<Slug>,
    /// Kinds of events, separated by commas; all if absent.
    kinds: Option<String>,
    since_index: Option<i64>,
}

/// The index after which a stream starts: `Last-Event-ID` of a client that reconnects, else `since_index`, else -1,
/// which is before the first event.
fn start_index(headers: &HeaderMap, asked: Option<i64>) -> i64 {
    let last = headers
        .get("last-event-id")
        .and_then(|v| v.to_str().ok()?.trim().parse().ok());
    last.or(asked).unwrap_or(-1)
}

/// `GET /api/sessions/{id}/events`: a session's events. With `caller_id` the stream marks that caller as present.
pub(crate) async fn session_events(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    Path(id): Path<String>,
    query: Result<Query<SessionStreamQuery>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    let app = &doors.app;
    let grant = access::authenticate(app, door, &headers, AcceptedCredentials::BearerOrCookie).await?;
    let opened = async {
        let Query(query) = query.map_err(|e| Error::invalid(e.body_text()))?;
        let id: SessionId = parse_id("session", &id)?;
        app.visible_session(&grant, &id).await?;
        let since = start_index(&headers, query.since_index);
        let Some(caller) = query.caller_id else {
            let live = app.store.events().follow(&id, since);
            return Ok(sse_response(app, &grant, live, |e| e.index, None));
        };
        // A caller is present where its session runs.
        if let Some(hop) = &app.hop
            && let Some(response) =
                Box::pin(hop.proxy_caller_stream(app, &grant, &id, &caller, since)).await?
        {
            return Ok(response);
        }
        Ok(caller_stream(app, &grant, &id, caller, since))
    };
    opened.await.map_err(|error| reply::error(&error))
}

/// A session's events after an index, for a caller, which is present while the stream is open. The session runs on this
/// server, or on none.
pub(crate) fn caller_stream(
    app: &Arc<App>,
    grant: &Grant,
    id: &SessionId,
    caller: CallerId,
    since: i64,
) -> Response {
    let live = app.store.events().follow(id, since);
    let key = PresenceGuard::sse_key(grant, id, caller);
    // Present before its open requests are read, so that no request is made in between and missed.
    let presence = PresenceGuard::for_stream(app, key.clone());
    // A caller that reconnects gets the requests that still wait for it again, even those before `since`.
    let again = app.sessions.open_requests(&key);
    let again = again.try_filter(move |event| std::future::ready(event.index <= since));
    sse_response(app, grant, again.chain(live), |e| e.index, Some(presence))
}

/// `GET /api/debugger`: the debugger's events, within the grant's project.
pub(crate) async fn debugger_events(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    query: Result<Query<DebuggerStreamQuery>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Result<Response, Response> {
    let grant = access::authenticate(&doors.app, door, &headers, AcceptedCredentials::BearerOrCookie).await?;
    let opened = async {
        let Query(query) = query.map_err(|e| Error::invalid(e.body_text()))?;
        if let Some(id) = &query.session_id {
            doors.app.visible_session(&grant, id).await?;
        }
        let kinds = query
            .kinds
            .map(|kinds| kinds.split(',').map(|k| k.trim().to_owned()).collect());
        let filter = DebugFilter {
            session: query.session_id,
            agent: query.agent,
            kinds,
            project: grant.project().cloned(),
        };
        let events = doors
            .app
            .store
            .debugger()
            .follow(filter, start_index(&headers, query.since_index));
        Ok(sse_response(&doors.app, &grant, events, |e| e.index, None))
    };
    opened.await.map_err(|error| reply::error(&error))
}

/// The response that streams `events` until the client disconnects, the token ends or the server stops.
fn sse_response<T: Serialize + Send + Sync + 'static>(
    app: &Arc<App>,
    grant: &Grant,
    events: impl Stream<Item = Result<Arc<T>>> + Send + 'static,
    index: fn(&T) -> i64,
    presence: Option<PresenceGuard>,
) -> Response {
    let (auth, owner, stopping) = (app.auth.clone(), grant.clone(), app.stopping.clone());
    let over = async move {
        tokio::select! {
            () = auth.wait_until_ended(&owner) => {}
            () = stopping.cancelled() => {}
        }
    };
    let mut charge = app.token_budgets.stream_of(Some(grant));
    let frames = events
        .take_until(Box::pin(over))
        // A log that cannot be read ends the stream; the client reconnects with its `Last-Event-ID`.
        .take_while(|item| {
            let good = item.as_ref().inspect_err(
                |e| tracing::error!(error = %e.for_log(), "reading the log failed; the event stream ends"),
            );
            std::future::ready(good.is_ok())
        })
        .filter_map(|item| std::future::ready(item.ok()))
        // Nor does a client get more that does not read what its streams hold already.
        .take_while(move |item| {
            let fits = charge
                .send(&**item)
                .inspect_err(|over| tracing::warn!(%over, "an event stream ends: its client does not read"));
            std::future::ready(fits.is_ok())
        })
        .filter_map(move |item| {
            // Without an SSE event name: a browser's `onmessage` gets only unnamed events, and the type is in the data.
            let frame = Frame::default().id(index(&item).to_string()).json_data(&*item);
            std::future::ready(frame.ok())
        })
        .map(move |frame| {
            // Moved into the stream: it is dropped with it when the caller disconnects.
            let _ = &presence;
            Ok::<_, Infallible>(frame)
        });
    let sse = Sse::new(frames).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    let mut response = sse.into_response();
    response
        .headers_mut()
        .insert("x-accel-buffering", http::HeaderValue::from_static("no"));
    response
}
