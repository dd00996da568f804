//! Lists in pages. A cursor names the last row of a page; whoever holds it can read nothing from it and
//! make nothing of it but ask for the next page.

use std::str::FromStr;

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use oubliette_protocol::{Error, Result};

/// Rows of a page when nobody says how many.
pub const DEFAULT_LIMIT: u32 = 100;
/// Most rows of a page.
pub const MAX_LIMIT: u32 = 1000;
/// Longer than any cursor of ours.
const MAX_CURSOR: usize = 400;

/// Which page of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct Page {
    /// At most this many rows; by default [`DEFAULT_LIMIT`].
    pub limit: Option<u32>,
    /// The page after the one this came with; absent: the first.
    pub cursor: Option<String>,
}

impl Page {
    /// The first page, with a limit.
    pub fn first(limit: u32) -> Self {
        Self {
            limit: Some(limit),
            cursor: None,
        }
    }

    pub(crate) fn rows(&self) -> Result<usize> {
        match self.limit.unwrap_or(DEFAULT_LIMIT) {
            limit @ 1..=MAX_LIMIT => Ok(limit as usize),
            limit => Err(Error::invalid(format!(
                "limit must be 1 to {MAX_LIMIT}, not {limit}"
            ))),
        }
    }

    /// The key of the row this page comes after, if the cursor is one of this list.
    pub(crate) fn after<K: FromStr>(&self, list: &str) -> Result<Option<K>> {
        let Some(cursor) = &self.cursor else {
            return Ok(None);
        };
        let bad = || Error::invalid("cursor is not one that this list gave out: leave it out to start over");
        if cursor.len() > MAX_CURSOR {
            return Err(bad());
        }
        let bytes = URL_SAFE_NO_PAD.decode(cursor).map_err(|_| bad())?;
        let text = String::from_utf8(bytes).map_err(|_| bad())?;
        let key = text
            .strip_prefix(list)
            .and_then(|rest| rest.strip_prefix(':'))
            .ok_or_else(bad)?;
        key.parse().map(Some).map_err(|_| bad())
    }
}

/// One page of a list.
#[derive(Debug, Clone, PartialEq)]
pub struct Paged<T> {
    /// Its rows.
    pub items: Vec<T>,
    /// Asks for the page after this one; absent on the last.
    pub next_cursor: Option<String>,
}

impl<T> Paged<T> {
    /// A page out of up to one row more than it may have.
    pub(crate) fn cut(mut items: Vec<T>, limit: usize, list: &str, key: impl Fn(&T) -> String) -> Self {
        let more = items.len() > limit;
        items.truncate(limit);
        let last = items.last().filter(|_| more);
        let next_cursor = last.map(|row| URL_SAFE_NO_PAD.encode(format!("{list}:{}", key(row))));
        Self { items, next_cursor }
    }
}

/// The key of a list ordered by time and then id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TimeKey<I> {
    pub(crate) millis: i64,
    pub(crate) id: I,
}

impl<I: FromStr> FromStr for TimeKey<I> {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        let (millis, id) = text.split_once('/').ok_or(())?;
        Ok(Self {
            millis: millis.parse().map_err(|_| ())?,
            id: id.parse().map_err(|_| ())?,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oubliette_protocol::{ErrorCode, ProjectId};
    use proptest::prelude::*;

    fn cursor_of(list: &str, key: &str) -> String {
        Paged::cut(vec![key, key], 1, list, |k| (*k).to_string())
            .next_cursor
            .unwrap()
    }

    #[test]
    fn a_page_has_a_cursor_only_when_there_is_more() {
        assert_eq!(Paged::cut(vec![1, 2], 2, "n", i32::to_string).next_cursor, None);
        let cut = Paged::cut(vec![1, 2, 3], 2, "n", i32::to_string);
        assert_eq!(cut.items, [1, 2]);
        let page = Page {
            limit: None,
            cursor: cut.next_cursor,
        };
        assert_eq!(page.after::<i32>("n").unwrap(), Some(2));
    }

    #[test]
    fn a_cursor_of_another_list_is_refused() {
        let page = Page {
            limit: None,
            cursor: Some(cursor_of("a", "1")),
        };
        assert_eq!(
            page.after::<i32>("b").unwrap_err().code,
            ErrorCode::InvalidArgument
        );
        assert_eq!(
            page.after::<ProjectId>("a").unwrap_err().code,
            ErrorCode::InvalidArgument
        );
    }

    #[test]
    fn limits_have_bounds() {
        assert_eq!(Page::default().rows().unwrap(), 100);
        assert_eq!(Page::first(1000).rows().unwrap(), 1000);
        for bad in [0, 1001, u32::MAX] {
            assert_eq!(
                Page::first(bad).rows().unwrap_err().code,
                ErrorCode::InvalidArgument
            );
        }
    }

    proptest! {
        #[test]
        fn what_was_put_in_comes_out(key in any::<i64>()) {
            let page = Page { limit: None, cursor: Some(cursor_of("list", &key.to_string())) };
            prop_assert_eq!(page.after::<i64>("list").unwrap(), Some(key));
        }

        #[test]
        fn no_cursor_panics_and_rubbish_is_refused(cursor in "\\PC{0,500}") {
            let page = Page { limit: None, cursor: Some(cursor) };
            if let Err(error) = page.after::<i64>("list") {
                prop_assert_eq!(error.code, ErrorCode::InvalidArgument);
            }
        }

        #[test]
        fn a_changed_cursor_never_gets_past_its_key_type(key in any::<u32>(), at in 0usize..20, to in any::<u8>()) {
            let mut cursor = cursor_of("list", &format!("{key}")).into_bytes();
            let at = at % cursor.len();
            cursor[at] = to;
            if let Ok(cursor) = String::from_utf8(cursor) {
                let page = Page { limit: None, cursor: Some(cursor) };
                let _ = page.after::<ProjectId>("list").is_err();
                let _ = page.after::<TimeKey<ProjectId>>("list");
            }
        }
    }
}
