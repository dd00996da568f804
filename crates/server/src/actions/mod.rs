//! The actions: everything Oubliette can be asked to do.
//!
//! MCP, REST, the control socket, the relay socket and the command line all call [`perform`], the only place
//! where a [`Grant`] is checked, an action is run and the audit log is written. An action is
//! one struct that implements [`ActionHandler`]; its fields are the arguments. To add one, write it in the file
//! of its noun and name it in the list below.
//!
//! - [`definition`]: name, description, scope, effect and schema of an action. [`call`]: what its handler gets.
//! - [`inside`]: checks of calls from inside a sandbox, which hold whatever the key.
//! - [`input`], [`output`]: checks of arguments, and result objects, that several actions share; [`library`]: what the
//!   actions on agents and on the catalog share.
//! - `project`, `workspace`, `session` and so on: the actions, one file for each noun.

pub(crate) mod call;
pub(crate) mod definition;
pub(crate) mod input;
pub(crate) mod inside;
mod library;
pub(crate) mod output;

use std::{
    borrow::Cow,
    sync::{Arc, OnceLock},
};

use oubliette_protocol::{Error, JsonObject, Result, tool::ToolSpec};
use oubliette_store::{AuditEntry, AuditPrincipal};
use serde_json::Value;

pub use call::ActionOrigin;
pub(crate) use call::{ActionCall, EventSink, InsideCall, OutsideCall};
pub(crate) use definition::{ActionDefinition, ActionHandler, Effect, StateOwner};

use crate::{app::App, auth::Grant};

macro_rules! actions {
    ($($module:ident: $($action:ident),+;)+) => {
        $(pub(crate) mod $module;)+

        /// An action with its parsed arguments.
        #[allow(clippy::large_enum_variant, reason = "made and moved once for each call")]
        #[allow(missing_docs, reason = "each variant holds the struct of the same name")]
        pub(crate) enum Action { $($($action($module::$action),)+)+ }

        impl Action {
            /// Parses the arguments of the action with this name.
            fn parse(name: &str, arguments: JsonObject) -> Result<Self> {
                $($(if name == <$module::$action as ActionHandler>::NAME {
                    return definition::parse_arguments(arguments).map(Action::$action);
                })+)+
                Err(unknown_action(name))
            }

            fn target(&self) -> Option<Cow<'_, str>> {
                match self { $($(Action::$action(action) => action.target(),)+)+ }
            }

            async fn run(self, call: &ActionCall<'_>) -> Result<Value> {
                // Boxed, so that the largest handler does not set the size of every call.
                match self { $($(Action::$action(action) => Box::pin(action.run(call)).await,)+)+ }
            }
        }

        /// The definitions of all actions, in the order of the list.
        pub fn all() -> &'static [ActionDefinition] {
            static ALL: OnceLock<Vec<ActionDefinition>> = OnceLock::new();
            ALL.get_or_init(|| vec![$($(<$module::$action as ActionHandler>::definition(),)+)+])
        }
    };
}

actions! {
    project: ProjectCreate, ProjectUpdate, ProjectList, ProjectGet, ProjectDelete;
    workspace: WorkspaceCreate, WorkspaceList, WorkspaceDelete, WorkspaceDiff;
    session: SessionMessage, SessionCancel, SessionEnd, SessionGet, SessionList, SessionEvents, SessionSwitchAgent;
    caller: CallerToolResponse;
    tool: ToolListing, ToolCall, ToolServerRestart;
    debugger: DebuggerEvents;
    agent: AgentList, AgentGet, AgentPut, AgentDelete;
    catalog: CatalogList, CatalogGet, CatalogPut, CatalogDelete;
    token: TokenCreate, TokenList, TokenRevoke;
    audit: AuditList;
    server: ServerInfo, Doctor;
}

/// The definition of the action with this name.
pub(crate) fn find(name: &str) -> Option<&'static ActionDefinition> {
    all().iter().find(|d| d.name == name)
}

/// `not_found` error for an action name that does not exist.
pub(crate) fn unknown_action(name: &str) -> Error {
    Error::not_found(format!(
        "there is no tool {}",
        oubliette_protocol::id::quoted(name)
    ))
}

