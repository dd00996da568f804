//! What is asked of sessions, and what they answer.

use std::{path::PathBuf, sync::Arc};

use oubliette_protocol::{
    Principal, ProjectId, SessionId, Slug, WorkspaceId,
    caller::Declaration,
    event::{Event, Status},
};
use serde::Serialize;

/// Where a request comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Asker {
    /// One of the server's doors.
    Outside,
    /// A session's agent, by a base tool.
    Base(SessionId),
    /// A session's agent, by one of Oubliette's own tools under its key.
    Key(SessionId),
}

impl Asker {
    /// The session it comes from the inside of.
    pub fn session(&self) -> Option<&SessionId> {
        match self {
            Asker::Outside => None,
            Asker::Base(session) | Asker::Key(session) => Some(session),
        }
    }
}

/// `session_message`.
#[derive(Debug, Clone)]
pub struct MessageRequest {
    /// Who asks.
    pub principal: Principal,
    /// From where.
    pub asker: Asker,
    /// The text.
    pub message: String,
    /// In which project; without it the session's, or the only visible one.
    pub project_id: Option<ProjectId>,
    /// To which session; without it a new one is started.
    pub session_id: Option<SessionId>,
    /// Which agent a new session runs; without it the project's.
    pub agent: Option<Slug>,
    /// Which workspace a new session works on; without it the project's default.
    pub workspace: WorkspaceChoice,
    /// What the caller lends.
    pub context: Option<Declaration>,
    /// The stateful MCP session it came over, if it did.
    pub mcp_session: Option<String>,
    /// When to answer.
    pub wait: Wait,
}

/// Which workspace a new session works on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum WorkspaceChoice {
    /// The project's default.
    #[default]
    Default,
    /// This one.
    Existing(WorkspaceId),
    /// A new one, made for the session.
    New,
}

/// When `session_message` answers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Wait {
    /// At once.
    #[default]
    No,
    /// When the turn has ended.
    ForTurn,
}

/// What `session_message` answers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct MessageReply {
    /// Which session.
    pub session_id: SessionId,
    /// The turn this message is, from 1.
    pub turn: u64,
    /// What the session is doing.
    pub status: Status,
    /// All of the turn's message text, when it was waited for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// What `session_cancel` answers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Cancelled {
    /// Which session.
    pub session_id: SessionId,
    /// The turn that was running, or the last one.
    pub turn: u64,
    /// Whether there was one to cancel.
    pub cancelled: bool,
}

/// What `session_switch_agent` answers.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Switched {
    /// Which session.
    pub session_id: SessionId,
    /// The agent it has now.
    pub agent: Slug,
    /// Whether everything in flight ended by itself.
    pub drained: bool,
    /// How long it took.
    pub took_ms: u64,
}

/// A session as it is shown.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SessionView {
    /// Its id.
    pub session_id: SessionId,
    /// Its project.
    pub project_id: ProjectId,
    /// What it works on.
    pub workspace_id: WorkspaceId,
    /// Who works.
    pub agent: Slug,
    /// What it is doing.
    pub status: Status,
    /// Why, when that needs saying.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The session that started it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_id: Option<SessionId>,
    /// The session at the top of the tree.
    pub root_id: SessionId,
    /// How far below the top it is.
    pub depth: u32,
    /// The last turn, from 1; 0 before the first.
    pub turn: u64,
    /// The beginning of its first message.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// How strong its walls are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolation: Option<String>,
    /// When it was started.
    pub created_at: jiff::Timestamp,
    /// When it last changed.
    pub updated_at: jiff::Timestamp,
    /// Its relay socket on the host, for admins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay_socket: Option<PathBuf>,
}

/// `session_list`.
#[derive(Debug, Clone, Default)]
pub struct ListQuery {
    /// Of one project.
    pub project_id: Option<ProjectId>,
    /// In one status.
    pub status: Option<Status>,
    /// At most so many.
    pub limit: Option<u32>,
    /// After these.
    pub cursor: Option<String>,
}

/// What `session_list` answers.
#[derive(Debug, Clone, Serialize)]
pub struct SessionPage {
    /// The sessions, newest first.
    pub sessions: Vec<SessionView>,
    /// Where the next page begins.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// `session_events`.
#[derive(Debug, Clone)]
pub struct EventsQuery {
    /// Of which session.
    pub session_id: SessionId,
    /// After this index.
    pub since_index: i64,
    /// At most so many.
    pub max_events: usize,
    /// How long to wait for the first.
    pub wait: std::time::Duration,
    /// Whether the sessions it started are shown too.
    pub children: Children,
}

/// Whether the sessions a session started are shown with it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Children {
    /// No.
    #[default]
    Hidden,
    /// Yes, all of the tree.
    Included,
}

/// What `session_events` answers.
#[derive(Debug, Clone, Serialize)]
pub struct EventsReply {
    /// The events.
    pub events: Vec<Arc<Event>>,
    /// The index of the last one, else what was asked from.
    pub last_index: i64,
    /// What the session is doing.
    pub status: Status,
    /// The same of every session below it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub children: Option<Vec<ChildEvents>>,
}

/// The events of a session below another.
#[derive(Debug, Clone, Serialize)]
pub struct ChildEvents {
    /// Which.
    pub session_id: SessionId,
    /// Its events.
    pub events: Vec<Arc<Event>>,
    /// The index of the last one, else -1.
    pub last_index: i64,
}
