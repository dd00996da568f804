//! `/internal`: requests of the other servers of the cluster.
//!
//! A request is taken only with a code of the cluster key ([`signature`](super::signature)), and its body is not read before
//! that is checked. The principal it is made for is looked up again by [`auth`](crate::auth). Without `[cluster]` there is no
//! such path.

use std::{
    convert::Infallible,
    net::IpAddr,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use axum::{
    Extension,
    body::Body,
    extract::{Request, State},
    response::{IntoResponse as _, Response},
};
use bytes::Bytes;
use futures::{Stream, StreamExt as _, stream};
use http::{HeaderMap, HeaderName, HeaderValue, Method, StatusCode, header, request::Parts};
use oubliette_protocol::{Error, Result, SessionId, event::SessionEvent};
use oubliette_store::MemberState;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio_util::sync::{CancellationToken, DropGuard};

use super::{
    ClusterHop, IfUnowned, OwnedTarget, PassedOnCallGuard, SessionPlace,
    signature::{CHALLENGE, GRANT, NotNew, RequestSignature, SignedRequest, hash_body},
    wire::{
        AnswerLine, CallSignal, CallerStream, ClosedMcpSession, HoldRequest, LINE_INTERVAL, MAX_BODY_BYTES,
        OpenRequestsQuery, PassedOnCall, encode_line,
    },
};
use crate::{
    actions::{self, ClientContext, EventSink, RequestHop},
    app::App,
    auth::Grant,
    doors::{
        DoorKind,
        body::{self, BodyError},
        connection_limit::client_key,
        console,
        http::HttpDoors,
        mcp, reply, sse,
        token_budget::RequestCharge,
    },
};

/// The header of an answer that says what became of the request.
pub(super) const HOP_STATUS: HeaderName = HeaderName::from_static("x-oubliette-hop");

/// Lines that wait to be sent.
const LINE_QUEUE: usize = 64;

/// What became of a request between servers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum HopStatus {
    /// It was served: the answer is that of what it asked for.
    Taken,
    /// Its challenge is not one of the last two.
    OldChallenge,
    /// It was meant for another server.
    Moved,
    /// It was not made with this cluster's key, or was made before.
    Refused,
}

impl HopStatus {
    fn as_str(self) -> &'static str {
        match self {
            Self::Taken => "taken",
            Self::OldChallenge => "old-challenge",
            Self::Moved => "moved",
            Self::Refused => "refused",
        }
    }

    /// What an answer says.
    pub(super) fn of(headers: &HeaderMap) -> Option<Self> {
        let text = headers.get(HOP_STATUS)?.to_str().ok()?;
        [Self::Taken, Self::OldChallenge, Self::Moved, Self::Refused]
            .into_iter()
            .find(|status| status.as_str() == text)
    }

    fn mark(self, mut response: Response) -> Response {
        response
            .headers_mut()
            .insert(HOP_STATUS, HeaderValue::from_static(self.as_str()));
        response
    }
}

/// Whether a path is one of this door's, whose requests are addressed to a server and not to a host name of the service.
pub(crate) fn is_internal(path: &str) -> bool {
    path.starts_with("/internal/")
}

