//! How the user of an MCP client is asked about one approval. Everything in the call's arguments comes from an agent: no long
//! text hides the fields after it, and what could not be seen is written out.

use oubliette_protocol::approval::ApprovalRequest;
use serde_json::{Value, json};

use crate::hidden_chars::write_out_deceptive_chars;

/// How much of a call's arguments a question shows, in characters.
const MAX_SHOWN_CHARS: usize = 4_000;
/// How much is shown of each text in arguments that are longer: the first length with which all of them fit.
const TEXT_CHARS: [usize; 3] = [1_000, 200, 40];

/// The parameters of an elicitation: the fields are the arguments of `approval_decide`.
pub(super) fn question(request: &ApprovalRequest) -> Value {
    json!({
        "mode": "form",
        "message": format!(
            "An agent wants to call {} with {}. Allow this call? ({})",
            write_out_deceptive_chars(&request.tool), format_arguments(&request.arguments), request.approval_id
        ),
        "requestedSchema": {
            "type": "object",
            "properties": {
                "decision": {
                    "type": "string",
                    "title": "Decision",
                    "description": "allow: the call is made; deny: the agent gets an error",
                    "enum": ["allow", "deny"],
                },
                "reason": {
                    "type": "string",
                    "title": "Reason",
                    "description": "Why; the agent is told the reason of a denial",
                    "maxLength": 2000,
                },
                "remember": {
                    "type": "string",
                    "title": "Remember",
                    "description": "session: later calls of this session that meet the same rule pass too",
                    "enum": ["session"],
                },
            },
            "required": ["decision"],
        },
    })
}

/// The arguments as JSON. Says so if something of them is left out.
fn format_arguments(arguments: &Value) -> String {
    let whole = write_out_deceptive_chars(&arguments.to_string());
    let fits = |text: &str| text.chars().nth(MAX_SHOWN_CHARS).is_none();
    if fits(&whole) {
        return whole;
    }
    let mut with_texts_cut = TEXT_CHARS.into_iter().map(|most| {
        let mut shortened = arguments.clone();
        cut_texts(&mut shortened, most);
        write_out_deceptive_chars(&shortened.to_string())
    });
    match with_texts_cut.find(|text| fits(text)) {
        Some(text) => format!("{text} (long texts are cut here; approval_list has more of them)"),
        None => {
            let start: String = whole.chars().take(MAX_SHOWN_CHARS).collect();
            format!("{start}… (only their beginning is shown here; approval_list has more of them)")
        }
    }
}

/// Cuts each text of more than so many characters.
fn cut_texts(value: &mut Value, most: usize) {
    match value {
        Value::String(text) => {
            if let Some((end, _)) = text.char_indices().nth(most) {
                let left_out = text[end..].chars().count();
                text.truncate(end);
                text.push_str(&format!("… ({left_out} more characters)"));
            }
        }
        Value::Array(items) => items.iter_mut().for_each(|item| cut_texts(item, most)),
        Value::Object(fields) => fields.values_mut().for_each(|field| cut_texts(field, most)),
        Value::Null | Value::Bool(_) | Value::Number(_) => {}
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_field_hides_behind_a_long_text_and_what_is_left_out_is_said() {
        let short = json!({"path": "a", "content": "x"});
        assert_eq!(format_arguments(&short), short.to_string());
        let long = format_arguments(&json!({"content": "x".repeat(60_000), "path": "/etc/passwd"}));
        assert!(long.contains(r#""path":"/etc/passwd""#), "{long}");
        assert!(
            long.contains("59000 more characters") && long.contains("are cut"),
            "{long}"
        );
        let words: Vec<String> = (0..50).map(|n| format!("{n}{}", "y".repeat(300))).collect();
        let many = format_arguments(&json!({"argv": words, "cwd": "elsewhere"}));
        assert!(
            many.contains(r#""cwd":"elsewhere""#) && many.contains("\"49yyy"),
            "{many}"
        );
        let endless: Vec<usize> = (0..10_000).collect();
        let cut = format_arguments(&json!({ "numbers": endless }));
        assert!(cut.contains("only their beginning") && cut.chars().count() < MAX_SHOWN_CHARS + 100);
    }

    #[test]
    fn what_could_not_be_seen_is_written_out() {
        let hidden = json!({"path": "a\u{202e}b\u{200b}\u{e0041}\u{1b} \u{a0}\u{2800}"});
        assert_eq!(
            format_arguments(&hidden),
            r#"{"path":"a\u202eb\u200b\udb40\udc41\u001b \u00a0\u2800"}"#
        );
    }
}
