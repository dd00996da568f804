//! Ids and names. Each is its own type, made only by parsing, so that a checked name stays checked:
//! none of them can hold a path separator, a NUL or a character outside ASCII.

use std::{
    fmt,
    str::FromStr,
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Names a catalog id, slug or caller id may not take: they would clash with Oubliette's own.
pub const RESERVED: [&str; 3] = ["oubliette", "session", "project"];

macro_rules! text_id {
    ($(#[$doc:meta])* $name:ident, $what:literal, $check:expr) => {
        $(#[$doc])*
        #[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize)]
        #[serde(transparent)]
        pub struct $name(Box<str>);

        impl $name {
            /// The id as text.
            pub fn as_str(&self) -> &str {
                &self.0
            }
        }

        impl fmt::Display for $name {
            fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str(&self.0)
            }
        }

        impl AsRef<str> for $name {
            fn as_ref(&self) -> &str {
                &self.0
            }
        }

        impl std::borrow::Borrow<str> for $name {
            fn borrow(&self) -> &str {
                &self.0
            }
        }

        impl FromStr for $name {
            type Err = Error;

            fn from_str(text: &str) -> Result<Self> {
                let check: fn(&str) -> std::result::Result<(), String> = $check;
                check(text).map_err(|why| {
                    Error::invalid(format!("{} is not a {}: {why}", quoted(text), $what))
                })?;
                Ok(Self(text.into()))
            }
        }

        impl<'de> Deserialize<'de> for $name {
            fn deserialize<D: serde::Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
                let text = std::borrow::Cow::<'de, str>::deserialize(d)?;
                text.parse().map_err(|e: Error| serde::de::Error::custom(e.message))
            }
        }

        impl schemars::JsonSchema for $name {
            fn schema_name() -> std::borrow::Cow<'static, str> {
                stringify!($name).into()
            }

            fn inline_schema() -> bool {
                true
            }

            fn json_schema(_: &mut schemars::SchemaGenerator) -> schemars::Schema {
                schemars::json_schema!({ "type": "string" })
            }
        }
    };
}

text_id!(
    /// `gogol_<ulid>`: one agent working in one sandbox on one workspace.
    SessionId, "session id (gogol_<ulid>)", |t| prefixed_ulid(t, "gogol_")
);
text_id!(
    /// `proj_<ulid>`.
    ProjectId, "project id (proj_<ulid>)", |t| prefixed_ulid(t, "proj_")
);
text_id!(
    /// `tok_<ulid>`: names a token; it is not the token.
    TokenId, "token id (tok_<ulid>)", |t| prefixed_ulid(t, "tok_")
);
text_id!(
    /// A UUID, also the workspace's folder name.
    WorkspaceId, "workspace id (a UUID)", hyphenated_uuid
);
text_id!(
    /// A UUID v4 naming one open caller tool request.
    RequestId, "request id (a UUID)", hyphenated_uuid
);
text_id!(
    /// An agent's name: `[a-z0-9][a-z0-9-]{0,31}`.
    Slug, "slug ([a-z0-9][a-z0-9-]{0,31})", slug
);
text_id!(
    /// A catalog entry's name, by the same rule as a slug.
    CatalogId, "catalog id ([a-z0-9][a-z0-9-]{0,31})", slug
);
text_id!(
    /// The name a caller lends its tools under: `[A-Za-z][A-Za-z0-9-]{0,31}`.
    CallerId, "caller id ([A-Za-z][A-Za-z0-9-]{0,31})", caller_id
);

impl SessionId {
    /// A new id; ids made later sort later.
    pub fn generate() -> Self {
        Self(format!("gogol_{}", next_ulid()).into())
    }
}

impl ProjectId {
    /// A new id; ids made later sort later.
    pub fn generate() -> Self {
        Self(format!("proj_{}", next_ulid()).into())
    }
}

impl TokenId {
    /// A new id; ids made later sort later.
    pub fn generate() -> Self {
        Self(format!("tok_{}", next_ulid()).into())
    }
}

impl WorkspaceId {
    /// A new id.
    pub fn generate() -> Self {
        Self(uuid::Uuid::new_v4().to_string().into())
    }
}

impl RequestId {
    /// A new id.
    pub fn generate() -> Self {
        Self(uuid::Uuid::new_v4().to_string().into())
    }
}

