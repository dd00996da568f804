//! Who is behind a request.
//!
//! Auth turns what a request shows (a bearer token, the console's cookie, the control socket) into a
//! [`Grant`], asking the store every time: a revoked or expired token is dead for the very next
//! request. Nothing else can make a `Grant`.

mod grant;
pub mod limit;
pub mod secret;

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

pub use grant::{Grant, Via};
use limit::Buckets;

/// A cookie's longest life.
const COOKIE_LIFE: Duration = Duration::from_secs(30 * 86_400);

/// Makes grants.
#[derive(Debug)]
pub struct Auth {
    store: Store,
    failed_logins: Buckets<IpAddr>,
    /// Counts revocations, so that what is held open can look again at once.
    revocations: watch::Sender<u64>,
}

/// What a new token is to be.
#[derive(Debug, Clone)]
pub struct Mint {
    /// What people call it.
    pub name: String,
    /// How far it reaches.
    pub scope: Scope,
    /// The one project it sees.
    pub project: Option<ProjectId>,
    /// When it ends.
    pub expires_at: Option<Timestamp>,
    /// The session it dies with.
    pub session: Option<SessionId>,
}

impl Auth {
    /// Over a store.
    pub fn new(store: Store) -> Arc<Self> {
        Arc::new(Self {
            store,
            // Ten at once, then one every six seconds: enough for typing errors, too few for guessing.
            failed_logins: Buckets::new(1.0 / 6.0, 10.0),
            revocations: watch::channel(0).0,
        })
    }

    /// The home's owner. For the control socket, whose peer the kernel vouches for, and for the
    /// command line working on a home whose server is not running.
    pub fn owner(&self) -> Grant {
        Grant::new(Principal::owner(), None, Via::Owner)
    }

    /// A bearer token or an agent's key.
    pub async fn token(&self, text: &str) -> Result<Grant> {
        // Hashing cannot be provoked with megabytes, and a text that is no token needs no query.
        if !secret::looks_like_token(text) {
            return Err(refused());
        }
        let row = self.store.token_by_hash(&secret::hash(text)).await?;
        grant(row, Via::Token)
    }

    /// The console's cookie.
    pub async fn cookie(&self, text: &str) -> Result<Grant> {
        let login = self.store.login_token(&secret::hash(text), COOKIE_LIFE).await?;
        let token = login.ok_or_else(logged_out)?;
        grant(self.store.token_get(&token).await?, Via::Cookie)
    }

    /// Exchanges a token for a cookie.
    pub async fn login(&self, token: &str, from: IpAddr) -> Result<(Grant, SecretString), LoginError> {
        let now = Instant::now();
        self.failed_logins.peek(&from, now).map_err(LoginError::TooMany)?;
        let grant = match self.token(token).await {
            Ok(grant) => grant,
            Err(error) => {
                let _ = self.failed_logins.take(&from, now);
                return Err(LoginError::Refused(error));
            }
        };
        let Some(token_id) = grant.token_id().cloned() else {
            return Err(LoginError::Refused(refused()));
        };
        let (cookie, hash) = secret::cookie();
        self.store
            .login_insert(&hash, &token_id)
            .await
            .map_err(LoginError::Refused)?;
        Ok((grant, cookie))
    }

    /// Forgets a cookie.
    pub async fn logout(&self, cookie: &str) -> Result<()> {
        self.store.login_delete(&secret::hash(cookie)).await
    }

    /// Makes a token and returns it; only its hash is kept.
    pub async fn mint(&self, mint: Mint) -> Result<(TokenId, SecretString)> {
        let token_id = TokenId::generate();
        let (token, hash) = secret::token();
        self.store
            .token_insert(NewToken {
                token_id: token_id.clone(),
                name: mint.name,
                scope: mint.scope,
                project_id: mint.project,
                expires_at: mint.expires_at,
                hash,
                session_id: mint.session,
            })
            .await?;
        Ok((token_id, token))
    }

    /// Ends a token; whatever it holds open is told at once.
    pub async fn revoke(&self, token_id: &TokenId) -> Result<bool> {
        let revoked = self.store.token_revoke(token_id).await?;
        self.revocations.send_modify(|n| *n += 1);
        Ok(revoked)
    }

    /// Ends every key of a session.
    pub async fn revoke_of_session(&self, session: &SessionId) -> Result<()> {
        if self.store.tokens_revoke_of_session(session).await? > 0 {
            self.revocations.send_modify(|n| *n += 1);
        }
        Ok(())
    }

    /// The grant of a principal that was let in before, asked for again: its token may have ended since.
    pub async fn again(&self, principal: &Principal) -> Result<Grant> {
        match &principal.token_id {
            Some(id) => grant(self.store.token_get(id).await?, Via::Token),
            // Without a token there is only the owner, or an agent by its base tools: never more than it was.
            None => Ok(Grant::new(principal.clone(), None, Via::Owner)),
        }
    }

    /// What every agent may do without a key: act in its session's own project.
    pub async fn base(&self, session: &SessionId) -> Result<Grant> {
        let row = self.store.session_get(session).await?;
        let row = row.ok_or_else(|| Error::unavailable("this session is no longer there"))?;
        let principal = Principal {
            token_id: None,
            scope: Scope::Write,
            project: Some(row.project_id),
        };
        Ok(Grant::new(principal, None, Via::Token))
    }

    /// Ends when the grant does: revoked, expired, or its token deleted. A stream that outlives the
    /// request it began with waits for this beside its events.
    pub async fn ended(&self, grant: &Grant) {
        let Some(token_id) = grant.token_id() else {
            return std::future::pending().await;
        };
        let mut revocations = self.revocations.subscribe();
        loop {
            let left = grant.expires_at().map_or(RECHECK, |at| {
                Duration::try_from(at.duration_since(Timestamp::now()))
                    .unwrap_or(Duration::ZERO)
                    .min(RECHECK)
            });
            // Also now and then without being told: a session's own token is ended in the store.
            let _ = tokio::time::timeout(left, revocations.changed()).await;
            if !matches!(self.store.token_get(token_id).await, Ok(Some(row)) if alive(&row)) {
                return;
            }
        }
    }
}

const RECHECK: Duration = Duration::from_secs(5);

/// Why there is no cookie.
#[derive(Debug)]
pub enum LoginError {
    /// Not a good token.
    Refused(Error),
    /// Too many that were not; try again after this long.
    TooMany(Duration),
}

fn alive(row: &TokenRow) -> bool {
    row.revoked_at.is_none() && row.expires_at.is_none_or(|at| at > Timestamp::now())
}

fn grant(row: Option<TokenRow>, via: Via) -> Result<Grant> {
    let row = row.filter(alive).ok_or_else(refused)?;
    let principal = Principal {
        token_id: Some(row.token_id),
        scope: row.scope,
        project: row.project_id,
    };
    Ok(Grant::new(principal, row.expires_at, via))
}

/// One text for unknown, revoked and expired: which it was is nobody's business.
fn refused() -> Error {
    Error::unauthenticated(
        "this token is unknown, expired or revoked; `oubliette token create` makes a new one",
    )
}

fn logged_out() -> Error {
    Error::unauthenticated("log in again: this login is over")
}

/// The text of a secret, for the one place that shows it.
pub fn expose(secret: &SecretString) -> &str {
    secret.expose_secret()
}
