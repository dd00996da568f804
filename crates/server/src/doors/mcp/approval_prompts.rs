//! Asks the user of an MCP client about calls that wait for approval, in the client's own form, while its
//! `session_message` with `wait` is open.
//!
//! Up to 2025-11-25 the server sends `elicitation/create` and the message stays open. From 2026-07-28 on the message is
//! answered with an input-required result, and the client sends it again with the user's answers; its state names the
//! turn, so that the message itself is not sent twice. The state is not secret and needs no seal: whoever sends it has
//! to be allowed to see the session and to decide its approvals.

use std::{
    collections::{HashMap, HashSet},
    convert::Infallible,
    sync::Arc,
};

use futures::{StreamExt as _, stream::FuturesUnordered};
use oubliette_protocol::{
    ApprovalId, Error, JsonObject, Result, SessionId,
    approval::{ApprovalRequest, ApprovalStatus},
    event::EventBody,
    strict,
};
use oubliette_session::{ApprovalQuery, HoldKind, TurnToAwait};
use oubliette_store::PageRequest;
use rmcp::{
    ErrorData, RoleServer, ServiceError,
    model::{
        CallToolRequestParams, CallToolResponse, ClientResult, ElicitRequest, ElicitRequestParams,
        ElicitResult, ElicitationAction, InputRequiredResult, InputResponses, ServerRequest,
    },
    service::{Peer, PeerRequestOptions, RequestContext},
};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use super::{approval_question::question, handler::is_legacy};
use crate::{
    actions::{self, ActionHandler as _, ClientContext, session_message::SessionMessage},
    app::App,
    auth::Grant,
    presence::PresenceGuard,
};

/// How many approvals one result asks about, and how many a state remembers having asked about.
const MAX_ASKED: usize = 100;

/// How a client is asked.
pub(super) enum PromptForm {
    /// By a request of its own, while the message stays open.
    Request(Peer<RoleServer>),
    /// By the message's result.
    Result,
}

impl PromptForm {
    /// How the client of a call can be asked: only one that declared elicitation by form, and only while it waits for
    /// a turn.
    pub(super) fn of(request: &CallToolRequestParams, context: &RequestContext<RoleServer>) -> Option<Self> {
        let waits = |arguments: &JsonObject| arguments.get("wait") == Some(&Value::Bool(true));
        if request.name != SessionMessage::NAME || !request.arguments.as_ref().is_some_and(waits) {
            return None;
        }
        let elicitation = context.client_capabilities()?.elicitation?;
        // An empty capability means forms.
        if elicitation.form.is_none() && elicitation.url.is_some() {
            return None;
        }
        Some(match is_legacy(context) {
            true => Self::Request(context.peer.clone()),
            false => Self::Result,
        })
    }
}

/// A session whose turn a client waits for, and the index of the last event before its message.
pub(crate) type AwaitedSession = (SessionId, i64);

/// The approvals of a session that wait now, oldest first, at most [`MAX_ASKED`].
async fn waiting_approvals(app: &App, grant: &Grant, session: &SessionId) -> Result<Vec<ApprovalRequest>> {
    let query = ApprovalQuery {
        session_id: Some(session.clone()),
        status: Some(ApprovalStatus::Pending),
        ..ApprovalQuery::default()
    };
    let page = PageRequest::first(MAX_ASKED as u32);
    let waiting = app.sessions.approval_list(grant.principal(), query, page).await?;
    Ok(waiting.items.into_iter().rev().map(|row| row.request).collect())
}

/// Sends the client a request for each approval of the session, until this is dropped.
pub(super) async fn ask_by_request(
    app: &Arc<App>,
    grant: &Grant,
    peer: &Peer<RoleServer>,
    announced: &mut mpsc::UnboundedReceiver<AwaitedSession>,
) -> Infallible {
    let Some((session, since)) = announced.recv().await else {
        return std::future::pending().await;
    };
    let mut events = app.store.events().follow(&session, since);
    let mut open = FuturesUnordered::new();
    let mut asked: HashMap<ApprovalId, CancellationToken> = HashMap::new();
    // What waited before the message is asked about too: the message's turn comes after it.
    let waiting = waiting_approvals(app, grant, &session).await.unwrap_or_default();
    let seen: HashSet<ApprovalId> = waiting
        .iter()
        .map(|request| request.approval_id.clone())
        .collect();
    for request in waiting {
        let decided = CancellationToken::new();
        asked.insert(request.approval_id.clone(), decided.clone());
        open.push(ask_once(app, grant, peer, request, decided));
    }
    loop {
        tokio::select! {
            event = events.next() => match event {
                Some(Ok(event)) => match &event.body {
                    EventBody::ApprovalRequested(request) if !seen.contains(&request.approval_id) => {
                        let decided = CancellationToken::new();
                        asked.insert(request.approval_id.clone(), decided.clone());
                        open.push(ask_once(app, grant, peer, request.clone(), decided));
                    }
                    EventBody::ApprovalDecided(decision) => {
                        if let Some(decided) = asked.remove(&decision.approval_id) {
                            decided.cancel();
                        }
                    }
                    _ => {}
                },
                Some(Err(_)) | None => std::future::pending().await,
            },
            Some(()) = open.next(), if !open.is_empty() => {}
        }
    }
}

