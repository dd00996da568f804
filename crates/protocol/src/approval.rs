//! Approvals: calls that wait for a person to allow them.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::Value;

use crate::{ApprovalId, Error, Result, id::quoted, tool::ToolSource};

/// What an approval is for: the fields of the event `approval_requested`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ApprovalRequest {
    /// Its id.
    pub approval_id: ApprovalId,
    /// The tool as it was called.
    pub tool: String,
    /// `@<id>/<tool>` for a catalog tool, else the tool's full name.
    pub canonical: String,
    /// Where the tool comes from.
    pub source: ApprovalSource,
    /// The call's arguments, secrets masked. In arguments of more than 64 KiB, texts of more than 2 KiB are cut and end with
    /// `… (N bytes in all)`; if that is not enough they are `{"truncated": true, "bytes", "start"}`.
    pub arguments: Value,
    /// The entry of `tools.ask` as it is written in agent.json.
    pub rule: Value,
    /// When it expires (RFC 3339).
    #[schemars(with = "String")]
    pub expires_at: jiff::Timestamp,
}

/// How an approval ended: the fields of the event `approval_decided`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
pub struct ApprovalDecision {
    /// Its id.
    pub approval_id: ApprovalId,
    /// How it ended; never `pending`.
    pub decision: ApprovalStatus,
    /// Who decided: a token's id, or `owner`. Absent if nobody did.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub by: Option<String>,
    /// The reason given with the decision. Absent if none was given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Where a call that waits for approval comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum ApprovalSource {
    /// A tool lent by a caller.
    Caller,
    /// One of Oubliette's own tools.
    Oubliette,
    /// A tool of the catalog.
    Catalog,
    /// A base tool.
    Base,
    /// A permission request of the agent's own (ACP).
    Agent,
}

impl ApprovalSource {
    /// Its name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Caller => "caller",
            Self::Oubliette => "oubliette",
            Self::Catalog => "catalog",
            Self::Base => "base",
            Self::Agent => "agent",
        }
    }
}

impl From<ToolSource> for ApprovalSource {
    fn from(source: ToolSource) -> Self {
        match source {
            ToolSource::Caller => Self::Caller,
            ToolSource::Oubliette => Self::Oubliette,
            ToolSource::Catalog => Self::Catalog,
            ToolSource::Base => Self::Base,
        }
    }
}

impl std::str::FromStr for ApprovalSource {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [
            Self::Caller,
            Self::Oubliette,
            Self::Catalog,
            Self::Base,
            Self::Agent,
        ]
        .into_iter()
        .find(|source| source.as_str() == text)
        .ok_or_else(|| Error::invalid(format!("{} is not a source of approvals", quoted(text))))
    }
}

/// The state of an approval.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum ApprovalStatus {
    /// It waits for a decision.
    Pending,
    /// Somebody allowed it.
    Allowed,
    /// Somebody denied it.
    Denied,
    /// Nobody decided in time.
    Expired,
    /// What it was for is gone: the turn, the agent, the session or the server ended, or the call was given up.
    Cancelled,
}

impl ApprovalStatus {
    /// Its name on the wire.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Pending => "pending",
            Self::Allowed => "allowed",
            Self::Denied => "denied",
            Self::Expired => "expired",
            Self::Cancelled => "cancelled",
        }
    }
}

impl std::str::FromStr for ApprovalStatus {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        [
            Self::Pending,
            Self::Allowed,
            Self::Denied,
            Self::Expired,
            Self::Cancelled,
        ]
        .into_iter()
        .find(|status| status.as_str() == text)
        .ok_or_else(|| Error::invalid(format!("{} is not a status of approvals", quoted(text))))
    }
}

/// How far a decision reaches.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum ApprovalReach {
    /// Later calls of the session that meet the same rule entry, too.
    Session,
}
