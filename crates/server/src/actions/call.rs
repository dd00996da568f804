//! One call of an action: its grant, where it comes from, and access to what the grant can see.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicI64, Ordering},
};

use oubliette_protocol::{Error, ProjectId, Result, SessionId, WorkspaceId, event::SessionEvent};
use oubliette_store::{PageRequest, ProjectFilter, ProjectRow, WorkspaceRow};
use tokio_util::sync::CancellationToken;

use crate::{app::App, auth::Grant};

/// Where a call comes from.
#[derive(Clone)]
pub enum ActionOrigin {
    /// A client outside any sandbox: MCP, REST, control socket or command line.
    Outside(OutsideCall),
    /// An agent in a sandbox, through its session's relay socket.
    Inside(InsideCall),
}

/// Details of a call from outside.
#[derive(Clone, Default)]
pub struct OutsideCall {
    /// The stateful MCP session it belongs to.
    pub mcp_session: Option<Arc<str>>,
    /// Cancelled when the client cancels the request or disconnects.
    pub cancellation: CancellationToken,
    /// Receiver of session events while the call runs, if the client wants them.
    pub stream: Option<Arc<dyn EventSink>>,
}

/// Details of a call from inside a sandbox.
#[derive(Clone)]
pub struct InsideCall {
    /// The session whose relay socket it came over.
    pub session: SessionId,
    /// Whether it is a base tool's call or one under an API key.
    pub authority: AgentAuthority,
    /// Cancelled when the agent cancels the call.
    pub cancellation: CancellationToken,
}

/// What gives an agent the right to a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AgentAuthority {
    /// The call is of a base tool, which every agent has.
    Base,
    /// The call has an API key.
    Key,
}

/// Receives session events while a call runs.
#[async_trait::async_trait]
pub trait EventSink: Send + Sync {
    /// Sends one event; returns when it is accepted.
    async fn event(&self, event: &SessionEvent);
}

impl ActionOrigin {
    /// From outside, without MCP session, event stream or cancellation.
    pub fn outside() -> Self {
        ActionOrigin::Outside(OutsideCall::default())
    }

    /// The calling session, if the call is from inside.
    pub fn session(&self) -> Option<&SessionId> {
        match self {
            ActionOrigin::Inside(inside) => Some(&inside.session),
            ActionOrigin::Outside(_) => None,
        }
    }

    /// Cancelled when the client or agent no longer waits for the answer.
    pub fn cancellation(&self) -> &CancellationToken {
        match self {
            ActionOrigin::Inside(inside) => &inside.cancellation,
            ActionOrigin::Outside(outside) => &outside.cancellation,
        }
    }
}

/// What the handler of an action gets besides its arguments.
pub(crate) struct ActionCall<'a> {
    /// The server's shared state.
    pub app: &'a Arc<App>,
    /// The checked permission of the token behind the call.
    pub grant: &'a Grant,
    /// Where the call comes from.
    pub origin: &'a ActionOrigin,
    project: OnceLock<ProjectId>,
    target: OnceLock<String>,
    streamed: AtomicI64,
}

/// Value of `streamed` before any event was sent.
const NONE_STREAMED: i64 = i64::MIN;

impl<'a> ActionCall<'a> {
    pub(super) fn new(app: &'a Arc<App>, grant: &'a Grant, origin: &'a ActionOrigin) -> Self {
        Self {
            app,
            grant,
            origin,
            project: OnceLock::new(),
            target: OnceLock::new(),
            streamed: AtomicI64::new(NONE_STREAMED),
        }
    }

    /// Notes the index of an event that was sent to the client's event stream.
    pub(super) fn note_streamed(&self, index: i64) {
        self.streamed.store(index, Ordering::Relaxed);
    }

    /// Index of the last event sent to the client's event stream.
    pub(super) fn last_streamed(&self) -> Option<i64> {
        Some(self.streamed.load(Ordering::Relaxed)).filter(|index| *index != NONE_STREAMED)
    }

    /// The project to name in the audit entry.
    pub(super) fn audited_project(&self) -> Option<&ProjectId> {
        self.project.get()
    }

    /// Sets the project to name in the audit entry; the first one set stays.
    pub(crate) fn note_project(&self, project: &ProjectId) {
        let _ = self.project.set(project.clone());
    }

    /// What the action created, to name in the audit entry if its arguments name no target.
    pub(super) fn audited_target(&self) -> Option<&str> {
        self.target.get().map(String::as_str)
    }

    /// Sets what the action created, for the audit entry; the first one set stays.
    pub(crate) fn note_target(&self, target: &str) {
        let _ = self.target.set(target.to_owned());
    }

    /// Reads a project; `not_found` if the grant cannot see it.
    pub(crate) async fn project(&self, id: &ProjectId) -> Result<ProjectRow> {
        self.grant.require_project(id)?;
        let row = self.app.store.project_get(id).await?;
        let row = row.ok_or_else(|| Error::not_found(format!("there is no project {id}")))?;
        self.note_project(id);
        Ok(row)
    }

    /// The only project the grant can see, for calls that name none; an error if there are several.
    pub(crate) async fn only_project(&self) -> Result<ProjectRow> {
        let filter = ProjectFilter {
            project: self.grant.project().cloned(),
            ..ProjectFilter::default()
        };
        let page = self.app.store.project_list(filter, PageRequest::first(2)).await?;
        let more = page.items.len() > 1;
        match page.items.into_iter().next() {
            Some(row) if !more => {
                self.note_project(&row.project_id);
                Ok(row)
            }
            Some(_) => Err(Error::invalid(
                "project_id: there is more than one project; name one",
            )),
            None => Err(Error::not_found(
                "there is no project yet; project_create makes one",
            )),
        }
    }

    /// Reads a workspace; `not_found` if the grant cannot see its project.
    pub(crate) async fn workspace(&self, id: &WorkspaceId) -> Result<WorkspaceRow> {
        let row = self.app.visible_workspace(self.grant, id).await?;
        self.note_project(&row.project_id);
        Ok(row)
    }
}
