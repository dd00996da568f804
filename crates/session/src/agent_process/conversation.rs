//! [`Conversation`]: an agent's conversation (an ACP session), and how it is opened: resumed, loaded or new.

use std::time::Duration;

use agent_client_protocol::v1::schema::NewSessionResponse;
use oubliette_protocol::{Error, Result};
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};
use tokio::time::Instant;

use super::{
    AgentProcess,
    capabilities::{LoadedTools, ToolChanges},
    parse_answer,
};
use crate::config::SessionConfig;

/// The longest id an agent may give its conversation; it is stored with the session.
const MAX_CONVERSATION_ID_BYTES: usize = 4 * 1024;
/// How long an agent may take to answer `authenticate`.
const AUTHENTICATE_TIMEOUT: Duration = Duration::from_secs(15);
/// After `session/load` an agent may still be replaying its history: it is prompted when it has said nothing for this long.
const REPLAY_PAUSE: Duration = Duration::from_millis(200);
/// The longest wait for the end of a replay.
const REPLAY_TIMEOUT: Duration = Duration::from_secs(5);
/// How many times an agent's return to the session is remembered.
const MAX_RETURNS: usize = 1_000;

/// An agent's conversation, stored to be loaded when the agent is started again.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Conversation {
    /// The ACP session id the agent gave it.
    pub(super) id: String,
    /// Whether the agent's instructions were sent in it.
    pub(super) instructed: bool,
    /// Whether the agent has yet to be told the earlier turns, because it could not load them.
    #[serde(default)]
    pub(super) untold: bool,
    /// The turns at which this agent became the session's agent, in order.
    #[serde(default)]
    pub(crate) active_since: Vec<u64>,
}

impl Conversation {
    /// Notes that a turn is this agent's. `others_since` is when another agent last became the session's.
    pub(super) fn note_turn(&mut self, turn: u64, others_since: Option<u64>) {
        let since = self.active_since.last().copied();
        if since.is_none() || since < others_since {
            self.active_since.push(turn);
            let excess = self.active_since.len().saturating_sub(MAX_RETURNS);
            self.active_since.drain(..excess);
        }
    }
}

impl AgentProcess {
    /// Opens the conversation: resumes or loads `before` if the agent can, else starts a new one, in which the agent is
    /// told the earlier turns with its first message.
    pub(crate) async fn open_conversation(
        &mut self,
        before: Option<&Conversation>,
        config: &SessionConfig,
    ) -> Result<()> {
        self.authenticate().await?;
        if let Some(before) = before.filter(|_| self.capabilities.loaded_tools == LoadedTools::Started) {
            match self.reopen(before, config).await? {
                ReopenOutcome::Done => return Ok(()),
                ReopenOutcome::NotOffered => {}
                ReopenOutcome::Refused(why) => self.notices.push(Error::unavailable(format!(
                    "the agent could not load its conversation, and goes on with a new one in which it is told what was \
                     said before: {}",
                    why.message
                ))),
            }
        }
        let params = self.open_params(None);
        let answer = self
            .request_and_wait("session/new", &params, config.open_timeout)
            .await?;
        let answer: NewSessionResponse = parse_answer("session/new", answer)?;
        if answer.session_id.0.len() > MAX_CONVERSATION_ID_BYTES {
            return Err(Error::unavailable(format!(
                "the agent's answer to session/new has an id longer than {MAX_CONVERSATION_ID_BYTES} bytes"
            )));
        }
        self.conversation = Some(Conversation {
            id: answer.session_id.0.to_string(),
            instructed: self.instructions.is_none() || self.capabilities.system_prompt,
            // The built-in agent keeps its memory in our store.
            untold: before.is_some() && self.instructions.is_some(),
            active_since: before
                .map(|before| before.active_since.clone())
                .unwrap_or_default(),
        });
        self.expect_tools(config);
        Ok(())
    }

