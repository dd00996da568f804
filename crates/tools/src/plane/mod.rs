//! One session's tool plane: every call, from inside and from outside, passes it.
//!
//! `readiness` makes a call wait for a context that is being built; `gate` resolves the name and checks the rules;
//! `argument_check` checks the arguments of a lent tool, and those that rules look at;
//! `in_flight` tracks the calls in progress, so that a switch of
//! agents can wait for them or cancel them; `record` writes each call to the debugger, secrets masked; `list`
//! builds `tool_list`.

pub(crate) mod argument_check;
mod gate;
mod in_flight;
mod list;
mod readiness;
mod record;

use std::sync::Arc;

use arc_swap::ArcSwapOption;
use oubliette_protocol::{
    ByteBudget, Error, JsonObject, Result, SessionId,
    debug::{DebugBody, shorten_texts},
    tool::{CallResult, ToolSource, ToolSpec},
};
use parking_lot::Mutex;
use serde_json::{
    Value,
    value::{RawValue, to_raw_value},
};
use tokio::{
    sync::{Semaphore, watch},
    task::AbortHandle,
};

use crate::{
    AgentContext, Approver, CallContext, CallMeter, CallOrigin, CallThread, CallerTools, DebugSink, OwnTools,
    RequestedTool, Secrets,
    call::{RawCallResult, ToolAnswer},
    secret,
};

pub use self::readiness::{ContextBuilding, ToolCallError};
use self::{
    argument_check::check_arguments,
    gate::{AdmittedCall, CallTarget, CatalogTarget},
    in_flight::InFlightCalls,
    record::{CallOutcome, CallRecord, RecordedCall},
};

/// What a [`ToolPlane`] is built from.
pub struct ToolPlaneParts {
    /// The session it belongs to.
    pub session_id: SessionId,
    /// The callers and their tools.
    pub callers: Arc<dyn CallerTools>,
    /// Oubliette's own tools.
    pub own: Arc<dyn OwnTools>,
    /// Asks people about calls under `tools.ask`.
    pub approver: Arc<dyn Approver>,
    /// The session's debugger.
    pub debug: Arc<dyn DebugSink>,
    /// Counts its calls.
    pub meter: Arc<dyn CallMeter>,
    /// The thread its calls run on.
    pub thread: CallThread,
    /// What its calls are charged to while they are kept in memory.
    pub buffers: ByteBudget,
}

/// One session's tools of every source, behind one gate.
pub struct ToolPlane {
    parts: ToolPlaneParts,
    context: ArcSwapOption<AgentContext>,
    /// How many builds of a context are in progress. Also marked as changed when a context is installed.
    builds: watch::Sender<usize>,
    change_follower: Mutex<Option<AbortHandle>>,
    in_flight_calls: InFlightCalls,
    /// Large arguments are checked one at a time.
    large_checks: Semaphore,
    secrets: Secrets,
    changes: watch::Sender<u64>,
}

/// What a source answered, in that source's own form.
enum SourceAnswer {
    /// A result in MCP's form.
    Result(CallResult),
    /// A result in MCP's form, as JSON text.
    Text(RawCallResult),
    /// The value a caller answered with.
    Lent(Value),
    /// The result object of one of Oubliette's own or base tools.
    Object(Value),
}

impl From<ToolAnswer> for SourceAnswer {
    fn from(answer: ToolAnswer) -> Self {
        match answer {
            ToolAnswer::Result(result) => SourceAnswer::Result(result),
            ToolAnswer::Text(text) => SourceAnswer::Text(text),
        }
    }
}

impl ToolPlane {
    /// Creates a plane without a context: a call fails, unless one is being built, until one is installed.
    pub fn new(parts: ToolPlaneParts) -> Arc<Self> {
        Arc::new(Self {
            parts,
            context: ArcSwapOption::empty(),
            builds: watch::Sender::new(0),
            change_follower: Mutex::new(None),
            in_flight_calls: InFlightCalls::default(),
            large_checks: Semaphore::new(1),
            secrets: Secrets::new(),
            changes: watch::Sender::new(0),
        })
    }

    /// Makes an agent's tools callable. A context installed before is not torn down: [`uninstall`](Self::uninstall)
    /// it first.
    pub fn install(self: &Arc<Self>, context: Arc<AgentContext>) {
        let mut theirs = context.changes();
        let plane = Arc::downgrade(self);
        let follower = tokio::spawn(async move {
            while theirs.changed().await.is_ok() {
                let Some(plane) = plane.upgrade() else { return };
                plane.notify_changed();
            }
        });
        if let Some(old) = self.change_follower.lock().replace(follower.abort_handle()) {
            old.abort();
        }
        self.context.store(Some(context));
        self.builds.send_modify(|_| {});
        self.notify_changed();
    }

    /// Removes and returns the context: a later call fails, unless the next one is being built, until that is
    /// installed.
    pub fn uninstall(&self) -> Option<Arc<AgentContext>> {
        if let Some(old) = self.change_follower.lock().take() {
            old.abort();
        }
        let context = self.context.swap(None);
        self.notify_changed();
        context
    }