/// Serves `/internal`.
pub(crate) async fn serve(
    State(doors): State<HttpDoors>,
    Extension(door): Extension<DoorKind>,
    request: Request,
) -> Response {
    let (Some(hop), DoorKind::Network { peer, .. }) = (doors.app.hop.clone(), door) else {
        let (parts, _) = request.into_parts();
        return console::serve(parts.method, parts.uri, parts.headers).await;
    };
    let (parts, body) = request.into_parts();
    let challenge = |mut response: Response| {
        let current = hop.challenges.current(Instant::now());
        if let Ok(value) = HeaderValue::from_str(&current) {
            response.headers_mut().insert(CHALLENGE, value);
        }
        response
    };
    let signature = match hop.admit(&parts, client_key(peer)) {
        Ok(signature) => signature,
        Err(Refusal::OldChallenge) => {
            let response = reply::error_with_status(
                StatusCode::PRECONDITION_REQUIRED,
                &Error::unavailable("send the request again with the current challenge"),
            );
            return challenge(HopStatus::OldChallenge.mark(response));
        }
        Err(Refusal::OtherServer) => {
            return moved("the request is for another server than the one that listens here now");
        }
        Err(Refusal::TooMany(wait)) => {
            return HopStatus::Refused.mark(reply::too_many_requests(
                "too many requests with another key",
                wait,
            ));
        }
        Err(Refusal::WrongKey) => {
            return HopStatus::Refused.mark(reply::error_with_status(
                StatusCode::FORBIDDEN,
                &Error::permission_denied("the request is not made with this cluster's key"),
            ));
        }
    };
    // What another server passes on it has charged to the token.
    let read = body::read_up_to(&parts.headers, body, MAX_BODY_BYTES, RequestCharge::unlimited()).await;
    let bytes = match read {
        Ok(body) if hash_body(&body.bytes) == signature.body_hash => body.bytes,
        Ok(_) | Err(BodyError::Incomplete | BodyError::OverBudget(_)) => {
            let error = Error::invalid("the body is not the one that was signed");
            return HopStatus::Refused.mark(reply::error(&error));
        }
        Err(BodyError::TooLarge) => return HopStatus::Refused.mark(reply::body_too_large(MAX_BODY_BYTES)),
    };
    // A future of its own: serving an action or a whole MCP request is large.
    let response = Box::pin(serve_admitted(&doors, &hop, parts, bytes)).await;
    let response = match response {
        Ok(response) => response,
        Err(error) => reply::error(&error),
    };
    match HopStatus::of(response.headers()) {
        Some(_) => challenge(response),
        None => challenge(HopStatus::Taken.mark(response)),
    }
}

fn moved(why: &str) -> Response {
    let response = reply::error_with_status(StatusCode::MISDIRECTED_REQUEST, &Error::unavailable(why));
    HopStatus::Moved.mark(response)
}

/// Why a request is not served.
enum Refusal {
    WrongKey,
    TooMany(Duration),
    OldChallenge,
    OtherServer,
}

impl ClusterHop {
    /// Checks that a request is another server's, meant for this one, and new.
    fn admit(&self, parts: &Parts, from: IpAddr) -> Result<RequestSignature, Refusal> {
        let now = Instant::now();
        let path = parts.uri.path_and_query().map_or("/", |path| path.as_str());
        let request = SignedRequest {
            method: &parts.method,
            path,
            headers: &parts.headers,
        };
        // Only what is refused is limited: other servers may have the same address as somebody who guesses.
        let refuse = |reason: &str| match self.failed_keys.take(&from, now) {
            Ok(()) => {
                tracing::warn!(address = %from, path = parts.uri.path(), reason, "a request to /internal was refused");
                Refusal::WrongKey
            }
            Err(wait) => Refusal::TooMany(wait),
        };
        let signature = RequestSignature::parse(&parts.headers)
            .ok_or_else(|| refuse("it has no code of a cluster key"))?;
        if !self.key.verify(&request, &signature) {
            return Err(refuse("its code was not made with this server's cluster key"));
        }
        if signature.to != *self.server_id() {
            return Err(Refusal::OtherServer);
        }
        match self.challenges.take(&signature, now) {
            Ok(()) => Ok(signature),
            Err(NotNew::OldChallenge) => Err(Refusal::OldChallenge),
            Err(NotNew::Repeated) => Err(refuse("it was taken before")),
        }
    }
}

