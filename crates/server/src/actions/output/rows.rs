//! Results that are rows of the database, as clients see them.

use indexmap::IndexMap;
use jiff::Timestamp;
use oubliette_protocol::{
    ApprovalId, ProjectId, Scope, SessionId, Slug, TokenId, WorkspaceId, WorkspacePolicy,
    approval::{ApprovalSource, ApprovalStatus},
};
use oubliette_store::{ApprovalRow, AuditRow, ListPage, ProjectRow, TokenRow, WorkspaceRow};
use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

use super::mask_values;
use crate::actions::project_settings::{ProjectLimits, ProjectSandbox, SessionKeySettings};

/// A project.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Project")]
pub(crate) struct ProjectView {
    /// Its id (`proj_…`).
    project_id: ProjectId,
    /// Its display name.
    name: String,
    /// What it is for.
    description: String,
    /// Environment variables of its agents; each value is shown as `***`.
    env: IndexMap<String, String>,
    /// The sandbox settings it has of its own.
    #[schemars(with = "ProjectSandbox")]
    sandbox: Value,
    /// The limits it has of its own.
    #[schemars(with = "ProjectLimits")]
    limits: Value,
    /// The workspace in which sessions work that name none.
    default_workspace_id: WorkspaceId,
    /// Where sessions work that name no workspace.
    workspaces: WorkspacePolicy,
    /// When it was created.
    created_at: Timestamp,
    /// When it was last changed.
    updated_at: Timestamp,
    /// Slug of the agent of sessions that name none; absent: they must name one.
    #[serde(skip_serializing_if = "Option::is_none")]
    agent: Option<Slug>,
    /// The API key that each session gets; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    api_key: Option<SessionKeySettings>,
}

impl From<&ProjectRow> for ProjectView {
    fn from(row: &ProjectRow) -> Self {
        Self {
            project_id: row.project_id.clone(),
            name: row.name.clone(),
            description: row.description.clone(),
            env: mask_values(&row.env),
            sandbox: row.sandbox.clone(),
            limits: row.limits.clone(),
            default_workspace_id: row.default_workspace.clone(),
            workspaces: row.workspaces,
            created_at: row.created_at,
            updated_at: row.updated_at,
            agent: row.agent.clone(),
            api_key: row.api_key_scope.map(|scope| SessionKeySettings { scope }),
        }
    }
}

/// A page of projects.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProjectPage {
    /// The projects, newest first.
    projects: Vec<ProjectView>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

impl From<ListPage<ProjectRow>> for ProjectPage {
    fn from(page: ListPage<ProjectRow>) -> Self {
        Self {
            projects: page.items.iter().map(ProjectView::from).collect(),
            next_cursor: page.next_cursor,
        }
    }
}

/// A workspace.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Workspace")]
pub(crate) struct WorkspaceView {
    /// Its id (a UUID).
    workspace_id: WorkspaceId,
    /// The project it belongs to.
    project_id: ProjectId,
    /// Its display name.
    name: String,
    /// Environment variables of sessions in it; each value is shown as `***`.
    env: IndexMap<String, String>,
    /// Whether it is its project's default one.
    default: bool,
    /// When it was created.
    created_at: Timestamp,
    /// The repository its first files came from; absent: it began empty.
    #[serde(skip_serializing_if = "Option::is_none")]
    #[schemars(with = "Option<WorkspaceOrigin>")]
    source: Option<Value>,
}

/// Where a workspace's first files came from.
#[derive(JsonSchema)]
#[allow(dead_code, reason = "only its schema is used: the database has it as JSON")]
struct WorkspaceOrigin {
    /// The repository's URL, without credentials.
    git: String,
    /// The branch, tag or commit that was asked for; null: the repository's default branch.
    #[serde(rename = "ref", skip_serializing_if = "Option::is_none")]
    reference: Option<String>,
}

impl WorkspaceView {
    /// A workspace of a project with this default one.
    pub(crate) fn new(row: &WorkspaceRow, default: &WorkspaceId) -> Self {
        Self {
            workspace_id: row.workspace_id.clone(),
            project_id: row.project_id.clone(),
            name: row.name.clone(),
            env: mask_values(&row.env),
            default: row.workspace_id == *default,
            created_at: row.created_at,
            source: row.source.clone(),
        }
    }
}

/// A page of workspaces.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct WorkspacePage {
    /// The workspaces.
    workspaces: Vec<WorkspaceView>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

impl WorkspacePage {
    /// A page of workspaces of a project with this default one.
    pub(crate) fn new(page: ListPage<WorkspaceRow>, default: &WorkspaceId) -> Self {
        let rows = page.items.iter();
        Self {
            workspaces: rows.map(|row| WorkspaceView::new(row, default)).collect(),
            next_cursor: page.next_cursor,
        }
    }
}

/// A token, without its secret text, which is not stored.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Token")]
pub(crate) struct TokenView {
    /// Its id (`tok_…`), which is not secret.
    token_id: TokenId,
    /// Its display name.
    name: String,
    /// What it may do.
    scope: Scope,
    /// Always `oub_***`.
    token: &'static str,
    /// When it was created.
    created_at: Timestamp,
    /// The one project it is limited to; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    project_id: Option<ProjectId>,
    /// When it expires; absent: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<Timestamp>,
    /// When it was revoked; absent: it was not.
    #[serde(skip_serializing_if = "Option::is_none")]
    revoked_at: Option<Timestamp>,
    /// The session it was created for or in; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<SessionId>,
}

