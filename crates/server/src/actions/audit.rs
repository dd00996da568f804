//! The audit log: who changed what.

use oubliette_protocol::{ProjectId, Result, Scope, SessionId, TokenId};
use oubliette_store::AuditFilter;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::Value;

use super::{Call, Effect, Tool, fields, shape};

/// `audit_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AuditList {
    /// Only this action.
    #[serde(default)]
    pub action: Option<String>,
    /// Only with this outcome: ok, or an error's code.
    #[serde(default)]
    pub outcome: Option<String>,
    /// Only by this token.
    #[serde(default)]
    pub token_id: Option<TokenId>,
    /// Only from inside this session.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Only in this project.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// At most so many (1 to 1000, default 100).
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the list before.
    #[serde(default)]
    pub cursor: Option<String>,
}

impl Tool for AuditList {
    const NAME: &'static str = "audit_list";
    const DESCRIPTION: &'static str = "Read the audit log, newest first: who changed what, and how it ended.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        if let Some(id) = &self.project_id {
            call.grant.require_project(id)?;
        }
        call.app.audit_settled().await;
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
            .audit_list(filter, fields::page(self.limit, self.cursor))
            .await?;
        Ok(shape::list("entries", &page, shape::audit))
    }
}
