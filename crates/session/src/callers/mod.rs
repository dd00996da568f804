//! Caller tools: what the program that started a session lends to its agent.
//!
//! - [`book`]: the pure state machine of one session; [`presence`] and `finished` are its parts.
//! - [`board`]: what callers hold open, across sessions.
//! - `again`: open requests read back from the log for a caller that returned.
//! - [`CallerBook`]: the book with a clock, the event log and whoever waits.

mod again;
pub mod board;
pub mod book;
mod finished;
pub mod presence;

#[cfg(test)]
mod book_tests;
#[cfg(test)]
mod shell_tests;

use std::{
    sync::{Arc, Weak},
    task::Poll,
    time::Instant,
};

use async_trait::async_trait;
use futures::Stream;
use oubliette_protocol::{
    CallerId, Error, Principal, RequestId, Result, Scope, SessionId,
    caller::{Declaration, LentTool, full_name},
    debug::DebugBody,
    event::{Event, EventBody},
};
use oubliette_store::{Store, TokenRow};
use oubliette_tools::{CallContext, Callers, Origin, Permit};
use parking_lot::Mutex;
use serde_json::Value;
use tokio::sync::{Notify, oneshot, watch};

use self::{
    board::Board,
    book::{Book, Declarer, Ended, Ending, Owner},
    presence::{Departure, HoldId},
};

pub use self::{
    board::{Hold, Kind, Load, PresenceKey},
    book::Rules,
};

type Waiter = oneshot::Sender<Ending>;

struct State {
    book: Book<Waiter>,
    /// When the driver looks next, while there is one.
    driven_until: Option<Instant>,
}

/// The callers of one session: declared, called, answered.
pub struct CallerBook {
    me: Weak<Self>,
    session: SessionId,
    store: Store,
    board: Arc<Board>,
    state: Mutex<State>,
    sooner: Notify,
    changes: watch::Sender<u64>,
}

impl CallerBook {
    pub(crate) fn new(session: SessionId, store: Store, board: Arc<Board>, rules: Rules) -> Arc<Self> {
        let book = Arc::new_cyclic(|me| Self {
            me: me.clone(),
            session,
            store,
            board: board.clone(),
            state: Mutex::new(State {
                book: Book::new(rules),
                driven_until: None,
            }),
            sooner: Notify::new(),
            changes: watch::Sender::new(0),
        });
        board.add(&book);
        book
    }

    /// Whose callers.
    pub fn session(&self) -> &SessionId {
        &self.session
    }

    /// Bumped whenever a declaration changes.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Takes a declaration. `taken` says who has a full name already. Everything is checked before
    /// anything changes.
    pub(crate) async fn declare(
        &self,
        principal: &Principal,
        mcp_session: Option<String>,
        declaration: Declaration,
        taken: impl Fn(&str) -> Option<String>,
    ) -> Result<()> {
        let declarer = Declarer {
            owner: Owner(principal.token_id.clone()),
            mcp_session,
        };
        self.check(&declaration, taken)?;
        self.release_if_revoked(&declaration.caller_id, &declarer.owner)
            .await;
        let caller_id = declaration.caller_id.clone();
        let ended = self
            .board
            .with_holds_of(&self.session, &caller_id, &declarer, |holds| {
                self.state
                    .lock()
                    .book
                    .declare(declarer.clone(), declaration, holds, Instant::now())
            })?;
        self.look_sooner();
        self.changes.send_modify(|version| *version += 1);
        self.finish(ended).await;
        Ok(())
    }

