//! The token behind a request.

use crate::{ProjectId, Scope, SessionId, TokenId};

/// The token behind a request, as plain data. It is no proof of access: only the server's auth makes a `Grant`, and
/// only a `Grant` lets an action run.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Principal {
    /// The token's id; `None` is the owner of the home, using the command line without a token.
    pub token_id: Option<TokenId>,
    /// The token's scope.
    pub scope: Scope,
    /// The only project the token can see; `None`: it can see all.
    pub project: Option<ProjectId>,
    /// The session from inside whose sandbox it acts: its agent made the call, or the token was made for it or with
    /// its key. `None`: from outside. It stays with the principal through every call made on its behalf, and bounds
    /// what any scope may do.
    pub inside: Option<SessionId>,
}

impl Principal {
    /// The owner of the home, who uses the command line without a token and has every right.
    pub fn owner() -> Self {
        Self {
            token_id: None,
            scope: Scope::Admin,
            project: None,
            inside: None,
        }
    }

    /// Whether the token can see a project: it is bound to it, or to none.
    pub fn sees(&self, project: &ProjectId) -> bool {
        self.project.as_ref().is_none_or(|only| only == project)
    }
}
