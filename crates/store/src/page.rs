//! Paged lists. A cursor is the base64url form of the list's name and the key of a page's last row. It is
//! opaque to clients: its only use is to request the next page.

use std::{
    fmt::{self, Display},
    str::FromStr,
};

use base64::{Engine, engine::general_purpose::URL_SAFE_NO_PAD};
use oubliette_protocol::{ApprovalId, Error, ProjectId, Result, SessionId, TokenId, WorkspaceId};

use crate::{
    db::{DbRow, QueryBuilder},
    db_error::read_error,
    store::Store,
};

/// Rows per page when the request sets no limit.
pub const DEFAULT_LIMIT: u32 = 100;
/// Maximum rows per page.
pub const MAX_LIMIT: u32 = 1000;
/// Maximum length of a cursor; every cursor made here is shorter.
const MAX_CURSOR_BYTES: usize = 400;

/// The requested page of a list.
#[derive(Debug, Clone, Default, PartialEq, Eq, Hash)]
pub struct PageRequest {
    /// Maximum rows, 1 to [`MAX_LIMIT`]; default [`DEFAULT_LIMIT`].
    pub limit: Option<u32>,
    /// The `next_cursor` of the previous page; absent for the first page.
    pub cursor: Option<String>,
}

impl PageRequest {
    /// The first page, with a limit.
    pub fn first(limit: u32) -> Self {
        Self {
            limit: Some(limit),
            cursor: None,
        }
    }

    pub(crate) fn checked_limit(&self) -> Result<usize> {
        match self.limit.unwrap_or(DEFAULT_LIMIT) {
            limit @ 1..=MAX_LIMIT => Ok(limit as usize),
            limit => Err(Error::invalid(format!(
                "limit must be 1 to {MAX_LIMIT}, not {limit}"
            ))),
        }
    }

    /// The key of the last row of the previous page. An error if the cursor is malformed or belongs to another
    /// list.
    pub(crate) fn after_key<K: FromStr>(&self, list: &str) -> Result<Option<K>> {
        let Some(cursor) = &self.cursor else {
            return Ok(None);
        };
        let bad = || Error::invalid("cursor is not one that this list gave out: leave it out to start over");
        if cursor.len() > MAX_CURSOR_BYTES {
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

/// One page of a list, as returned.
#[derive(Debug, Clone, PartialEq)]
pub struct ListPage<T> {
    /// Its rows.
    pub items: Vec<T>,
    /// Cursor for the next page; absent on the last page.
    pub next_cursor: Option<String>,
}

impl<T> ListPage<T> {
    /// Builds a page from query results. The query asks for `limit + 1` rows; the extra one shows that there
    /// is a next page.
    pub(crate) fn from_rows(mut items: Vec<T>, limit: usize, list: &str, key: impl Fn(&T) -> String) -> Self {
        let more = items.len() > limit;
        items.truncate(limit);
        let last = items.last().filter(|_| more);
        let next_cursor = last.map(|row| URL_SAFE_NO_PAD.encode(format!("{list}:{}", key(row))));
        Self { items, next_cursor }
    }
}

/// A list that is read page by page: its order, and how its rows are read.
pub(crate) struct PagedList<T, K> {
    /// Its name in cursors.
    pub(crate) name: &'static str,
    /// The `ORDER BY` clause: the columns of the key.
    pub(crate) order: &'static str,
    /// The condition that selects the rows after a key, without the key.
    pub(crate) after: &'static str,
    /// The key of a row.
    pub(crate) key: fn(&T) -> K,
    /// Reads a row.
    pub(crate) read: fn(&DbRow) -> Result<T>,
}

/// The key of a row in a list: its position in the list's order.
pub(crate) trait PageKey: FromStr + Display {
    /// Appends the key to a query, as a value.
    fn push_to(&self, query: &mut QueryBuilder<'_>);
}

impl PageKey for i64 {
    fn push_to(&self, query: &mut QueryBuilder<'_>) {
        query.push_bind(*self);
    }
}

macro_rules! id_page_keys {
    ($($id:ty),*) => {$(
        impl PageKey for $id {
            fn push_to(&self, query: &mut QueryBuilder<'_>) {
                query.push_bind(self.as_str().to_owned());
            }
        }
    )*};
}

id_page_keys!(ApprovalId, ProjectId, SessionId, TokenId);

impl Store {
    /// Reads one page of a list. `query` selects its rows and ends within the `WHERE` clause.
    pub(crate) async fn fetch_page<T, K: PageKey>(
        &self,
        mut query: QueryBuilder<'_>,
        list: &PagedList<T, K>,
        page: &PageRequest,
    ) -> Result<ListPage<T>> {
        let (limit, after) = (page.checked_limit()?, page.after_key::<K>(list.name)?);
        if let Some(after) = after {
            query.push(" AND ").push(list.after);
            after.push_to(&mut query);
        }
        query.push(" ORDER BY ").push(list.order).push(" LIMIT ");
        query.push_bind(limit as i64 + 1);
        let rows = query.build().fetch_all(self.readers()).await;
        let rows = rows.map_err(read_error)?;
        let items = rows.iter().map(list.read).collect::<Result<Vec<_>>>()?;
        Ok(ListPage::from_rows(items, limit, list.name, |row| {
            (list.key)(row).to_string()
        }))
    }
}

/// The key of a list ordered by time and then id.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct TimeIdKey<I> {
    pub(crate) millis: i64,
    pub(crate) id: I,
}

impl<I: FromStr> FromStr for TimeIdKey<I> {
    type Err = ();

    fn from_str(text: &str) -> std::result::Result<Self, ()> {
        let (millis, id) = text.split_once('/').ok_or(())?;
        Ok(Self {
            millis: millis.parse().map_err(|_| ())?,
            id: id.parse().map_err(|_| ())?,
        })
    }
}

impl<I: Display> Display for TimeIdKey<I> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.millis, self.id)
    }
}