async fn serve_admitted(
    doors: &HttpDoors,
    hop: &Arc<ClusterHop>,
    parts: Parts,
    body: Bytes,
) -> Result<Response> {
    let app = &doors.app;
    if app.stopping.is_cancelled() || hop.member.state() != MemberState::Active {
        // Nothing is begun here any more, and others take the sessions over.
        return Ok(moved("the server stops, or may run no sessions"));
    }
    let path = parts.uri.path().to_owned();
    let posted = parts.method == Method::POST;
    match path.strip_prefix("/internal/").unwrap_or_default() {
        "challenge" if posted => Ok(StatusCode::NO_CONTENT.into_response()),
        "signal" if posted => {
            let signal: CallSignal = parse(&body)?;
            hop.open_calls.signal(&signal.call_id);
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        "mcp-closed" if posted => {
            let closed: ClosedMcpSession = parse(&body)?;
            app.sessions.mcp_session_closed(&closed.mcp_session);
            Ok(StatusCode::NO_CONTENT.into_response())
        }
        "presence" if posted => {
            let hold: HoldRequest = parse(&body)?;
            Ok(hold_presence(app, hop, hold))
        }
        "open-requests" if posted => {
            let query: OpenRequestsQuery = parse(&body)?;
            let events = app.sessions.open_requests(&query.key);
            let lines = events.filter_map(|event| {
                std::future::ready(event.ok().map(|event| AnswerLine::Event {
                    event: Box::new((*event).clone()),
                }))
            });
            Ok(line_response(lines))
        }
        "mcp" => {
            let grant = passed_on_grant(app, &parts.headers).await?;
            let request = Request::from_parts(parts, Body::from(body));
            Ok(mcp::serve_here(doors, grant, request).await)
        }
        "caller-stream" if posted => {
            let grant = passed_on_grant(app, &parts.headers).await?;
            let CallerStream {
                session_id,
                caller_id,
                since,
            } = parse(&body)?;
            app.visible_session(&grant, &session_id).await?;
            let target = OwnedTarget::Session(&session_id);
            match hop.place(app, &grant, target, IfUnowned::Claim).await? {
                SessionPlace::Here => Ok(sse::caller_stream(app, &grant, &session_id, caller_id, since)),
                SessionPlace::Peer(_) => Ok(moved("another server runs this session")),
            }
        }
        rest => match rest.strip_prefix("actions/") {
            Some(name) if posted => {
                let call: PassedOnCall = parse(&body)?;
                let grant = passed_on_grant(app, &parts.headers).await;
                Ok(perform_action(app, hop, grant, name.to_owned(), call))
            }
            Some(_) | None => Err(Error::not_found("there is no such path between servers")),
        },
    }
}

fn parse<T: DeserializeOwned>(body: &[u8]) -> Result<T> {
    serde_json::from_slice(body)
        .map_err(|e| Error::invalid(format!("the body is not of the expected form: {e}")))
}

/// The grant of a request that another server passed on.
async fn passed_on_grant(app: &App, headers: &HeaderMap) -> Result<Grant> {
    let told = headers.get(GRANT).map(HeaderValue::as_bytes);
    let told = told.ok_or_else(|| Error::unauthenticated("the request names no principal"))?;
    app.auth.grant_from_peer(&parse(told)?).await
}

/// An answer of lines, with a sign of life when there is none for a while.
fn line_response(lines: impl Stream<Item = AnswerLine> + Send + 'static) -> Response {
    let lines = stream::unfold(Some(Box::pin(lines)), |lines| async move {
        let mut lines = lines?;
        let line = tokio::time::timeout(LINE_INTERVAL, lines.next()).await;
        match line {
            Ok(Some(line)) => Some((line, Some(lines))),
            Ok(None) => None,
            Err(_) => Some((AnswerLine::Alive, Some(lines))),
        }
    });
    let body = Body::from_stream(lines.map(|line| Ok::<_, Infallible>(encode_line(&line))));
    ([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response()
}

/// Performs an action for another server's client. The action runs in a task of its own, so that one once begun is
/// finished; when the other server ends the request, it sees that its client has left.
fn perform_action(
    app: &Arc<App>,
    hop: &ClusterHop,
    grant: Result<Grant>,
    name: String,
    call: PassedOnCall,
) -> Response {
    let grant = match grant {
        Ok(grant) => grant,
        Err(error) => return line_response(stream::iter([AnswerLine::Failed { error }])),
    };
    let (registered, stop_waiting) = hop.open_calls.add(call.call_id);
    let gone = CancellationToken::new();
    let (lines, answer) = mpsc::channel(LINE_QUEUE);
    let (awaited, awaited_sessions) = mpsc::unbounded_channel();
    let (messaged, messaged_sessions) = mpsc::unbounded_channel();
    let moved = Arc::new(AtomicBool::new(false));
    let progress = lines.clone();
    let client = ClientContext {
        mcp_session: call.mcp_session.map(Arc::from),
        cancellation: gone.clone(),
        progress: call.progress.then(|| {
            // A report that finds no room is dropped: the next one says more.
            Arc::new(move |report| drop(progress.try_send(AnswerLine::Progress { report }))) as _
        }),
        stream: call
            .events
            .then(|| Arc::new(LineSink(lines.clone())) as Arc<dyn EventSink>),
        awaited_session: Some(awaited),
        messaged_session: Some(messaged),
        stop_waiting,
        hop: RequestHop::PassedOn(moved.clone()),
    };
    let (app, arguments) = (app.clone(), call.arguments);
    tokio::spawn(async move {
        let outcome = actions::perform(&app, &grant, &name, arguments, &client).await;
        drop(client);
        let line = match outcome {
            Ok(result) => AnswerLine::Done { result },
            Err(_) if moved.load(Ordering::Acquire) => AnswerLine::Moved,
            Err(error) => AnswerLine::Failed { error },
        };
        let _ = lines.send(line).await;
    });
    line_response(stream::unfold(
        OpenAnswer {
            answer,
            awaited_sessions,
            messaged_sessions,
            _registered: registered,
            _gone: gone.drop_guard(),
        },
        |mut open| async move { open.next().await.map(|line| (line, open)) },
    ))
}

/// The lines of an action that is being performed. Dropped, it tells the action that its client has left.
struct OpenAnswer {
    answer: mpsc::Receiver<AnswerLine>,
    awaited_sessions: mpsc::UnboundedReceiver<(SessionId, i64)>,
    messaged_sessions: mpsc::UnboundedReceiver<(SessionId, i64)>,
    _registered: PassedOnCallGuard,
    _gone: DropGuard,
}

impl OpenAnswer {
    async fn next(&mut self) -> Option<AnswerLine> {
        tokio::select! {
            // The outcome comes last.
            biased;
            Some((session_id, since)) = self.messaged_sessions.recv() => {
                Some(AnswerLine::Messaged { session_id, since })
            }
            Some((session_id, since)) = self.awaited_sessions.recv() => {
                Some(AnswerLine::Awaited { session_id, since })
            }
            line = self.answer.recv() => line,
        }
    }
}

/// Sends session events as lines.
struct LineSink(mpsc::Sender<AnswerLine>);

#[async_trait::async_trait]
impl EventSink for LineSink {
    async fn event(&self, event: &SessionEvent) {
        let event = Box::new(event.clone());
        // A failure is ignored: the request of a server that is gone is cancelled anyway.
        let _ = self.0.send(AnswerLine::Event { event }).await;
    }
}

/// Marks callers as present until the other server ends the request, which means that they left, or signals that theirs
/// was answered.
fn hold_presence(app: &Arc<App>, hop: &ClusterHop, hold: HoldRequest) -> Response {
    let (registered, answered) = hop.open_calls.add(hold.call_id);
    let held = app.sessions.hold_presence(hold.key, hold.kind);
    let stopping = app.stopping.clone();
    let first = stream::iter([AnswerLine::Held]);
    let rest = stream::once(async move {
        tokio::select! {
            () = answered.cancelled() => held.answered(),
            () = stopping.cancelled() => drop(held),
        }
        drop(registered);
        AnswerLine::Alive
    });
    line_response(first.chain(rest))
}
