//! The built-in agent's memory, kept by the host for exactly one session and agent.

use oubliette_protocol::{SessionId, Slug, relay::RpcError};
use oubliette_store::Store;
use serde_json::{Value, json};

const LOAD: &str = "_oubliette/memory/load";
const APPEND: &str = "_oubliette/memory/append";
const REPLACE: &str = "_oubliette/memory/replace";

/// Answers memory requests. Whose memory it is was settled when the agent was started: nothing in a
/// request can name another.
pub(crate) struct MemoryDesk {
    store: Store,
    session: SessionId,
    agent: Slug,
}

impl MemoryDesk {
    pub(crate) fn new(store: Store, session: SessionId, agent: Slug) -> Self {
        Self {
            store,
            session,
            agent,
        }
    }

    /// The answer, or `None` when this is no memory request.
    pub(crate) async fn answer(&self, method: &str, params: &Value) -> Option<Result<Value, RpcError>> {
        let entries = || match params.get("entries") {
            Some(Value::Array(entries)) => Ok(entries.clone()),
            _ => Err(RpcError {
                code: oubliette_protocol::relay::INVALID_PARAMS,
                message: "entries must be a list".into(),
                data: None,
            }),
        };
        Some(match method {
            LOAD => self
                .store
                .memory_load(&self.session, &self.agent)
                .await
                .map(|entries| json!({ "entries": entries }))
                .map_err(|e| RpcError::from(&e)),
            APPEND => match entries() {
                Ok(entries) => self
                    .store
                    .memory_append(&self.session, &self.agent, entries)
                    .await
                    .map(|_| json!({}))
                    .map_err(|e| RpcError::from(&e)),
                Err(error) => Err(error),
            },
            REPLACE => match entries() {
                Ok(entries) => self
                    .store
                    .memory_replace(&self.session, &self.agent, entries)
                    .await
                    .map(|_| json!({}))
                    .map_err(|e| RpcError::from(&e)),
                Err(error) => Err(error),
            },
            _ => return None,
        })
    }
}