impl From<TokenRow> for TokenView {
    fn from(row: TokenRow) -> Self {
        Self {
            token_id: row.token_id,
            name: row.name,
            scope: row.scope,
            token: "oub_***",
            created_at: row.created_at,
            project_id: row.project_id,
            expires_at: row.expires_at,
            revoked_at: row.revoked_at,
            session_id: row.session_id,
        }
    }
}

/// A page of tokens.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TokenPage {
    /// The tokens.
    tokens: Vec<TokenView>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

impl From<ListPage<TokenRow>> for TokenPage {
    fn from(page: ListPage<TokenRow>) -> Self {
        Self {
            tokens: page.items.into_iter().map(TokenView::from).collect(),
            next_cursor: page.next_cursor,
        }
    }
}

/// An entry of the audit log.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "AuditEntry")]
pub(crate) struct AuditView {
    /// Its index in the log.
    index: i64,
    /// When it was written.
    ts: Timestamp,
    /// Who it was: a token's id, `owner` or `anonymous`.
    principal: String,
    /// Name of the action.
    action: String,
    /// `ok`, or the error's code.
    outcome: String,
    /// The token; absent for the owner and for requests without a valid token.
    #[serde(skip_serializing_if = "Option::is_none")]
    token_id: Option<TokenId>,
    /// The session it came from; absent: from outside.
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<SessionId>,
    /// The project it concerns; absent: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    project_id: Option<ProjectId>,
    /// The id or name of what it was performed on.
    #[serde(skip_serializing_if = "Option::is_none")]
    target: Option<String>,
    /// Further details, without secrets.
    #[serde(skip_serializing_if = "Option::is_none")]
    detail: Option<Value>,
}

impl From<AuditRow> for AuditView {
    fn from(row: AuditRow) -> Self {
        let entry = row.entry;
        Self {
            index: row.index,
            ts: row.ts,
            principal: entry.principal.as_str().to_owned(),
            action: entry.action,
            outcome: entry.outcome,
            token_id: entry.principal.token_id().cloned(),
            session_id: entry.session_id,
            project_id: entry.project_id,
            target: entry.target,
            detail: entry.detail,
        }
    }
}

/// A page of the audit log.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct AuditPage {
    /// The entries, newest first.
    entries: Vec<AuditView>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

impl From<ListPage<AuditRow>> for AuditPage {
    fn from(page: ListPage<AuditRow>) -> Self {
        Self {
            entries: page.items.into_iter().map(AuditView::from).collect(),
            next_cursor: page.next_cursor,
        }
    }
}

/// A call that waits, or waited, for a person to allow it.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Approval")]
pub(crate) struct ApprovalView {
    /// Its id (`appr_…`).
    approval_id: ApprovalId,
    /// The session whose call waits.
    session_id: SessionId,
    /// The session's project.
    project_id: ProjectId,
    /// Slug of the agent whose rules ask.
    agent: Slug,
    /// The tool as it was called.
    tool: String,
    /// `@<id>/<tool>` for a catalog tool, else the tool's full name.
    canonical: String,
    /// Where the tool comes from.
    source: ApprovalSource,
    /// The call's arguments, secrets masked. In arguments of more than 64 KiB, texts of more than 2 KiB are cut and end with
    /// `… (N bytes in all)`; if that is not enough they are `{"truncated": true, "bytes", "start"}`.
    arguments: Value,
    /// The entry of `tools.ask` as it is written in agent.json.
    rule: Value,
    /// Its state.
    status: ApprovalStatus,
    /// When it was requested.
    requested_at: Timestamp,
    /// When it expires.
    expires_at: Timestamp,
    /// When it was decided or ended; absent while it waits.
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_at: Option<Timestamp>,
    /// Who decided: a token's id, or `owner`; absent if nobody did.
    #[serde(skip_serializing_if = "Option::is_none")]
    decided_by: Option<String>,
    /// Why; absent if nothing was said.
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
}

impl From<ApprovalRow> for ApprovalView {
    fn from(row: ApprovalRow) -> Self {
        let request = row.request;
        Self {
            approval_id: request.approval_id,
            session_id: row.session_id,
            project_id: row.project_id,
            agent: row.agent,
            tool: request.tool,
            canonical: request.canonical,
            source: request.source,
            arguments: request.arguments,
            rule: request.rule,
            status: row.status,
            requested_at: row.requested_at,
            expires_at: request.expires_at,
            decided_at: row.decided_at,
            decided_by: row.decided_by,
            reason: row.reason,
        }
    }
}

/// A page of approvals.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ApprovalPage {
    /// The approvals, newest first.
    approvals: Vec<ApprovalView>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

impl From<ListPage<ApprovalRow>> for ApprovalPage {
    fn from(page: ListPage<ApprovalRow>) -> Self {
        Self {
            approvals: page.items.into_iter().map(ApprovalView::from).collect(),
            next_cursor: page.next_cursor,
        }
    }
}
