//! Who is behind a request.

use crate::{ProjectId, Scope, TokenId};

/// The token behind a request, as plain data. It proves nothing by itself: the server's auth makes a
/// `Grant` from a request, and only a `Grant` opens an action.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub struct Principal {
    /// The token; `None` is the home's owner at the command line.
    pub token_id: Option<TokenId>,
    /// How far it reaches.
    pub scope: Scope,
    /// The one project it is bound to, if it is.
    pub project: Option<ProjectId>,
}

impl Principal {
    /// The owner of the home, acting without a token.
    pub fn owner() -> Self {
        Self {
            token_id: None,
            scope: Scope::Admin,
            project: None,
        }
    }

    /// Whether a project is within reach.
    pub fn sees(&self, project: &ProjectId) -> bool {
        self.project.as_ref().is_none_or(|only| only == project)
    }
}