/// The next ULID of this process. Those of one millisecond come in order too: lists are sorted by them.
fn next_ulid() -> ulid::Ulid {
    static LAST: Mutex<ulid::Generator> = Mutex::new(ulid::Generator::new());
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    last.generate()
        .unwrap_or_else(ulid::Overflow::commit_overflow_increment)
}

fn prefixed_ulid(text: &str, prefix: &str) -> std::result::Result<(), String> {
    let rest = text
        .strip_prefix(prefix)
        .ok_or_else(|| format!("it must start with {prefix}"))?;
    let crockford = |b: u8| matches!(b, b'0'..=b'9' | b'A'..=b'Z') && !matches!(b, b'I' | b'L' | b'O' | b'U');
    match rest.len() == 26 && rest.bytes().all(crockford) {
        true => Ok(()),
        false => Err("what follows the prefix must be a ULID".into()),
    }
}

fn hyphenated_uuid(text: &str) -> std::result::Result<(), String> {
    let shape = text.len() == 36
        && text.bytes().enumerate().all(|(i, b)| match i {
            8 | 13 | 18 | 23 => b == b'-',
            _ => matches!(b, b'0'..=b'9' | b'a'..=b'f'),
        });
    if shape {
        Ok(())
    } else {
        Err("it must be a lower-case hyphenated UUID".into())
    }
}

fn slug(text: &str) -> std::result::Result<(), String> {
    let mut bytes = text.bytes();
    let first = bytes
        .next()
        .is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if !first || text.len() > 32 || !bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    {
        return Err("use 1 to 32 of a-z, 0-9 and -, not starting with -".into());
    }
    match RESERVED.contains(&text) {
        true => Err("this name is reserved".into()),
        false => Ok(()),
    }
}

fn caller_id(text: &str) -> std::result::Result<(), String> {
    let mut bytes = text.bytes();
    let first = bytes.next().is_some_and(|b| b.is_ascii_alphabetic());
    if !first || text.len() > 32 || !bytes.all(|b| b.is_ascii_alphanumeric() || b == b'-') {
        return Err("use a letter, then up to 31 letters, digits and -".into());
    }
    match text {
        "oubliette" => Err("this name is reserved".into()),
        _ => Ok(()),
    }
}

/// Text made safe for an error message: escaped and cut short.
pub fn quoted(text: &str) -> String {
    const MOST: usize = 80;
    let cut: String = text.chars().take(MOST).collect();
    let more = if cut.len() < text.len() { "…" } else { "" };
    format!("{cut:?}{more}")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn generated_ids_parse_again() {
        assert!(SessionId::generate().as_str().parse::<SessionId>().is_ok());
        assert!(ProjectId::generate().as_str().parse::<ProjectId>().is_ok());
        assert!(TokenId::generate().as_str().parse::<TokenId>().is_ok());
        assert!(WorkspaceId::generate().as_str().parse::<WorkspaceId>().is_ok());
        assert!(RequestId::generate().as_str().parse::<RequestId>().is_ok());
    }

    #[test]
    fn ids_made_later_sort_later() {
        let made: Vec<_> = (0..10_000).map(|_| SessionId::generate()).collect();
        assert!(made.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn path_tricks_are_refused() {
        for trick in [
            "",
            "..",
            "../x",
            "a/b",
            "a\0",
            "-a",
            "A",
            "ａ",
            "oubliette",
            "session",
            "project",
        ] {
            assert!(trick.parse::<Slug>().is_err(), "{trick:?}");
        }
        assert!("a".repeat(33).parse::<Slug>().is_err());
        assert!("a".repeat(32).parse::<Slug>().is_ok());
        assert!("gogol_../../etc/passwd0000000000".parse::<SessionId>().is_err());
    }

    proptest! {
        #[test]
        fn no_id_ever_holds_a_path(text in ".{0,40}") {
            for parsed in [
                text.parse::<Slug>().map(|x| x.to_string()),
                text.parse::<CallerId>().map(|x| x.to_string()),
                text.parse::<SessionId>().map(|x| x.to_string()),
                text.parse::<WorkspaceId>().map(|x| x.to_string()),
            ].into_iter().flatten() {
                prop_assert!(parsed.is_ascii() && !parsed.contains(['/', '\\', '\0', '.']));
            }
        }
    }
}
