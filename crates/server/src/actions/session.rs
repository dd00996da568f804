//! `session_*`: reading sessions and their events, switching agents, cancelling turns, ending and deleting sessions.

use std::{borrow::Cow, time::Duration};

use oubliette_protocol::{ProjectId, Result, Scope, SessionId, Slug, event::SessionStatus};
use oubliette_session::{
    CancelReply, EventsQuery, EventsReply, HoldKind, IncludeChildren, SessionListQuery, SessionPage,
    SessionView, SwitchReply,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{
    ActionCall, ActionHandler, Effect,
    workspace::{deletable_workspace, delete_workspace},
};
use crate::{auth::CredentialKind, presence::PresenceGuard};

/// `session_cancel`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionCancel {
    /// Id of the session whose running turn to cancel (`gogol_…`).
    pub session_id: SessionId,
}

/// `session_end`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionEnd {
    /// Id of the session to end (`gogol_…`).
    pub session_id: SessionId,
}

/// `session_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionDelete {
    /// Id of the session to delete (`gogol_…`). It, and every session it started, must have ended or failed.
    pub session_id: SessionId,
    /// Whether its workspace is deleted too. Not a project's default one, nor one another active session works in.
    /// Default: false.
    #[serde(default)]
    pub workspace: Option<bool>,
}

/// `session_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionGet {
    /// Id of the session (`gogol_…`).
    pub session_id: SessionId,
}

/// `session_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionList {
    /// Only sessions of this project (`proj_…`). Absent: of all your token can see.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Only sessions in this status: starting, running, idle, switching, ended or failed. Absent: in any.
    #[serde(default)]
    pub status: Option<SessionStatus>,
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `session_events`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionEvents {
    /// Id of the session (`gogol_…`).
    pub session_id: SessionId,
    /// Return events after this index, not the one at it: pass last_index of the previous answer. Default: -1, from
    /// the first.
    #[serde(default)]
    pub since_index: Option<i64>,
    /// Maximum number of events to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub max_events: Option<u32>,
    /// How long to wait for a first event if there is none yet, in milliseconds, 0 to 50000. Default: 0.
    #[serde(default)]
    pub wait_ms: Option<u32>,
    /// Whether to return, as `children`, also the first events of every session started below this one, at most
    /// 1000 together. Default: false.
    #[serde(default)]
    pub include_children: Option<bool>,
}

/// `session_switch_agent`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct SessionSwitchAgent {
    /// Id of the session (`gogol_…`).
    pub session_id: SessionId,
    /// Slug of the agent to switch to, for example "assistant".
    pub agent: Slug,
}

impl ActionHandler for SessionCancel {
    type Output = CancelReply;

    const NAME: &'static str = "session_cancel";
    const DESCRIPTION: &'static str = "Cancel the running turn of a session.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.session_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.note_session(&self.session_id).await?;
        call.app
            .sessions
            .cancel(call.grant.principal(), &self.session_id)
            .await
    }
}

impl ActionHandler for SessionEnd {
    type Output = SessionView;

    const NAME: &'static str = "session_end";
    const DESCRIPTION: &'static str = "End a session and every session it started.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.session_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.note_session(&self.session_id).await?;
        call.app
            .sessions
            .end(call.grant.principal(), &self.session_id)
            .await
    }
}

/// Result of `session_delete`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct SessionDeleted {
    /// The session.
    session_id: SessionId,
    /// True.
    deleted: bool,
    /// How many sessions were deleted: it, and those it started.
    sessions: usize,
    /// Whether its workspace was deleted as well.
    workspace_deleted: bool,
}

impl ActionHandler for SessionDelete {
    type Output = SessionDeleted;

    const NAME: &'static str = "session_delete";
    const DESCRIPTION: &'static str = "Delete an ended session, and every session it started, with their logs, \
        debugger events and homes; with workspace, also its workspace. What it used stays in the usage report.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.session_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.note_session(&self.session_id).await?;
        let app = call.app;
        let rows = app
            .sessions
            .deletable(call.grant.principal(), &self.session_id)
            .await?;
        // Checked before anything is deleted.
        let workspace = match (self.workspace, rows.first()) {
            (Some(true), Some(row)) => deletable_workspace(app, &row.workspace_id).await?,
            _ => None,
        };
        app.sessions.delete(&rows).await?;
        if let Some(row) = &workspace {
            delete_workspace(app, row).await?;
        }
        Ok(SessionDeleted {
            session_id: self.session_id,
            deleted: true,
            sessions: rows.len(),
            workspace_deleted: workspace.is_some(),
        })
    }
}

impl ActionHandler for SessionGet {
    type Output = SessionView;

    const NAME: &'static str = "session_get";
    const DESCRIPTION: &'static str = "Show one session.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.app
            .sessions
            .get(call.grant.principal(), &self.session_id)
            .await
    }
}

impl ActionHandler for SessionList {
    type Output = SessionPage;

    const NAME: &'static str = "session_list";
    const DESCRIPTION: &'static str = "List sessions, newest first.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let query = SessionListQuery {
            project_id: self.project_id,
            status: self.status,
            limit: self.limit,
            cursor: self.cursor,
        };
        call.app.sessions.list(call.grant.principal(), query).await
    }
}

impl ActionHandler for SessionEvents {
    type Output = EventsReply;

    const NAME: &'static str = "session_events";
    const DESCRIPTION: &'static str =
        "Read a session's events after an index. With wait_ms it waits for the first new one (long poll).";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let query = EventsQuery {
            session_id: self.session_id,
            since_index: self.since_index.unwrap_or(-1),
            max_events: self.max_events.unwrap_or(100) as usize,
            wait: Duration::from_millis(self.wait_ms.unwrap_or(0).into()),
            children: if self.include_children == Some(true) {
                IncludeChildren::Yes
            } else {
                IncludeChildren::No
            },
        };
        let held = match call.grant.credential() {
            CredentialKind::Token | CredentialKind::Cookie | CredentialKind::Owner => {
                Some(PresenceGuard::for_request(
                    call.app,
                    call.grant,
                    &query.session_id,
                    call.mcp_session(),
                    HoldKind::Poll,
                ))
            }
            // Lends no tools: there is no caller to be present.
            CredentialKind::BaseTool => None,
        };
        let without_wait = EventsQuery {
            wait: Duration::ZERO,
            ..query.clone()
        };
        let reply = tokio::select! {
            reply = call.app.sessions.events(call.grant.principal(), query) => reply,
            // A stopping server answers polls with the events there are.
            () = call.app.stopping.cancelled() => call.app.sessions.events(call.grant.principal(), without_wait).await,
            // Dropping `held` marks the caller as disconnected.
            error = call.abandoned() => return Err(error),
        };
        if let Some(held) = held {
            held.release_as_answered();
        }
        let reply = reply?;
        if let Some(sink) = call.event_sink() {
            for event in &reply.events {
                sink.event(event).await;
            }
        }
        Ok(reply)
    }
}

impl ActionHandler for SessionSwitchAgent {
    type Output = SwitchReply;

    const NAME: &'static str = "session_switch_agent";
    const DESCRIPTION: &'static str = "Give a session another agent. The running turn gets a few seconds to end; the new \
        agent starts with tools and memory of its own.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(format!("{} → {}", self.session_id, self.agent).into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.note_session(&self.session_id).await?;
        call.app
            .sessions
            .switch_agent(call.grant.principal(), &self.session_id, &self.agent)
            .await
    }
}
