//! Tool names that every provider accepts: a letter or `_`, then letters, digits, `_` and `-`, 64 characters
//! at most. A name in the model's answer is mapped back to the tool's own name.

use std::collections::HashMap;

use oubliette_protocol::tool::ToolSpec;

const MAX_NAME_LENGTH: usize = 64;

/// The tools of one request under names that providers accept, with the way back to their own names.
pub(crate) struct ProviderToolNames {
    tools: Vec<ToolSpec>,
    original_names: HashMap<String, String>,
}

impl ProviderToolNames {
    pub(crate) fn new(listed: Vec<ToolSpec>) -> Self {
        let mut real = HashMap::with_capacity(listed.len());
        let mut tools = Vec::with_capacity(listed.len());
        // Unchanged names first, so that a changed name never takes one of them.
        let (fine, odd): (Vec<_>, Vec<_>) = listed
            .into_iter()
            .partition(|tool| to_accepted_name(&tool.name) == tool.name);
        for tool in fine.into_iter().chain(odd) {
            let sent = make_unique(to_accepted_name(&tool.name), &real);
            real.insert(sent.clone(), tool.name);
            tools.push(ToolSpec { name: sent, ..tool });
        }
        Self {
            tools,
            original_names: real,
        }
    }

    /// The tools with the names sent to the provider.
    pub(crate) fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    /// The tool's own name. A name that was never sent is returned unchanged; the server refuses it.
    pub(crate) fn original_name<'a>(&'a self, sent: &'a str) -> &'a str {
        self.original_names.get(sent).map_or(sent, String::as_str)
    }
}

/// `name` with every character that some provider refuses replaced by `_`, and at most 64 long.
pub(crate) fn to_accepted_name(name: &str) -> String {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let mut accepted: String = name.chars().map(|c| if fine(c) { c } else { '_' }).collect();
    if !accepted.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        accepted.insert(0, '_');
    }
    accepted.truncate(MAX_NAME_LENGTH);
    accepted
}

fn make_unique(wanted: String, taken: &HashMap<String, String>) -> String {
    if !taken.contains_key(&wanted) {
        return wanted;
    }
    let numbered = (2..).map(|number: usize| {
        let end = format!("_{number}");
        let kept = wanted.len().min(MAX_NAME_LENGTH - end.len());
        format!("{}{end}", &wanted[..kept])
    });
    numbered
        .into_iter()
        .find(|name| !taken.contains_key(name))
        .unwrap_or(wanted)
}

#[cfg(test)]
mod tests {
    use oubliette_protocol::tool::any_object_schema;

    use super::*;

    fn names(listed: &[&str]) -> ProviderToolNames {
        let spec = |name: &&str| ToolSpec {
            name: (*name).to_owned(),
            description: String::new(),
            input_schema: any_object_schema(),
        };
        ProviderToolNames::new(listed.iter().map(spec).collect())
    }

    #[test]
    fn every_sent_name_is_accepted_unique_and_maps_back() {
        let long = "x".repeat(80);
        let listed = [
            "odd.name/x",
            "odd_name_x",
            "odd name x",
            "9lives",
            "größe",
            "",
            &long,
            &format!("{long}y"),
        ];
        let names = names(&listed);
        let sent: Vec<&str> = names.tools().iter().map(|t| t.name.as_str()).collect();
        assert_eq!(sent.len(), listed.len());
        for name in &sent {
            assert_eq!(to_accepted_name(name), *name);
            assert_eq!(sent.iter().filter(|other| *other == name).count(), 1, "{name}");
        }
        let mut back: Vec<&str> = sent.iter().map(|name| names.original_name(name)).collect();
        let mut expected = listed.to_vec();
        back.sort_unstable();
        expected.sort_unstable();
        assert_eq!(back, expected);
        assert_eq!(
            names.original_name("odd_name_x"),
            "odd_name_x",
            "a good name keeps its own"
        );
        assert_eq!(names.original_name("made_up"), "made_up");
    }
}
