//! One call of an action: who, from where, and what it may reach.

use std::sync::{
    Arc, OnceLock,
    atomic::{AtomicI64, Ordering},
};

use oubliette_protocol::{Error, ProjectId, Result, SessionId, WorkspaceId, event::Event};
use oubliette_store::{Page, ProjectFilter, ProjectRow, WorkspaceRow};
use tokio_util::sync::CancellationToken;

use crate::{app::App, auth::Grant};

/// Where a call comes from.
#[derive(Clone)]
pub enum Origin {
    /// A client, a person, a program.
    Outside(Outside),
    /// An agent, through its session's relay socket.
    Inside(Inside),
}

/// A call from outside.
#[derive(Clone, Default)]
pub struct Outside {
    /// The stateful MCP session it came on.
    pub mcp_session: Option<Arc<str>>,
    /// Cancelled when the client breaks its request off.
    pub gone: CancellationToken,
    /// Where events may be streamed while the call runs.
    pub stream: Option<Arc<dyn EventSink>>,
}

/// A call from a sandbox.
#[derive(Clone)]
pub struct Inside {
    /// Whose socket it came on.
    pub session: SessionId,
    /// By what right.
    pub reason: Reason,
    /// Cancelled when the agent gives the call up.
    pub gone: CancellationToken,
}

/// By what right an agent calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reason {
    /// A base tool: every agent has those.
    Base,
    /// A key it showed.
    Key,
}

/// Takes events while a call runs.
#[async_trait::async_trait]
pub trait EventSink: Send + Sync {
    /// Sends one; waits until it is taken.
    async fn event(&self, event: &Event);
}

impl Origin {
    /// From outside, with nothing special about it.
    pub fn outside() -> Self {
        Origin::Outside(Outside::default())
    }

    /// The session, when from inside.
    pub fn session(&self) -> Option<&SessionId> {
        match self {
            Origin::Inside(inside) => Some(&inside.session),
            Origin::Outside(_) => None,
        }
    }

    /// Cancelled when nobody waits for the answer any more.
    pub fn gone(&self) -> &CancellationToken {
        match self {
            Origin::Inside(inside) => &inside.gone,
            Origin::Outside(outside) => &outside.gone,
        }
    }
}

/// What a handler works with.
pub struct Call<'a> {
    /// The server.
    pub app: &'a Arc<App>,
    /// Who.
    pub grant: &'a Grant,
    /// From where.
    pub origin: &'a Origin,
    project: OnceLock<ProjectId>,
    streamed: AtomicI64,
}

/// Nothing was streamed.
const NOTHING: i64 = i64::MIN;

impl<'a> Call<'a> {
    pub(super) fn new(app: &'a Arc<App>, grant: &'a Grant, origin: &'a Origin) -> Self {
        Self {
            app,
            grant,
            origin,
            project: OnceLock::new(),
            streamed: AtomicI64::new(NOTHING),
        }
    }

    /// An event was streamed while the call runs.
    pub(super) fn streamed(&self, index: i64) {
        self.streamed.store(index, Ordering::Relaxed);
    }

    /// The last event that was.
    pub(super) fn streamed_until(&self) -> Option<i64> {
        Some(self.streamed.load(Ordering::Relaxed)).filter(|index| *index != NOTHING)
    }

    /// The project acted in, for the audit log.
    pub(super) fn noted_project(&self) -> Option<&ProjectId> {
        self.project.get()
    }

    /// Notes the project acted in.
    pub fn note_project(&self, project: &ProjectId) {
        let _ = self.project.set(project.clone());
    }

    /// A project within reach. One outside reads as not there.
    pub async fn project(&self, id: &ProjectId) -> Result<ProjectRow> {
        self.grant.require_project(id)?;
        let row = self.app.store.project_get(id).await?;
        let row = row.ok_or_else(|| Error::not_found(format!("there is no project {id}")))?;
        self.note_project(id);
        Ok(row)
    }

    /// The only project this grant sees, for calls that name none.
    pub async fn only_project(&self) -> Result<ProjectRow> {
        let filter = ProjectFilter {
            only: self.grant.project().cloned(),
            ..ProjectFilter::default()
        };
        let page = self.app.store.project_list(filter, Page::first(2)).await?;
        let more = page.items.len() > 1;
        match page.items.into_iter().next() {
            Some(row) if !more => {
                self.note_project(&row.project_id);
                Ok(row)
            }
            Some(_) => Err(Error::invalid(
                "project_id: there is more than one project; say which",
            )),
            None => Err(Error::not_found(
                "there is no project yet; project_create makes one",
            )),
        }
    }

    /// A workspace within reach.
    pub async fn workspace(&self, id: &WorkspaceId) -> Result<WorkspaceRow> {
        let missing = || Error::not_found(format!("there is no workspace {id}"));
        let row = self.app.store.workspace_get(id).await?.ok_or_else(missing)?;
        if !self.grant.principal().sees(&row.project_id) {
            return Err(missing());
        }
        self.note_project(&row.project_id);
        Ok(row)
    }
}
