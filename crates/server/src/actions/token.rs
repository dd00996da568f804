//! Tokens: who may act.

use std::borrow::Cow;

use oubliette_protocol::{Error, ProjectId, Result, Scope, SessionId, TokenId, duration::Span};
use oubliette_store::TokenFilter;
use schemars::JsonSchema;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{Call, Effect, Tool, fields, shape};
use crate::auth::{Mint, expose};

/// `token_create`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenCreate {
    /// What people call it.
    pub name: String,
    /// How far it reaches.
    pub scope: Scope,
    /// The one project it sees; all when absent.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// How long it lives ("30d"); for ever when absent.
    #[serde(default)]
    pub expires_in: Option<Span>,
}

/// `token_list`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenList {
    /// Only those bound to this project.
    #[serde(default)]
    pub project_id: Option<ProjectId>,
    /// At most so many (1 to 1000, default 100).
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the list before.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `token_revoke`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct TokenRevoke {
    /// Which.
    pub token_id: TokenId,
}

impl Call<'_> {
    /// The session that the token behind this call dies with. What such a token makes dies with it too, or a
    /// key for one session would be a way to one without end.
    async fn session_of_key(&self) -> Result<Option<SessionId>> {
        let Some(id) = self.grant.token_id() else {
            return Ok(None);
        };
        Ok(self.app.store.token_get(id).await?.and_then(|row| row.session_id))
    }
}

impl Tool for TokenCreate {
    const NAME: &'static str = "token_create";
    const DESCRIPTION: &'static str = "Create a token. It is shown once, in this answer. It never reaches further than the token that made it.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Write;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(fields::name("name", &self.name).unwrap_or_default().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let name = fields::name("name", &self.name)?;
        call.grant.require(self.scope, "a token of that scope")?;
        match &self.project_id {
            Some(id) => {
                call.project(id).await?;
            }
            None => call.grant.require_unbound("a token for every project")?,
        }
        let asked = match self.expires_in {
            None => None,
            Some(Span(span)) if span.is_zero() => {
                return Err(Error::invalid("expires_in must be longer than nothing"));
            }
            Some(Span(span)) => {
                let far =
                    |_| Error::invalid("expires_in is too far away; leave it out for a token without end");
                Some(oubliette_store::now().checked_add(span).map_err(far)?)
            }
        };
        // A token does not outlive the one it was made with.
        let expires_at = match (asked, call.grant.expires_at()) {
            (Some(asked), Some(own)) => Some(asked.min(own)),
            (asked, own) => asked.or(own),
        };
        let session = call.session_of_key().await?;
        let mint = Mint {
            name: name.clone(),
            scope: self.scope,
            project: self.project_id.clone(),
            expires_at,
            session: session.clone(),
        };
        let (token_id, token) = call.app.auth.mint(mint).await?;
        let mut shape = json!({
            "token_id": token_id,
            "token": expose(&token),
            "name": name,
            "scope": self.scope,
        });
        if let Some(project) = &self.project_id {
            shape["project_id"] = json!(project);
        }
        if let Some(at) = expires_at {
            shape["expires_at"] = json!(at);
        }
        if let Some(session) = session {
            shape["session_id"] = json!(session);
        }
        Ok(shape)
    }
}

impl Tool for TokenList {
    const NAME: &'static str = "token_list";
    const DESCRIPTION: &'static str = "List tokens, those made for running sessions too. The tokens themselves are not shown.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &Call<'_>) -> Result<Value> {
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
            .token_list(filter, fields::page(self.limit, self.cursor))
            .await?;
        Ok(shape::list("tokens", &page, shape::token))
    }
}

impl Tool for TokenRevoke {
    const NAME: &'static str = "token_revoke";
    const DESCRIPTION: &'static str =
        "Revoke a token, at once: its next request is refused and its streams end.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Delete;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.token_id.as_str().into())
    }

    async fn run(self, call: &Call<'_>) -> Result<Value> {
        let missing = || Error::not_found(format!("there is no token {}", self.token_id));
        let row = call
            .app
            .store
            .token_get(&self.token_id)
            .await?
            .ok_or_else(missing)?;
        // A bound token sees the tokens of its project alone: not even that others exist.
        if call.grant.project().is_some() && row.project_id.as_ref() != call.grant.project() {
            return Err(missing());
        }
        if let Some(project) = &row.project_id {
            call.note_project(project);
        }
        call.app.revoke_token(&self.token_id).await?;
        Ok(json!({ "token_id": self.token_id, "revoked": true }))
    }
}