    /// The installed context, if there is one.
    pub fn context(&self) -> Option<Arc<AgentContext>> {
        self.context.load_full()
    }

    /// The thread its calls should be made on. Calls from other threads work too, with more latency.
    pub fn thread(&self) -> &CallThread {
        &self.parts.thread
    }

    /// What its calls are charged to while they are kept in memory. Whoever calls it charges arguments and result.
    pub fn buffers(&self) -> &ByteBudget {
        &self.parts.buffers
    }

    /// Adds a value that is masked in debugger events and error texts, such as the agent's key. At most 64 are
    /// kept: check a key that comes from inside before adding it, or invalid ones could use up the places.
    pub fn hide_secret(&self, secret: &str) {
        const MAX_SECRETS: usize = 64;
        if self.secrets.len() < MAX_SECRETS {
            self.secrets.add(secret);
        }
    }

    /// Whether this value is masked already.
    pub fn is_hidden(&self, secret: &str) -> bool {
        self.secrets.contains(secret)
    }

    /// Masks the secrets added by [`hide_secret`](Self::hide_secret) in a JSON value, such as what an agent reports.
    pub fn mask(&self, value: &mut Value) {
        self.secrets.mask(value);
    }

    /// Masks the secrets added by [`hide_secret`](Self::hide_secret) in a text.
    pub fn mask_text(&self, text: &mut String) {
        if !self.secrets.is_empty() {
            *text = self.secrets.mask_text(text);
        }
    }

    /// Calls a tool; whatever its source, the result is in MCP's form. A call made while a context is being built
    /// waits for it.
    pub async fn call(
        &self,
        tool: impl Into<RequestedTool>,
        arguments: JsonObject,
        origin: CallOrigin,
        ctx: CallContext,
    ) -> Result<CallResult, ToolCallError> {
        let context = self.ready_context(&ctx.cancel).await?;
        self.call_in(&context, tool, arguments, origin, ctx).await
    }

    /// Calls a tool as [`call`](Self::call) does, in a context from [`ready_context`](Self::ready_context).
    pub async fn call_in(
        &self,
        context: &AgentContext,
        tool: impl Into<RequestedTool>,
        arguments: JsonObject,
        origin: CallOrigin,
        ctx: CallContext,
    ) -> Result<CallResult, ToolCallError> {
        let (record, answer) = Box::pin(self.run(context, tool.into(), arguments, origin, ctx)).await?;
        match answer {
            Ok(answer) => {
                let result = match &answer {
                    SourceAnswer::Result(result) => result.clone(),
                    SourceAnswer::Text(text) => text.parse(),
                    SourceAnswer::Lent(value) => CallResult::from_value(value.clone()),
                    SourceAnswer::Object(value) => CallResult::data(value.clone()),
                };
                record.end(CallOutcome::Answer(answer));
                Ok(result)
            }
            Err(error) => Err(record.end_with_error(error).into()),
        }
    }

    /// Calls a tool; the result is its source and the value that answered with, as JSON text and not wrapped in
    /// MCP's form. A call made while a context is being built waits for it.
    pub async fn call_raw(
        &self,
        tool: impl Into<RequestedTool>,
        arguments: JsonObject,
        origin: CallOrigin,
        ctx: CallContext,
    ) -> Result<(ToolSource, Box<RawValue>), ToolCallError> {
        let context = self.ready_context(&ctx.cancel).await?;
        let (record, answer) = self.run(&context, tool.into(), arguments, origin, ctx).await?;
        match answer {
            Ok(answer) => {
                let raw = match &answer {
                    SourceAnswer::Result(result) => to_raw_value(result),
                    SourceAnswer::Text(text) => Ok(text.raw().to_owned()),
                    SourceAnswer::Lent(value) | SourceAnswer::Object(value) => to_raw_value(value),
                };
                let source = record.source();
                record.end(CallOutcome::Answer(answer));
                Ok((source, raw.map_err(Error::internal)?))
            }
            Err(error) => Err(record.end_with_error(error).into()),
        }
    }

