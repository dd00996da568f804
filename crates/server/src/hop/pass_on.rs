//! Passing an action on to the server that runs its session, and its answer back to the client here.

use std::{sync::Arc, time::Duration};

use oubliette_protocol::{Error, JsonObject, Result};
use oubliette_store::PeerServer;
use serde_json::Value;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::{
    ClusterHop, IfUnowned, OwnedTarget, SessionPlace,
    client::{PeerFailure, PeerRequest},
    new_call_id, owner_unreachable,
    wire::{AnswerLine, AnswerLineReader, CallSignal, PassedOnCall},
};
use crate::{
    actions::{ActionDefinition, ClientContext, Effect},
    app::App,
    auth::Grant,
};

/// How long a request waits for another server to take over the sessions of one that cannot be reached.
pub(super) const TAKEOVER_WAIT: Duration = Duration::from_secs(15);
/// How long the server that runs a session may take to begin an answer that the database has as well.
const DETOUR_TIMEOUT: Duration = Duration::from_secs(4);
/// How often is looked who runs a session, meanwhile.
const OWNER_POLL: Duration = Duration::from_millis(250);

/// Where an action has to be performed.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ActionRoute<'a> {
    /// What it acts on.
    pub(crate) target: OwnedTarget<'a>,
    /// What becomes of a session that no server runs.
    pub(crate) unowned: IfUnowned,
    /// What is answered while the server that runs it cannot be reached.
    pub(crate) unreachable: IfUnreachable,
}

/// What is answered while the server that runs a session cannot be reached.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum IfUnreachable {
    /// What the database has: all but what only that server knows.
    AnswerHere,
    /// Nothing, until another server has taken the session over, or for 15 s.
    Wait,
}

/// Whether a request may be made again when nobody knows whether it was served.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RetrySafety {
    Yes,
    No,
}

/// How long, and how often, a server that does not answer is asked.
pub(super) struct RetryPolicy<'a> {
    /// How long it, or another that takes its sessions over, is waited for.
    pub(super) waiting: Duration,
    pub(super) repeatable: RetrySafety,
    /// The client has left.
    pub(super) cancelled: &'a CancellationToken,
}

/// What became of an action.
pub(crate) enum RouteOutcome {
    /// It is to be performed here.
    Here,
    /// Another server performed it, with this outcome.
    Answered(Result<Value>),
}

impl ClusterHop {
    /// Passes an action on if another server runs its session. An error says that no server performed it, or that it is
    /// not known.
    pub(crate) async fn pass_on(
        self: &Arc<Self>,
        app: &Arc<App>,
        grant: &Grant,
        definition: &ActionDefinition,
        route: ActionRoute<'_>,
        arguments: JsonObject,
        client: &ClientContext,
    ) -> Result<RouteOutcome> {
        let call = PassedOnCall {
            arguments,
            call_id: new_call_id(),
            mcp_session: client.mcp_session.as_ref().map(|id| id.to_string()),
            progress: client.progress.is_some(),
            events: client.stream.is_some(),
        };
        let path = format!("/internal/actions/{}", definition.name);
        let mut request = None;
        let repeatable = match definition.effect {
            Effect::Read => RetrySafety::Yes,
            Effect::Write | Effect::Set | Effect::Delete | Effect::Stream => RetrySafety::No,
        };
        let attempt = |peer: PeerServer| {
            // Made only if there is another server to send it to.
            let request = match &request {
                Some(request) => Ok(request),
                None => PeerRequest::post(&path, &call)
                    .and_then(|made| made.for_grant(grant))
                    .map(|made| match route.unreachable {
                        IfUnreachable::AnswerHere => made.answered_within(DETOUR_TIMEOUT),
                        IfUnreachable::Wait => made,
                    })
                    .map(|made| &*request.insert(made)),
            };
            let request = request.cloned();
            let (me, app, call_id) = (self.clone(), app.clone(), call.call_id.clone());
            async move {
                let request = request.map_err(PeerFailure::NotTaken)?;
                let answering = me.answer(&app, &peer, &request, &call_id, client);
                tokio::select! {
                    outcome = answering => outcome,
                    // Dropping the request tells the other server that its client has left.
                    () = client.cancellation.cancelled() => Ok(Err(Error::unavailable("the client left"))),
                }
            }
        };
        let waiting = match route.unreachable {
            IfUnreachable::AnswerHere => Duration::ZERO,
            IfUnreachable::Wait => TAKEOVER_WAIT,
        };
        let retries = RetryPolicy {
            waiting,
            repeatable,
            cancelled: &client.cancellation,
        };
        let done = self.at_owner(app, grant, route, retries, attempt).await;
        match done {
            Ok(Some(outcome)) => Ok(RouteOutcome::Answered(outcome)),
            Ok(None) => Ok(RouteOutcome::Here),
            Err(error) if route.unreachable == IfUnreachable::AnswerHere => {
                tracing::debug!(action = definition.name, error = %error.for_log(), "answered from the database");
                Ok(RouteOutcome::Here)
            }
            Err(error) => Err(error),
        }
    }

