//! Authentication: who sends a request and what they may do.
//!
//! A request's credential (bearer token, the console's cookie, the control socket) becomes a [`Grant`]. The store is
//! asked every time, so a revoked or expired token is refused from the next request on, also when another server of the
//! cluster passed the request on. Nothing else can make a `Grant`.
//!
//! - `grant`: the `Grant` itself. [`secret`]: random tokens and cookies, and their hashes.
//! - [`rate_limit`]: token buckets for requests and failed logins.

mod grant;
pub(crate) mod rate_limit;
pub(crate) mod secret;

use std::{
    net::IpAddr,
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use oubliette_protocol::{Error, Principal, ProjectId, Result, Scope, SessionId, TokenId};
use oubliette_store::{NewToken, Store, TokenRow};
use secrecy::{ExposeSecret as _, SecretString};
use tokio::sync::watch;

pub(crate) use grant::{CredentialKind, Grant, PassedOnGrant};
use rate_limit::RateLimiter;

/// How long a login cookie is valid.
const COOKIE_MAX_AGE: Duration = Duration::from_secs(30 * 86_400);

/// Authenticates requests: turns credentials into grants.
#[derive(Debug)]
pub struct Authenticator {
    store: Store,
    failed_logins: RateLimiter<IpAddr>,
    /// Counts revocations and logouts, so that open streams check their credential again at once.
    revocations: watch::Sender<u64>,
}

/// What a new token is created with.
#[derive(Debug, Clone)]
pub struct TokenSpec {
    /// A name for people; need not be unique.
    pub name: String,
    /// What it may do.
    pub scope: Scope,
    /// The only project it may see; `None` for all.
    pub project: Option<ProjectId>,
    /// When it expires; `None` for never.
    pub expires_at: Option<Timestamp>,
    /// The session it was made for or from inside of: whoever has it acts from inside that session, and it is
    /// revoked when the session ends.
    pub session: Option<SessionId>,
}

impl Authenticator {
    /// Authenticates against the tokens in this store.
    pub fn new(store: Store) -> Arc<Self> {
        Arc::new(Self {
            store,
            // Ten at once, then one every six seconds: enough for typing errors, too few for guessing.
            failed_logins: RateLimiter::new(1.0 / 6.0, 10.0),
            revocations: watch::channel(0).0,
        })
    }

    /// The grant of the home's owner: for the control socket, whose peer has proved it, and for the command
    /// line working on a home whose server is not running.
    pub fn owner_grant(&self) -> Grant {
        Grant::new(Principal::owner(), None, CredentialKind::Owner)
    }

    /// Checks a bearer token or an agent's key.
    pub async fn authenticate_token(&self, text: &str) -> Result<Grant> {
        // Checked first, so that nobody can have megabytes hashed, and a malformed token costs no query.
        if !secret::looks_like_token(text) {
            return Err(invalid_token());
        }
        let row = self.store.token_by_hash(&secret::hash(text)).await?;
        grant_from_row(row, CredentialKind::Token)
    }

    /// Checks the key of a call that the agent of `session` makes. Whatever the key, the grant is from inside.
    pub async fn authenticate_inside(&self, text: &str, session: &SessionId) -> Result<Grant> {
        self.authenticate_token(text).await?.enter_session(session)
    }

    /// Checks the console's login cookie.
    pub async fn authenticate_cookie(&self, text: &str) -> Result<Grant> {
        let login = secret::hash(text);
        let token = self.store.login_token(&login, COOKIE_MAX_AGE).await?;
        let token = token.ok_or_else(login_expired)?;
        let grant = grant_from_row(self.store.token_get(&token).await?, CredentialKind::Cookie)?;
        Ok(grant.with_login(login))
    }

    /// Exchanges a token for a login cookie. Failures are limited for each address.
    pub async fn login(&self, token: &str, from: IpAddr) -> Result<(Grant, SecretString), LoginError> {
        let now = Instant::now();
        self.failed_logins
            .check(&from, now)
            .map_err(LoginError::TooManyFailures)?;
        let grant = match self.authenticate_token(token).await {
            Ok(grant) => grant,
            Err(error) => {
                let _ = self.failed_logins.take(&from, now);
                return Err(LoginError::Refused(error));
            }
        };
        let Some(token_id) = grant.token_id().cloned() else {
            return Err(LoginError::Refused(invalid_token()));
        };
        let (cookie, hash) = secret::new_cookie();
        self.store
            .login_insert(&hash, &token_id)
            .await
            .map_err(LoginError::Refused)?;
        Ok((grant, cookie))
    }

    /// Invalidates a login cookie and wakes the streams opened with it, which then end.
    pub async fn logout(&self, cookie: &str) -> Result<()> {
        self.store.login_delete(&secret::hash(cookie)).await?;
        self.revocations.send_modify(|n| *n += 1);
        Ok(())
    }

    /// Creates a token and returns its id and text; only its hash is stored.
    pub async fn mint(&self, spec: TokenSpec) -> Result<(TokenId, SecretString)> {
        let token_id = TokenId::generate();
        let (token, hash) = secret::new_token();
        self.store
            .token_insert(NewToken {
                token_id: token_id.clone(),
                name: spec.name,
                scope: spec.scope,
                project_id: spec.project,
                expires_at: spec.expires_at,
                hash,
                session_id: spec.session,
            })
            .await?;
        Ok((token_id, token))
    }

    /// Revokes a token and wakes its open streams, which then end. Returns whether it was not revoked before.
    pub async fn revoke(&self, token_id: &TokenId) -> Result<bool> {
        let revoked = self.store.token_revoke(token_id).await?;
        self.revocations.send_modify(|n| *n += 1);
        Ok(revoked)
    }

    /// Has open streams check their credential again.
    pub(crate) fn recheck_streams(&self) {
        self.revocations.send_modify(|n| *n += 1);
    }

    /// Revokes every key of a session's agent.
    pub async fn revoke_session_keys(&self, session: &SessionId) -> Result<()> {
        if self.store.tokens_revoke_of_session(session).await? > 0 {
            self.revocations.send_modify(|n| *n += 1);
        }
        Ok(())
    }

    /// A new grant for a principal that was authenticated earlier: its token may have expired or been revoked since.
    pub async fn reauthenticate(&self, principal: &Principal) -> Result<Grant> {
        match &principal.token_id {
            Some(id) => {
                let grant = grant_from_row(self.store.token_get(id).await?, CredentialKind::Token)?;
                // A call that came from inside stays inside, also with a token that is of no session itself.
                match &principal.inside {
                    Some(session) => grant.enter_session(session),
                    None => Ok(grant),
                }
            }
            // A principal without a token is the owner, or an agent using its base tools; its scope, project and
            // session stay what they were.
            None => Ok(Grant::new(principal.clone(), None, CredentialKind::Owner)),
        }
    }

    /// The grant of an agent's base tools, which need no key: scope `write` in its session's own project.
    pub async fn base_tools_grant(&self, session: &SessionId) -> Result<Grant> {
        let row = self.store.session_get(session).await?;
        let row = row.ok_or_else(|| Error::unavailable("this session is no longer there"))?;
        let principal = Principal {
            token_id: None,
            scope: Scope::Write,
            project: Some(row.project_id),
            inside: Some(session.clone()),
        };
        Ok(Grant::new(principal, None, CredentialKind::BaseTool))
    }

    /// The grant of a request that another server of the cluster passed on. Everything is looked up again: a token that was
    /// revoked meanwhile is refused, and scope and project are those of the database.
    pub(crate) async fn grant_from_peer(&self, told: &PassedOnGrant) -> Result<Grant> {
        let incomplete = || Error::unauthenticated("the request names no principal");
        let grant = match told.credential {
            CredentialKind::BaseTool => {
                let session = told.inside.as_ref().ok_or_else(incomplete)?;
                return self.base_tools_grant(session).await;
            }
            CredentialKind::Owner if told.token_id.is_none() => {
                return match &told.inside {
                    None => Ok(self.owner_grant()),
                    // A base tool's principal, which a call it made acts for.
                    Some(session) => {
                        let grant = self.base_tools_grant(session).await?;
                        Ok(Grant::new(grant.principal().clone(), None, CredentialKind::Owner))
                    }
                };
            }
            CredentialKind::Token | CredentialKind::Cookie | CredentialKind::Owner => {
                let token = told.token_id.as_ref().ok_or_else(incomplete)?;
                grant_from_row(self.store.token_get(token).await?, told.credential)?
            }
        };
        let grant = match (&told.login, told.credential) {
            (Some(login), CredentialKind::Cookie) => {
                let login: secret::SecretHash = hex::decode(login)
                    .ok()
                    .and_then(|bytes| bytes.try_into().ok())
                    .ok_or_else(incomplete)?;
                let of_login = self.store.login_token(&login, COOKIE_MAX_AGE).await?;
                if of_login.as_ref() != grant.token_id() {
                    return Err(login_expired());
                }
                grant.with_login(login)
            }
            (None, CredentialKind::Cookie) => return Err(incomplete()),
            _ => grant,
        };
        match &told.inside {
            Some(session) => grant.enter_session(session),
            None => Ok(grant),
        }
    }

    /// Completes when the grant's token is revoked, expired or deleted, or its login is over. An open stream waits
    /// for this beside its events.
    pub async fn wait_until_ended(&self, grant: &Grant) {
        let Some(token_id) = grant.token_id() else {
            return std::future::pending().await;
        };
        // Before the first check, so that no revocation is missed in between.
        let mut revocations = self.revocations.subscribe();
        while let Some(left) = self.validity_left(token_id, grant).await {
            let left = left.min(TOKEN_RECHECK_INTERVAL);
            // Also checked periodically: a session's key is revoked in the store without a notification.
            let _ = tokio::time::timeout(left, revocations.changed()).await;
        }
    }

    /// For how long a grant may stay valid; none if it is not valid any more.
    async fn validity_left(&self, token_id: &TokenId, grant: &Grant) -> Option<Duration> {
        let row = self.store.token_get(token_id).await.ok().flatten()?;
        let login = match grant.login() {
            None => true,
            Some(login) => {
                let of_token = self.store.login_token(login, COOKIE_MAX_AGE).await;
                matches!(of_token, Ok(Some(id)) if id == *token_id)
            }
        };
        (login && row.is_valid()).then(|| row.time_left().unwrap_or(Duration::MAX))
    }
}

/// How often an open stream checks that its token is still valid.
const TOKEN_RECHECK_INTERVAL: Duration = Duration::from_secs(5);

/// Why a login failed.
#[derive(Debug)]
pub enum LoginError {
    /// The token was not accepted, or the store failed.
    Refused(Error),
    /// Too many failed logins from this address; the next is accepted after this duration.
    TooManyFailures(Duration),
}

fn grant_from_row(row: Option<TokenRow>, credential: CredentialKind) -> Result<Grant> {
    let row = row.filter(TokenRow::is_valid).ok_or_else(invalid_token)?;
    let principal = Principal {
        token_id: Some(row.token_id),
        scope: row.scope,
        project: row.project_id,
        inside: row.session_id,
    };
    Ok(Grant::new(principal, row.expires_at, credential))
}

/// One text for unknown, revoked and expired tokens, so that a client cannot find out which tokens exist.
fn invalid_token() -> Error {
    Error::unauthenticated(
        "this token is unknown, expired or revoked; `oubliette token create` makes a new one",
    )
}

fn login_expired() -> Error {
    Error::unauthenticated("log in again: this login is over")
}

/// The text of a secret, where it is shown or sent once.
pub fn expose(secret: &SecretString) -> &str {
    secret.expose_secret()
}
