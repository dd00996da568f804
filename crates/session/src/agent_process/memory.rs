//! The built-in agent's memory, which the server stores for each pair of session and agent.

use oubliette_protocol::{ByteBudget, Error, Result, SessionId, Slug, relay::RpcError, size::json_bytes};
use oubliette_store::{MEMORY_ENTRY_OVERHEAD, Store};
use serde_json::{Value, json};
use tokio::sync::Mutex;

const LOAD: &str = "_oubliette/memory/load";
const APPEND: &str = "_oubliette/memory/append";
const REPLACE: &str = "_oubliette/memory/replace";

/// The largest memory of one agent in one session, in bytes of JSON and with [`MEMORY_ENTRY_OVERHEAD`] for each entry. It
/// is sent to the agent in one line.
const MAX_MEMORY_BYTES: u64 = 16 * 1024 * 1024;
/// The most entries in one request: they are written in one transaction, which others wait for.
const MAX_ENTRIES: usize = 10_000;

/// Answers an agent's memory requests. Session and agent are fixed when the agent is started, so a request
/// cannot reach another one's memory.
pub(crate) struct MemoryHandler {
    store: Store,
    session: SessionId,
    agent: Slug,
    /// The size of the memory; none until it is first needed.
    size: Mutex<Option<u64>>,
    /// What a memory that is being read is charged to.
    buffers: ByteBudget,
}

impl MemoryHandler {
    pub(crate) fn new(store: Store, session: SessionId, agent: Slug, buffers: ByteBudget) -> Self {
        Self {
            store,
            session,
            agent,
            size: Mutex::default(),
            buffers,
        }
    }

    /// The answer to a memory request; `None` for any other method.
    pub(crate) async fn answer(
        &self,
        method: &str,
        params: &Value,
    ) -> Option<std::result::Result<Value, RpcError>> {
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
                .load()
                .await
                .map(|entries| json!({ "entries": entries }))
                .map_err(|e| RpcError::from(&e)),
            APPEND => match entries() {
                Ok(entries) => self
                    .append(entries)
                    .await
                    .map(|()| json!({}))
                    .map_err(|e| RpcError::from(&e)),
                Err(error) => Err(error),
            },
            REPLACE => match entries() {
                Ok(entries) => self
                    .replace(entries)
                    .await
                    .map(|()| json!({}))
                    .map_err(|e| RpcError::from(&e)),
                Err(error) => Err(error),
            },
            _ => return None,
        })
    }

    /// Reads the memory, if there is room for it.
    async fn load(&self) -> Result<Vec<Value>> {
        let size = self.current_size(&mut *self.size.lock().await).await?;
        let _charge = self
            .buffers
            .charge(usize::try_from(size).map_err(Error::internal)?)?;
        self.store.memory_load(&self.session, &self.agent).await
    }

    async fn append(&self, entries: Vec<Value>) -> Result<()> {
        let mut size = self.size.lock().await;
        let after = check_size(self.current_size(&mut size).await?, &entries)?;
        self.store
            .memory_append(&self.session, &self.agent, entries)
            .await?;
        *size = Some(after);
        Ok(())
    }

    async fn replace(&self, entries: Vec<Value>) -> Result<()> {
        let mut size = self.size.lock().await;
        let after = check_size(0, &entries)?;
        self.store
            .memory_replace(&self.session, &self.agent, entries)
            .await?;
        *size = Some(after);
        Ok(())
    }

    /// The size of the memory, read from the database the first time.
    async fn current_size(&self, known: &mut Option<u64>) -> Result<u64> {
        let size = match *known {
            Some(size) => size,
            None => self.store.memory_bytes(&self.session, &self.agent).await?,
        };
        *known = Some(size);
        Ok(size)
    }
}

/// The size of a memory after entries were added; an error if that is too much.
fn check_size(before: u64, entries: &[Value]) -> Result<u64> {
    if entries.len() > MAX_ENTRIES {
        return Err(Error::limit_exceeded(format!(
            "one request may have {MAX_ENTRIES} entries of memory"
        )));
    }
    let entry_bytes = |entry| json_bytes(entry) as u64 + MEMORY_ENTRY_OVERHEAD;
    let after = before.saturating_add(entries.iter().map(entry_bytes).sum());
    match after > MAX_MEMORY_BYTES {
        true => Err(Error::limit_exceeded(format!(
            "the agent's memory would have {after} bytes, and may have {MAX_MEMORY_BYTES}; replace it by a shorter one"
        ))),
        false => Ok(after),
    }
}
