//! Everything Oubliette can be asked to do.
//!
//! MCP, REST, the control socket, the relay socket and the command line all end in [`perform`]: the
//! one place where a [`Grant`] is checked, an action is run and the audit log is written. An action is
//! one struct that implements [`Tool`]; its fields are the arguments. To add one, write it in the file
//! of its noun and name it in the list below.
//!
//! - [`definition`]: what an action says of itself. [`call`]: what a handler works with.
//! - [`inside`]: what an agent may never do, whatever its key.
//! - [`shape`], [`fields`]: what goes out and what comes in, shared by the nouns.
//! - a file a noun: the actions.

pub mod call;
pub mod definition;
pub mod fields;
pub mod inside;
pub mod shape;

use std::{
    borrow::Cow,
    sync::{Arc, OnceLock},
};

use oubliette_protocol::{Error, Object, Result, tool::ToolSpec};
use oubliette_store::AuditEntry;
use serde_json::Value;

pub use call::{Call, EventSink, Inside, Origin, Outside};
pub use definition::{Definition, Effect, Reach, Tool};

use crate::{app::App, auth::Grant};

macro_rules! actions {
    ($($module:ident: $($action:ident),+;)+) => {
        $(pub mod $module;)+

        /// One thing asked for, its arguments read.
        #[allow(clippy::large_enum_variant, reason = "one at a time, moved once")]
        #[allow(missing_docs, reason = "each variant is the struct of its name")]
        pub enum Action { $($($action($module::$action),)+)+ }

        impl Action {
            /// Reads the arguments of the named action.
            fn read(name: &str, given: Object) -> Result<Self> {
                $($(if name == <$module::$action as Tool>::NAME {
                    return definition::arguments(given).map(Action::$action);
                })+)+
                Err(unknown(name))
            }

            fn target(&self) -> Option<Cow<'_, str>> {
                match self { $($(Action::$action(action) => action.target(),)+)+ }
            }

            async fn run(self, call: &Call<'_>) -> Result<Value> {
                // Boxed, so that the largest handler does not set the size of every call.
                match self { $($(Action::$action(action) => Box::pin(action.run(call)).await,)+)+ }
            }
        }

        /// Every action, in the order of the list.
        pub fn all() -> &'static [Definition] {
            static ALL: OnceLock<Vec<Definition>> = OnceLock::new();
            ALL.get_or_init(|| vec![$($(<$module::$action as Tool>::definition(),)+)+])
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

/// The definition of a name.
pub fn find(name: &str) -> Option<&'static Definition> {
    all().iter().find(|d| d.name == name)
}

/// No such action.
pub fn unknown(name: &str) -> Error {
    Error::not_found(format!(
        "there is no tool {}",
        oubliette_protocol::id::quoted(name)
    ))
}

/// Whether a grant may perform an action at all. What it acts on is the handler's to check.
pub fn permits(grant: &Grant, definition: &Definition) -> Result<()> {
    grant.require(definition.scope, definition.name)?;
    match (definition.reach, definition.effect.changes()) {
        (Reach::Server, true) => grant.require_unbound(definition.name),
        (Reach::Server, false) | (Reach::Project, _) => Ok(()),
    }
}

/// What a grant is shown: just what it may perform.
pub fn visible(grant: &Grant) -> impl Iterator<Item = &'static Definition> {
    all()
        .iter()
        .filter(|definition| permits(grant, definition).is_ok())
}

/// The same as tools, for the relay socket.
pub fn specs(grant: &Grant) -> Vec<ToolSpec> {
    visible(grant).map(spec).collect()
}

/// An action as a tool.
pub fn spec(definition: &Definition) -> ToolSpec {
    ToolSpec {
        name: definition.name.into(),
        description: definition.description.into(),
        input_schema: Value::Object((definition.schema)().clone()),
    }
}

/// Performs an action: checks the grant, reads the arguments, runs it, writes the audit log. Every door
/// ends here.
pub async fn perform(
    app: &Arc<App>,
    grant: &Grant,
    name: &str,
    given: Object,
    origin: &Origin,
) -> Result<Value> {
    let definition = find(name).ok_or_else(|| unknown(name))?;
    let started = std::time::Instant::now();
    let call = Call::new(app, grant, origin);
    let mut target = None;
    let outcome = async {
        // Before the arguments are looked at: what is out of reach says nothing about its arguments.
        permits(grant, definition)?;
        let action = Action::read(name, given)?;
        target = action.target().map(Cow::into_owned);
        if let Origin::Inside(inside) = origin {
            inside::check(app, &inside.session, &action).await?;
        }
        action.run(&call).await
    }
    .await;
    app.metrics.action(
        definition.name,
        outcome.as_ref().err().map(|e| e.code),
        started.elapsed(),
    );
    if let Err(error) = &outcome {
        log(definition.name, grant, error);
    }
    if definition.effect.changes() {
        let entry = entry(&call, definition, target, outcome.as_ref().err());
        match definition.effect {
            Effect::Stream => app.audit_soon(entry).await,
            Effect::Read | Effect::Write | Effect::Set | Effect::Delete => {
                let written = app.store.audit_append(entry).await;
                // What was done is done; that it could not be written down must not be silent.
                if let Err(error) = written {
                    tracing::error!(action = definition.name, error = %error.for_log(), "audit entry not written");
                    outcome.as_ref().map_err(Clone::clone)?;
                    return Err(error);
                }
            }
        }
    }
    outcome
}

fn entry(
    call: &Call<'_>,
    definition: &Definition,
    target: Option<String>,
    error: Option<&Error>,
) -> AuditEntry {
    AuditEntry {
        token_id: call.grant.token_id().cloned(),
        session_id: call.origin.session().cloned(),
        action: definition.name.into(),
        target,
        outcome: error.map_or("ok", |e| e.code.as_str()).into(),
        project_id: call.noted_project().or(call.grant.project()).cloned(),
        detail: None,
    }
}

/// Runs what waits for the disk where it holds nobody up.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(Error::internal)?
}

fn log(action: &str, grant: &Grant, error: &Error) {
    let token = grant.token_id().map(tracing::field::display);
    match &error.log {
        Some(_) => {
            tracing::error!(action, token, code = %error.code, error = %error.for_log(), "action failed")
        }
        None => tracing::debug!(action, token, code = %error.code, error = %error.message, "action refused"),
    }
}
