//! Patterns of tool names, sorted by kind so that ten thousand of them against ten thousand tools stay cheap: exact
//! names and prefixes are looked up in maps, only the other globs are tried one by one.

use std::collections::HashMap;

/// A list of patterns, each known by its position.
#[derive(Debug, Default)]
pub(crate) struct PatternList {
    exact: HashMap<String, Vec<usize>>,
    /// Length of a prefix → prefix → positions.
    prefixes: HashMap<usize, HashMap<String, Vec<usize>>>,
    globs: Vec<(String, usize)>,
}

impl PatternList {
    pub(crate) fn new<'a>(patterns: impl Iterator<Item = (usize, &'a str)>) -> Self {
        let mut list = Self::default();
        for (position, pattern) in patterns {
            match pattern.find('*') {
                None => list.exact.entry(pattern.to_owned()).or_default().push(position),
                Some(star) if star + 1 == pattern.len() => {
                    let prefixes = list.prefixes.entry(star).or_default();
                    prefixes
                        .entry(pattern[..star].to_owned())
                        .or_default()
                        .push(position);
                }
                Some(_) => list.globs.push((pattern.to_owned(), position)),
            }
        }
        list
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.exact.is_empty() && self.prefixes.is_empty() && self.globs.is_empty()
    }

    /// The positions of the patterns that match one of the names, in order.
    pub(crate) fn matching<'a>(&self, names: impl Iterator<Item = &'a str>) -> Vec<usize> {
        let mut found = Vec::new();
        if self.is_empty() {
            return found;
        }
        for name in names {
            found.extend(self.exact.get(name).into_iter().flatten());
            let prefixed = self
                .prefixes
                .iter()
                .filter_map(|(length, set)| set.get(name.get(..*length)?));
            found.extend(prefixed.flatten());
            let globs = self.globs.iter().filter(|(glob, _)| glob_matches(glob, name));
            found.extend(globs.map(|(_, position)| position));
        }
        found.sort_unstable();
        found.dedup();
        found
    }
}

/// Whether a pattern matches a whole name; `*` stands for any run of characters, even none.
///
/// It backtracks only to the last star, so the cost is at most pattern × name and never exponential.
pub fn glob_matches(pattern: &str, name: &str) -> bool {
    let (pattern, name) = (pattern.as_bytes(), name.as_bytes());
    let (mut p, mut n) = (0, 0);
    let mut back: Option<(usize, usize)> = None;
    while n < name.len() {
        match pattern.get(p) {
            Some(b'*') => {
                back = Some((p + 1, n));
                p += 1;
            }
            Some(&byte) if byte == name[n] => {
                p += 1;
                n += 1;
            }
            _ => match back {
                Some((after_star, from)) => {
                    back = Some((after_star, from + 1));
                    p = after_star;
                    n = from + 1;
                }
                None => return false,
            },
        }
    }
    pattern[p..].iter().all(|&byte| byte == b'*')
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn many_stars_do_not_backtrack_exponentially() {
        let pattern = "*a".repeat(100);
        assert!(!glob_matches(&pattern, &"a".repeat(99)));
        assert!(glob_matches(&pattern, &"a".repeat(10_000)));
        assert!(!glob_matches(&format!("{pattern}b"), &"a".repeat(10_000)));
    }

    /// The definition of a match, as a recursion without regard to cost.
    fn glob_matches_naive(pattern: &[u8], name: &[u8]) -> bool {
        match pattern.split_first() {
            None => name.is_empty(),
            Some((b'*', rest)) => (0..=name.len()).any(|skip| glob_matches_naive(rest, &name[skip..])),
            Some((byte, rest)) => name.first() == Some(byte) && glob_matches_naive(rest, &name[1..]),
        }
    }

    proptest! {
        #[test]
        fn glob_matches_agrees_with_the_naive_version(pattern in "[ab*]{0,8}", name in "[ab]{0,8}") {
            prop_assert_eq!(glob_matches(&pattern, &name), glob_matches_naive(pattern.as_bytes(), name.as_bytes()));
        }

        #[test]
        fn a_pattern_list_agrees_with_glob_matches(patterns in prop::collection::vec("[ab_*]{1,5}", 0..6), name in "[ab_]{0,6}") {
            let list = PatternList::new(patterns.iter().map(String::as_str).enumerate());
            let expected: Vec<usize> =
                (0..patterns.len()).filter(|&at| glob_matches(&patterns[at], &name)).collect();
            prop_assert_eq!(list.matching([name.as_str()].into_iter()), expected);
        }
    }
}
