//! The proof that a request is authenticated.

use jiff::Timestamp;
use oubliette_protocol::{Error, Principal, ProjectId, Result, Scope, SessionId, TokenId};
use serde::{Deserialize, Serialize};

use super::secret::SecretHash;

/// Who acts, with which scope and in which project. Only [`Authenticator`](super::Authenticator) makes one, from a
/// request's credential or what another server of the cluster says of it, and it is made anew for every request: without one no action can be executed.
#[derive(Debug, Clone)]
pub struct Grant {
    principal: Principal,
    expires_at: Option<Timestamp>,
    credential: CredentialKind,
    login: Option<SecretHash>,
}

/// The kind of credential a grant was made from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CredentialKind {
    /// A bearer token, or the key of an agent.
    Token,
    /// None: the call is of a base tool, which every agent has.
    BaseTool,
    /// The console's login cookie.
    Cookie,
    /// The control socket or the command line: the home's owner.
    Owner,
}

/// What one server tells another of a grant, so that it can make its own. It says only who acts: scope, project and
/// validity are read from the database again, so no server can give a token more than it has.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct PassedOnGrant {
    pub(super) credential: CredentialKind,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) token_id: Option<TokenId>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) inside: Option<SessionId>,
    /// The hash of the login cookie, in hexadecimal digits.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) login: Option<String>,
}

impl Grant {
    /// What another server is told of it.
    pub(crate) fn passed_on(&self) -> PassedOnGrant {
        PassedOnGrant {
            credential: self.credential,
            token_id: self.principal.token_id.clone(),
            inside: self.principal.inside.clone(),
            login: self.login.map(hex::encode),
        }
    }

    pub(super) fn new(
        principal: Principal,
        expires_at: Option<Timestamp>,
        credential: CredentialKind,
    ) -> Self {
        Self {
            principal,
            expires_at,
            credential,
            login: None,
        }
    }

    /// The same grant, made from the login with this cookie: it ends with the login.
    pub(super) fn with_login(mut self, login: SecretHash) -> Self {
        self.login = Some(login);
        self
    }

    /// The hash of the login cookie it was made from.
    pub(super) fn login(&self) -> Option<&SecretHash> {
        self.login.as_ref()
    }

    /// The same grant for a call from inside `session`. The key of another session is refused: the call would be from
    /// inside two sessions, and the rules of one of them would not hold.
    pub(super) fn enter_session(mut self, session: &SessionId) -> Result<Self> {
        match &self.principal.inside {
            Some(other) if other != session => Err(Error::permission_denied(
                "this key belongs to another session; use the key of this one, or one that belongs to none",
            )),
            _ => {
                self.principal.inside = Some(session.clone());
                Ok(self)
            }
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

    /// The session from inside whose sandbox it acts, whatever door the request came in by; `None` from outside.
    pub fn inside(&self) -> Option<&SessionId> {
        self.principal.inside.as_ref()
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
