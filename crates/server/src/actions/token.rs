//! `token_*`: creating, listing and revoking access tokens.

use std::borrow::Cow;

use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, Scope, SessionId, TokenId, duration::HumanDuration};
use oubliette_store::TokenFilter;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActionCall, ActionHandler, Effect, input, output::TokenPage};
use crate::auth::{TokenSpec, expose};

/// `token_create`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenCreate {
    /// Display name: one line of 1 to 200 characters. Need not be unique.
    pub name: String,
    /// Scope of the token: "read", "write" or "admin". Not above your own.
    pub scope: Scope,
    /// Id of the only project the token can see (`proj_…`). Default: all projects, which needs a token that is not
    /// bound to a project itself.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Lifetime: a whole number and a unit (ms, s, m, h, d), for example "30d". Cut to what is left of
    /// your own token's. Default: as long as your own token, which may be without end.
    #[serde(default)]
    pub expires_in: Option<HumanDuration>,
}

/// `token_list`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenList {
    /// Only tokens bound to this project (`proj_…`). Absent: all your token can see.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `token_revoke`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct TokenRevoke {
    /// Id of the token to revoke (`tok_…`), not the token itself.
    pub token_id: TokenId,
}

/// Result of `token_create`. Without `Debug`, because it has the token itself.
#[derive(Serialize, JsonSchema)]
pub(crate) struct CreatedToken {
    /// Its id (`tok_…`), which is not secret.
    token_id: TokenId,
    /// The token itself, which is shown only now.
    token: String,
    /// Its display name.
    name: String,
    /// What it may do.
    scope: Scope,
    /// The one project it is limited to; absent: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    project_id: Option<ProjectId>,
    /// When it expires; absent: never.
    #[serde(skip_serializing_if = "Option::is_none")]
    expires_at: Option<Timestamp>,
    /// The session it was made in; absent: it was made from outside.
    #[serde(skip_serializing_if = "Option::is_none")]
    session_id: Option<SessionId>,
}

/// Result of `token_revoke`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct TokenRevoked {
    /// The token.
    token_id: TokenId,
    /// True.
    revoked: bool,
}

impl ActionHandler for TokenCreate {
    type Output = CreatedToken;

    const NAME: &'static str = "token_create";
    const DESCRIPTION: &'static str = "Create a token. It is shown once, in this answer. It never has more rights than the token that made it.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Write;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(input::check_name("name", &self.name).unwrap_or_default().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let name = input::check_name("name", &self.name)?;
        call.grant.require(self.scope, "a token of that scope")?;
        match &self.project_id {
            Some(id) => {
                call.project(id).await?;
            }
            None => call.grant.require_unbound("a token for every project")?,
        }
        let asked = match self.expires_in {
            None => None,
            Some(HumanDuration(span)) if span.is_zero() => {
                return Err(Error::invalid("expires_in must be longer than nothing"));
            }
            Some(HumanDuration(span)) => {
                let far =
                    |_| Error::invalid("expires_in is too far away; leave it out for a token without end");
                let now = call.app.store.expiry_clock().await?;
                Some(now.checked_add(span).map_err(far)?)
            }
        };
        // A token expires no later than the one it was made with.
        let expires_at = match (asked, call.grant.expires_at()) {
            (Some(asked), Some(own)) => Some(asked.min(own)),
            (asked, own) => asked.or(own),
        };
        // A token made from inside a session is inside it as well, and ends with it.
        let session = call.grant.inside().cloned();
        let mint = TokenSpec {
            name: name.clone(),
            scope: self.scope,
            project: self.project_id.clone(),
            expires_at,
            session: session.clone(),
        };
        let (token_id, token) = call.app.auth.mint(mint).await?;
        Ok(CreatedToken {
            token_id,
            token: expose(&token).to_owned(),
            name,
            scope: self.scope,
            project_id: self.project_id,
            expires_at,
            session_id: session,
        })
    }
}

impl ActionHandler for TokenList {
    type Output = TokenPage;

    const NAME: &'static str = "token_list";
    const DESCRIPTION: &'static str =
        "List tokens, including those created for running sessions. The tokens themselves are not shown.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        if let Some(id) = &self.project_id {
            call.project(id).await?;
        }
        let project = self.project_id.or_else(|| call.grant.project().cloned());
        let filter = TokenFilter {
            project,
            include_sessions: true,
            ..TokenFilter::default()
        };
        let page = call
            .app
            .store
            .token_list(filter, input::page_request(self.limit, self.cursor))
            .await?;
        Ok(page.into())
    }
}

impl ActionHandler for TokenRevoke {
    type Output = TokenRevoked;

    const NAME: &'static str = "token_revoke";
    const DESCRIPTION: &'static str =
        "Revoke a token. It takes effect at once: the token's next request is refused and its streams end.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.token_id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let missing = || Error::not_found(format!("there is no token {}", self.token_id));
        let row = call
            .app
            .store
            .token_get(&self.token_id)
            .await?
            .ok_or_else(missing)?;
        // A token bound to a project must not learn that other tokens exist.
        if call.grant.project().is_some() && row.project_id.as_ref() != call.grant.project() {
            return Err(missing());
        }
        if let Some(project) = &row.project_id {
            call.note_project(project);
        }
        call.app.revoke_token(&self.token_id).await?;
        Ok(TokenRevoked {
            token_id: self.token_id,
            revoked: true,
        })
    }
}
