//! Caller tools: tools that a client program lends to a session's agent.
//!
//! - [`book`]: a pure state machine of one session's callers and open calls; [`presence`] and `recently_ended`
//!   are its parts.
//! - [`presence_tracker`]: the streams, polls and messages that callers hold open, of all sessions.
//! - `redelivery`: reads open requests back from the log for a caller that has reconnected.
//! - [`CallerRelay`]: connects the book with the clock, the event log and the waiting calls.

pub(crate) mod answer_refusal;
pub(crate) mod book;
mod presence;
pub(crate) mod presence_tracker;
mod recently_ended;
mod redelivery;

#[cfg(test)]
mod book_tests;
#[cfg(test)]
mod relay_tests;

use std::{
    sync::{Arc, Weak},
    task::Poll,
    time::Instant,
};

use async_trait::async_trait;
use futures::Stream;
use oubliette_protocol::{
    CallerId, Error, Principal, RequestId, Result, Scope, SessionId,
    caller::{CallerDeclaration, LentTool, full_name},
    debug::DebugBody,
    event::{EventBody, SessionEvent},
};
use oubliette_store::{Store, TokenRow};
use oubliette_tools::{CallContext, CallOrigin, CallerTools, Permit};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{Notify, oneshot, watch};

use self::{
    book::{CallEnding, CallerBook, DeclarationOrigin, EndedCall, PrincipalId},
    presence::{HoldEnd, HoldId},
    presence_tracker::PresenceTracker,
};

pub use self::{
    book::RelayLimits,
    presence_tracker::{CallerLoad, HoldKind, PresenceHold, PresenceKey},
};

type CallWaiter = oneshot::Sender<CallEnding>;

struct CallerRelayState {
    book: CallerBook<CallWaiter>,
    /// When the deadline task next checks the book; `None` while that task does not run.
    next_check: Option<Instant>,
}

/// The caller relay of one session: takes declarations, passes calls to callers and answers back to the agent.
pub struct CallerRelay {
    weak_self: Weak<Self>,
    session: SessionId,
    store: Store,
    presence: Arc<PresenceTracker>,
    state: Mutex<CallerRelayState>,
    deadline_moved: Notify,
    changes: watch::Sender<u64>,
}

impl CallerRelay {
    pub(crate) fn new(
        session: SessionId,
        store: Store,
        presence: Arc<PresenceTracker>,
        limits: RelayLimits,
    ) -> Arc<Self> {
        let relay = Arc::new_cyclic(|weak_self| Self {
            weak_self: weak_self.clone(),
            session,
            store,
            presence: presence.clone(),
            state: Mutex::new(CallerRelayState {
                book: CallerBook::new(limits),
                next_check: None,
            }),
            deadline_moved: Notify::new(),
            changes: watch::Sender::new(0),
        });
        presence.add_relay(&relay);
        relay
    }

    /// The session whose callers these are.
    pub fn session(&self) -> &SessionId {
        &self.session
    }

    /// A counter that increases whenever a declaration changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Records a declaration. `taken` returns what already uses a full tool name. Everything is checked before
    /// anything is changed.
    pub(crate) async fn declare(
        &self,
        principal: &Principal,
        mcp_session: Option<String>,
        declaration: CallerDeclaration,
        taken: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        let declarer = DeclarationOrigin {
            principal: PrincipalId(principal.token_id.clone()),
            mcp_session,
        };
        self.check_names(&declaration, taken)?;
        self.release_if_revoked(&declaration.caller_id, &declarer.principal)
            .await;
        let caller_id = declaration.caller_id.clone();
        let ended = self
            .presence
            .with_holds_of(&self.session, &caller_id, &declarer, |holds| {
                self.state
                    .lock()
                    .book
                    .declare(declarer.clone(), declaration, holds, Instant::now())
            })?;
        self.ensure_deadline_task();
        self.changes.send_modify(|version| *version += 1);
        self.log_and_deliver(ended).await;
        Ok(())
    }