    /// Checks a declaration against the session without taking it.
    pub(crate) fn check(
        &self,
        declaration: &Declaration,
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

    /// A revoked or expired token is not live: what it declared can be taken over.
    async fn release_if_revoked(&self, caller_id: &CallerId, by: &Owner) {
        let owner = self
            .state
            .lock()
            .book
            .live_owner(caller_id, Instant::now())
            .cloned();
        if let Some(Owner(Some(token))) = owner.filter(|owner| owner != by) {
            let row = self.store.token_get(&token).await.ok().flatten();
            let now = oubliette_store::now();
            let live = |row: &TokenRow| row.revoked_at.is_none() && row.expires_at.is_none_or(|at| at > now);
            if !row.as_ref().is_some_and(live) {
                self.board
                    .leave(|declarer| declarer.owner == Owner(Some(token.clone())));
                self.state.lock().book.disown(caller_id);
            }
        }
    }

    /// Answers an open request. `result` and `error` are absent when null.
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
                self.note_refusal(request_id, &error.message);
                return Err(error);
            }
            (None, Some(error)) => Ending::Failed(error),
            (result, None) => Ending::Answered(result.unwrap_or(Value::Null)),
        };
        let owner = Owner(principal.token_id.clone());
        // What is no request id names no request.
        let known = request_id
            .parse::<RequestId>()
            .map_err(|_| book::Refusal::NotFound);
        let answered = known.and_then(|id| self.state.lock().book.answer(&id, &owner, ending));
        match answered {
            Ok(ended) => {
                self.finish(vec![ended]).await;
                Ok(())
            }
            Err(refusal) => {
                self.note_refusal(request_id, refusal.reason());
                Err(refusal.error())
            }
        }
    }

    fn note_refusal(&self, request_id: &str, reason: &str) {
        note_refusal(&self.store, &self.session, request_id, reason);
    }

    /// The open requests of the callers a stream speaks for, to be delivered again, oldest first. Which
    /// they are is settled now; they are read as they are asked for, page by page.
    pub fn open_requests(&self, key: &PresenceKey) -> impl Stream<Item = Result<Arc<Event>>> + Send + use<> {
        let owner = Owner(key.principal.clone());
        let mut indexes = self.state.lock().book.open_indexes(|caller, declarer| {
            declarer.owner == owner
                && key.caller_id.as_ref().is_none_or(|named| named == caller)
                && (key.caller_id.is_some()
                    || declarer.mcp_session == key.mcp_session
                    || key.session.is_some())
        });
        // Calls made at once may be logged in another order than they were opened in.
        indexes.sort_unstable();
        again::read(self.store.events().clone(), self.session.clone(), indexes.into())
    }

    /// Whether a caller is present.
    pub fn is_present(&self, caller_id: &CallerId) -> bool {
        self.state.lock().book.is_present(caller_id, Instant::now())
    }

    /// How many calls wait.
    pub fn open_calls(&self) -> usize {
        self.state.lock().book.open_calls()
    }

    /// The session is over: every open call ends as cancelled.
    pub(crate) async fn close(&self) {
        let ended = self.state.lock().book.close();
        self.finish(ended).await;
        self.board.remove(&self.session);
        self.changes.send_modify(|version| *version += 1);
    }

    pub(super) fn arrive(&self, hold: HoldId, speaks: impl Fn(&CallerId, &Declarer) -> bool) {
        self.state.lock().book.arrive(hold, speaks);
    }

    pub(super) fn depart(&self, hold: HoldId, how: Departure, now: Instant) {
        self.state.lock().book.depart(hold, how, now);
        self.look_sooner();
    }

    pub(super) fn leave(&self, matches: impl Fn(&CallerId, &Declarer) -> bool) {
        self.state.lock().book.leave(Instant::now(), matches);
        self.look_sooner();
    }

    /// The end of a call goes into the log before the agent can act on it.
    async fn finish(&self, ended: Vec<Ended<Waiter>>) {
        let (store, session) = (self.store.clone(), self.session.clone());
        // These calls are in no table any more: whatever happens to whoever ended them, this is their end.
        let finished = whole(async move {
            for Ended {
                request_id,
                waiter,
                ending,
                ..
            } in ended
            {
                let outcome = ending.outcome();
                let body = EventBody::CallerToolDone { request_id, outcome };
                if let Err(error) = store.events().append_soon(&session, body).await {
                    tracing::error!(%session, error = %error.for_log(), "a caller call's end was not logged");
                }
                // Nobody waits when the call was cancelled.
                let _ = waiter.send(ending);
            }
        });
        let _ = finished.await;
    }

    /// Makes sure that something looks at the book when its next deadline comes: one task a session, from the
    /// first call on until a deadline comes with none open. A call that ends in time does not wake it.
    fn look_sooner(&self) {
        let mut state = self.state.lock();
        let Some(next) = state.book.next_deadline() else {
            return;
        };
        match state.driven_until {
            Some(until) if until <= next => {}
            Some(_) => self.sooner.notify_one(),
            None => {
                let Some(me) = self.me.upgrade() else { return };
                state.driven_until = Some(next);
                drop(state);
                tokio::spawn(me.drive());
            }
        }
    }

    async fn drive(self: Arc<Self>) {
        loop {
            let (ended, next) = {
                let mut state = self.state.lock();
                let ended = state.book.tick(Instant::now());
                state.driven_until = state.book.next_deadline();
                (ended, state.driven_until)
            };
            self.finish(ended).await;
            let Some(next) = next else { return };
            tokio::select! {
                () = tokio::time::sleep_until(next.into()) => {}
                () = self.sooner.notified() => {}
            }
        }
    }

    async fn relay(
        &self,
        caller_id: &CallerId,
        tool: &LentTool,
        arguments: Value,
        ctx: &CallContext,
    ) -> Result<Value> {
        let request_id = RequestId::generate();
        let (waiter, ending) = oneshot::channel();
        self.state
            .lock()
            .book
            .call(request_id.clone(), caller_id, &tool.name, waiter, Instant::now())?;
        let mut open = OpenCall {
            book: self.me.clone(),
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
        // Whole, so that the log never has the end of a call whose beginning it lacks.
        let logged = whole(async move { store.events().append(&session, vec![body]).await });
        match logged.await.and_then(|logged| logged) {
            Ok(events) => {
                let index = events.first().map_or(-1, |event| event.index);
                self.state.lock().book.logged(&request_id, index);
            }
            Err(error) => {
                open.logged = false;
                return Err(error);
            }
        }
        self.look_sooner();
        let mut ending = ending;
        let ending = tokio::select! {
            ending = &mut ending => ending,
            () = ctx.cancel.cancelled() => {
                let cancelled = self.state.lock().book.cancel(&request_id);
                if let Some(ended) = cancelled {
                    Box::pin(self.finish(vec![ended])).await;
                }
                // Had it ended in the same moment, then that is how it ended, for everyone.
                ending.await
            }
        };
        let ending = ending.unwrap_or(Ending::Cancelled);
        let full = || full_name(caller_id, &tool.name);
        match ending {
            Ending::Answered(value) => Ok(value),
            Ending::Failed(text) => Err(Error::tool_error(text)),
            Ending::Timeout => Err(Error::timeout(format!(
                "{}: the caller did not answer in time",
                full()
            ))),
            Ending::Disconnected => Err(Error::caller_disconnected(format!(
                "{}: the caller is not connected any more, so the tool cannot be run",
                full()
            ))),
            Ending::Cancelled => Err(Error::unavailable(format!("{}: the call was cancelled", full()))),
        }
    }
}

