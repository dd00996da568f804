//! Server-sent events: a log replayed, then live, for as long as the client reads.

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
    Door,
    access::{self, Takes},
    http::Doors,
    reply,
};
use crate::{app::App, auth::Grant, presence::Held};

/// Comments that keep a silent stream open.
const KEEP_ALIVE: Duration = Duration::from_secs(10);

/// What a session's stream may be asked for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct SessionQuery {
    since_index: Option<i64>,
    caller_id: Option<CallerId>,
}

/// What the debugger's stream may be asked for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct DebugQuery {
    session_id: Option<SessionId>,
    agent: Option<Slug>,
    /// Comma-separated.
    kinds: Option<String>,
    since_index: Option<i64>,
}

/// `Last-Event-ID` of a client that comes back, else what it asks for, else from the first.
fn since(headers: &HeaderMap, asked: Option<i64>) -> i64 {
    let last = headers
        .get("last-event-id")
        .and_then(|v| v.to_str().ok()?.trim().parse().ok());
    last.or(asked).unwrap_or(-1)
}

/// `GET /api/sessions/{id}/events`.
pub async fn session(
    State(doors): State<Doors>,
    Extension(door): Extension<Door>,
    Path(id): Path<String>,
    query: Result<Query<SessionQuery>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Response {
    let grant = match access::admit(&doors.app, door, &headers, Takes::Cookie).await {
        Ok(grant) => grant,
        Err(refused) => return refused,
    };
    let opened = async {
        let Query(query) = query.map_err(|e| Error::invalid(e.body_text()))?;
        let missing = || {
            Error::not_found(format!(
                "there is no session {}",
                oubliette_protocol::id::quoted(&id)
            ))
        };
        let id: SessionId = id.parse().map_err(|_| missing())?;
        let row = doors.app.store.session_get(&id).await?.ok_or_else(missing)?;
        if !grant.principal().sees(&row.project_id) {
            return Err(missing());
        }
        let since = since(&headers, query.since_index);
        let live = doors.app.store.events().follow(&id, since);
        let Some(caller) = query.caller_id else {
            return Ok(stream(&doors.app, &grant, live, |e| e.index, None));
        };
        let key = Held::sse_key(&grant, &id, caller);
        // Held before the open requests are looked for, so that none falls in between.
        let held = Held::stream(&doors.app, key.clone());
        // A caller that is back: what still waits for it is told again, wherever it says it was.
        let again = doors.app.sessions.open_requests(&key);
        let again = again.try_filter(move |event| std::future::ready(event.index <= since));
        let events = again.chain(live);
        Ok(stream(&doors.app, &grant, events, |e| e.index, Some(held)))
    };
    opened.await.unwrap_or_else(|error| reply::error(&error))
}

/// `GET /api/debugger`.
pub async fn debugger(
    State(doors): State<Doors>,
    Extension(door): Extension<Door>,
    query: Result<Query<DebugQuery>, axum::extract::rejection::QueryRejection>,
    headers: HeaderMap,
) -> Response {
    let grant = match access::admit(&doors.app, door, &headers, Takes::Cookie).await {
        Ok(grant) => grant,
        Err(refused) => return refused,
    };
    let opened = async {
        let Query(query) = query.map_err(|e| Error::invalid(e.body_text()))?;
        if let Some(id) = &query.session_id {
            let missing = || Error::not_found(format!("there is no session {id}"));
            let row = doors.app.store.session_get(id).await?.ok_or_else(missing)?;
            if !grant.principal().sees(&row.project_id) {
                return Err(missing());
            }
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
            .follow(filter, since(&headers, query.since_index));
        Ok(stream(&doors.app, &grant, events, |e| e.index, None))
    };
    opened.await.unwrap_or_else(|error| reply::error(&error))
}

/// The stream, until the client, the token or the server goes.
fn stream<T: Serialize + Send + Sync + 'static>(
    app: &Arc<App>,
    grant: &Grant,
    events: impl Stream<Item = Result<Arc<T>>> + Send + 'static,
    index: fn(&T) -> i64,
    held: Option<Held>,
) -> Response {
    let (auth, grant, stopping) = (app.auth.clone(), grant.clone(), app.stopping.clone());
    let over = async move {
        tokio::select! {
            () = auth.ended(&grant) => {}
            () = stopping.cancelled() => {}
        }
    };
    let frames = events
        .take_until(Box::pin(over))
        // A log that cannot be read ends the stream; the client comes back where it was.
        .take_while(|item| {
            let good = item
                .as_ref()
                .inspect_err(|e| tracing::error!(error = %e.for_log(), "an event stream ended"));
            std::future::ready(good.is_ok())
        })
        .filter_map(|item| std::future::ready(item.ok()))
        .filter_map(move |item| {
            // Unnamed: a browser's `onmessage` hears every one of them, and the type is in the data.
            let frame = Frame::default().id(index(&item).to_string()).json_data(&*item);
            std::future::ready(frame.ok())
        })
        .map(move |frame| {
            // Held as long as the stream lives: its end is the caller's leaving.
            let _ = &held;
            Ok::<_, Infallible>(frame)
        });
    let sse = Sse::new(frames).keep_alive(KeepAlive::new().interval(KEEP_ALIVE));
    let mut response = sse.into_response();
    response
        .headers_mut()
        .insert("x-accel-buffering", http::HeaderValue::from_static("no"));
    response
}
