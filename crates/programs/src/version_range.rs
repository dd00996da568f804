//! Version ranges of npm's `engines` and of Python's `Requires-Python`: whether an interpreter is new enough.

use std::{cmp::Ordering, fmt, str::FromStr};

/// A version of an interpreter, such as 22.12.0.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct InterpreterVersion {
    pub(crate) major: u64,
    pub(crate) minor: u64,
    pub(crate) patch: u64,
}

impl fmt::Display for InterpreterVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.major, self.minor, self.patch)
    }
}

impl FromStr for InterpreterVersion {
    type Err = ();

    /// Parses `v22.12.0`, `22.12.0` or `3.11`; a pre-release is not accepted.
    fn from_str(text: &str) -> Result<Self, ()> {
        let partial = PartialVersion::parse(text).ok_or(())?;
        partial.given.first().ok_or(())?;
        Ok(partial.lowest())
    }
}

/// Whether a version is in an npm range such as `>=18`, `^20.19.0 || >=22.12.0` or `18.x`. A range that cannot be read is
/// no reason to refuse, so any version is in it.
pub(crate) fn npm_range_allows(range: &str, version: InterpreterVersion) -> bool {
    let alternatives: Option<Vec<bool>> = range
        .split("||")
        .map(|alternative| alternative_allows(alternative, version))
        .collect();
    alternatives.is_none_or(|allowed| allowed.contains(&true))
}

fn alternative_allows(text: &str, version: InterpreterVersion) -> Option<bool> {
    if let Some((low, high)) = text.split_once(" - ") {
        let low = PartialVersion::parse(low.trim())?.lowest();
        let high = PartialVersion::parse(high.trim())?;
        return Some(version >= low && high.next().is_none_or(|next| version < next));
    }
    // An operator may stand apart from its version.
    let mut words = Vec::new();
    let mut operator = String::new();
    for word in text.split_whitespace() {
        match word
            .bytes()
            .all(|b| matches!(b, b'<' | b'>' | b'=' | b'^' | b'~'))
        {
            true => operator.push_str(word),
            false => words.push(format!("{}{word}", std::mem::take(&mut operator))),
        }
    }
    let mut allowed = operator.is_empty();
    for word in &words {
        allowed &= comparator_allows(word, version)?;
    }
    Some(allowed)
}

fn comparator_allows(word: &str, version: InterpreterVersion) -> Option<bool> {
    let at = word
        .find(|c: char| !matches!(c, '<' | '>' | '=' | '^' | '~'))
        .unwrap_or(word.len());
    let (operator, text) = word.split_at(at);
    let partial = PartialVersion::parse(text)?;
    let (low, next) = (partial.lowest(), partial.next());
    let below = |bound: Option<InterpreterVersion>| bound.is_none_or(|bound| version < bound);
    Some(match operator {
        "" | "=" | "==" => version >= low && below(next),
        ">=" => version >= low,
        ">" => next.is_some_and(|next| version >= next),
        "<" => version < low,
        "<=" => below(next),
        "^" => version >= low && below(partial.next_incompatible()),
        "~" | "~>" => {
            let kept = partial.given.len().min(2);
            let prefix = PartialVersion {
                given: partial.given.iter().take(kept).copied().collect(),
            };
            version >= low && below(prefix.next())
        }
        _ => return None,
    })
}

/// Whether a version satisfies a Python specifier such as `>=3.10,<4` or `~=3.9`. One that cannot be read allows any.
pub(crate) fn python_specifier_allows(specifier: &str, version: InterpreterVersion) -> bool {
    specifier
        .split(',')
        .map(str::trim)
        .filter(|part| !part.is_empty())
        .all(|part| {
            let at = part
                .find(|c: char| !matches!(c, '<' | '>' | '=' | '!' | '~'))
                .unwrap_or(part.len());
            let (operator, text) = part.split_at(at);
            let Some(partial) = PartialVersion::parse(text.trim().trim_end_matches(".*")) else {
                return true;
            };
            let (low, next) = (partial.lowest(), partial.next());
            let same = version >= low && next.is_none_or(|next| version < next);
            match (operator, version.cmp(&low)) {
                (">=", order) => order != Ordering::Less,
                (">", order) => order == Ordering::Greater,
                ("<=", order) => order != Ordering::Greater,
                ("<", order) => order == Ordering::Less,
                ("==", _) => same,
                ("!=", _) => !same,
                ("~=", order) => {
                    let kept = partial.given.len().saturating_sub(1).max(1);
                    let prefix = PartialVersion {
                        given: partial.given.iter().take(kept).copied().collect(),
                    };
                    order != Ordering::Less && prefix.next().is_none_or(|next| version < next)
                }
                _ => true,
            }
        })
}

