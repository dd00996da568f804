//! `approval_*`: calls that wait for a person to allow them: listing and deciding them.

use std::borrow::Cow;

use oubliette_protocol::{
    ApprovalId, Error, ProjectId, Result, Scope, SessionId,
    approval::{ApprovalReach, ApprovalStatus},
};
use oubliette_session::{ApprovalChoice, ApprovalQuery, ApprovalVerdict};
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::json;

use super::{
    ActionCall, ActionHandler, Effect, input,
    output::{ApprovalPage, ApprovalView},
};

/// Maximum length of the reason of a decision, in characters.
const MAX_REASON_CHARS: usize = 2_000;

/// `approval_list`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApprovalList {
    /// Only approvals of this session (`gogol_…`). Absent: of all your token can see.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Only approvals of this project (`proj_…`). Absent: of all your token can see.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Only approvals with this status: pending, allowed, denied, expired or cancelled. Absent: all.
    #[serde(default)]
    pub status: Option<ApprovalStatus>,
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `approval_decide`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ApprovalDecide {
    /// Id of the approval (`appr_…`).
    pub approval_id: ApprovalId,
    /// "allow": the call is made; "deny": the agent gets an error.
    pub decision: GivenDecision,
    /// Why, at most 2000 characters. The agent is told the reason of a denial. Default: none.
    #[serde(default)]
    pub reason: Option<String>,
    /// "session": later calls of the session that meet the same rule entry pass without asking. Only with "allow".
    /// Default: this call alone.
    #[serde(default)]
    pub remember: Option<ApprovalReach>,
}

/// What is decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub(crate) enum GivenDecision {
    /// The call may be made.
    Allow,
    /// It may not.
    Deny,
}

impl GivenDecision {
    fn as_str(self) -> &'static str {
        match self {
            Self::Allow => "allow",
            Self::Deny => "deny",
        }
    }
}

impl ActionHandler for ApprovalList {
    type Output = ApprovalPage;

    const NAME: &'static str = "approval_list";
    const DESCRIPTION: &'static str =
        "List approvals, newest first: calls of agents that wait, or waited, for a person to allow them.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let query = ApprovalQuery {
            project_id: self.project_id,
            session_id: self.session_id,
            status: self.status,
        };
        let page = input::page_request(self.limit, self.cursor);
        let sessions = &call.app.sessions;
        let rows = sessions
            .approval_list(call.grant.principal(), query, page)
            .await?;
        Ok(rows.into())
    }
}

impl ActionHandler for ApprovalDecide {
    type Output = ApprovalView;

    const NAME: &'static str = "approval_decide";
    const DESCRIPTION: &'static str =
        "Allow or deny a call that waits for approval. Never possible from inside a sandbox.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Write;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.approval_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let reason = self.reason.filter(|reason| !reason.trim().is_empty());
        if reason
            .as_ref()
            .is_some_and(|reason| reason.chars().count() > MAX_REASON_CHARS)
        {
            return Err(Error::invalid(format!(
                "reason is longer than {MAX_REASON_CHARS} characters"
            )));
        }
        if self.remember.is_some() && self.decision == GivenDecision::Deny {
            return Err(Error::invalid(
                "remember: only an allowed call can be remembered; to deny a tool, write it into tools.denied",
            ));
        }
        let (principal, sessions) = (call.grant.principal(), &call.app.sessions);
        let row = sessions.approval(principal, &self.approval_id).await?;
        call.note_project(&row.project_id);
        call.note_detail(json!({
            "decision": self.decision.as_str(),
            "reason": reason,
            "remember": self.remember,
            "session_id": row.session_id,
            "agent": row.agent,
            "tool": row.request.tool,
            "rule": row.request.rule,
        }));
        let verdict = ApprovalVerdict {
            choice: match self.decision {
                GivenDecision::Allow => ApprovalChoice::Allow,
                GivenDecision::Deny => ApprovalChoice::Deny,
            },
            reason,
            reach: self.remember,
        };
        let decided = sessions
            .approval_decide(principal, &self.approval_id, verdict)
            .await?;
        Ok(decided.into())
    }
}
