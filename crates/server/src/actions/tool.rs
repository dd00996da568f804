//! `tool_*`: the tools of a session: listing them, calling one, restarting a tool server.

use std::{borrow::Cow, time::Duration};

use oubliette_protocol::{
    CatalogId, Error, Result, Scope, SessionId, Slug,
    tool::{CallResult, ToolList, arguments_object},
};
use oubliette_tools::{CallContext, preview};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use super::{ActionCall, ActionHandler, Effect};

/// After this time a call's token is watched: a call of a token that is revoked meanwhile is cancelled.
const TOKEN_WATCH_DELAY: Duration = Duration::from_secs(1);

/// `tool_list`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolListing {
    /// Id of the session whose tools and tool servers to list (`gogol_…`). Give this or agent, not both.
    #[serde(default)]
    pub session_id: Option<SessionId>,
    /// Slug of an agent whose tools to list without starting it; of MCP servers only tools with an alias are
    /// known then. Give this or session_id, not both.
    #[serde(default)]
    pub agent: Option<Slug>,
}

/// `tool_call`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolCall {
    /// Id of the session whose tool to call (`gogol_…`).
    pub session_id: SessionId,
    /// Any name of the tool: the one its agent sees, an alias, or the canonical name such as "@files/read_file".
    pub tool: String,
    /// Arguments of the tool, by its input schema. Default: {}.
    #[serde(default)]
    #[schemars(with = "Option<serde_json::Map<String, Value>>")]
    pub arguments: Option<Value>,
}

/// `tool_server_restart`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolServerRestart {
    /// Id of the session whose tool server to restart (`gogol_…`).
    pub session_id: SessionId,
    /// Catalog id of the tool server, for example "files".
    pub server: CatalogId,
}

impl ActionHandler for ToolListing {
    type Output = ToolList;

    const NAME: &'static str = "tool_list";
    const DESCRIPTION: &'static str = "List a session's or an agent's tools: names, source, whether allowed and available and why, and the health of every tool server (green, yellow or red).";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let list = match (&self.session_id, &self.agent) {
            (Some(session), None) => {
                call.app
                    .sessions
                    .tool_list(call.grant.principal(), session)
                    .await?
            }
            (None, Some(agent)) => {
                let entry = call.app.library.agent(agent)?;
                let catalog = call.app.library.catalog();
                let uses = entry
                    .definition
                    .tools
                    .uses
                    .iter()
                    .filter_map(|id| catalog.get(id));
                let tools: Vec<_> = uses.map(|tool| tool.definition.clone()).collect();
                preview(&entry.definition, &tools)
            }
            _ => return Err(Error::invalid("give session_id or agent, one of them")),
        };
        Ok(list)
    }
}

impl ActionHandler for ToolCall {
    type Output = CallResult;

    const NAME: &'static str = "tool_call";
    const DESCRIPTION: &'static str = "Call a tool of a session through the same gate as its agent. Oubliette's own tools \
        run under your token; a caller's tools need the token that lent them, or admin.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Stream;

    fn target(&self) -> Option<Cow<'_, str>> {
        let tool: String = self.tool.chars().take(100).collect();
        Some(format!("{} {tool}", self.session_id).into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.note_session(&self.session_id).await?;
        let arguments = arguments_object(self.arguments)?;
        let cancel = call.client.cancellation.child_token();
        let context = CallContext {
            cancel: cancel.clone(),
            progress: call.client.progress.clone(),
            turn: call.app.sessions.current_turn(&self.session_id),
        };
        let sessions = &call.app.sessions;
        let calling = sessions.tool_call(
            call.grant.principal(),
            &self.session_id,
            self.tool,
            arguments,
            context,
        );
        let mut calling = std::pin::pin!(calling);
        let ended = async {
            // Most calls are over before; those that wait for a person may outlive their token.
            tokio::time::sleep(TOKEN_WATCH_DELAY).await;
            call.app.auth.wait_until_ended(call.grant).await;
        };
        let result = tokio::select! {
            result = &mut calling => result?,
            () = ended => {
                cancel.cancel();
                // To its end, so that what it holds is given back before the client hears of it.
                let _ = calling.await;
                return Err(Error::unauthenticated("this token has expired or was revoked"));
            }
        };
        Ok(result)
    }
}

/// Result of `tool_server_restart`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ServerRestarted {
    /// The session.
    session_id: SessionId,
    /// The tool server.
    server: CatalogId,
    /// True.
    restarted: bool,
}

impl ActionHandler for ToolServerRestart {
    type Output = ServerRestarted;

    const NAME: &'static str = "tool_server_restart";
    const DESCRIPTION: &'static str = "Restart one tool server of a session.";
    const SCOPE: Scope = Scope::Write;
    const EFFECT: Effect = Effect::Set;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(format!("{} {}", self.session_id, self.server).into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.note_session(&self.session_id).await?;
        call.app
            .sessions
            .tool_server_restart(call.grant.principal(), &self.session_id, &self.server)
            .await?;
        Ok(ServerRestarted {
            session_id: self.session_id,
            server: self.server,
            restarted: true,
        })
    }
}
