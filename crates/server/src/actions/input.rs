//! Checks of arguments that several actions share: pages, names, environments.

use indexmap::IndexMap;
use oubliette_protocol::{
    Error, Result,
    agent::{check_env_name, check_env_value},
    id::quoted,
};
use oubliette_store::{
    PageRequest,
    page::{DEFAULT_LIMIT, MAX_LIMIT},
};
use serde::{Deserialize, Deserializer};

/// Maximum length of a display name, in characters.
pub(crate) const MAX_NAME_CHARS: usize = 200;
/// Maximum length of a description, in characters.
pub(crate) const MAX_DESCRIPTION_CHARS: usize = 10_000;
/// Maximum number of variables in one environment.
pub(crate) const MAX_ENV_VARS: usize = 256;
/// Maximum length of a variable's value, in bytes.
pub(crate) const MAX_ENV_VALUE_BYTES: usize = 64 * 1024;
/// Text that answers show instead of a secret value.
pub(crate) const MASK: &str = "***";
/// What is wrong with a given value of [`MASK`] where there is no value to keep.
pub(crate) const NOTHING_MASKED: &str =
    "*** keeps a stored value, and none is stored under this name here; give the value itself";

/// Deserializes a field for which null means "remove": absent is `None`, null is `Some(None)`.
pub(crate) fn nullable<'de, T, D>(field: D) -> std::result::Result<Option<Option<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::deserialize(field).map(Some)
}

/// The page of a list that the arguments ask for.
pub(crate) fn page_request(limit: Option<u32>, cursor: Option<String>) -> PageRequest {
    PageRequest { limit, cursor }
}

/// One page of a list in memory that is sorted by key: the items after `cursor`, and the cursor of the next page.
pub(crate) fn page_of_sorted<'a, T: 'a>(
    items: impl Iterator<Item = (&'a str, T)>,
    limit: Option<u32>,
    cursor: Option<&str>,
) -> Result<(Vec<T>, Option<String>)> {
    let limit = limit.unwrap_or(DEFAULT_LIMIT);
    if !(1..=MAX_LIMIT).contains(&limit) {
        return Err(Error::invalid(format!(
            "limit must be 1 to {MAX_LIMIT}, not {limit}"
        )));
    }
    let mut rows: Vec<_> = items
        .filter(|(key, _)| cursor.is_none_or(|c| *key > c))
        .take(limit as usize + 1)
        .collect();
    let more = rows.len() > limit as usize;
    rows.truncate(limit as usize);
    let next = rows.last().filter(|_| more).map(|(key, _)| (*key).to_owned());
    Ok((rows.into_iter().map(|(_, row)| row).collect(), next))
}

/// Checks a display name and trims it: one line of 1 to [`MAX_NAME_CHARS`] characters.
pub(crate) fn check_name(field: &str, text: &str) -> Result<String> {
    let text = text.trim();
    if text.is_empty() {
        return Err(Error::invalid(format!("{field} must not be empty")));
    }
    if text.chars().count() > MAX_NAME_CHARS {
        return Err(Error::invalid(format!(
            "{field} is longer than {MAX_NAME_CHARS} characters"
        )));
    }
    if text.chars().any(char::is_control) {
        return Err(Error::invalid(format!(
            "{field} must be one line of plain text, not {}",
            quoted(text)
        )));
    }
    Ok(text.to_owned())
}

/// Checks a description: at most [`MAX_DESCRIPTION_CHARS`] characters, without NUL.
pub(crate) fn check_description(text: &str) -> Result<String> {
    match text.chars().count() > MAX_DESCRIPTION_CHARS || text.contains('\0') {
        true => Err(Error::invalid(format!(
            "description must be at most {MAX_DESCRIPTION_CHARS} characters, without NUL"
        ))),
        false => Ok(text.to_owned()),
    }
}

/// Checks an environment. A value of [`MASK`] is replaced by the one `before` has under that name, and refused if it has none.
pub(crate) fn check_env(
    given: IndexMap<String, String>,
    before: &IndexMap<String, String>,
) -> Result<IndexMap<String, String>> {
    if given.len() > MAX_ENV_VARS {
        return Err(Error::invalid(format!(
            "env has more than {MAX_ENV_VARS} variables"
        )));
    }
    let mut env = IndexMap::with_capacity(given.len());
    for (name, value) in given {
        check_env_name(&name).map_err(|why| Error::invalid(format!("env: {}: {why}", quoted(&name))))?;
        check_env_value(&value, MAX_ENV_VALUE_BYTES)
            .map_err(|why| Error::invalid(format!("env.{name} {why}")))?;
        let value = match (value.as_str(), before.get(&name)) {
            (MASK, Some(old)) => old.clone(),
            (MASK, None) => return Err(Error::invalid(format!("env.{name}: {NOTHING_MASKED}"))),
            _ => value,
        };
        env.insert(name, value);
    }
    Ok(env)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_one_short_line() {
        assert_eq!(check_name("name", " a b ").unwrap(), "a b");
        for bad in ["", "  ", "a\nb", "a\0", &"x".repeat(100_000)] {
            assert!(
                check_name("name", bad).unwrap_err().message.starts_with("name"),
                "{}",
                bad.len()
            );
        }
        assert!(check_name("name", &"ü".repeat(MAX_NAME_CHARS)).is_ok());
    }

    #[test]
    fn a_masked_value_keeps_the_stored_one() {
        let before = IndexMap::from([("A".to_owned(), "secret".to_owned())]);
        let given = IndexMap::from([
            ("A".to_owned(), MASK.to_owned()),
            ("B".to_owned(), "b".to_owned()),
        ]);
        let now = check_env(given, &before).unwrap();
        assert_eq!((now["A"].as_str(), now["B"].as_str()), ("secret", "b"));
        assert!(check_env(IndexMap::from([("A=B".to_owned(), String::new())]), &before).is_err());
        let refused = check_env(IndexMap::from([("B".to_owned(), MASK.to_owned())]), &before).unwrap_err();
        assert!(refused.message.starts_with("env.B: ***"), "{}", refused.message);
    }

    #[test]
    fn pages_end_at_the_limit_and_continue_at_the_cursor() {
        let rows = || ["a", "b", "c"].into_iter().map(|r| (r, r));
        assert_eq!(
            page_of_sorted(rows(), Some(2), None).unwrap(),
            (vec!["a", "b"], Some("b".into()))
        );
        assert_eq!(
            page_of_sorted(rows(), Some(2), Some("b")).unwrap(),
            (vec!["c"], None)
        );
        assert!(
            page_of_sorted(rows(), Some(0), None).is_err()
                && page_of_sorted(rows(), Some(1001), None).is_err()
        );
    }
}
