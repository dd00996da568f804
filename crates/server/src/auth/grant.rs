//! The proof that a request is authenticated.

use jiff::Timestamp;
use oubliette_protocol::{Error, Principal, ProjectId, Result, Scope, TokenId};

/// Who acts, with which scope and in which project. Only [`Authenticator`](super::Authenticator) makes one, from a
/// request's credential, and it is made anew for every request: without one no action can be executed.
#[derive(Debug, Clone)]
pub struct Grant {
    principal: Principal,
    expires_at: Option<Timestamp>,
    credential: CredentialKind,
}

/// The kind of credential a grant was made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CredentialKind {
    /// A bearer token, or the key of an agent.
    Token,
    /// The console's login cookie.
    Cookie,
    /// The control socket or the command line: the home's owner.
    Owner,
}

impl Grant {
    pub(super) fn new(
        principal: Principal,
        expires_at: Option<Timestamp>,
        credential: CredentialKind,
    ) -> Self {
        Self {
            principal,
            expires_at,
            credential,
        }
    }

    /// The principal: token, scope and project as plain data.
    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    /// The token; `None` for the home's owner and for agents' base tools.
    pub fn token_id(&self) -> Option<&TokenId> {
        self.principal.token_id.as_ref()
    }

    /// What it may do.
    pub fn scope(&self) -> Scope {
        self.principal.scope
    }

    /// The only project it may see; `None` for all.
    pub fn project(&self) -> Option<&ProjectId> {
        self.principal.project.as_ref()
    }

    /// When its token expires.
    pub fn expires_at(&self) -> Option<Timestamp> {
        self.expires_at
    }

    /// The kind of credential it was made from.
    pub fn credential(&self) -> CredentialKind {
        self.credential
    }

    /// Fails unless it has at least this scope. `for_what` names the action in the error.
    pub fn require(&self, scope: Scope, for_what: &str) -> Result<()> {
        match self.scope() >= scope {
            true => Ok(()),
            false => Err(Error::permission_denied(format!(
                "{for_what} needs a token with scope {scope}; this one has {}",
                self.scope()
            ))),
        }
    }

    /// Fails unless it may see the project, with the error of a project that does not exist.
    pub fn require_project(&self, project: &ProjectId) -> Result<()> {
        match self.principal.sees(project) {
            true => Ok(()),
            false => Err(Error::not_found(format!("there is no project {project}"))),
        }
    }

    /// Fails if it is bound to one project, for actions that concern the whole server.
    pub fn require_unbound(&self, for_what: &str) -> Result<()> {
        match self.project() {
            None => Ok(()),
            Some(project) => Err(Error::permission_denied(format!(
                "{for_what} concerns the whole server; this token is bound to project {project}"
            ))),
        }
    }
}
