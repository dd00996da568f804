//! One session's gate: every call, from inside and from outside, takes this way.
//!
//! `gate` resolves the name and asks the rules; `flight` keeps count of what is under way, so that a switch
//! can wait for it or cancel it; `record` tells the debugger, secrets taken out.

mod flight;
mod gate;
mod list;
mod record;

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use oubliette_protocol::{
    Error, Object, Result, SessionId,
    debug::DebugBody,
    tool::{CallResult, ToolSpec},
};
use parking_lot::Mutex;
use serde_json::{
    Value,
    value::{RawValue, to_raw_value},
};
use tokio::{sync::watch, task::AbortHandle};

use crate::{
    CallContext, CallThread, Callers, Context, DebugSink, Origin, OwnTools, Secrets, Wanted,
    call::{Given, ResultText},
};

use self::{
    flight::Flights,
    gate::{Pass, Target},
    record::{End, Record},
};

/// What a plane is made of.
pub struct PlaneParts {
    /// Whose plane it is.
    pub session_id: SessionId,
    /// The callers and their tools.
    pub callers: Arc<dyn Callers>,
    /// Oubliette's own tools.
    pub own: Arc<dyn OwnTools>,
    /// The session's debugger.
    pub debug: Arc<dyn DebugSink>,
    /// Where its calls are made.
    pub thread: CallThread,
}

/// One session's gate.
pub struct Plane {
    parts: PlaneParts,
    context: ArcSwapOption<Context>,
    follower: Mutex<Option<AbortHandle>>,
    flights: Flights,
    secrets: Secrets,
    changes: watch::Sender<u64>,
}

/// What a source answered, in its own shape.
enum Answer {
    /// MCP's shape already.
    Result(CallResult),
    /// The same, as it stood on the wire.
    Text(ResultText),
    /// What a caller answered.
    Lent(Value),
    /// One of Oubliette's result objects.
    Object(Value),
}

impl From<Given> for Answer {
    fn from(given: Given) -> Self {
        match given {
            Given::Result(result) => Answer::Result(result),
            Given::Text(text) => Answer::Text(text),
        }
    }
}

impl Plane {
    /// A plane with no context yet: every call fails until one is installed.
    pub fn new(parts: PlaneParts) -> Arc<Self> {
        Arc::new(Self {
            parts,
            context: ArcSwapOption::empty(),
            follower: Mutex::new(None),
            flights: Flights::default(),
            secrets: Secrets::new(),
            changes: watch::Sender::new(0),
        })
    }

    /// Opens the plane to an agent's tools. The context that was there before is not torn down: take it
    /// first.
    pub fn install(self: &Arc<Self>, context: Arc<Context>) {
        let mut theirs = context.changes();
        let plane = Arc::downgrade(self);
        let follower = tokio::spawn(async move {
            while theirs.changed().await.is_ok() {
                let Some(plane) = plane.upgrade() else { return };
                plane.touch();
            }
        });
        if let Some(old) = self.follower.lock().replace(follower.abort_handle()) {
            old.abort();
        }
        self.context.store(Some(context));
        self.touch();
    }

    /// Closes the plane: every later call fails until the next context is installed.
    pub fn take(&self) -> Option<Arc<Context>> {
        if let Some(old) = self.follower.lock().take() {
            old.abort();
        }
        let context = self.context.swap(None);
        self.touch();
        context
    }

    /// The agent's context, while there is one.
    pub fn context(&self) -> Option<Arc<Context>> {
        self.context.load_full()
    }

    /// The thread to make its calls on; from elsewhere they are made as well, only later.
    pub fn thread(&self) -> &CallThread {
        &self.parts.thread
    }

    /// A value that debugger events and error texts must never show, like the agent's key. A key that comes
    /// from inside is to be checked first: there is room for a number of them, not for whatever claims to be
    /// one.
    pub fn hide(&self, secret: &str) {
        const MOST: usize = 64;
        if self.secrets.len() < MOST {
            self.secrets.hide(secret);
        }
    }

    /// Whether this value is hidden already.
    pub fn hides(&self, secret: &str) -> bool {
        self.secrets.has(secret)
    }

    /// Takes the keys that were used here out of what an agent reports.
    pub fn veil(&self, value: &mut Value) {
        self.secrets.mask(value);
    }

    /// The same for a text.
    pub fn veil_text(&self, text: &mut String) {
        if !self.secrets.is_empty() {
            *text = self.secrets.mask_text(text);
        }
    }

    /// Calls a tool; whatever its source, the result is in MCP's shape.
    pub async fn call(
        &self,
        wanted: Wanted,
        arguments: Object,
        origin: Origin,
        ctx: CallContext,
    ) -> Result<CallResult> {
        let context = self.ready()?;
        let (record, answer) = Box::pin(self.run(&context, wanted, arguments, origin, ctx)).await?;
        match answer {
            Ok(answer) => {
                let result = match &answer {
                    Answer::Result(result) => result.clone(),
                    Answer::Text(text) => text.read(),
                    Answer::Lent(value) => CallResult::from_value(value.clone()),
                    Answer::Object(value) => CallResult::data(value.clone()),
                };
                record.end(End::Answer(answer));
                Ok(result)
            }
            Err(error) => Err(record.failed(error)),
        }
    }

