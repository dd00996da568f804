//! Where sessions of a project work that name no workspace.

use serde::{Deserialize, Serialize};

/// Where sessions of a project work that name no workspace.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, schemars::JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum WorkspacePolicy {
    /// All in the project's default workspace.
    #[default]
    Shared,
    /// Each in a new one of its own.
    Own,
}

impl WorkspacePolicy {
    /// The policy's name on the wire and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            WorkspacePolicy::Shared => "shared",
            WorkspacePolicy::Own => "own",
        }
    }
}

impl std::str::FromStr for WorkspacePolicy {
    type Err = crate::Error;

    fn from_str(text: &str) -> crate::Result<Self> {
        match text {
            "shared" => Ok(WorkspacePolicy::Shared),
            "own" => Ok(WorkspacePolicy::Own),
            _ => Err(crate::Error::invalid(format!(
                "{} says not where sessions work: use shared or own",
                crate::id::quoted(text)
            ))),
        }
    }
}