impl PageKey for TimeIdKey<WorkspaceId> {
    fn push_to(&self, query: &mut QueryBuilder<'_>) {
        query.push("(").push_bind(self.millis).push(", ");
        query.push_bind(self.id.as_str().to_owned()).push(")");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oubliette_protocol::{ErrorCode, ProjectId};
    use proptest::prelude::*;

    fn cursor_of(list: &str, key: &str) -> String {
        ListPage::from_rows(vec![key, key], 1, list, |k| (*k).to_string())
            .next_cursor
            .unwrap()
    }

    #[test]
    fn a_page_has_a_cursor_only_when_there_is_more() {
        assert_eq!(
            ListPage::from_rows(vec![1, 2], 2, "n", i32::to_string).next_cursor,
            None
        );
        let cut = ListPage::from_rows(vec![1, 2, 3], 2, "n", i32::to_string);
        assert_eq!(cut.items, [1, 2]);
        let page = PageRequest {
            limit: None,
            cursor: cut.next_cursor,
        };
        assert_eq!(page.after_key::<i32>("n").unwrap(), Some(2));
    }

    #[test]
    fn a_cursor_of_another_list_is_refused() {
        let page = PageRequest {
            limit: None,
            cursor: Some(cursor_of("a", "1")),
        };
        assert_eq!(
            page.after_key::<i32>("b").unwrap_err().code,
            ErrorCode::InvalidArgument
        );
        assert_eq!(
            page.after_key::<ProjectId>("a").unwrap_err().code,
            ErrorCode::InvalidArgument
        );
    }

    #[test]
    fn limits_have_bounds() {
        assert_eq!(PageRequest::default().checked_limit().unwrap(), 100);
        assert_eq!(PageRequest::first(1000).checked_limit().unwrap(), 1000);
        for bad in [0, 1001, u32::MAX] {
            assert_eq!(
                PageRequest::first(bad).checked_limit().unwrap_err().code,
                ErrorCode::InvalidArgument
            );
        }
    }

    proptest! {
        #[test]
        fn a_cursor_round_trips_its_key(key in any::<i64>()) {
            let page = PageRequest { limit: None, cursor: Some(cursor_of("list", &key.to_string())) };
            prop_assert_eq!(page.after_key::<i64>("list").unwrap(), Some(key));
        }

        #[test]
        fn a_malformed_cursor_is_refused_without_a_panic(cursor in "\\PC{0,500}") {
            let page = PageRequest { limit: None, cursor: Some(cursor) };
            if let Err(error) = page.after_key::<i64>("list") {
                prop_assert_eq!(error.code, ErrorCode::InvalidArgument);
            }
        }

        #[test]
        fn a_tampered_cursor_does_not_panic(key in any::<u32>(), at in 0usize..20, to in any::<u8>()) {
            let mut cursor = cursor_of("list", &format!("{key}")).into_bytes();
            let at = at % cursor.len();
            cursor[at] = to;
            if let Ok(cursor) = String::from_utf8(cursor) {
                let page = PageRequest { limit: None, cursor: Some(cursor) };
                let _ = page.after_key::<ProjectId>("list").is_err();
                let _ = page.after_key::<TimeIdKey<ProjectId>>("list");
            }
        }
    }
}