/// Runs a future to its end even when whoever waits for it is dropped: what cannot be done at once is
/// done in a task of its own.
async fn whole<T: Send + 'static>(future: impl Future<Output = T> + Send + 'static) -> Result<T> {
    let mut future = Box::pin(future);
    match futures::poll!(&mut future) {
        Poll::Ready(done) => Ok(done),
        Poll::Pending => tokio::spawn(future).await.map_err(Error::internal),
    }
}

/// Records a refused answer: in the debugger and the server's log, nowhere else.
pub(crate) fn note_refusal(store: &Store, session: &SessionId, request_id: &str, reason: &str) {
    let request_id: String = request_id.chars().take(100).collect();
    tracing::warn!(%session, request_id, reason, "an answer to a caller tool request was refused");
    let body = DebugBody::AnswerRefused {
        request_id,
        reason: reason.to_owned(),
    };
    store.debugger().record(Some(session.clone()), None, body);
}

/// An open call, for when whoever waits is dropped: the caller then learns that it is cancelled.
struct OpenCall {
    book: Weak<CallerBook>,
    request_id: RequestId,
    logged: bool,
}

impl Drop for OpenCall {
    fn drop(&mut self) {
        let Some(book) = self.book.upgrade() else { return };
        let Some(ended) = book.state.lock().book.cancel(&self.request_id) else {
            return;
        };
        if let (true, Ok(runtime)) = (self.logged, tokio::runtime::Handle::try_current()) {
            runtime.spawn(async move { book.finish(vec![ended]).await });
        }
    }
}

#[async_trait]
impl Callers for CallerBook {
    fn declarations(&self) -> Vec<Arc<Declaration>> {
        self.state.lock().book.declarations()
    }

    fn may_call(&self, caller_id: &CallerId, origin: &Origin) -> Result<()> {
        let Origin::Outside(principal) = origin else {
            return Ok(());
        };
        let declared = self.state.lock().book.owner(caller_id) == Some(&Owner(principal.token_id.clone()));
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
        self.relay(caller_id, tool, arguments, ctx).await
    }
}
