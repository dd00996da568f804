//! What statements bind. The schema has whole numbers and text; times are milliseconds, JSON is text.

use std::borrow::Cow;

use serde::{Deserialize, Serialize};

/// What a column holds; null aside.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum ColumnType {
    /// Whole numbers of 64 bits.
    Number,
    /// Text.
    Text,
}

/// A value for a statement. A missing one has a type too: PostgreSQL needs it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum DbValue<'q> {
    Number(Option<i64>),
    Text(Option<Cow<'q, str>>),
}

macro_rules! values {
    ($lifetime:lifetime: $($from:ty => |$name:ident| $value:expr),* $(,)?) => {$(
        impl<$lifetime> From<$from> for DbValue<$lifetime> {
            fn from($name: $from) -> Self {
                $value
            }
        }
    )*};
}

values! { 'q:
    i64 => |number| DbValue::Number(Some(number)),
    u32 => |number| DbValue::Number(Some(number.into())),
    Option<i64> => |number| DbValue::Number(number),
    &'q str => |text| DbValue::Text(Some(Cow::Borrowed(text))),
    &'q String => |text| DbValue::Text(Some(Cow::Borrowed(text))),
    String => |text| DbValue::Text(Some(Cow::Owned(text))),
    Option<&'q str> => |text| DbValue::Text(text.map(Cow::Borrowed)),
    Option<String> => |text| DbValue::Text(text.map(Cow::Owned)),
}
