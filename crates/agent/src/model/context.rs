//! Stored entries as the messages of a request, and keeping them within a size limit.

use agent_client_protocol::Error;
use genai::chat::{ChatMessage, ContentPart, MessageContent, ToolCall, ToolResponse};
use serde_json::Value;

use super::tool_names;
use crate::memory::{
    ConversationMemory, MemoryEntry, MemoryHost, ProviderMessage, RememberedCall, RememberedResult,
};

/// How many of the newest entries keep their tool results in full: the model is working with them.
const UNSHORTENED_ENTRIES: usize = 4;

/// The messages of a conversation, for one provider. What an interrupted turn left incomplete is
/// completed or left out, because providers refuse a call without a result and a result without a call.
pub(crate) fn chat_messages(entries: &[MemoryEntry], adapter: &str) -> Vec<ChatMessage> {
    let mut messages: Vec<ChatMessage> = Vec::with_capacity(entries.len());
    let mut asked: Vec<String> = Vec::new();
    let mut entries = entries.iter().peekable();
    while let Some(entry) = entries.next() {
        match entry {
            MemoryEntry::User { text } => {
                asked.push(if text.is_empty() {
                    "(nothing)".to_owned()
                } else {
                    text.clone()
                });
                // A turn interrupted before its answer leaves two prompts in a row: they become one message.
                if !matches!(entries.peek(), Some(MemoryEntry::User { .. })) {
                    messages.push(ChatMessage::user(asked.join("\n\n")));
                    asked.clear();
                }
            }
            MemoryEntry::Assistant { text, calls, native } => {
                if text.is_empty() && calls.is_empty() {
                    continue;
                }
                messages.push(ChatMessage::assistant(assistant_content(
                    text,
                    calls,
                    native.as_ref(),
                    adapter,
                )));
                if calls.is_empty() {
                    continue;
                }
                let results = match entries.peek() {
                    Some(MemoryEntry::Results { results }) => {
                        entries.next();
                        results.as_slice()
                    }
                    _ => &[],
                };
                messages.push(ChatMessage::from(tool_responses(calls, results)));
            }
            MemoryEntry::Forgotten { .. } => {
                messages.push(ChatMessage::user(
                    "(The beginning of this conversation is not shown any more.)",
                ));
            }
            MemoryEntry::Results { .. } | MemoryEntry::Unknown => {}
        }
    }
    messages
}

fn assistant_content(
    text: &str,
    calls: &[RememberedCall],
    native: Option<&ProviderMessage>,
    adapter: &str,
) -> MessageContent {
    let own = native.filter(|native| native.adapter == adapter);
    if let Some(content) = own.and_then(|native| serde_json::from_value(native.content.clone()).ok()) {
        return content;
    }
    let said = (!text.is_empty()).then(|| ContentPart::Text(text.to_owned()));
    let called = calls.iter().map(|call| {
        ContentPart::ToolCall(ToolCall {
            call_id: call.id.clone(),
            fn_name: tool_names::to_accepted_name(&call.tool),
            fn_arguments: Value::Object(call.arguments.clone()),
            thought_signatures: None,
        })
    });
    MessageContent::from_parts(said.into_iter().chain(called).collect::<Vec<_>>())
}

fn tool_responses(calls: &[RememberedCall], results: &[RememberedResult]) -> Vec<ToolResponse> {
    let answer = |call: &RememberedCall| {
        let text = results
            .iter()
            .find(|result| result.id == call.id)
            .map(|result| result.text.clone());
        let text =
            text.unwrap_or_else(|| "Error: the call was interrupted; it may or may not have run".to_owned());
        ToolResponse::new(call.id.clone(), text).with_fn_name(tool_names::to_accepted_name(&call.tool))
    };
    calls.iter().map(answer).collect()
}

/// Shortens the memory, here and at the host, once it is longer than `most` bytes: to 70 % of that, so
/// that it happens rarely and the provider's cache of the conversation's beginning stays valid.
pub(crate) async fn shorten_if_longer<K: MemoryHost>(
    memory: &mut ConversationMemory<K>,
    most: usize,
) -> Result<(), Error> {
    if total_size(memory.entries()) > most {
        let shorter = shorten_entries(memory.entries().to_vec(), most / 10 * 7);
        memory.replace(shorter).await?;
    }
    Ok(())
}

/// Shortens the memory to half its size; `false` when nothing more can be dropped.
pub(crate) async fn shorten_to_half<K: MemoryHost>(
    memory: &mut ConversationMemory<K>,
) -> Result<bool, Error> {
    let before = total_size(memory.entries());
    let shorter = shorten_entries(memory.entries().to_vec(), before / 2);
    if total_size(&shorter) >= before {
        return Ok(false);
    }
    memory.replace(shorter).await?;
    Ok(true)
}

/// Truncates old tool results first, then drops whole turns, oldest first. The last turn always stays.
fn shorten_entries(mut entries: Vec<MemoryEntry>, most: usize) -> Vec<MemoryEntry> {
    let mut now = total_size(&entries);
    let fresh = entries.len().saturating_sub(UNSHORTENED_ENTRIES);
    for entry in entries.iter_mut().take(fresh) {
        if now <= most {
            return entries;
        }
        let before = entry_size(entry);
        if let MemoryEntry::Results { results } = entry {
            for result in results {
                result.text = truncate_text(std::mem::take(&mut result.text), 200);
            }
        }
        now = now - before + entry_size(entry);
    }
    let mut forgotten = 0;
    while now > most {
        let Some(next) = second_turn_index(&entries) else {
            break;
        };
        for entry in entries.drain(..next) {
            now -= entry_size(&entry);
            forgotten += match entry {
                MemoryEntry::User { .. } => 1,
                MemoryEntry::Forgotten { turns } => turns,
                MemoryEntry::Assistant { .. } | MemoryEntry::Results { .. } | MemoryEntry::Unknown => 0,
            };
        }
    }
    if forgotten > 0 {
        entries.insert(0, MemoryEntry::Forgotten { turns: forgotten });
    }
    entries
}

