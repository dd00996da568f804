//! What was remembered, as the messages of a request; and keeping it bounded.

use agent_client_protocol::Error;
use genai::chat::{ChatMessage, ContentPart, MessageContent, ToolCall, ToolResponse};
use serde_json::Value;

use super::names;
use crate::memory::{Answer, Called, Entry, Keeper, Memory, Native};

/// The newest entries, which the model is at work on, are never shortened.
const FRESH: usize = 4;

/// The messages of a conversation, for one provider. Whatever a killed process left half said is
/// made whole: providers refuse a call without a result and a result without a call.
pub(crate) fn messages(entries: &[Entry], adapter: &str) -> Vec<ChatMessage> {
    let mut messages: Vec<ChatMessage> = Vec::with_capacity(entries.len());
    let mut asked: Vec<String> = Vec::new();
    let mut entries = entries.iter().peekable();
    while let Some(entry) = entries.next() {
        match entry {
            Entry::User { text } => {
                asked.push(if text.is_empty() {
                    "(nothing)".to_owned()
                } else {
                    text.clone()
                });
                // A turn that died before its answer leaves two prompts in a row.
                if !matches!(entries.peek(), Some(Entry::User { .. })) {
                    messages.push(ChatMessage::user(asked.join("\n\n")));
                    asked.clear();
                }
            }
            Entry::Assistant { text, calls, native } => {
                if text.is_empty() && calls.is_empty() {
                    continue;
                }
                messages.push(ChatMessage::assistant(spoken(
                    text,
                    calls,
                    native.as_ref(),
                    adapter,
                )));
                if calls.is_empty() {
                    continue;
                }
                let results = match entries.peek() {
                    Some(Entry::Results { results }) => {
                        entries.next();
                        results.as_slice()
                    }
                    _ => &[],
                };
                messages.push(ChatMessage::from(answers(calls, results)));
            }
            Entry::Forgotten { .. } => {
                messages.push(ChatMessage::user(
                    "(The beginning of this conversation is not shown any more.)",
                ));
            }
            Entry::Results { .. } | Entry::Unknown => {}
        }
    }
    messages
}

fn spoken(text: &str, calls: &[Called], native: Option<&Native>, adapter: &str) -> MessageContent {
    let own = native.filter(|native| native.adapter == adapter);
    if let Some(content) = own.and_then(|native| serde_json::from_value(native.content.clone()).ok()) {
        return content;
    }
    let said = (!text.is_empty()).then(|| ContentPart::Text(text.to_owned()));
    let called = calls.iter().map(|call| {
        ContentPart::ToolCall(ToolCall {
            call_id: call.id.clone(),
            fn_name: names::accepted(&call.tool),
            fn_arguments: Value::Object(call.arguments.clone()),
            thought_signatures: None,
        })
    });
    MessageContent::from_parts(said.into_iter().chain(called).collect::<Vec<_>>())
}

fn answers(calls: &[Called], results: &[Answer]) -> Vec<ToolResponse> {
    let answer = |call: &Called| {
        let text = results
            .iter()
            .find(|result| result.id == call.id)
            .map(|result| result.text.clone());
        let text =
            text.unwrap_or_else(|| "Error: the call was interrupted; it may or may not have run".to_owned());
        ToolResponse::new(call.id.clone(), text).with_fn_name(names::accepted(&call.tool))
    };
    calls.iter().map(answer).collect()
}

/// Shortens the memory, in the host's keeping too, once it is longer than `most` characters. It is
/// cut well below that, so that this is rare and a provider's cache of the beginning stays good.
pub(crate) async fn keep_bounded<K: Keeper>(memory: &mut Memory<K>, most: usize) -> Result<(), Error> {
    if size(memory.entries()) > most {
        let shorter = shortened(memory.entries().to_vec(), most / 10 * 7);
        memory.replace(shorter).await?;
    }
    Ok(())
}

/// Halves the memory; `false` when nothing is left to drop.
pub(crate) async fn halve<K: Keeper>(memory: &mut Memory<K>) -> Result<bool, Error> {
    let before = size(memory.entries());
    let shorter = shortened(memory.entries().to_vec(), before / 2);
    if size(&shorter) >= before {
        return Ok(false);
    }
    memory.replace(shorter).await?;
    Ok(true)
}

/// Old tool results go first, then whole turns, the oldest first; the newest entries stay.
fn shortened(mut entries: Vec<Entry>, most: usize) -> Vec<Entry> {
    let mut now = size(&entries);
    let fresh = entries.len().saturating_sub(FRESH);
    for entry in entries.iter_mut().take(fresh) {
        if now <= most {
            return entries;
        }
        let before = size_of(entry);
        if let Entry::Results { results } = entry {
            for result in results {
                result.text = cut(std::mem::take(&mut result.text), 200);
            }
        }
        now = now - before + size_of(entry);
    }
    let mut forgotten = 0;
    while now > most {
        let Some(next) = next_turn(&entries) else { break };
        for entry in entries.drain(..next) {
            now -= size_of(&entry);
            forgotten += match entry {
                Entry::User { .. } => 1,
                Entry::Forgotten { turns } => turns,
                Entry::Assistant { .. } | Entry::Results { .. } | Entry::Unknown => 0,
            };
        }
    }
    if forgotten > 0 {
        entries.insert(0, Entry::Forgotten { turns: forgotten });
    }
    entries
}

