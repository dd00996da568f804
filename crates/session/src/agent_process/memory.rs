//! The built-in agent's memory, which the server stores for each pair of session and agent.

use oubliette_protocol::{SessionId, Slug, relay::RpcError};
use oubliette_store::Store;
use serde_json::{Value, json};

const LOAD: &str = "_oubliette/memory/load";
const APPEND: &str = "_oubliette/memory/append";
const REPLACE: &str = "_oubliette/memory/replace";

/// Answers an agent's memory requests. Session and agent are fixed when the agent is started, so a request
/// cannot reach another one's memory.
pub(crate) struct MemoryHandler {
    store: Store,
    session: SessionId,
    agent: Slug,
}

impl MemoryHandler {
    pub(crate) fn new(store: Store, session: SessionId, agent: Slug) -> Self {
        Self {
            store,
            session,
            agent,
        }
    }

    /// The answer to a memory request; `None` for any other method.
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
