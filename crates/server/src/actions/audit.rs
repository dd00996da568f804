//! `audit_list`: the audit log, which has every change with its token, target and outcome.

use oubliette_protocol::{ProjectId, Result, Scope, SessionId, TokenId};
use oubliette_store::AuditFilter;
use schemars::JsonSchema;
use serde::Deserialize;

use super::{ActionCall, ActionHandler, Effect, input, output::AuditPage};

/// `audit_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct AuditList {
    /// Only entries of this action, for example "project_create". Absent: all.
    #[serde(default)]
    pub action: Option<String>,
    /// Only entries with this outcome: "ok" or an error code such as "permission_denied". Absent: all.
    #[serde(default)]
    pub outcome: Option<String>,
    /// Only changes made with this token (`tok_…`). Absent: all.
    #[serde(default)]
    pub token_id: Option<TokenId>,
    /// Only changes made from inside this session (`gogol_…`). Absent: all.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Only changes in this project (`proj_…`). Absent: all your token can see.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

impl ActionHandler for AuditList {
    type Output = AuditPage;

    const NAME: &'static str = "audit_list";
    const DESCRIPTION: &'static str = "Read the audit log, newest first: who changed what, and how it ended. principal \
        is a token's id, owner, or anonymous for a refused login or connection.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        if let Some(id) = &self.project_id {
            call.grant.require_project(id)?;
        }
        let filter = AuditFilter {
            project: self.project_id.or_else(|| call.grant.project().cloned()),
            token: self.token_id,
            session: self.session_id,
            action: self.action,
            outcome: self.outcome,
        };
        let page = call
            .app
            .store
            .audit_list(filter, input::page_request(self.limit, self.cursor))
            .await?;
        Ok(page.into())
    }
}
