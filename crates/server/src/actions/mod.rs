//! The actions: everything Oubliette can be asked to do.
//!
//! MCP, REST, the control socket, the relay socket and the command line all call [`perform`], the only place
//! where a [`Grant`] is checked, an action is run and the audit log is written. An action is
//! one struct that implements [`ActionHandler`]; its fields are the arguments. To add one, write it in the file
//! of its noun and name it in the list below. Modules are declared outside the macro, where `cargo fmt` finds them.
//!
//! - [`definition`]: name, description, scope, effect and schema of an action. [`call`]: what its handler gets.
//! - [`inside`]: checks of calls from inside a sandbox, which hold whatever the key.
//! - [`project_settings`]: what a project's sessions run with; [`budget`]: checks of its budgets.
//! - [`routing`]: which actions only the server can perform that runs their session.
//! - [`input`], [`output`]: checks of arguments, and results, that several actions share; [`library`]: what the actions on
//!   agents and on the catalog share.
//! - `project`, `workspace`, `session` and so on: the actions, one file for each noun; `session_message` has its own.

pub(crate) mod agent;
pub(crate) mod approval;
pub(crate) mod audit;
mod budget;
pub(crate) mod call;
pub(crate) mod caller;
pub(crate) mod catalog;
pub(crate) mod debugger;
pub(crate) mod definition;
pub(crate) mod explain;
pub(crate) mod figures;
pub(crate) mod input;
pub(crate) mod inside;
mod library;
pub(crate) mod library_exchange;
pub(crate) mod output;
pub(crate) mod preset;
pub(crate) mod program;
pub(crate) mod project;
pub(crate) mod project_settings;
pub(crate) mod queue;
mod routing;
pub(crate) mod server;
pub(crate) mod server_list;
pub(crate) mod session;
pub(crate) mod session_message;
pub(crate) mod token;
pub(crate) mod tool;
pub(crate) mod tool_add;
pub(crate) mod usage;
pub(crate) mod workspace;

use std::{
    borrow::Cow,
    sync::{Arc, OnceLock, atomic::Ordering},
};

use oubliette_protocol::{Error, JsonObject, Result, tool::ToolSpec};
use oubliette_store::{AuditEntry, AuditPrincipal};
use serde_json::Value;

pub(crate) use call::{ActionCall, EventSink};
pub use call::{ClientContext, RequestHop};
pub(crate) use definition::{ActionDefinition, ActionHandler, Effect, StateOwner};

use crate::{
    app::App,
    auth::Grant,
    hop::{SessionPlace, pass_on::RouteOutcome},
};

