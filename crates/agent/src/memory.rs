//! What was said before. The host keeps it, per session and agent; this is the agent's copy.
//!
//! Every message is handed to the host and acknowledged before the turn goes on, so what the model
//! has seen survives whatever happens to this process. A host without the `_oubliette/memory`
//! methods (an editor) gives a conversation that lives as long as the process.

use std::{future::Future, time::Duration};

use agent_client_protocol::{Client, Error, ErrorCode, UntypedMessage, v1::ConnectionTo};
use oubliette_protocol::Object;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

/// How long the host may take to store a message.
const PATIENCE: Duration = Duration::from_secs(60);

/// One message.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
pub(crate) enum Entry {
    /// A prompt: one of these a turn.
    User {
        /// What was asked.
        text: String,
    },
    /// What the model answered.
    Assistant {
        /// What it said.
        #[serde(default, skip_serializing_if = "String::is_empty")]
        text: String,
        /// What it called.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        calls: Vec<Called>,
        /// The answer as the provider wants it back (signed reasoning), and whose it is.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        native: Option<Native>,
    },
    /// What the calls of the answer before gave.
    Results {
        /// In the order of the calls.
        results: Vec<Answer>,
    },
    /// Turns that were dropped to keep the memory bounded.
    Forgotten {
        /// How many.
        turns: usize,
    },
    /// Written by a later version.
    #[serde(other)]
    Unknown,
}

/// A tool call the model made.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Called {
    /// The provider's id of it.
    pub(crate) id: String,
    /// The tool's name.
    pub(crate) tool: String,
    /// Its arguments.
    #[serde(default)]
    pub(crate) arguments: Object,
}

/// What a tool answered.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Answer {
    /// The provider's id of the call.
    pub(crate) id: String,
    /// The tool's name.
    pub(crate) tool: String,
    /// What the model is shown.
    pub(crate) text: String,
}

/// A message in one provider's own shape.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Native {
    /// Which provider's.
    pub(crate) adapter: String,
    /// The message.
    pub(crate) content: Value,
}

/// Where memory is kept.
pub(crate) trait Keeper: Send + Sync {
    /// Asks the host; `None` when it does not know the method.
    fn ask(&self, method: &str, params: Value) -> impl Future<Output = Result<Option<Value>, Error>> + Send;
}

impl Keeper for ConnectionTo<Client> {
    async fn ask(&self, method: &str, params: Value) -> Result<Option<Value>, Error> {
        let request = self.send_request(UntypedMessage::new(method, params)?);
        match tokio::time::timeout(PATIENCE, request.block_task()).await {
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

/// The conversation so far.
pub(crate) struct Memory<K> {
    keeper: K,
    entries: Vec<Entry>,
}

impl<K: Keeper> Memory<K> {
    /// What the host remembers.
    pub(crate) async fn load(keeper: K) -> Result<Self, Error> {
        let loaded = keeper.ask("_oubliette/memory/load", json!({})).await?;
        let entries = match loaded.and_then(|mut value| value.get_mut("entries").map(Value::take)) {
            Some(Value::Array(values)) => values.into_iter().map(read).collect(),
            _ => Vec::new(),
        };
        Ok(Self { keeper, entries })
    }

    /// Everything, oldest first.
    pub(crate) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// How many turns were begun.
    pub(crate) fn turns(&self) -> usize {
        let begun = self.entries.iter().map(|entry| match entry {
            Entry::User { .. } => 1,
            Entry::Forgotten { turns } => *turns,
            Entry::Assistant { .. } | Entry::Results { .. } | Entry::Unknown => 0,
        });
        begun.sum()
    }

    /// Remembers one message: durable when this returns.
    pub(crate) async fn append(&mut self, entry: Entry) -> Result<(), Error> {
        self.keeper
            .ask("_oubliette/memory/append", json!({ "entries": [&entry] }))
            .await?;
        self.entries.push(entry);
        Ok(())
    }

    /// Puts a shorter conversation in the place of this one.
    pub(crate) async fn replace(&mut self, entries: Vec<Entry>) -> Result<(), Error> {
        self.keeper
            .ask("_oubliette/memory/replace", json!({ "entries": &entries }))
            .await?;
        self.entries = entries;
        Ok(())
    }
}

fn read(value: Value) -> Entry {
    serde_json::from_value(value).unwrap_or(Entry::Unknown)
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;

    #[derive(Default)]
    struct Host(Mutex<Vec<Value>>);

    impl Keeper for &Host {
        async fn ask(&self, method: &str, mut params: Value) -> Result<Option<Value>, Error> {
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
    async fn what_was_said_is_found_again() {
        let host = Host::default();
        let mut memory = Memory::load(&host).await.unwrap();
        memory.append(Entry::User { text: "one".into() }).await.unwrap();
        memory
            .append(Entry::Assistant {
                text: "yes".into(),
                calls: vec![],
                native: None,
            })
            .await
            .unwrap();
        memory.append(Entry::User { text: "two".into() }).await.unwrap();

        let again = Memory::load(&host).await.unwrap();
        assert_eq!(again.entries(), memory.entries());
        assert_eq!(again.turns(), 2);
    }

    #[tokio::test]
    async fn forgotten_turns_still_count_and_strange_entries_do_not_hurt() {
        let host = Host::default();
        host.0
            .lock()
            .unwrap()
            .extend([json!({ "kind": "from_the_future", "x": 1 }), json!(7)]);
        let mut memory = Memory::load(&host).await.unwrap();
        assert_eq!(memory.turns(), 0);
        let shorter = vec![Entry::Forgotten { turns: 5 }, Entry::User { text: "six".into() }];
        memory.replace(shorter).await.unwrap();
        assert_eq!(Memory::load(&host).await.unwrap().turns(), 6);
    }
}