/// Sends one request, and decides as the user answers. An approval that is decided elsewhere is no longer asked about.
async fn ask_once(
    app: &Arc<App>,
    grant: &Grant,
    peer: &Peer<RoleServer>,
    request: ApprovalRequest,
    decided: CancellationToken,
) {
    let Ok(question) = serde_json::from_value::<ElicitRequestParams>(question(&request)) else {
        return;
    };
    let question = ServerRequest::ElicitRequest(ElicitRequest::new(question));
    let sent = peer
        .send_cancellable_request(question, PeerRequestOptions::no_options())
        .await;
    let answer = match sent {
        Ok(mut asked) => tokio::select! {
            () = decided.cancelled() => {
                // The client closes what it shows its user.
                let _ = asked.cancel(Some("it was decided elsewhere".to_owned())).await;
                return;
            }
            answer = &mut asked.rx => answer.unwrap_or(Err(ServiceError::TransportClosed)),
        },
        Err(error) => Err(error),
    };
    match answer {
        Ok(ClientResult::ElicitResult(answer)) => decide(app, grant, &request.approval_id, &answer).await,
        Ok(_) => {}
        Err(error) => tracing::debug!(%error, approval = %request.approval_id, "an elicitation failed"),
    }
}

/// Waits for the first approval of the session that its client is to be asked about. It may have waited before the
/// message: the message's turn comes after it. Returns the index of the last event that was looked at.
pub(super) async fn first_approval(
    app: &App,
    grant: &Grant,
    awaited: &AwaitedSession,
) -> (i64, ApprovalRequest) {
    let (session, since) = awaited;
    let waiting = waiting_approvals(app, grant, session).await.unwrap_or_default();
    match waiting.into_iter().next() {
        Some(request) => (*since, request),
        None => next_approval(app, awaited, &[]).await,
    }
}

/// Waits for an approval of the session that waits and is not in `asked`. Returns the index of its event. What was requested
/// and decided while the client had its user answer another one is passed over.
async fn next_approval(
    app: &App,
    (session, since): &AwaitedSession,
    asked: &[ApprovalId],
) -> (i64, ApprovalRequest) {
    let mut events = app.store.events().follow(session, *since);
    while let Some(Ok(event)) = events.next().await {
        if let EventBody::ApprovalRequested(request) = &event.body
            && !asked.contains(&request.approval_id)
            && is_pending(app, &request.approval_id).await
        {
            return (event.index, request.clone());
        }
    }
    std::future::pending().await
}

/// Whether an approval waits. If that cannot be read it is asked about: an answer that comes too late changes nothing.
async fn is_pending(app: &App, id: &ApprovalId) -> bool {
    match app.store.approval_get(id).await {
        Ok(row) => row.is_some_and(|row| row.status == ApprovalStatus::Pending),
        Err(_) => true,
    }
}

/// What a client sends back with the user's answers.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct PromptState {
    session_id: SessionId,
    turn: u64,
    since: i64,
    /// Whether the turn had begun at `since`; else the message is queued.
    begun: bool,
    asked: Vec<ApprovalId>,
}

/// The result that asks about an approval, and about the others of the session that wait. `reply` is the answer to the
/// message, without a text since the turn goes on.
pub(super) async fn input_required(
    app: &App,
    grant: &Grant,
    reply: &Value,
    (index, request): (i64, ApprovalRequest),
    mut asked: Vec<ApprovalId>,
) -> Result<InputRequiredResult> {
    let session_id: SessionId = strict::from_value(reply["session_id"].clone())?;
    let waiting = waiting_approvals(app, grant, &session_id).await?;
    let mut requests = JsonObject::new();
    for request in std::iter::once(request).chain(waiting) {
        if !asked.contains(&request.approval_id) {
            let wanted = json!({ "method": "elicitation/create", "params": question(&request) });
            requests.insert(request.approval_id.to_string(), wanted);
            asked.push(request.approval_id);
        }
    }
    let forgotten = asked.len().saturating_sub(MAX_ASKED);
    let turn = reply["turn"].as_u64().unwrap_or_default();
    let row = app.store.session_get(&session_id).await?;
    let state = PromptState {
        session_id,
        turn,
        since: index,
        begun: row.is_some_and(|row| row.turn >= turn),
        asked: asked.split_off(forgotten),
    };
    let requests = serde_json::from_value(Value::Object(requests)).map_err(Error::internal)?;
    let mut result = InputRequiredResult::from_input_requests(requests);
    result.request_state = Some(serde_json::to_string(&state).map_err(Error::internal)?);
    Ok(result)
}