    /// Checks that the full names of a declaration's tools are free in the session.
    pub(crate) fn check_names(
        &self,
        declaration: &CallerDeclaration,
        taken: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        for tool in &declaration.tools {
            let full = full_name(&declaration.caller_id, &tool.name);
            if let Some(whose) = taken(&full) {
                return Err(Error::conflict(format!(
                    "context.caller_tools: {full} is taken: {whose}; lend it under another name"
                )));
            }
        }
        Ok(())
    }

    /// Gives up a caller id whose token was revoked or has expired, so that another token can declare it.
    async fn release_if_revoked(&self, caller_id: &CallerId, by: &PrincipalId) {
        let owner = self
            .state
            .lock()
            .book
            .live_owner(caller_id, Instant::now())
            .cloned();
        if let Some(PrincipalId(Some(token))) = owner.filter(|owner| owner != by) {
            let row = self.store.token_get(&token).await.ok().flatten();
            let now = oubliette_store::now();
            let live = |row: &TokenRow| row.revoked_at.is_none() && row.expires_at.is_none_or(|at| at > now);
            if !row.as_ref().is_some_and(live) {
                self.presence
                    .mark_left(|declarer| declarer.principal == PrincipalId(Some(token.clone())));
                self.state.lock().book.mark_token_revoked(caller_id);
            }
        }
    }

    /// Answers an open request with a result or an error. A null `result` counts as absent; with neither the
    /// answer is null.
    pub async fn answer(
        &self,
        principal: &Principal,
        request_id: &str,
        result: Option<Value>,
        error: Option<String>,
    ) -> Result<()> {
        let ending = match (result.filter(|r| !r.is_null()), error) {
            (Some(_), Some(_)) => {
                let error = Error::invalid("give result or error, not both");
                self.record_refusal(request_id, &error.message);
                return Err(error);
            }
            (None, Some(error)) => CallEnding::Failed(error),
            (result, None) => CallEnding::Answered(result.unwrap_or(Value::Null)),
        };
        let owner = PrincipalId(principal.token_id.clone());
        // A malformed id is refused like an unknown one.
        let known = request_id
            .parse::<RequestId>()
            .map_err(|_| answer_refusal::AnswerRefusal::NotFound);
        let answered = known.and_then(|id| self.state.lock().book.answer(&id, &owner, ending));
        match answered {
            Ok(ended) => {
                self.log_and_deliver(vec![ended]).await;
                Ok(())
            }
            Err(refusal) => {
                self.record_refusal(request_id, refusal.reason());
                Err(refusal.error())
            }
        }
    }

    fn record_refusal(&self, request_id: &str, reason: &str) {
        record_refusal(&self.store, &self.session, request_id, reason);
    }

    /// The open requests of the callers a stream belongs to, oldest first, for delivery after a reconnect. The
    /// set is fixed by this call; the events are read page by page as the stream is polled.
    pub fn open_requests(
        &self,
        key: &PresenceKey,
    ) -> impl Stream<Item = Result<Arc<SessionEvent>>> + Send + use<> {
        let owner = PrincipalId(key.principal.clone());
        let mut indexes = self.state.lock().book.open_request_indexes(|caller, declarer| {
            declarer.principal == owner
                && key.caller_id.as_ref().is_none_or(|named| named == caller)
                && (key.caller_id.is_some()
                    || declarer.mcp_session == key.mcp_session
                    || key.session.is_some())
        });
        // Concurrent calls may be logged in another order than they were opened.
        indexes.sort_unstable();
        redelivery::read_events_at(self.store.events().clone(), self.session.clone(), indexes.into())
    }

    /// Whether a caller is present.
    pub fn is_present(&self, caller_id: &CallerId) -> bool {
        self.state.lock().book.is_present(caller_id, Instant::now())
    }

    /// How many calls wait for an answer.
    pub fn open_calls(&self) -> usize {
        self.state.lock().book.open_calls()
    }