/// The index of the entry that begins the second turn.
fn second_turn_index(entries: &[MemoryEntry]) -> Option<usize> {
    let mut begins = entries
        .iter()
        .enumerate()
        .filter(|(_, entry)| matches!(entry, MemoryEntry::User { .. }));
    begins.nth(1).map(|(index, _)| index)
}

fn total_size(entries: &[MemoryEntry]) -> usize {
    entries.iter().map(entry_size).sum()
}

fn entry_size(entry: &MemoryEntry) -> usize {
    let json = |value: &dyn Fn() -> serde_json::Result<String>| value().map_or(0, |text| text.len());
    match entry {
        MemoryEntry::User { text } => text.len(),
        MemoryEntry::Assistant {
            native: Some(native), ..
        } => json(&|| serde_json::to_string(&native.content)),
        MemoryEntry::Assistant {
            text,
            calls,
            native: None,
        } => text.len() + json(&|| serde_json::to_string(calls)),
        MemoryEntry::Results { results } => results.iter().map(|result| result.text.len()).sum(),
        MemoryEntry::Forgotten { .. } | MemoryEntry::Unknown => 0,
    }
}

/// At most `most` characters of the text, with a note of how much was dropped.
pub(crate) fn truncate_text(text: String, most: usize) -> String {
    match text.char_indices().nth(most) {
        None => text,
        Some((end, _)) => format!(
            "{}\n[… {} more bytes were dropped]",
            &text[..end],
            text.len() - end
        ),
    }
}

#[cfg(test)]
mod tests {
    use oubliette_protocol::JsonObject;

    use super::*;

    fn user(text: &str) -> MemoryEntry {
        MemoryEntry::User { text: text.into() }
    }

    fn calling(id: &str) -> MemoryEntry {
        let call = RememberedCall {
            id: id.into(),
            tool: "odd.tool".into(),
            arguments: JsonObject::new(),
        };
        MemoryEntry::Assistant {
            text: "let me see".into(),
            calls: vec![call],
            native: None,
        }
    }

    fn result(id: &str, text: &str) -> MemoryEntry {
        MemoryEntry::Results {
            results: vec![RememberedResult {
                id: id.into(),
                tool: "odd.tool".into(),
                text: text.into(),
            }],
        }
    }

    fn roles(entries: &[MemoryEntry]) -> Vec<String> {
        chat_messages(entries, "OpenAI")
            .iter()
            .map(|message| message.role.to_string())
            .collect()
    }

    #[test]
    fn an_interrupted_conversation_is_completed() {
        assert_eq!(
            roles(&[user("a"), calling("1"), result("1", "x")]),
            ["User", "Assistant", "Tool"]
        );
        assert_eq!(
            roles(&[user("a"), calling("1"), user("b")]),
            ["User", "Assistant", "Tool", "User"]
        );
        assert_eq!(
            roles(&[user("a"), user("b")]),
            ["User"],
            "two prompts in a row are one message"
        );
        assert_eq!(
            roles(&[user("a"), result("1", "x"), MemoryEntry::Unknown]),
            ["User"]
        );
        let empty = MemoryEntry::Assistant {
            text: String::new(),
            calls: vec![],
            native: None,
        };
        assert_eq!(roles(&[user("a"), empty]), ["User"]);
        let repaired = chat_messages(&[user("a"), calling("1"), result("other", "x")], "OpenAI");
        let texts = serde_json::to_string(&repaired).unwrap();
        assert!(
            texts.contains("interrupted") && texts.contains("odd_tool"),
            "{texts}"
        );
    }

    #[test]
    fn a_providers_own_form_is_sent_only_to_that_provider() {
        let content = serde_json::to_value(MessageContent::from_text("signed")).unwrap();
        let native = Some(ProviderMessage {
            adapter: "Anthropic".into(),
            content,
        });
        let entries = [
            user("a"),
            MemoryEntry::Assistant {
                text: "plain".into(),
                calls: vec![],
                native,
            },
        ];
        let of = |adapter| serde_json::to_string(&chat_messages(&entries, adapter)).unwrap();
        assert!(of("Anthropic").contains("signed") && !of("Anthropic").contains("plain"));
        assert!(of("OpenAI").contains("plain") && !of("OpenAI").contains("signed"));
    }

    #[test]
    fn old_results_are_truncated_before_old_turns_are_dropped() {
        let long = "x".repeat(1000);
        let mut entries = Vec::new();
        for number in 0..10 {
            entries.extend([user(&format!("turn {number}")), calling("1"), result("1", &long)]);
        }
        let turns = |entries: &[MemoryEntry]| {
            entries
                .iter()
                .filter(|e| matches!(e, MemoryEntry::User { .. }))
                .count()
        };
        let some = shorten_entries(entries.clone(), 8000);
        assert!(total_size(&some) <= 8000);
        assert_eq!(turns(&some), 10, "results were enough");
        assert_eq!(some.last(), entries.last());
        let few = shorten_entries(entries.clone(), 2500);
        assert!(total_size(&few) <= 2500, "{}", total_size(&few));
        let Some(MemoryEntry::Forgotten { turns: gone }) = few.first() else {
            panic!("{few:?}")
        };
        assert_eq!(gone + turns(&few), 10);
        assert_eq!(few.last(), entries.last());
        let none = shorten_entries(entries, 1);
        assert_eq!(turns(&none), 1, "the turn at work stays, however long it is");
        assert_eq!(roles(&none)[0], "User");
    }
}