    /// Passes a call through the gate and dispatches it. The outer error is a call that the gate blocked; the
    /// record is to be ended with the inner result.
    async fn run<'a>(
        &'a self,
        context: &'a AgentContext,
        requested: RequestedTool,
        arguments: JsonObject,
        origin: CallOrigin,
        ctx: CallContext,
    ) -> Result<(CallRecord<'a>, Result<SourceAnswer>)> {
        self.parts.debug.check_room()?;
        let started = oubliette_protocol::now();
        // Registered first: a call that waits for a person is in progress, and a switch of agents waits for it.
        let in_flight_call = self.in_flight_calls.register(&ctx.cancel);
        let ctx = ctx.with_cancel(in_flight_call.token());
        let call = (&in_flight_call, &ctx);
        let (admitted, arguments) = match self.admit(context, &requested, &origin, arguments, call).await {
            Ok(admitted) => admitted,
            Err(refused) => {
                let reason = self.mask_for_agent(context, &refused.error.message);
                self.parts.debug.record(
                    Some(context.agent()),
                    DebugBody::ToolBlocked {
                        tool: truncate_name(requested.name()),
                        canonical: refused.canonical,
                        reason,
                        started: Some(started),
                        turn: ctx.turn,
                    },
                );
                return Err(refused.error);
            }
        };
        self.parts.meter.count_call(&origin);
        let call = RecordedCall::new(&requested, &admitted, ctx.turn, started);
        let record = CallRecord::begin(self, context, call, arguments, in_flight_call);
        let result = {
            let calling = std::pin::pin!(self.dispatch(context, admitted, record.arguments(), &origin, &ctx));
            record.in_flight_call().run(calling).await
        };
        let result = result.map_err(|e| {
            let message = self.mask_for_agent(context, &e.message);
            e.with_message(message)
        });
        Ok((record, result))
    }

    async fn dispatch(
        &self,
        context: &AgentContext,
        admitted: AdmittedCall,
        arguments: &JsonObject,
        origin: &CallOrigin,
        ctx: &CallContext,
    ) -> Result<SourceAnswer> {
        let AdmittedCall { permit, target, .. } = admitted;
        let session = &self.parts.session_id;
        match target {
            CallTarget::Catalog(CatalogTarget::Entry { id, tool }) => context
                .dispatch(permit, &id, &tool, arguments, ctx)
                .await
                .map(SourceAnswer::from),
            CallTarget::Catalog(CatalogTarget::Unavailable(reason)) => Err(Error::unavailable(reason)),
            CallTarget::Caller(lent) => {
                let arguments = check_arguments(&lent, arguments, &self.large_checks).await?;
                let callers = &self.parts.callers;
                callers
                    .call(permit, lent.caller_id(), lent.tool(), arguments, ctx)
                    .await
                    .map(SourceAnswer::Lent)
            }
            CallTarget::Oubliette(tool) => {
                let own = &self.parts.own;
                own.call(permit, session, origin, &tool, arguments.clone(), ctx)
                    .await
                    .map(SourceAnswer::Object)
            }
            CallTarget::Base(tool) => self
                .parts
                .own
                .call_base(permit, session, &tool, arguments.clone(), ctx)
                .await
                .map(SourceAnswer::Object),
        }
    }

    /// A call's arguments as people are shown them: secrets masked, large ones cut.
    fn masked_arguments(&self, context: &AgentContext, source: ToolSource, arguments: &JsonObject) -> Value {
        let mut shown = Value::Object(arguments.clone());
        if source == ToolSource::Oubliette {
            secret::mask_own_tool_fields(&mut shown);
        }
        self.secrets.mask(&mut shown);
        context.secrets().mask(&mut shown);
        shorten_texts(shown)
    }

    fn mask_for_agent(&self, context: &AgentContext, text: &str) -> String {
        context.secrets().mask_text(&self.secrets.mask_text(text))
    }

    /// The catalog tools that the agent's tool list shows. A name that a caller lends is not among them.
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

    /// The base tools that the agent's rules do not deny.
    pub fn base_tools(&self) -> Vec<ToolSpec> {
        let Some(context) = self.context() else {
            return Vec::new();
        };
        let registry = context.registry();
        let specs = self.parts.own.base_specs().into_iter();
        specs
            .filter(|spec| registry.rules().denied_by(&spec.name).is_none())
            .collect()
    }

    /// Whether the agent's rules deny a tool that is not from the catalog, by its full name.
    pub fn denies(&self, full_name: &str) -> bool {
        self.context()
            .is_some_and(|context| context.registry().rules().denied_by(full_name).is_some())
    }

    /// A version number that grows whenever the agent's tool list may have changed.
    pub fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Reports that the tool list may have changed for a reason outside the context, such as a caller's declaration.
    pub fn notify_changed(&self) {
        self.changes.send_modify(|version| *version += 1);
    }

    /// How many calls are in progress.
    pub fn in_flight(&self) -> usize {
        self.in_flight_calls.count()
    }

    /// Waits until no call is in progress.
    pub async fn wait_drained(&self) {
        self.in_flight_calls.wait_drained().await;
    }

    /// Ends every call in progress with an error that gives the reason; returns how many there were.
    pub fn cancel_all(&self, reason: &str) -> usize {
        self.in_flight_calls.cancel_all(reason)
    }
}

impl Drop for ToolPlane {
    fn drop(&mut self) {
        if let Some(follower) = self.change_follower.get_mut().take() {
            follower.abort();
        }
    }
}

/// Cuts a name to a length fit for the debugger.
fn truncate_name(name: &str) -> String {
    match name.char_indices().nth(crate::name::MAX_CALLED_NAME) {
        Some((end, _)) => format!("{}…", &name[..end]),
        None => name.to_owned(),
    }
}
