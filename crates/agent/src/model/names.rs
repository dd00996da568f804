//! Tool names that every provider accepts: a letter or `_` first, then letters, digits, `_` and `-`,
//! 64 at most. What the model calls is turned back into the tool's own name.

use std::collections::HashMap;

use oubliette_protocol::tool::ToolSpec;

const LONGEST: usize = 64;

/// The tools of one request, under names that may be sent.
pub(crate) struct Names {
    tools: Vec<ToolSpec>,
    real: HashMap<String, String>,
}

impl Names {
    pub(crate) fn new(listed: Vec<ToolSpec>) -> Self {
        let mut real = HashMap::with_capacity(listed.len());
        let mut tools = Vec::with_capacity(listed.len());
        // Names that need no change first, so that a changed one never takes theirs.
        let (fine, odd): (Vec<_>, Vec<_>) = listed
            .into_iter()
            .partition(|tool| accepted(&tool.name) == tool.name);
        for tool in fine.into_iter().chain(odd) {
            let sent = free(accepted(&tool.name), &real);
            real.insert(sent.clone(), tool.name);
            tools.push(ToolSpec { name: sent, ..tool });
        }
        Self { tools, real }
    }

    /// The tools as they are sent.
    pub(crate) fn tools(&self) -> &[ToolSpec] {
        &self.tools
    }

    /// The tool a model means. A name nobody sent is passed on as it is: the server refuses it.
    pub(crate) fn real<'a>(&'a self, sent: &'a str) -> &'a str {
        self.real.get(sent).map_or(sent, String::as_str)
    }
}

/// `name` in the characters everybody accepts.
pub(crate) fn accepted(name: &str) -> String {
    let fine = |c: char| c.is_ascii_alphanumeric() || matches!(c, '_' | '-');
    let mut accepted: String = name.chars().map(|c| if fine(c) { c } else { '_' }).collect();
    if !accepted.starts_with(|c: char| c.is_ascii_alphabetic() || c == '_') {
        accepted.insert(0, '_');
    }
    accepted.truncate(LONGEST);
    accepted
}

fn free(wanted: String, taken: &HashMap<String, String>) -> String {
    if !taken.contains_key(&wanted) {
        return wanted;
    }
    let numbered = (2..).map(|number: usize| {
        let end = format!("_{number}");
        let kept = wanted.len().min(LONGEST - end.len());
        format!("{}{end}", &wanted[..kept])
    });
    numbered
        .into_iter()
        .find(|name| !taken.contains_key(name))
        .unwrap_or(wanted)
}

#[cfg(test)]
mod tests {
    use oubliette_protocol::tool::any_object;

    use super::*;

    fn names(listed: &[&str]) -> Names {
        let spec = |name: &&str| ToolSpec {
            name: (*name).to_owned(),
            description: String::new(),
            input_schema: any_object(),
        };
        Names::new(listed.iter().map(spec).collect())
    }

    #[test]
    fn every_name_is_acceptable_unique_and_found_again() {
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
            assert_eq!(accepted(name), *name);
            assert_eq!(sent.iter().filter(|other| *other == name).count(), 1, "{name}");
        }
        let mut back: Vec<&str> = sent.iter().map(|name| names.real(name)).collect();
        let mut expected = listed.to_vec();
        back.sort_unstable();
        expected.sort_unstable();
        assert_eq!(back, expected);
        assert_eq!(
            names.real("odd_name_x"),
            "odd_name_x",
            "a good name keeps its own"
        );
        assert_eq!(names.real("made_up"), "made_up");
    }
}
