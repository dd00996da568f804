//! One call of an action: its grant, its client, and access to what the grant can see.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicBool, AtomicI64, Ordering},
};

use oubliette_protocol::{
    Error, ProjectId, Result, SessionId, WorkspaceId, event::SessionEvent, relay::ProgressCallback,
};
use oubliette_store::{PageRequest, ProjectFilter, ProjectRow, WorkspaceRow};
use serde_json::Value;
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

use crate::{app::App, auth::Grant};

/// What a call's client gives besides grant and arguments. It holds nothing that decides about permission: whether the
/// call is from inside a sandbox is a property of its grant.
#[derive(Clone, Default)]
pub struct ClientContext {
    /// The stateful MCP session it belongs to.
    pub mcp_session: Option<Arc<str>>,
    /// Cancelled when the client or agent cancels the request or disconnects.
    pub cancellation: CancellationToken,
    /// Receives progress of what the call does, if the client asked for it. Must not block.
    pub progress: Option<ProgressCallback>,
    /// Receiver of session events while the call runs, if the client wants them.
    pub stream: Option<Arc<dyn EventSink>>,
    /// Told the session whose turn a `session_message` waits for, and the index of the last event before its message.
    pub awaited_session: Option<mpsc::UnboundedSender<(SessionId, i64)>>,
    /// Told the session that a `session_message` goes to, and the index of the last event before it.
    pub messaged_session: Option<mpsc::UnboundedSender<(SessionId, i64)>>,
    /// Cancelled when a waiting `session_message` is to be answered before its turn has ended.
    pub stop_waiting: CancellationToken,
    /// Whether another server of the cluster passed the call on to this one.
    pub hop: RequestHop,
}

/// Whether a call is at the server its client sent it to.
#[derive(Debug, Clone, Default)]
pub enum RequestHop {
    /// It is: another server of the cluster may have to perform it.
    #[default]
    First,
    /// Another server passed it on. It is not passed on again: if a third server runs the session by now, nothing is done and
    /// this is set.
    PassedOn(Arc<AtomicBool>),
}

/// Receives session events while a call runs.
#[async_trait::async_trait]
pub trait EventSink: Send + Sync {
    /// Sends one event; returns when it is accepted.
    async fn event(&self, event: &SessionEvent);
}

impl ClientContext {
    /// The context of a client that has only a token to cancel the call with.
    pub fn cancelled_by(cancellation: CancellationToken) -> Self {
        Self {
            cancellation,
            ..Self::default()
        }
    }
}

/// What the handler of an action gets besides its arguments.
pub(crate) struct ActionCall<'a> {
    /// The server's shared state.
    pub app: &'a Arc<App>,
    /// The checked permission of the token behind the call.
    pub grant: &'a Grant,
    /// What its client gives besides grant and arguments.
    pub client: &'a ClientContext,
    project: OnceLock<ProjectId>,
    target: OnceLock<String>,
    detail: OnceLock<Value>,
    streamed: AtomicI64,
}

/// Value of `streamed` before any event was sent.
const NONE_STREAMED: i64 = i64::MIN;

impl<'a> ActionCall<'a> {
    pub(super) fn new(app: &'a Arc<App>, grant: &'a Grant, client: &'a ClientContext) -> Self {
        Self {
            app,
            grant,
            client,
            project: OnceLock::new(),
            target: OnceLock::new(),
            detail: OnceLock::new(),
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

    /// The stateful MCP session the call belongs to.
    pub(super) fn mcp_session(&self) -> Option<Arc<str>> {
        self.client.mcp_session.clone()
    }

    /// The receiver of session events while the call runs, if the client wants them.
    pub(super) fn event_sink(&self) -> Option<&Arc<dyn EventSink>> {
        self.client.stream.as_ref()
    }

    /// The project to name in the audit entry.
    pub(super) fn audited_project(&self) -> Option<&ProjectId> {
        self.project.get()
    }

    /// Sets the project to name in the audit entry; the first one set stays.
    pub(crate) fn note_project(&self, project: &ProjectId) {
        let _ = self.project.set(project.clone());
    }

    /// Sets a session's project for the audit entry, if the grant can see the session.
    pub(super) async fn note_session(&self, id: &SessionId) -> Result<()> {
        if let Some(project) = self.app.store.session_project(id).await?
            && self.grant.principal().sees(&project)
        {
            self.note_project(&project);
        }
        Ok(())
    }

    /// What the action created, to name in the audit entry if its arguments name no target.
    pub(super) fn audited_target(&self) -> Option<&str> {
        self.target.get().map(String::as_str)
    }

    /// Sets what the action created, for the audit entry; the first one set stays.
    pub(crate) fn note_target(&self, target: &str) {
        let _ = self.target.set(target.to_owned());
    }

    /// What the audit entry says besides.
    pub(super) fn audited_detail(&self) -> Option<&Value> {
        self.detail.get()
    }

    /// Sets what the audit entry says besides, without secrets; the first one set stays.
    pub(crate) fn note_detail(&self, detail: Value) {
        let _ = self.detail.set(detail);
    }

    /// Completes when nobody may have the answer any more, with the reason: the client left, or its token or login
    /// ended. Whatever waits for more than a moment waits for this as well.
    pub(super) async fn abandoned(&self) -> Error {
        tokio::select! {
            () = self.client.cancellation.cancelled() => Error::unavailable("the client left"),
            () = self.app.auth.wait_until_ended(self.grant) => {
                Error::unauthenticated("this token has expired or was revoked")
            }
        }
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