    /// Calls a tool; the result is the bare value its source gave, as the text to send.
    pub async fn call_raw(
        &self,
        wanted: Wanted,
        arguments: Object,
        origin: Origin,
        ctx: CallContext,
    ) -> Result<Box<RawValue>> {
        let context = self.ready()?;
        let (record, answer) = self.run(&context, wanted, arguments, origin, ctx).await?;
        match answer {
            Ok(answer) => {
                let raw = match &answer {
                    Answer::Result(result) => to_raw_value(result),
                    Answer::Text(text) => Ok(text.raw().to_owned()),
                    Answer::Lent(value) | Answer::Object(value) => to_raw_value(value),
                };
                record.end(End::Answer(answer));
                raw.map_err(Error::internal)
            }
            Err(error) => Err(record.failed(error)),
        }
    }

    fn ready(&self) -> Result<Arc<Context>> {
        self.context()
            .ok_or_else(|| Error::unavailable("the agent's tools are not ready: its context is not built"))
    }

    /// Lets a call through the gate and makes it.
    async fn run<'a>(
        &'a self,
        context: &'a Context,
        wanted: Wanted,
        arguments: Object,
        origin: Origin,
        ctx: CallContext,
    ) -> Result<(Record<'a>, Result<Answer>)> {
        let pass = match self.admit(context, &wanted, &origin) {
            Ok(pass) => pass,
            Err(refused) => {
                let reason = self.masked(context, &refused.error.message);
                self.parts.debug.record(
                    Some(context.agent()),
                    DebugBody::ToolBlocked {
                        tool: shown(wanted.name()),
                        canonical: refused.canonical,
                        reason,
                        turn: ctx.turn,
                    },
                );
                return Err(refused.error);
            }
        };
        let flight = self.flights.board(&ctx.cancel);
        let ctx = ctx.with_cancel(flight.token());
        let record = Record::begin(self, context, &wanted, &pass, arguments, ctx.turn, flight);
        let result = {
            let calling = std::pin::pin!(self.dispatch(context, pass, record.arguments(), &origin, &ctx));
            record.flight().fly(calling).await
        };
        let result = result.map_err(|e| Error {
            message: self.masked(context, &e.message),
            ..e
        });
        Ok((record, result))
    }

    async fn dispatch(
        &self,
        context: &Context,
        pass: Pass,
        arguments: &Object,
        origin: &Origin,
        ctx: &CallContext,
    ) -> Result<Answer> {
        let Pass { permit, target, .. } = pass;
        let session = &self.parts.session_id;
        match target {
            Target::Catalog { id, tool } => context
                .dispatch(permit, &id, &tool, arguments, ctx)
                .await
                .map(Answer::from),
            Target::Down(reason) => Err(Error::unavailable(reason)),
            Target::Caller { lender, tool } => {
                let arguments = Value::Object(arguments.clone());
                tool.check_arguments(&arguments)?;
                let callers = &self.parts.callers;
                callers
                    .call(permit, &lender.caller_id, &tool, arguments, ctx)
                    .await
                    .map(Answer::Lent)
            }
            Target::Own(tool) => {
                let own = &self.parts.own;
                own.call(permit, session, origin, &tool, arguments.clone(), ctx)
                    .await
                    .map(Answer::Object)
            }
            Target::Base(tool) => self
                .parts
                .own
                .base(permit, session, &tool, arguments.clone(), ctx)
                .await
                .map(Answer::Object),
        }
    }

    fn masked(&self, context: &Context, text: &str) -> String {
        context.secrets().mask_text(&self.secrets.mask_text(text))
    }

    /// The catalog tools the agent's list shows.
    pub fn agent_tools(&self) -> Vec<ToolSpec> {
        let Some(context) = self.context() else {
            return Vec::new();
        };
        let lent = self.lent_names();
        let registry = context.registry();
        registry
            .listed()
            .filter(|entry| !lent.contains(&entry.name))
            .map(|entry| entry.spec())
            .collect()
    }

    /// The base tools that are not denied.
    pub fn base_tools(&self) -> Vec<ToolSpec> {
        let Some(context) = self.context() else {
            return Vec::new();
        };
        let registry = context.registry();
        let specs = self.parts.own.base_specs().into_iter();
        specs
            .filter(|spec| registry.rules().denies(&spec.name).is_none())
            .collect()
    }

    /// Whether the agent's rules deny a tool of another source than the catalog.
    pub fn denies(&self, full_name: &str) -> bool {
        self.context()
            .is_some_and(|context| context.registry().rules().denies(full_name).is_some())
    }

    /// Bumped whenever the agent's tool list may have changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Says that the list may have changed for a reason outside: a caller's declaration.
    pub fn touch(&self) {
        self.changes.send_modify(|version| *version += 1);
    }

    /// How many calls are under way.
    pub fn in_flight(&self) -> usize {
        self.flights.count()
    }

    /// Returns when no call is under way.
    pub async fn drained(&self) {
        self.flights.drained().await;
    }

    /// Ends every call under way with an error that says why; returns how many there were.
    pub fn cancel_all(&self, reason: &str) -> usize {
        self.flights.cancel_all(reason)
    }
}

impl Drop for Plane {
    fn drop(&mut self) {
        if let Some(follower) = self.follower.get_mut().take() {
            follower.abort();
        }
    }
}

/// A name fit for the log, however long it was.
fn shown(name: &str) -> String {
    match name.char_indices().nth(crate::name::MAX_CALLED) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}
