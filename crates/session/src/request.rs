//! Requests to sessions and their replies, one pair for each action of the server.

use std::{collections::BTreeMap, path::PathBuf, sync::Arc};

use oubliette_protocol::{
    ApprovalId, Principal, ProjectId, SessionId, Slug, TokenId, WorkspaceId,
    caller::CallerDeclaration,
    event::{SessionEvent, SessionStatus},
};
use schemars::JsonSchema;
use serde::Serialize;

/// Where a request comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum RequestOrigin {
    /// A client of one of the server's doors.
    Outside,
    /// The agent of this session, through a base tool.
    BaseTool(SessionId),
    /// The agent of this session, through one of Oubliette's own tools, called with the session's API key.
    OwnTool(SessionId),
}

impl RequestOrigin {
    /// The session whose agent made the request; `None` when it came from outside.
    pub fn session(&self) -> Option<&SessionId> {
        match self {
            RequestOrigin::Outside => None,
            RequestOrigin::BaseTool(session) | RequestOrigin::OwnTool(session) => Some(session),
        }
    }
}

/// Arguments of `session_message`.
#[derive(Debug, Clone)]
pub struct MessageRequest {
    /// The principal that sends the message.
    pub principal: Principal,
    /// Whether it comes from outside or from another session's agent.
    pub origin: RequestOrigin,
    /// The text, not empty, at most 4 MiB.
    pub message: String,
    /// The project; without it the session's project or, for a new session, the only one the principal sees.
    pub project_id: Option<ProjectId>,
    /// The session; without it a new one is started.
    pub session_id: Option<SessionId>,
    /// The agent of a new session; without it the parent's, or the project's.
    pub agent: Option<Slug>,
    /// The workspace of a new session.
    pub workspace: WorkspaceChoice,
    /// The tools the caller lends to the session.
    pub context: Option<CallerDeclaration>,
    /// The id of the stateful MCP session the request came over, if it came over one.
    pub mcp_session: Option<String>,
    /// When the reply is sent.
    pub wait: WaitMode,
}

/// Which workspace a new session works on.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub enum WorkspaceChoice {
    /// The parent session's when it is of the same project, else the project's default.
    #[default]
    Default,
    /// This one.
    Existing(WorkspaceId),
    /// A new one, created for the session.
    New,
}

/// When `session_message` replies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum WaitMode {
    /// As soon as the message is queued.
    #[default]
    No,
    /// When the turn has ended.
    ForTurn,
}

/// Reply of `session_message`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct MessageReply {
    /// The session.
    pub session_id: SessionId,
    /// The number of this message's turn, from 1.
    pub turn: u64,
    /// The session's status when the reply was made.
    pub status: SessionStatus,
    /// All message text of the turn; absent unless the turn was waited for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
}

/// Reply of `session_cancel`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct CancelReply {
    /// The session.
    pub session_id: SessionId,
    /// The turn that was running, or the last one.
    pub turn: u64,
    /// Whether a turn was running.
    pub cancelled: bool,
}

/// Reply of `session_switch_agent`.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct SwitchReply {
    /// The session.
    pub session_id: SessionId,
    /// The agent the session has now.
    pub agent: Slug,
    /// Whether the running turn and all calls ended by themselves; false when some had to be cancelled.
    pub drained: bool,
    /// Duration of the switch, in milliseconds.
    pub took_ms: u64,
}

/// A session as clients see it.
#[derive(Debug, Clone, PartialEq, Serialize, JsonSchema)]
pub struct SessionView {
    /// Its id.
    pub session_id: SessionId,
    /// Its project.
    pub project_id: ProjectId,
    /// Its workspace.
    pub workspace_id: WorkspaceId,
    /// The slug of its agent.
    pub agent: Slug,
    /// Its status.
    pub status: SessionStatus,
    /// Why it has this status, for example the error of a failed session.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// The session that started it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub parent_id: Option<SessionId>,
    /// The root of its tree of sessions; its own id when it has no parent.
    pub root_id: SessionId,
    /// Its depth below the root; 0 for the root.
    pub depth: u32,
    /// The number of its last turn, from 1; 0 before the first.
    pub turn: u64,
    /// The first line of its first message, at most 80 characters.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub title: Option<String>,
    /// The isolation level of its sandbox; absent until its agent has run once.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub isolation: Option<String>,
    /// The container images its sandboxes were started from, by name, with the digest that each name stood for when it was
    /// first used: it stays the same for this session. Absent without a sandbox driver that has images.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub images: Option<BTreeMap<String, String>>,
    /// Who started it; absent if another session did without a token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub created_by: Option<SessionCreator>,
    /// When it was started.
    pub created_at: jiff::Timestamp,
    /// When it last changed.
    pub updated_at: jiff::Timestamp,
    /// What its model requests used, those of its children not included.
    pub usage: oubliette_protocol::usage::UsageTotals,
    /// The path of its relay socket on the host; only for admins, and only until it has ended.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub relay_socket: Option<PathBuf>,
    /// Ids of its pending approvals, oldest first, at most 1000; not in lists of sessions.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pending_approvals: Option<Vec<ApprovalId>>,
    /// The tools that its agent was last shown, by name; absent in lists, and until the agent has listed its tools.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tools_listed: Option<Vec<String>>,
}

/// Who started a session.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, JsonSchema)]
pub struct SessionCreator {
    /// The token; absent for the owner of the home directory, who needs none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub token_id: Option<TokenId>,
    /// The token's name, or "owner"; absent if the token is no longer stored.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
}

/// Arguments of `session_list`.
#[derive(Debug, Clone, Default)]
pub struct SessionListQuery {
    /// Only sessions of this project.
    pub project_id: Option<ProjectId>,
    /// Only sessions with this status.
    pub status: Option<SessionStatus>,
    /// The most sessions in one page; without it the store's default.
    pub limit: Option<u32>,
    /// Where the page begins: `next_cursor` of the previous page.
    pub cursor: Option<String>,
}

/// Reply of `session_list`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct SessionPage {
    /// The sessions, newest first.
    pub sessions: Vec<SessionView>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub next_cursor: Option<String>,
}

/// Arguments of `session_events`.
#[derive(Debug, Clone)]
pub struct EventsQuery {
    /// The session whose log is read.
    pub session_id: SessionId,
    /// Only events after this index; -1 is from the beginning.
    pub since_index: i64,
    /// The most events in the reply, 1 to [`MAX_EVENTS`](crate::events::MAX_EVENTS).
    pub max_events: usize,
    /// How long to wait for the first event, at most [`MAX_WAIT`](crate::events::MAX_WAIT).
    pub wait: std::time::Duration,
    /// Whether the events of its descendants are included.
    pub children: IncludeChildren,
}

/// Whether `session_events` includes the sessions started by a session, directly or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum IncludeChildren {
    /// Only the session itself.
    #[default]
    No,
    /// All its descendants too.
    Yes,
}

/// Reply of `session_events`.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct EventsReply {
    /// The events, oldest first.
    pub events: Vec<Arc<SessionEvent>>,
    /// The index of the last event, or `since_index` when there is none.
    pub last_index: i64,
    /// The session's status when the reply was made.
    pub status: SessionStatus,
    /// The events of each descendant, when they were asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub children: Option<Vec<ChildEvents>>,
}

/// The events of one descendant of a session.
#[derive(Debug, Clone, Serialize, JsonSchema)]
pub struct ChildEvents {
    /// The descendant.
    pub session_id: SessionId,
    /// Its events, from the beginning of its log.
    pub events: Vec<Arc<SessionEvent>>,
    /// The index of the last event, or -1 when there is none.
    pub last_index: i64,
}
