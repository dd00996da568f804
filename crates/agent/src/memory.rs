//! The conversation so far. The host stores it, per session and agent; this is the agent's copy.
//!
//! Every entry is sent to the host and acknowledged before the turn continues, so the conversation
//! survives a crash of this process. With a host that does not implement the `_oubliette/memory` methods
//! (an editor) the conversation lives as long as the process.

use std::{future::Future, time::Duration};

use agent_client_protocol::{Client, Error, ErrorCode, UntypedMessage, v1::ConnectionTo};
use oubliette_protocol::JsonObject;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// How long the host may take to answer a memory request.
const HOST_TIMEOUT: Duration = Duration::from_secs(60);

/// One entry of the conversation.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum MemoryEntry {
    /// The user's prompt, which begins a turn.
    User {
        /// The prompt's text.
        text: String,
    },
    /// The model's answer.
    Assistant {
        /// The answer's text.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        text: String,
        /// The tool calls it made.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        calls: Vec<RememberedCall>,
        /// The answer in the provider's own form, kept when that form carries signed reasoning, which the
        /// provider wants back.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        native: Option<ProviderMessage>,
    },
    /// The results of the preceding answer's tool calls.
    Results {
        /// In the order of the calls.
        results: Vec<RememberedResult>,
    },
    /// Turns that were dropped to keep the memory bounded.
    Forgotten {
        /// How many turns.
        turns: usize,
    },
    /// An entry written by a later version of this program.
    #[serde(other)]
    Unknown,
}

/// A tool call the model made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RememberedCall {
    /// The id the provider gave the call.
    pub(crate) id: String,
    /// The tool's name.
    pub(crate) tool: String,
    /// Its arguments.
    #[serde(default)]
    pub(crate) arguments: JsonObject,
}

/// The result of a tool call.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct RememberedResult {
    /// The id the provider gave the call.
    pub(crate) id: String,
    /// The tool's name.
    pub(crate) tool: String,
    /// The result as text, as the model gets it.
    pub(crate) text: String,
}

/// A message in one provider's own form.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct ProviderMessage {
    /// The name of the API adapter that produced it.
    pub(crate) adapter: String,
    /// The message.
    pub(crate) content: Value,
}

/// The host, which stores the memory.
pub(crate) trait MemoryHost: Send + Sync {
    /// Sends a request to the host; `None` when it does not implement the method.
    fn request(
        &self,
        method: &str,
        params: Value,
    ) -> impl Future<Output = Result<Option<Value>, Error>> + Send;
}

impl MemoryHost for ConnectionTo<Client> {
    async fn request(&self, method: &str, params: Value) -> Result<Option<Value>, Error> {
        let request = self.send_request(UntypedMessage::new(method, params)?);
        match tokio::time::timeout(HOST_TIMEOUT, request.block_task()).await {
            Ok(Ok(value)) => Ok(Some(value)),
            Ok(Err(error)) if error.code == ErrorCode::METHOD_NOT_FOUND => Ok(None),
            Ok(Err(error)) => Err(Error::new(
                error.code.value(),
                format!("{method}: {}", error.message),
            )),
            Err(_) => Err(Error::new(
                ErrorCode::INTERNAL_ERROR.value(),
                format!("{method}: no answer from the host"),
            )),
        }
    }
}

/// The entries of a conversation, in step with what the host has stored.
pub(crate) struct ConversationMemory<K> {
    keeper: K,
    entries: Vec<MemoryEntry>,
}

impl<K: MemoryHost> ConversationMemory<K> {
    /// Loads the conversation from the host; empty if it has none.
    pub(crate) async fn load(keeper: K) -> Result<Self, Error> {
        let loaded = keeper.request("_oubliette/memory/load", json!({})).await?;
        let entries = match loaded.and_then(|mut value| value.get_mut("entries").map(Value::take)) {
            Some(Value::Array(values)) => values.into_iter().map(parse_entry).collect(),
            _ => Vec::new(),
        };
        Ok(Self { keeper, entries })
    }

    /// All entries, oldest first.
    pub(crate) fn entries(&self) -> &[MemoryEntry] {
        &self.entries
    }

    /// How many turns have begun, dropped ones included.
    pub(crate) fn turns_begun(&self) -> usize {
        let begun = self.entries.iter().map(|entry| match entry {
            MemoryEntry::User { .. } => 1,
            MemoryEntry::Forgotten { turns } => *turns,
            MemoryEntry::Assistant { .. } | MemoryEntry::Results { .. } | MemoryEntry::Unknown => 0,
        });
        begun.sum()
    }

    /// Appends an entry; the host has stored it when this returns.
    pub(crate) async fn append(&mut self, entry: MemoryEntry) -> Result<(), Error> {
        self.keeper
            .request("_oubliette/memory/append", json!({ "entries": [&entry] }))
            .await?;
        self.entries.push(entry);
        Ok(())
    }

    /// Replaces all entries, here and at the host.
    pub(crate) async fn replace(&mut self, entries: Vec<MemoryEntry>) -> Result<(), Error> {
        self.keeper
            .request("_oubliette/memory/replace", json!({ "entries": &entries }))
            .await?;
        self.entries = entries;
        Ok(())
    }
}

fn parse_entry(value: Value) -> MemoryEntry {
    serde_json::from_value(value).unwrap_or(MemoryEntry::Unknown)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct FakeMemoryHost(Mutex<Vec<Value>>);

    impl MemoryHost for &FakeMemoryHost {
        async fn request(&self, method: &str, mut params: Value) -> Result<Option<Value>, Error> {
            let mut kept = self.0.lock().unwrap();
            let given = params.get_mut("entries").map(Value::take);
            match (method.rsplit('/').next(), given) {
                (Some("append"), Some(Value::Array(more))) => kept.extend(more),
                (Some("replace"), Some(Value::Array(all))) => *kept = all,
                _ => {}
            }
            Ok(Some(json!({ "entries": *kept })))
        }
    }

    #[tokio::test]
    async fn appended_entries_are_loaded_again() {
        let host = FakeMemoryHost::default();
        let mut memory = ConversationMemory::load(&host).await.unwrap();
        memory
            .append(MemoryEntry::User { text: "one".into() })
            .await
            .unwrap();
        memory
            .append(MemoryEntry::Assistant {
                text: "yes".into(),
                calls: vec![],
                native: None,
            })
            .await
            .unwrap();
        memory
            .append(MemoryEntry::User { text: "two".into() })
            .await
            .unwrap();

        let again = ConversationMemory::load(&host).await.unwrap();
        assert_eq!(again.entries(), memory.entries());
        assert_eq!(again.turns_begun(), 2);
    }

    #[tokio::test]
    async fn dropped_turns_still_count_and_unknown_entries_are_ignored() {
        let host = FakeMemoryHost::default();
        host.0
            .lock()
            .unwrap()
            .extend([json!({ "kind": "from_the_future", "x": 1 }), json!(7)]);
        let mut memory = ConversationMemory::load(&host).await.unwrap();
        assert_eq!(memory.turns_begun(), 0);
        let shorter = vec![
            MemoryEntry::Forgotten { turns: 5 },
            MemoryEntry::User { text: "six".into() },
        ];
        memory.replace(shorter).await.unwrap();
        assert_eq!(ConversationMemory::load(&host).await.unwrap().turns_begun(), 6);
    }
}
