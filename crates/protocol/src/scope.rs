//! What a token may do: read < write < admin.

use serde::{Deserialize, Serialize};

/// A token's reach. The order is the meaning: a wider scope may do all that a narrower one may.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Scope {
    /// Look.
    Read,
    /// Look and change what belongs to projects.
    Write,
    /// Everything.
    Admin,
}

impl Scope {
    /// Every scope, narrowest first.
    pub const ALL: [Scope; 3] = [Scope::Read, Scope::Write, Scope::Admin];

    /// The word for it.
    pub fn as_str(self) -> &'static str {
        match self {
            Scope::Read => "read",
            Scope::Write => "write",
            Scope::Admin => "admin",
        }
    }
}

impl std::fmt::Display for Scope {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(self.as_str())
    }
}

impl std::str::FromStr for Scope {
    type Err = crate::Error;

    fn from_str(text: &str) -> crate::Result<Self> {
        Scope::ALL
            .into_iter()
            .find(|s| s.as_str() == text)
            .ok_or_else(|| {
                crate::Error::invalid(format!(
                    "{} is not a scope: use read, write or admin",
                    crate::id::quoted(text)
                ))
            })
    }
}
