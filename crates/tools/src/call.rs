//! A call on its way to the gate: what is wanted, who wants it, how it can be given up.

use std::sync::Arc;

use oubliette_protocol::{CallerId, Principal, tool::CallResult};
use serde::{
    Deserialize, Deserializer,
    de::{MapAccess, SeqAccess, Visitor},
};
use serde_json::value::RawValue;
use tokio_util::sync::CancellationToken;

/// How far a call has got, as MCP's `notifications/progress` says it.
#[derive(Debug, Clone, PartialEq)]
pub struct Progress {
    /// Grows with every notification.
    pub progress: f64,
    /// Where it ends, if that is known.
    pub total: Option<f64>,
    /// What is being done.
    pub message: Option<String>,
}

/// Where progress goes.
pub type ProgressSink = Arc<dyn Fn(Progress) + Send + Sync>;

/// What goes with a call besides its arguments.
#[derive(Clone, Default)]
pub struct CallContext {
    /// Cancelled when whoever asked gives up.
    pub cancel: CancellationToken,
    /// Where progress goes, if anybody listens.
    pub progress: Option<ProgressSink>,
    /// The session's turn it belongs to.
    pub turn: Option<u64>,
}

impl CallContext {
    /// The same call, cancelled by `cancel` instead.
    #[must_use]
    pub fn with_cancel(&self, cancel: CancellationToken) -> Self {
        Self {
            cancel,
            progress: self.progress.clone(),
            turn: self.turn,
        }
    }
}

impl std::fmt::Debug for CallContext {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CallContext")
            .field("turn", &self.turn)
            .finish_non_exhaustive()
    }
}

/// Who asks.
#[derive(Clone, PartialEq, Eq)]
pub enum Origin {
    /// The session's own agent, over the relay socket.
    Inside {
        /// The key it showed, if it showed one.
        api_key: Option<String>,
    },
    /// A token, through one of the server's doors.
    Outside(Principal),
}

// The key must not reach a log by way of a derived Debug.
impl std::fmt::Debug for Origin {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Origin::Inside { api_key } => f
                .debug_struct("Inside")
                .field("api_key", &api_key.as_ref().map(|_| "…"))
                .finish(),
            Origin::Outside(principal) => f.debug_tuple("Outside").field(principal).finish(),
        }
    }
}

/// Which tool is asked for, and what it may be.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Wanted {
    /// Any source, by any name the agent could use (`tool_call`).
    Any(String),
    /// A catalog tool by any of its names (`agent_call_tool`).
    Catalog(String),
    /// A lent tool, unprefixed (`caller_tool`).
    Caller {
        /// Its name, without the caller's prefix.
        tool: String,
        /// Whose, when two callers lend the name.
        caller_id: Option<CallerId>,
    },
    /// One of Oubliette's own, unprefixed (`oubliette_call_tool`).
    Own(String),
    /// A base tool (`session_message`, `session_events`, `project_list`).
    Base(String),
}

impl Wanted {
    /// The name as it was called.
    pub fn name(&self) -> &str {
        match self {
            Wanted::Any(name) | Wanted::Catalog(name) | Wanted::Own(name) | Wanted::Base(name) => name,
            Wanted::Caller { tool, .. } => tool,
        }
    }
}

/// What a tool answered.
#[derive(Debug)]
pub(crate) enum Given {
    Result(CallResult),
    Text(ResultText),
}

impl Given {
    /// The result.
    pub(crate) fn read(self) -> CallResult {
        match self {
            Given::Result(result) => result,
            Given::Text(text) => text.read(),
        }
    }
}

/// The text of a [`CallResult`] that was looked at and not read: it can be passed on as it stands.
#[derive(Debug)]
pub(crate) struct ResultText {
    raw: Box<RawValue>,
    is_error: bool,
}

impl ResultText {
    /// The text, if it is that of a result, with all that one must have and nothing else.
    pub(crate) fn of(text: &[u8]) -> Option<Self> {
        /// Fields have to come by name.
        #[derive(Deserialize)]
        #[serde(rename_all = "camelCase", deny_unknown_fields)]
        struct Plain {
            #[serde(rename = "content")]
            _content: Vec<Sound>,
            #[serde(default, rename = "structuredContent")]
            _structured_content: SoundObject,
            #[serde(default)]
            is_error: bool,
        }
        if !text.trim_ascii_start().starts_with(b"{") {
            return None;
        }
        let Plain { is_error, .. } = serde_json::from_slice(text).ok()?;
        let raw = serde_json::from_slice(text).ok()?;
        Some(Self { raw, is_error })
    }

    pub(crate) fn raw(&self) -> &RawValue {
        &self.raw
    }

    pub(crate) fn is_error(&self) -> bool {
        self.is_error
    }

    pub(crate) fn read(&self) -> CallResult {
        serde_json::from_str(self.raw.get()).unwrap_or_default()
    }
}

/// Any value that [`Value`](serde_json::Value) could hold, looked at and not kept.
#[derive(Default)]
struct Sound;

/// The same of an object.
#[derive(Default)]
struct SoundObject;

impl<'de> Deserialize<'de> for Sound {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(Look)
    }
}

impl<'de> Deserialize<'de> for SoundObject {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_map(Look).map(|Sound| Self)
    }
}

struct Look;

impl<'de> Visitor<'de> for Look {
    type Value = Sound;

    fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("JSON")
    }

    fn visit_bool<E>(self, _: bool) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_i64<E>(self, _: i64) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_u64<E>(self, _: u64) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_f64<E>(self, _: f64) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_str<E>(self, _: &str) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_unit<E>(self) -> Result<Sound, E> {
        Ok(Sound)
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut items: A) -> Result<Sound, A::Error> {
        while items.next_element::<Sound>()?.is_some() {}
        Ok(Sound)
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Sound, A::Error> {
        while entries.next_entry::<Sound, Sound>()?.is_some() {}
        Ok(Sound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_never_printed() {
        let origin = Origin::Inside {
            api_key: Some("oub_secret".into()),
        };
        assert!(!format!("{origin:?}").contains("oub_secret"));
    }

    #[test]
    fn a_result_is_passed_on_unread_only_if_it_is_all_that_one_is() {
        for text in [
            r#"{"content":[]}"#,
            r#" {"content":[{"type":"text","text":"\u00fc \ud83d\ude00"}],"structuredContent":{"a":[1,2.5,null,true]},"isError":true}"#,
        ] {
            let result = ResultText::of(text.as_bytes()).unwrap();
            assert_eq!(result.read(), serde_json::from_str(text).unwrap());
            assert_eq!(result.is_error(), result.read().is_error);
        }
        let deep = format!(
            r#"{{"content":[{}{}]}}"#,
            "[".repeat(100_000),
            "]".repeat(100_000)
        );
        for text in [
            &*deep,
            "[[],{},false]",
            "{}",
            r#"{"content":{}}"#,
            r#"{"content":[],"resultType":"complete"}"#,
            r#"{"content":[],"structuredContent":null}"#,
            r#"{"content":[],"structuredContent":[1]}"#,
            r#"{"content":[],"isError":null}"#,
            r#"{"content":[],"content":[]}"#,
            r#"{"content":["\ud800"]}"#,
            r#"{"content":[1e999]}"#,
        ] {
            assert!(
                ResultText::of(text.as_bytes()).is_none(),
                "{}",
                &text[..40.min(text.len())]
            );
        }
        assert!(ResultText::of(b"{\"content\":[\"\xff\"]}").is_none());
    }
}
