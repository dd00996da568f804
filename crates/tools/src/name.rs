//! Building, splitting and bounding tool names.
//!
//! A catalog tool has a canonical name, `@<id>/<tool>`, and a plain one, `<id>_<tool>`, that any model can
//! spell. Neither a catalog id nor a caller id can contain `_`, so the part before the first `_` of a plain
//! name is the id of its owner.

use oubliette_protocol::{CatalogId, agent::is_tool_name_byte, relay::method, tool::OWN_PREFIX};

/// Maximum length of a tool name accepted from a server, in bytes.
pub const MAX_TOOL_NAME: usize = 200;

/// Maximum length of a name in a call, in bytes: the longest tool name with `@<id>/` before it.
pub const MAX_CALLED_NAME: usize = MAX_TOOL_NAME + 64;

/// The canonical name, `@<id>/<tool>`.
pub fn canonical(id: &CatalogId, tool: &str) -> String {
    format!("@{id}/{tool}")
}

/// The plain name, `<id>_<tool>`, with every character outside `[A-Za-z0-9_-]` replaced by `_`.
pub fn plain(id: &CatalogId, tool: &str) -> String {
    let mut name = String::with_capacity(id.as_str().len() + 1 + tool.len());
    name.push_str(id.as_str());
    name.push('_');
    name.extend(tool.chars().map(|c| {
        if u8::try_from(c).is_ok_and(is_tool_name_byte) {
            c
        } else {
            '_'
        }
    }));
    name
}

/// Splits a plain name at its first `_` into the id of a catalog entry or caller and the tool's name.
pub(crate) fn split_owner(name: &str) -> Option<(&str, &str)> {
    name.split_once('_')
        .filter(|(owner, rest)| !owner.is_empty() && !rest.is_empty())
}

/// What a name is reserved for, when no catalog tool may have it.
pub fn reserved_for(name: &str) -> Option<&'static str> {
    if method::BASE_TOOLS.contains(&name) {
        return Some("a base tool of every agent");
    }
    name.starts_with(OWN_PREFIX)
        .then_some("one of Oubliette's own tools")
}

/// Up to three of `names` that are close enough to `wanted` to be suggested for a typing error.
pub fn nearest<'a>(wanted: &str, names: impl Iterator<Item = &'a str>) -> Vec<&'a str> {
    const LONGEST: usize = 64;
    const MOST: usize = 500;
    if wanted.len() > LONGEST {
        return Vec::new();
    }
    let near = names.take(MOST).filter(|name| name.len() <= LONGEST);
    // At most half of a short name may differ, or any short name would match.
    let most = (wanted.len() / 2).min(3);
    let mut scored: Vec<(usize, &str)> = near
        .map(|name| (distance(wanted, name), name))
        .filter(|(far, _)| *far <= most)
        .collect();
    scored.sort_unstable();
    scored.dedup();
    scored.into_iter().take(3).map(|(_, name)| name).collect()
}

/// Levenshtein distance in bytes.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.len()).collect();
    for (i, x) in a.bytes().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.bytes().enumerate() {
            let changed = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = changed.min(row[j] + 1).min(diagonal + 1);
        }
    }
    row[b.len()]
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn names_are_built_split_and_reserved() {
        let id: CatalogId = "my-files".parse().unwrap();
        assert_eq!(canonical(&id, "read.file"), "@my-files/read.file");
        assert_eq!(plain(&id, "read.file/ä x"), "my-files_read_file___x");
        assert_eq!(split_owner("my-files_read_file"), Some(("my-files", "read_file")));
        assert_eq!(split_owner("_x"), None);
        assert!(reserved_for("session_message").is_some() && reserved_for("oubliette_x").is_some());
        assert!(reserved_for("oubliettes_x").is_none());
    }

    #[test]
    fn close_misspellings_are_suggested() {
        assert_eq!(
            nearest("read_fiel", ["read_file", "write", "read"].into_iter()),
            ["read_file"]
        );
        assert!(nearest(&"x".repeat(10_000), ["x"].into_iter()).is_empty());
        assert!(nearest("zzz", ["a"].into_iter()).is_empty() && nearest("", ["a"].into_iter()).is_empty());
    }

    proptest! {
        #[test]
        fn a_plain_name_has_only_plain_characters(tool in ".{1,60}") {
            let id: CatalogId = "a".parse().unwrap();
            let name = plain(&id, &tool);
            prop_assert!(name.bytes().all(is_tool_name_byte));
            prop_assert_eq!(name.chars().count(), tool.chars().count() + 2);
        }
    }
}