/// Serves a message that is sent again with the user's answers: decides, and waits for the turn to end or for the next
/// approval.
pub(super) async fn resume(
    app: &Arc<App>,
    grant: &Grant,
    state: &str,
    responses: Option<&InputResponses>,
    client: &ClientContext,
) -> Result<CallToolResponse, ErrorData> {
    let resumed = async {
        actions::check_grant(grant, &SessionMessage::definition())?;
        let state: PromptState =
            strict::from_str(state).map_err(|error| Error::invalid(format!("requestState: {error}")))?;
        if state.asked.len() > MAX_ASKED {
            return Err(Error::invalid(
                "requestState: it is not one that this server gave out",
            ));
        }
        for (id, answer) in responses.into_iter().flatten() {
            let id: ApprovalId = id.parse()?;
            match serde_json::from_value::<ElicitResult>(answer.clone()) {
                Ok(answer) => decide(app, grant, &id, &answer).await,
                Err(error) => return Err(Error::invalid(format!("inputResponses.{id}: {error}"))),
            }
        }
        let awaited = TurnToAwait {
            session_id: state.session_id.clone(),
            turn: state.turn,
            since: state.since,
            begun: state.begun,
        };
        let stop = CancellationToken::new();
        let present =
            PresenceGuard::where_session_runs(app, grant, &state.session_id, HoldKind::Wait).await?;
        let waiting = async {
            let reply = app
                .sessions
                .wait_for_turn(grant.principal(), None, &awaited, &stop)
                .await;
            present.release_as_answered();
            reply
        };
        let mut waiting = std::pin::pin!(waiting);
        let session = (state.session_id.clone(), state.since);
        let next = tokio::select! {
            biased;
            reply = &mut waiting => return Ok((reply?, None)),
            () = client.cancellation.cancelled() => return Err(Error::unavailable("the client left")),
            () = app.auth.wait_until_ended(grant) => {
                return Err(Error::unauthenticated("this token has expired or was revoked"));
            }
            next = next_approval(app, &session, &state.asked) => next,
        };
        stop.cancel();
        Ok((waiting.await?, Some((next, state.asked))))
    };
    let outcome: Result<CallToolResponse> = async {
        let (reply, next) = resumed.await?;
        let ended = reply.text.is_some();
        let reply = actions::output::to_json(reply)?;
        match next.filter(|_| !ended) {
            None => Ok(super::handler::tool_result(Ok(reply)).into()),
            Some((next, asked)) => {
                let result = input_required(app, grant, &reply, next, asked).await?;
                Ok(result.into())
            }
        }
    }
    .await;
    Ok(outcome.unwrap_or_else(|error| super::handler::tool_result(Err(error)).into()))
}

/// Decides an approval as a user answered. One that was cancelled, or answered without a decision, stays pending.
async fn decide(app: &Arc<App>, grant: &Grant, id: &ApprovalId, answer: &ElicitResult) {
    let mut arguments = JsonObject::from_iter([("approval_id".to_owned(), json!(id))]);
    match &answer.action {
        ElicitationAction::Accept => {
            let Some(Value::Object(content)) = &answer.content else {
                return;
            };
            let given = ["decision", "reason", "remember"].into_iter();
            let given = given.filter_map(|name| Some((name.to_owned(), content.get(name)?.clone())));
            arguments.extend(given.filter(|(_, value)| !value.is_null() && *value != ""));
            match arguments.get("decision") {
                None => return,
                // A form may keep what was chosen for an allowed call.
                Some(decision) if decision == "deny" => drop(arguments.remove("remember")),
                Some(_) => {}
            }
        }
        ElicitationAction::Decline => {
            arguments.insert("decision".into(), "deny".into());
        }
        // Cancelled, or an action of a later revision.
        _ => return,
    }
    let client = ClientContext::default();
    // A refused decision is in the audit log; an approval that was decided elsewhere needs no more.
    let decided = actions::perform(app, grant, "approval_decide", arguments, &client).await;
    if let Err(error) = decided {
        tracing::debug!(%error, approval = %id, "an answer to an elicitation did not decide");
    }
}