    /// Makes a request to the server that runs a session; `None` if that is this one. A server that cannot be reached is
    /// waited for, or for another that takes its sessions over.
    pub(super) async fn at_owner<T, F>(
        &self,
        app: &App,
        grant: &Grant,
        route: ActionRoute<'_>,
        retries: RetryPolicy<'_>,
        mut attempt: impl FnMut(PeerServer) -> F,
    ) -> Result<Option<T>>
    where
        F: Future<Output = Result<T, PeerFailure>>,
    {
        let mut give_up = None;
        loop {
            let SessionPlace::Peer(peer) = self.place(app, grant, route.target, route.unowned).await? else {
                return Ok(None);
            };
            let error = match attempt(peer.clone()).await {
                Ok(done) => return Ok(Some(done)),
                Err(PeerFailure::Moved) => owner_unreachable(&peer),
                Err(PeerFailure::NotTaken(error)) => error,
                Err(PeerFailure::Unanswered(error)) if retries.repeatable == RetrySafety::Yes => error,
                Err(PeerFailure::Unanswered(error)) => return Err(error),
            };
            let now = Instant::now();
            let give_up = *give_up.get_or_insert(now + retries.waiting);
            if now >= give_up {
                return Err(error);
            }
            tracing::debug!(server = %peer.server_id, error = %error.for_log(), "the server that runs a session did not answer");
            tokio::select! {
                () = tokio::time::sleep(OWNER_POLL) => {}
                () = retries.cancelled.cancelled() => return Err(Error::unavailable("the client left")),
            }
        }
    }

    /// Sends an action and passes on what its server tells the client, to the outcome.
    async fn answer(
        &self,
        app: &App,
        peer: &PeerServer,
        request: &PeerRequest,
        call_id: &str,
        client: &ClientContext,
    ) -> Result<Result<Value>, PeerFailure> {
        let answer = self.peers.send(peer, request).await?;
        if !answer.status().is_success() {
            return Err(PeerFailure::NotTaken(owner_unreachable(peer)));
        }
        let unanswered = |why: &str| {
            PeerFailure::Unanswered(Error::unavailable(format!(
                "the server that runs this session ({}) {why}; look whether it was done before you try again",
                peer.server_id
            )))
        };
        let mut lines = AnswerLineReader::new(answer.bytes_stream());
        let mut stop_waiting = std::pin::pin!(self.signal_when(&client.stop_waiting, peer, call_id));
        let mut gone = std::pin::pin!(self.peers.gone(&peer.server_id));
        loop {
            let line = tokio::select! {
                line = lines.next() => line,
                () = &mut gone => return Err(unanswered("is gone")),
                never = &mut stop_waiting => match never {},
            };
            match line {
                Ok(Some(AnswerLine::Done { result })) => return Ok(Ok(result)),
                Ok(Some(AnswerLine::Failed { error })) => return Ok(Err(error)),
                Ok(Some(AnswerLine::Moved)) => return Err(PeerFailure::Moved),
                Ok(Some(AnswerLine::Messaged { session_id, since })) => {
                    let listener = client
                        .mcp_session
                        .as_ref()
                        .and_then(|id| app.mcp_sessions.get(id));
                    if let Some(listener) = listener {
                        listener.record_peer(peer);
                        listener.record_message(&session_id, since);
                    }
                }
                Ok(Some(AnswerLine::Awaited { session_id, since })) => {
                    if let Some(awaited) = &client.awaited_session {
                        let _ = awaited.send((session_id, since));
                    }
                }
                Ok(Some(AnswerLine::Event { event })) => {
                    if let Some(sink) = &client.stream {
                        sink.event(&event).await;
                    }
                }
                Ok(Some(AnswerLine::Progress { report })) => {
                    if let Some(progress) = &client.progress {
                        progress(report);
                    }
                }
                Ok(Some(AnswerLine::Alive | AnswerLine::Held | AnswerLine::Unknown)) => {}
                Ok(None) => return Err(unanswered("ended the connection before its answer")),
                Err(error) => {
                    tracing::debug!(server = %peer.server_id, %error, "reading another server's answer failed");
                    return Err(unanswered("did not finish its answer"));
                }
            }
        }
    }

    /// Tells the other server when a waiting call is to be answered before its turn has ended.
    async fn signal_when(
        &self,
        stop_waiting: &CancellationToken,
        peer: &PeerServer,
        call_id: &str,
    ) -> std::convert::Infallible {
        stop_waiting.cancelled().await;
        self.signal(peer, call_id).await;
        std::future::pending().await
    }

    /// Tells the other server that an open call is to end as answered.
    pub(super) async fn signal(&self, peer: &PeerServer, call_id: &str) {
        let signal = CallSignal {
            call_id: call_id.to_owned(),
        };
        let Ok(request) = PeerRequest::post("/internal/signal", &signal) else {
            return;
        };
        if let Err(failure) = self.peers.send(peer, &request).await {
            tracing::debug!(server = %peer.server_id, ?failure, "signalling an open call failed");
        }
    }
}