    /// Ends every open call as cancelled, because the session ends or leaves memory.
    pub(crate) async fn close(&self) {
        let ended = self.state.lock().book.close();
        self.log_and_deliver(ended).await;
        self.presence.remove_relay(&self.session);
        self.changes.send_modify(|version| *version += 1);
    }

    pub(super) fn add_hold(&self, hold: HoldId, matches: impl Fn(&CallerId, &DeclarationOrigin) -> bool) {
        self.state.lock().book.add_hold(hold, matches);
    }

    pub(super) fn end_hold(&self, hold: HoldId, how: HoldEnd, now: Instant) {
        self.state.lock().book.end_hold(hold, how, now);
        self.ensure_deadline_task();
    }

    pub(super) fn mark_left(&self, matches: impl Fn(&CallerId, &DeclarationOrigin) -> bool) {
        self.state.lock().book.mark_left(Instant::now(), matches);
        self.ensure_deadline_task();
    }

    /// Logs the end of calls and then passes the results to the waiting agents, in this order, so that the log
    /// has the end before the agent can act on it.
    async fn log_and_deliver(&self, ended: Vec<EndedCall<CallWaiter>>) {
        let (store, session) = (self.store.clone(), self.session.clone());
        // The book no longer has these calls, so this must finish even if the future is dropped.
        let finished = run_to_completion(async move {
            for EndedCall {
                request_id,
                waiter,
                ending,
                ..
            } in ended
            {
                let outcome = ending.outcome();
                let body = EventBody::CallerToolDone { request_id, outcome };
                // The audit entry of an answer follows, and is waited for: one commit has both.
                if let Err(error) = store.events().append_with_next(&session, body).await {
                    tracing::error!(%session, error = %error.for_log(), "appending the end of a caller tool call failed");
                }
                // Nobody waits when the call was cancelled.
                let _ = waiter.send(ending);
            }
        });
        let _ = finished.await;
    }

    /// Makes sure that the book is checked at its next deadline. One task a session does that; it starts with
    /// the first call and ends when it finds no further deadline. A call that is answered does not wake it.
    fn ensure_deadline_task(&self) {
        let mut state = self.state.lock();
        let Some(next) = state.book.next_deadline() else {
            return;
        };
        match state.next_check {
            Some(until) if until <= next => {}
            Some(_) => self.deadline_moved.notify_one(),
            None => {
                let Some(me) = self.weak_self.upgrade() else {
                    return;
                };
                state.next_check = Some(next);
                drop(state);
                tokio::spawn(me.run_deadline_task());
            }
        }
    }

    async fn run_deadline_task(self: Arc<Self>) {
        loop {
            let (ended, next) = {
                let mut state = self.state.lock();
                let ended = state.book.tick(Instant::now());
                state.next_check = state.book.next_deadline();
                (ended, state.next_check)
            };
            self.log_and_deliver(ended).await;
            let Some(next) = next else { return };
            tokio::select! {
                () = tokio::time::sleep_until(next.into()) => {}
                () = self.deadline_moved.notified() => {}
            }
        }
    }