/// Checks that a grant's scope and project binding allow an action. The handler checks the target.
pub(crate) fn check_grant(grant: &Grant, definition: &ActionDefinition) -> Result<()> {
    grant.require(definition.scope, definition.name)?;
    match (definition.state_owner, definition.effect.changes()) {
        (StateOwner::Server, true) => grant.require_unbound(definition.name),
        (StateOwner::Server, false) | (StateOwner::Project, _) => Ok(()),
    }
}

/// The actions a grant may perform, which are the tools its client is shown.
pub fn visible(grant: &Grant) -> impl Iterator<Item = &'static ActionDefinition> {
    all()
        .iter()
        .filter(|definition| check_grant(grant, definition).is_ok())
}

/// The [`visible`] actions as tools, for the relay socket.
pub(crate) fn tool_specs(grant: &Grant) -> Vec<ToolSpec> {
    visible(grant).map(tool_spec).collect()
}

/// An action as a tool for a model.
pub(crate) fn tool_spec(definition: &ActionDefinition) -> ToolSpec {
    ToolSpec {
        name: definition.name.into(),
        description: definition.description.into(),
        input_schema: Value::Object((definition.schema)().clone()),
    }
}

/// Performs an action: checks the grant, parses the arguments, runs the handler, writes the audit log. Every door
/// calls this. The audit entry of a change is written before this returns; that of [`Effect::Stream`] is queued.
pub async fn perform(
    app: &Arc<App>,
    grant: &Grant,
    name: &str,
    arguments: JsonObject,
    origin: &ActionOrigin,
) -> Result<Value> {
    let definition = find(name).ok_or_else(|| unknown_action(name))?;
    let started = std::time::Instant::now();
    let call = ActionCall::new(app, grant, origin);
    let mut target = None;
    let outcome = async {
        // Before parsing, so that a client without access learns nothing about the arguments.
        check_grant(grant, definition)?;
        let action = Action::parse(name, arguments)?;
        target = action.target().map(Cow::into_owned);
        if let ActionOrigin::Inside(inside) = origin {
            inside::check(app, &inside.session, &action).await?;
        }
        action.run(&call).await
    }
    .await;
    app.metrics.count_action(
        definition.name,
        outcome.as_ref().err().map(|e| e.code),
        started.elapsed(),
    );
    if let Err(error) = &outcome {
        log_error(definition.name, grant, error);
    }
    if definition.effect.changes() {
        let entry = audit_entry(&call, definition, target, outcome.as_ref().err());
        match definition.effect {
            Effect::Stream => app.queue_audit(entry).await,
            Effect::Read | Effect::Write | Effect::Set | Effect::Delete => {
                let written = app.store.audit_append(entry).await;
                // The action is done and stays done, but a missing audit entry is reported as an error.
                if let Err(error) = written {
                    tracing::error!(action = definition.name, error = %error.for_log(), "appending an audit entry failed");
                    outcome.as_ref().map_err(Clone::clone)?;
                    return Err(error);
                }
            }
        }
    }
    outcome
}

fn audit_entry(
    call: &ActionCall<'_>,
    definition: &ActionDefinition,
    target: Option<String>,
    error: Option<&Error>,
) -> AuditEntry {
    AuditEntry {
        principal: AuditPrincipal::of_grant(call.grant.token_id()),
        session_id: call.origin.session().cloned(),
        action: definition.name.into(),
        target: target.or_else(|| call.audited_target().map(str::to_owned)),
        outcome: error.map_or("ok", |e| e.code.as_str()).into(),
        project_id: call.audited_project().or(call.grant.project()).cloned(),
        detail: None,
    }
}

/// Runs blocking work, such as disk access, on tokio's blocking threads.
pub(crate) async fn run_blocking<T: Send + 'static>(
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(Error::internal)?
}

fn log_error(action: &str, grant: &Grant, error: &Error) {
    let token = grant.token_id().map(tracing::field::display);
    if error.has_cause() {
        tracing::error!(action, token, code = %error.code, error = %error.for_log(), "action failed");
    } else {
        tracing::debug!(action, token, code = %error.code, error = %error.message, "action refused");
    }
}