macro_rules! actions {
    ($($module:ident: $($action:ident),+;)+) => {
        /// An action with its parsed arguments.
        #[allow(clippy::large_enum_variant, reason = "made and moved once for each call")]
        #[allow(missing_docs, reason = "each variant holds the struct of the same name")]
        pub(crate) enum Action { $($($action($module::$action),)+)+ }

        impl Action {
            /// Parses the arguments of the action with this name.
            pub(crate) fn parse(name: &str, arguments: JsonObject) -> Result<Self> {
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
                match self { $($(Action::$action(action) => output::to_json(Box::pin(action.run(call)).await?),)+)+ }
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
    session_message: SessionMessage;
    session: SessionCancel, SessionEnd, SessionDelete, SessionGet, SessionList, SessionEvents, SessionSwitchAgent;
    queue: SessionQueueList, SessionQueueRemove;
    caller: CallerToolResponse;
    approval: ApprovalList, ApprovalDecide;
    tool: ToolListing, ToolCall, ToolServerRestart;
    explain: ToolExplain;
    debugger: DebuggerEvents;
    figures: FiguresReport;
    agent: AgentList, AgentGet, AgentPut, AgentDelete;
    preset: PresetList;
    catalog: CatalogList, CatalogGet, CatalogPut, CatalogDelete, CatalogStatus, CatalogTest;
    program: ProgramInstall, ProgramList, ProgramRemove;
    tool_add: ToolAdd;
    library_exchange: LibraryList, LibraryRead, LibraryPush;
    token: TokenCreate, TokenList, TokenRevoke;
    audit: AuditList;
    usage: UsageReporting;
    server: ServerInfo, Doctor;
    server_list: ServerList;
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
/// calls this. The audit entry of a change is written before this returns; that of [`Effect::Stream`] survives a power
/// cut only a moment later. An action on a session that another server of the cluster runs is performed, and audited, there.
pub async fn perform(
    app: &Arc<App>,
    grant: &Grant,
    name: &str,
    arguments: JsonObject,
    client: &ClientContext,
) -> Result<Value> {
    let definition = find(name).ok_or_else(|| unknown_action(name))?;
    let started = std::time::Instant::now();
    let call = ActionCall::new(app, grant, client);
    let mut target = None;
    let mut performed = PerformedBy::ThisServer;
    let outcome = async {
        // Before parsing, so that a client without access learns nothing about the arguments.
        check_grant(grant, definition)?;
        let kept = app.hop.as_ref().map(|_| arguments.clone());
        let action = Action::parse(name, arguments)?;
        target = action.target().map(Cow::into_owned);
        // By the grant, not by the door: a session's key is from inside wherever it is used.
        if let Some(session) = grant.inside() {
            inside::check(app, session, &action).await?;
        }
        if let Some(arguments) = kept
            && let Some(answer) = Box::pin(perform_elsewhere(
                &call,
                definition,
                &action,
                arguments,
                &mut performed,
            ))
            .await?
        {
            return answer;
        }
        action.run(&call).await
    }
    .await;
    if performed == PerformedBy::Peer {
        return outcome;
    }
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
        let commit_began = std::time::Instant::now();
        let written = match definition.effect {
            Effect::Stream => app.store.audit_append_soon(entry).await,
            Effect::Read | Effect::Write | Effect::Set | Effect::Delete => {
                app.store.audit_append(entry).await
            }
        };
        app.metrics.count_commit(commit_began.elapsed());
        // The action is done and stays done, but a missing audit entry is reported as an error.
        if let Err(error) = written {
            tracing::error!(action = definition.name, error = %error.for_log(), "appending an audit entry failed");
            outcome.as_ref().map_err(Clone::clone)?;
            return Err(error);
        }
    }
    outcome
}

/// Which server performed an action, and so has counted and audited it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PerformedBy {
    ThisServer,
    Peer,
}

/// Has another server of the cluster perform an action, if that one runs the session. `None`: it is to be performed here. An
/// error means that nobody performed it, or that it is not known.
async fn perform_elsewhere(
    call: &ActionCall<'_>,
    definition: &ActionDefinition,
    action: &Action,
    arguments: JsonObject,
    performed: &mut PerformedBy,
) -> Result<Option<Result<Value>>> {
    let (app, grant, client) = (call.app, call.grant, call.client);
    let (Some(hop), Some(route)) = (&app.hop, routing::route(action, grant)) else {
        return Ok(None);
    };
    match &client.hop {
        RequestHop::First => {
            let routed = hop
                .pass_on(app, grant, definition, route, arguments, client)
                .await?;
            Ok(match routed {
                RouteOutcome::Here => None,
                RouteOutcome::Answered(outcome) => {
                    *performed = PerformedBy::Peer;
                    Some(outcome)
                }
            })
        }
        RequestHop::PassedOn(moved) => match hop.place(app, grant, route.target, route.unowned).await? {
            SessionPlace::Here => Ok(None),
            SessionPlace::Peer(_) => {
                moved.store(true, Ordering::Release);
                *performed = PerformedBy::Peer;
                Err(Error::unavailable("another server runs this session"))
            }
        },
    }
}

fn audit_entry(
    call: &ActionCall<'_>,
    definition: &ActionDefinition,
    target: Option<String>,
    error: Option<&Error>,
) -> AuditEntry {
    AuditEntry {
        principal: AuditPrincipal::of_grant(call.grant.token_id()),
        session_id: call.grant.inside().cloned(),
        action: definition.name.into(),
        target: target.or_else(|| call.audited_target().map(str::to_owned)),
        outcome: error.map_or("ok", |e| e.code.as_str()).into(),
        project_id: call.audited_project().or(call.grant.project()).cloned(),
        detail: call.audited_detail().cloned(),
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