/// The numbers of a version that a range gives: none of `*`, one of `18` or `18.x`, up to three.
#[derive(Debug)]
struct PartialVersion {
    given: Vec<u64>,
}

impl PartialVersion {
    fn parse(text: &str) -> Option<Self> {
        let text = text.trim().trim_start_matches(['v', 'V']);
        // A pre-release is rounded to its release.
        let core = text.split(['-', '+']).next().unwrap_or_default();
        let mut given = Vec::new();
        for part in core.split('.').take(4) {
            match part {
                "x" | "X" | "*" | "" => break,
                number if given.len() < 3 => given.push(number.parse().ok()?),
                _ => return None,
            }
        }
        (!text.is_empty()).then_some(Self { given })
    }

    fn part(&self, i: usize) -> u64 {
        self.given.get(i).copied().unwrap_or(0)
    }

    /// The lowest version it stands for.
    fn lowest(&self) -> InterpreterVersion {
        InterpreterVersion {
            major: self.part(0),
            minor: self.part(1),
            patch: self.part(2),
        }
    }

    /// The lowest version above all it stands for; none if it stands for all.
    fn next(&self) -> Option<InterpreterVersion> {
        let InterpreterVersion { major, minor, patch } = self.lowest();
        let version = |major, minor, patch| InterpreterVersion { major, minor, patch };
        match self.given.len() {
            0 => None,
            1 => Some(version(major.saturating_add(1), 0, 0)),
            2 => Some(version(major, minor.saturating_add(1), 0)),
            _ => Some(version(major, minor, patch.saturating_add(1))),
        }
    }

    /// The lowest version above those that `^` allows: the first number that is not zero stays.
    fn next_incompatible(&self) -> Option<InterpreterVersion> {
        let first = self.given.iter().position(|part| *part != 0);
        let kept = first.map_or(self.given.len(), |at| at + 1);
        Self {
            given: self.given[..kept].to_vec(),
        }
        .next()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn version(text: &str) -> InterpreterVersion {
        text.parse().unwrap()
    }

    #[test]
    fn npm_ranges_are_read_as_npm_does() {
        for (range, inside, outside) in [
            (">=18", &["18.0.0", "22.1.0"][..], &["16.9.9"][..]),
            (">= 18.17 <21", &["18.17.0", "20.9.0"], &["18.16.9", "21.0.0"]),
            (
                "^20.19.0 || >=22.12.0",
                &["20.19.1", "22.12.0", "24.0.0"],
                &["20.18.9", "21.0.0", "22.11.9"],
            ),
            ("18.x", &["18.0.0", "18.99.1"], &["19.0.0", "17.0.0"]),
            ("*", &["0.1.0"], &[]),
            ("", &["0.1.0"], &[]),
            ("~20.3", &["20.3.9"], &["20.4.0"]),
            ("^0.10.3", &["0.10.4"], &["0.11.0"]),
            ("16 - 18", &["16.0.0", "18.99.0"], &["19.0.0"]),
            (">20", &["21.0.0"], &["20.99.0"]),
            ("<=20", &["20.99.0"], &["21.0.0"]),
            ("v22.1.0", &["22.1.0"], &["22.1.1"]),
            ("anything at all", &["1.0.0"], &[]),
        ] {
            for text in inside {
                assert!(npm_range_allows(range, version(text)), "{text} in {range}");
            }
            for text in outside {
                assert!(!npm_range_allows(range, version(text)), "{text} not in {range}");
            }
        }
    }

    #[test]
    fn python_specifiers_are_read_as_pip_does() {
        for (specifier, inside, outside) in [
            (">=3.10", &["3.10.0", "3.12.1"][..], &["3.9.9"][..]),
            (">=3.8,<3.13,!=3.9.*", &["3.8.0", "3.12.9"], &["3.13.0", "3.9.4"]),
            ("~=3.9", &["3.9.0", "3.14.0"], &["4.0.0", "3.8.0"]),
            ("==3.11.*", &["3.11.2"], &["3.12.0"]),
            ("", &["2.7.0"], &[]),
        ] {
            for text in inside {
                assert!(
                    python_specifier_allows(specifier, version(text)),
                    "{text} in {specifier}"
                );
            }
            for text in outside {
                assert!(
                    !python_specifier_allows(specifier, version(text)),
                    "{text} not in {specifier}"
                );
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn no_range_panics(range in "[0-9x*. <>=^~|\\-v,!a]{0,40}") {
            let _ = npm_range_allows(&range, version("20.1.2"));
            let _ = python_specifier_allows(&range, version("3.11.2"));
        }
    }
}