    /// Opens an earlier conversation again.
    async fn reopen(&mut self, before: &Conversation, config: &SessionConfig) -> Result<ReopenOutcome> {
        let mut refused = None;
        for (method, offered) in [
            ("session/resume", self.capabilities.resume),
            ("session/load", self.capabilities.load),
        ] {
            if !offered {
                continue;
            }
            let params = self.open_params(Some(&before.id));
            match self.request_and_wait(method, &params, config.open_timeout).await {
                Ok(_) => {
                    if method == "session/load" && self.instructions.is_some() {
                        self.wait_for_replay().await?;
                        self.replays = true;
                    }
                    self.conversation = Some(before.clone());
                    self.expect_tools(config);
                    return Ok(ReopenOutcome::Done);
                }
                // The agent may have lost its files.
                Err(error) if self.handle.exit().is_none() => {
                    tracing::info!(%error, method, "opening a conversation again failed");
                    refused = Some(error);
                }
                Err(error) => return Err(error),
            }
        }
        Ok(refused.map_or(ReopenOutcome::NotOffered, ReopenOutcome::Refused))
    }

    /// The parameters of the request that opens a conversation.
    fn open_params(&self, id: Option<&str>) -> Value {
        let mut params = json!({
            "cwd": self.cwd,
            "mcpServers": [self.tools_server],
        });
        if let Some(id) = id {
            params["sessionId"] = json!(id);
        }
        // To agents that do not offer this, `prompt` sends the instructions with the first message.
        if let Some(instructions) = self
            .instructions
            .as_ref()
            .filter(|_| self.capabilities.system_prompt)
        {
            let content = json!([{ "type": "text", "text": instructions }]);
            params["systemPrompt"] = json!({ "mode": "append", "content": content });
        }
        params
    }

    /// Calls the agent's `authenticate` method for API keys, if it offers one. The key in its environment is a
    /// placeholder; the model forwarder has the real one.
    async fn authenticate(&mut self) -> Result<()> {
        let Some(method) = self.capabilities.api_key_method.clone() else {
            return Ok(());
        };
        let params = json!({ "methodId": method });
        match self
            .request_and_wait("authenticate", &params, AUTHENTICATE_TIMEOUT)
            .await
        {
            // Without it the conversation may open as well; if not, that error says why.
            Err(error) if self.handle.exit().is_none() => {
                tracing::debug!(%error, method, "an agent refused its authenticate method");
                Ok(())
            }
            other => other.map(drop),
        }
    }

    /// Drops what the agent replays after its answer to `session/load`.
    async fn wait_for_replay(&mut self) -> Result<()> {
        let deadline = Instant::now() + REPLAY_TIMEOUT;
        while Instant::now() < deadline {
            let received = match tokio::time::timeout(REPLAY_PAUSE, self.receive()).await {
                Ok(received) => received,
                Err(_) => return Ok(()),
            };
            let handled = match received {
                Ok(message) => self.handle(message).await.map(drop),
                Err(error) => Err(error),
            };
            if let Err(error) = handled {
                return Err(self.explain_connection_error(error).await);
            }
        }
        Ok(())
    }

    /// From now on the agent has to connect to its tools.
    fn expect_tools(&mut self, config: &SessionConfig) {
        if self.instructions.is_some() {
            self.tools_due = Some(std::time::Instant::now() + config.tools_connect_timeout);
        }
    }

    /// Whether the agent lists its tools again when it is told that they changed. The built-in agent does so by itself
    /// at its next turn.
    pub(crate) fn tool_changes(&self) -> Option<ToolChanges> {
        self.instructions
            .is_some()
            .then_some(self.capabilities.tool_changes)
    }
}

/// What came of opening an earlier conversation.
enum ReopenOutcome {
    Done,
    /// The agent offers no method for it.
    NotOffered,
    Refused(Error),
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_agents_turns_are_those_since_it_became_the_sessions_agent() {
        let mut conversation = Conversation {
            id: "c".into(),
            instructed: true,
            untold: false,
            active_since: Vec::new(),
        };
        conversation.note_turn(1, None);
        conversation.note_turn(2, None);
        conversation.note_turn(5, Some(3));
        conversation.note_turn(6, Some(3));
        assert_eq!(conversation.active_since, [1, 5]);
        let stored: Conversation = serde_json::from_str(r#"{"id":"c","instructed":false}"#).unwrap();
        assert!(stored.active_since.is_empty() && !stored.untold);
    }
}
