//! Ids and names. Each is a type of its own, made only by parsing or generating, so that a value of it is always
//! valid: none can hold a path separator, a NUL or a character outside ASCII.

use std::{
    fmt,
    str::FromStr,
    sync::{Mutex, PoisonError},
};

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Names a slug or catalog id may not have, because Oubliette's own tools begin with them. A caller id may not be
/// the first of them either.
pub const RESERVED_NAMES: [&str; 3] = ["oubliette", "session", "project"];

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
                    Error::invalid(format!("{} is not {}: {why}", quoted(text), $what))
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
    /// Id of a session, one agent working in one sandbox on one workspace: `gogol_<ulid>`.
    SessionId, "a session id (gogol_<ulid>)", |t| check_prefixed_ulid(t, "gogol_")
);
text_id!(
    /// Id of a project: `proj_<ulid>`.
    ProjectId, "a project id (proj_<ulid>)", |t| check_prefixed_ulid(t, "proj_")
);
text_id!(
    /// Id of a token: `tok_<ulid>`. Not secret, unlike the token itself.
    TokenId, "a token id (tok_<ulid>)", |t| check_prefixed_ulid(t, "tok_")
);
text_id!(
    /// Id of an approval: `appr_<ulid>`.
    ApprovalId, "an approval id (appr_<ulid>)", |t| check_prefixed_ulid(t, "appr_")
);
text_id!(
    /// Id of a server: `srv_<ulid>`, new at every start.
    ServerId, "a server id (srv_<ulid>)", |t| check_prefixed_ulid(t, "srv_")
);
text_id!(
    /// Id of a workspace and name of its folder: a UUID.
    WorkspaceId, "a workspace id (a UUID)", check_uuid
);
text_id!(
    /// Id of one call of a caller's tool: a UUID, v4 when generated.
    RequestId, "a request id (a UUID)", check_uuid
);
text_id!(
    /// Id of an agent: `[a-z0-9][a-z0-9-]{0,31}`, not one of [`RESERVED_NAMES`].
    Slug, "a slug ([a-z0-9][a-z0-9-]{0,31})", check_slug
);
text_id!(
    /// Id of a catalog entry, with the same form as a [`Slug`].
    CatalogId, "a catalog id ([a-z0-9][a-z0-9-]{0,31})", check_slug
);
text_id!(
    /// Name a caller lends its tools under: `[A-Za-z][A-Za-z0-9-]{0,31}`, not `oubliette`.
    CallerId, "a caller id ([A-Za-z][A-Za-z0-9-]{0,31})", check_caller_id
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

impl ApprovalId {
    /// A new id; ids made later sort later.
    pub fn generate() -> Self {
        Self(format!("appr_{}", next_ulid()).into())
    }
}

impl ServerId {
    /// A new id; ids made later sort later.
    pub fn generate() -> Self {
        Self(format!("srv_{}", next_ulid()).into())
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

/// The next ULID of this process, above all earlier ones even within one millisecond, because lists are sorted by
/// id.
fn next_ulid() -> ulid::Ulid {
    static LAST: Mutex<ulid::Generator> = Mutex::new(ulid::Generator::new());
    let mut last = LAST.lock().unwrap_or_else(PoisonError::into_inner);
    last.generate()
        .unwrap_or_else(ulid::Overflow::commit_overflow_increment)
}

fn check_prefixed_ulid(text: &str, prefix: &str) -> std::result::Result<(), String> {
    let rest = text
        .strip_prefix(prefix)
        .ok_or_else(|| format!("it must start with {prefix}"))?;
    let crockford = |b: u8| matches!(b, b'0'..=b'9' | b'A'..=b'Z') && !matches!(b, b'I' | b'L' | b'O' | b'U');
    match rest.len() == 26 && rest.bytes().all(crockford) {
        true => Ok(()),
        false => Err("what follows the prefix must be a ULID".into()),
    }
}

fn check_uuid(text: &str) -> std::result::Result<(), String> {
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

fn check_slug(text: &str) -> std::result::Result<(), String> {
    let mut bytes = text.bytes();
    let first = bytes
        .next()
        .is_some_and(|b| b.is_ascii_lowercase() || b.is_ascii_digit());
    if !first || text.len() > 32 || !bytes.all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-')
    {
        return Err("use 1 to 32 of a-z, 0-9 and -, not starting with -".into());
    }
    match RESERVED_NAMES.contains(&text) {
        true => Err("this name is reserved".into()),
        false => Ok(()),
    }
}

fn check_caller_id(text: &str) -> std::result::Result<(), String> {
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

/// Text for an error message: quoted, escaped and cut to 80 characters.
pub fn quoted(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    let cut: String = text.chars().take(MAX_CHARS).collect();
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
        assert!(ServerId::generate().as_str().parse::<ServerId>().is_ok());
        assert!(WorkspaceId::generate().as_str().parse::<WorkspaceId>().is_ok());
        assert!(RequestId::generate().as_str().parse::<RequestId>().is_ok());
    }

    #[test]
    fn ids_made_later_sort_later() {
        let made: Vec<_> = (0..10_000).map(|_| SessionId::generate()).collect();
        assert!(made.is_sorted_by(|a, b| a < b));
    }

    #[test]
    fn names_with_path_characters_and_reserved_names_are_refused() {
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

    #[test]
    fn a_refusal_says_what_was_expected() {
        let refused = |error: Error| error.message.split(':').next().unwrap_or_default().to_owned();
        let approval = "x".parse::<ApprovalId>().unwrap_err();
        assert_eq!(refused(approval), r#""x" is not an approval id (appr_<ulid>)"#);
        let session = "x".parse::<SessionId>().unwrap_err();
        assert_eq!(refused(session), r#""x" is not a session id (gogol_<ulid>)"#);
    }

    proptest! {
        #[test]
        fn no_parsed_id_holds_a_path_character(text in ".{0,40}") {
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
