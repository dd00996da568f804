//! The scope of a token: read < write < admin.

use serde::{Deserialize, Serialize};

/// Scope of a token. Ordered: a higher scope may do all that a lower one may.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, schemars::JsonSchema,
)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Scope {
    /// Read everything the token can see, change nothing.
    Read,
    /// Also change projects and what belongs to them: workspaces, sessions.
    Write,
    /// Also manage agents, catalog and tokens, and read the audit log.
    Admin,
}

impl Scope {
    /// Every scope, lowest first.
    pub const ALL: [Scope; 3] = [Scope::Read, Scope::Write, Scope::Admin];

    /// The scope's name on the wire and on the command line.
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
