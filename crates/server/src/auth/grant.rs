//! The proof that a request may act.

use jiff::Timestamp;
use oubliette_protocol::{Error, Principal, ProjectId, Result, Scope, TokenId};

/// Who acts, and how far. Only [`Auth`](super::Auth) makes one, from what a request shows, and it is
/// made again for every request: holding one is the permission to execute an action.
#[derive(Debug, Clone)]
pub struct Grant {
    principal: Principal,
    expires_at: Option<Timestamp>,
    via: Via,
}

/// How a request showed who it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Via {
    /// A bearer token, or the key of an agent.
    Token,
    /// The console's cookie.
    Cookie,
    /// The control socket or the command line: the home's owner.
    Owner,
}

impl Grant {
    pub(super) fn new(principal: Principal, expires_at: Option<Timestamp>, via: Via) -> Self {
        Self {
            principal,
            expires_at,
            via,
        }
    }

    /// Who acts, as plain data.
    pub fn principal(&self) -> &Principal {
        &self.principal
    }

    /// The token, unless it is the owner.
    pub fn token_id(&self) -> Option<&TokenId> {
        self.principal.token_id.as_ref()
    }

    /// How far it reaches.
    pub fn scope(&self) -> Scope {
        self.principal.scope
    }

    /// The project it is bound to.
    pub fn project(&self) -> Option<&ProjectId> {
        self.principal.project.as_ref()
    }

    /// When it ends by itself.
    pub fn expires_at(&self) -> Option<Timestamp> {
        self.expires_at
    }

    /// How it was shown.
    pub fn via(&self) -> Via {
        self.via
    }

    /// Refuses a scope it does not have.
    pub fn require(&self, scope: Scope, for_what: &str) -> Result<()> {
        match self.scope() >= scope {
            true => Ok(()),
            false => Err(Error::permission_denied(format!(
                "{for_what} needs a token with scope {scope}; this one has {}",
                self.scope()
            ))),
        }
    }

    /// Refuses a project it cannot see, as if there were none.
    pub fn require_project(&self, project: &ProjectId) -> Result<()> {
        match self.principal.sees(project) {
            true => Ok(()),
            false => Err(Error::not_found(format!("there is no project {project}"))),
        }
    }

    /// Refuses what concerns the whole server when it is bound to one project.
    pub fn require_unbound(&self, for_what: &str) -> Result<()> {
        match self.project() {
            None => Ok(()),
            Some(project) => Err(Error::permission_denied(format!(
                "{for_what} concerns the whole server; this token is bound to project {project}"
            ))),
        }
    }
}