/// Where the second turn begins.
fn next_turn(entries: &[Entry]) -> Option<usize> {
    let mut begins = entries
        .iter()
        .enumerate()
        .filter(|(_, entry)| matches!(entry, Entry::User { .. }));
    begins.nth(1).map(|(index, _)| index)
}

fn size(entries: &[Entry]) -> usize {
    entries.iter().map(size_of).sum()
}

fn size_of(entry: &Entry) -> usize {
    let json = |value: &dyn Fn() -> serde_json::Result<String>| value().map_or(0, |text| text.len());
    match entry {
        Entry::User { text } => text.len(),
        Entry::Assistant {
            native: Some(native), ..
        } => json(&|| serde_json::to_string(&native.content)),
        Entry::Assistant {
            text,
            calls,
            native: None,
        } => text.len() + json(&|| serde_json::to_string(calls)),
        Entry::Results { results } => results.iter().map(|result| result.text.len()).sum(),
        Entry::Forgotten { .. } | Entry::Unknown => 0,
    }
}

/// The beginning of a text that is too long, with a word about the rest.
pub(crate) fn cut(text: String, most: usize) -> String {
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
    use oubliette_protocol::Object;

    use super::*;

    fn user(text: &str) -> Entry {
        Entry::User { text: text.into() }
    }

    fn calling(id: &str) -> Entry {
        let call = Called {
            id: id.into(),
            tool: "odd.tool".into(),
            arguments: Object::new(),
        };
        Entry::Assistant {
            text: "let me see".into(),
            calls: vec![call],
            native: None,
        }
    }

    fn result(id: &str, text: &str) -> Entry {
        Entry::Results {
            results: vec![Answer {
                id: id.into(),
                tool: "odd.tool".into(),
                text: text.into(),
            }],
        }
    }

    fn roles(entries: &[Entry]) -> Vec<String> {
        messages(entries, "OpenAI")
            .iter()
            .map(|message| message.role.to_string())
            .collect()
    }

    #[test]
    fn what_a_killed_process_left_is_made_whole() {
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
        assert_eq!(roles(&[user("a"), result("1", "x"), Entry::Unknown]), ["User"]);
        let empty = Entry::Assistant {
            text: String::new(),
            calls: vec![],
            native: None,
        };
        assert_eq!(roles(&[user("a"), empty]), ["User"]);
        let repaired = messages(&[user("a"), calling("1"), result("other", "x")], "OpenAI");
        let texts = serde_json::to_string(&repaired).unwrap();
        assert!(
            texts.contains("interrupted") && texts.contains("odd_tool"),
            "{texts}"
        );
    }

    #[test]
    fn one_providers_shape_is_not_sent_to_another() {
        let content = serde_json::to_value(MessageContent::from_text("signed")).unwrap();
        let native = Some(Native {
            adapter: "Anthropic".into(),
            content,
        });
        let entries = [
            user("a"),
            Entry::Assistant {
                text: "plain".into(),
                calls: vec![],
                native,
            },
        ];
        let of = |adapter| serde_json::to_string(&messages(&entries, adapter)).unwrap();
        assert!(of("Anthropic").contains("signed") && !of("Anthropic").contains("plain"));
        assert!(of("OpenAI").contains("plain") && !of("OpenAI").contains("signed"));
    }

    #[test]
    fn old_results_go_first_then_old_turns_and_never_the_newest() {
        let long = "x".repeat(1000);
        let mut entries = Vec::new();
        for number in 0..10 {
            entries.extend([user(&format!("turn {number}")), calling("1"), result("1", &long)]);
        }
        let turns = |entries: &[Entry]| entries.iter().filter(|e| matches!(e, Entry::User { .. })).count();
        let some = shortened(entries.clone(), 8000);
        assert!(size(&some) <= 8000);
        assert_eq!(turns(&some), 10, "results were enough");
        assert_eq!(some.last(), entries.last());
        let few = shortened(entries.clone(), 2500);
        assert!(size(&few) <= 2500, "{}", size(&few));
        let Some(Entry::Forgotten { turns: gone }) = few.first() else {
            panic!("{few:?}")
        };
        assert_eq!(gone + turns(&few), 10);
        assert_eq!(few.last(), entries.last());
        let none = shortened(entries, 1);
        assert_eq!(turns(&none), 1, "the turn at work stays, however long it is");
        assert_eq!(roles(&none)[0], "User");
    }
}
