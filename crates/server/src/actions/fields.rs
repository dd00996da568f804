//! What comes in: paging, names, environments.

use indexmap::IndexMap;
use oubliette_protocol::{Error, Result, agent::env_name, id::quoted};
use oubliette_store::Page;
use serde::{Deserialize, Deserializer};

/// Longest name of anything.
pub const MAX_NAME: usize = 200;
/// Longest description.
pub const MAX_DESCRIPTION: usize = 10_000;
/// Most variables of one environment.
pub const MAX_ENV: usize = 256;
/// Longest value of a variable.
pub const MAX_ENV_VALUE: usize = 64 * 1024;
/// What stands in the place of an environment's values.
pub const MASK: &str = "***";

/// Most rows of a list that is not the store's.
const MOST_ROWS: u32 = 1000;

/// A field that null takes away: absent it is `None`, null is `Some(None)`.
pub fn or_null<'de, T, D>(field: D) -> std::result::Result<Option<Option<T>>, D::Error>
where
    T: Deserialize<'de>,
    D: Deserializer<'de>,
{
    Option::deserialize(field).map(Some)
}

/// How much of a list.
pub fn page(limit: Option<u32>, cursor: Option<String>) -> Page {
    Page { limit, cursor }
}

/// A page of what is kept in order in memory: after `cursor`, with the cursor of the next one.
pub fn slice<'a, T: 'a>(
    items: impl Iterator<Item = (&'a str, T)>,
    limit: Option<u32>,
    cursor: Option<&str>,
) -> Result<(Vec<T>, Option<String>)> {
    let limit = limit.unwrap_or(100);
    if !(1..=MOST_ROWS).contains(&limit) {
        return Err(Error::invalid(format!(
            "limit must be 1 to {MOST_ROWS}, not {limit}"
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

/// A name people give: some text, one line, not too long.
pub fn name(field: &str, text: &str) -> Result<String> {
    let text = text.trim();
    if text.is_empty() {
        return Err(Error::invalid(format!("{field} must not be empty")));
    }
    if text.chars().count() > MAX_NAME {
        return Err(Error::invalid(format!(
            "{field} is longer than {MAX_NAME} characters"
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

/// A description: any text, not too long.
pub fn description(text: &str) -> Result<String> {
    match text.chars().count() > MAX_DESCRIPTION || text.contains('\0') {
        true => Err(Error::invalid(format!(
            "description must be at most {MAX_DESCRIPTION} characters, without NUL"
        ))),
        false => Ok(text.to_owned()),
    }
}

/// An environment as it is given. A masked value keeps what `before` has under that name.
pub fn env(
    given: IndexMap<String, String>,
    before: &IndexMap<String, String>,
) -> Result<IndexMap<String, String>> {
    if given.len() > MAX_ENV {
        return Err(Error::invalid(format!("env has more than {MAX_ENV} variables")));
    }
    let mut env = IndexMap::with_capacity(given.len());
    for (name, value) in given {
        env_name(&name).map_err(|why| Error::invalid(format!("env: {}: {why}", quoted(&name))))?;
        if value.len() > MAX_ENV_VALUE || value.contains('\0') {
            return Err(Error::invalid(format!(
                "env.{name}: at most {MAX_ENV_VALUE} bytes, without NUL"
            )));
        }
        let value = match before.get(&name) {
            Some(old) if value == MASK => old.clone(),
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
        assert_eq!(name("name", " a b ").unwrap(), "a b");
        for bad in ["", "  ", "a\nb", "a\0", &"x".repeat(100_000)] {
            assert!(
                name("name", bad).unwrap_err().message.starts_with("name"),
                "{}",
                bad.len()
            );
        }
        assert!(name("name", &"ü".repeat(MAX_NAME)).is_ok());
    }

    #[test]
    fn a_masked_value_keeps_the_old_one() {
        let before = IndexMap::from([("A".to_owned(), "secret".to_owned())]);
        let given = IndexMap::from([
            ("A".to_owned(), MASK.to_owned()),
            ("B".to_owned(), "b".to_owned()),
        ]);
        let now = env(given, &before).unwrap();
        assert_eq!((now["A"].as_str(), now["B"].as_str()), ("secret", "b"));
        assert!(env(IndexMap::from([("A=B".to_owned(), String::new())]), &before).is_err());
    }

    #[test]
    fn pages_are_bounded() {
        let rows = || ["a", "b", "c"].into_iter().map(|r| (r, r));
        assert_eq!(
            slice(rows(), Some(2), None).unwrap(),
            (vec!["a", "b"], Some("b".into()))
        );
        assert_eq!(slice(rows(), Some(2), Some("b")).unwrap(), (vec!["c"], None));
        assert!(slice(rows(), Some(0), None).is_err() && slice(rows(), Some(1001), None).is_err());
    }
}