    async fn call_lent_tool(
        &self,
        caller_id: &CallerId,
        tool: &LentTool,
        arguments: Value,
        ctx: &CallContext,
    ) -> Result<Value> {
        let request_id = RequestId::generate();
        let (waiter, ending) = oneshot::channel();
        self.state.lock().book.open_call(
            request_id.clone(),
            caller_id,
            &tool.name,
            waiter,
            Instant::now(),
        )?;
        let mut open = OpenCallGuard {
            relay: self.weak_self.clone(),
            request_id: request_id.clone(),
            logged: true,
        };
        let body = EventBody::CallerToolRequest {
            request_id: request_id.clone(),
            caller_id: caller_id.clone(),
            tool: tool.name.clone(),
            arguments,
        };
        let (store, session) = (self.store.clone(), self.session.clone());
        // Runs to completion, so that the log never has the end of a call without its beginning.
        let logged = run_to_completion(async move { store.events().append(&session, vec![body]).await });
        match logged.await.and_then(|logged| logged) {
            Ok(events) => {
                let index = events.first().map_or(-1, |event| event.index);
                self.state.lock().book.set_log_index(&request_id, index);
            }
            Err(error) => {
                open.logged = false;
                return Err(error);
            }
        }
        self.ensure_deadline_task();
        let mut ending = ending;
        let ending = tokio::select! {
            ending = &mut ending => ending,
            () = ctx.cancel.cancelled() => {
                let cancelled = self.state.lock().book.cancel(&request_id);
                if let Some(ended) = cancelled {
                    Box::pin(self.log_and_deliver(vec![ended])).await;
                }
                // If it ended at the same moment, the agent gets that ending, which is also in the log.
                ending.await
            }
        };
        let ending = ending.unwrap_or(CallEnding::Cancelled);
        let full = || full_name(caller_id, &tool.name);
        match ending {
            CallEnding::Answered(value) => Ok(value),
            CallEnding::Failed(text) => Err(Error::tool_error(text)),
            CallEnding::Timeout => Err(Error::timeout(format!(
                "{}: the caller did not answer in time",
                full()
            ))),
            CallEnding::Disconnected => Err(Error::caller_disconnected(format!(
                "{}: the caller is not connected any more, so the tool cannot be run",
                full()
            ))),
            CallEnding::Cancelled => Err(Error::unavailable(format!("{}: the call was cancelled", full()))),
        }
    }
}

/// Runs a future to its end even when the returned future is dropped: if it is not ready at the first poll, it
/// continues in a task of its own.
pub(crate) async fn run_to_completion<T: Send + 'static>(
    future: impl Future<Output = T> + Send + 'static,
) -> Result<T> {
    let mut future = Box::pin(future);
    match futures::poll!(&mut future) {
        Poll::Ready(done) => Ok(done),
        Poll::Pending => tokio::spawn(future).await.map_err(Error::internal),
    }
}

/// Records a refused answer in the debugger and in the server's log, but not in the session's event log.
pub(crate) fn record_refusal(store: &Store, session: &SessionId, request_id: &str, reason: &str) {
    let request_id: String = request_id.chars().take(100).collect();
    tracing::warn!(%session, request_id, reason, "an answer to a caller tool request was refused");
    let body = DebugBody::AnswerRefused {
        request_id,
        reason: reason.to_owned(),
    };
    store.debugger().record(Some(session.clone()), None, body);
}

/// Cancels an open call when the future that waits for it is dropped, so that the log tells the caller.
struct OpenCallGuard {
    relay: Weak<CallerRelay>,
    request_id: RequestId,
    logged: bool,
}

impl Drop for OpenCallGuard {
    fn drop(&mut self) {
        let Some(relay) = self.relay.upgrade() else { return };
        let Some(ended) = relay.state.lock().book.cancel(&self.request_id) else {
            return;
        };
        if let (true, Ok(runtime)) = (self.logged, tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { relay.log_and_deliver(vec![ended]).await });
        }
    }
}

#[async_trait]
impl CallerTools for CallerRelay {
    fn declarations(&self) -> Vec<Arc<CallerDeclaration>> {
        self.state.lock().book.declarations()
    }

    fn may_call(&self, caller_id: &CallerId, origin: &CallOrigin) -> Result<()> {
        let CallOrigin::Outside(principal) = origin else {
            return Ok(());
        };
        let declared =
            self.state.lock().book.owner(caller_id) == Some(&PrincipalId(principal.token_id.clone()));
        match declared || principal.scope == Scope::Admin {
            true => Ok(()),
            false => Err(Error::permission_denied(format!(
                "tools of caller {caller_id} can be called by the token that declared them, or by an admin"
            ))),
        }
    }

    async fn call(
        &self,
        _permit: Permit,
        caller_id: &CallerId,
        tool: &LentTool,
        arguments: Value,
        ctx: &CallContext,
    ) -> Result<Value> {
        self.call_lent_tool(caller_id, tool, arguments, ctx).await
    }
}
