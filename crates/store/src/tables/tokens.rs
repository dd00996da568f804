//! API tokens. Only the hash of a token is stored. Creating and revoking one survives a power cut.

use std::{collections::HashMap, time::Duration};

use jiff::Timestamp;
use oubliette_protocol::{Error, ProjectId, Result, Scope, SessionId, TokenId};

use super::row::{optional_parsed, optional_time, parsed, text, time};
use crate::{
    db::{DbPool, DbRow, QueryBuilder, postgres::lease::DATABASE_CLOCK, query},
    db_error::{WriteError, read_error},
    page::{ListPage, PageRequest, PagedList},
    store::Store,
    writer::{StoreWrite, Survives, WriteTx},
};

static LIST: PagedList<TokenRow, TokenId> = PagedList {
    name: "tokens",
    order: "token_id DESC",
    after: "token_id < ",
    key: |row| row.token_id.clone(),
    read: token_from_row,
};
const TOKEN_COLUMNS: &str =
    "token_id, name, scope, project_id, session_id, created_at, expires_at, revoked_at";

/// A token to store.
#[derive(Debug, Clone)]
pub struct NewToken {
    /// Its id, which is not secret.
    pub token_id: TokenId,
    /// Its display name.
    pub name: String,
    /// What it may do.
    pub scope: Scope,
    /// The one project it is limited to; none: all projects.
    pub project_id: Option<ProjectId>,
    /// When it expires; none: never.
    pub expires_at: Option<Timestamp>,
    /// The hash of the token's text, by which it is looked up.
    pub hash: [u8; 32],
    /// The session it was created for, if any.
    pub session_id: Option<SessionId>,
}

/// A stored token, without its hash.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRow {
    /// Its id, which is not secret.
    pub token_id: TokenId,
    /// Its display name.
    pub name: String,
    /// What it may do.
    pub scope: Scope,
    /// The one project it is limited to; none: all projects.
    pub project_id: Option<ProjectId>,
    /// The session it was created for, if any.
    pub session_id: Option<SessionId>,
    /// When it was created.
    pub created_at: Timestamp,
    /// When it expires; none: never. Not enforced here: the caller must check [`TokenRow::is_valid`].
    pub expires_at: Option<Timestamp>,
    /// When it was revoked, if it was.
    pub revoked_at: Option<Timestamp>,
    /// How far the clock that expiry is compared with was ahead of this machine's when the row was read, in milliseconds: 0 unless
    /// it is PostgreSQL's.
    clock_ahead_ms: i64,
}

impl TokenRow {
    /// How long it is valid from now on, zero if it has expired; none: it does not expire. On PostgreSQL the database's clock
    /// decides, so that servers whose clocks differ agree.
    pub fn time_left(&self) -> Option<Duration> {
        let now = crate::now().as_millisecond().saturating_add(self.clock_ahead_ms);
        let left = self.expires_at?.as_millisecond().saturating_sub(now);
        Some(Duration::from_millis(left.max(0).unsigned_abs()))
    }

    /// Whether it was neither revoked when it was read nor has expired.
    pub fn is_valid(&self) -> bool {
        self.revoked_at.is_none() && self.time_left() != Some(Duration::ZERO)
    }
}

/// Selects tokens to list.
#[derive(Debug, Clone, Default)]
pub struct TokenFilter {
    /// Only tokens limited to this project.
    pub project: Option<ProjectId>,
    /// Include revoked tokens.
    pub include_revoked: bool,
    /// Include tokens created for sessions.
    pub include_sessions: bool,
}

impl Store {
    /// Stores a token; `conflict` if its id or hash exists already.
    pub async fn token_insert(&self, token: NewToken) -> Result<()> {
        self.write(InsertToken(token)).await
    }

    /// The token with this hash, unless it was revoked. The caller must check whether it has expired.
    pub async fn token_by_hash(&self, hash: &[u8; 32]) -> Result<Option<TokenRow>> {
        let cache_version = match self.caches().tokens.get(hash) {
            Ok(row) => return Ok(Some(row)),
            Err(cache_version) => cache_version,
        };
        let mut query = self.select_tokens();
        query.push(" WHERE hash = ").push_bind(hex::encode(hash));
        query.push(" AND revoked_at IS NULL");
        let Some(row) = self.fetch_token(query).await? else {
            return Ok(None);
        };
        // Of one that expires by the database's clock, which may be set meanwhile, nothing is remembered.
        if row.expires_at.is_none() || matches!(self.readers(), DbPool::Sqlite(_)) {
            self.caches().tokens.insert(cache_version, *hash, row.clone());
        }
        Ok(Some(row))
    }

    /// One token, revoked or not.
    pub async fn token_get(&self, id: &TokenId) -> Result<Option<TokenRow>> {
        let mut query = self.select_tokens();
        query.push(" WHERE token_id = ").push_bind(id.as_str());
        self.fetch_token(query).await
    }

    /// The names of these tokens; those that do not exist are absent.
    pub async fn token_names(&self, tokens: &[TokenId]) -> Result<HashMap<TokenId, String>> {
        if tokens.is_empty() {
            return Ok(HashMap::new());
        }
        let mut query = QueryBuilder::new("SELECT token_id, name FROM tokens WHERE token_id IN (");
        for (number, token) in tokens.iter().enumerate() {
            query.push(if number == 0 { "" } else { ", " });
            query.push_bind(token.as_str());
        }
        query.push(")");
        let rows = query.build().fetch_all(self.readers()).await;
        rows.map_err(read_error)?
            .iter()
            .map(|row| Ok((parsed(row, "token_id")?, text(row, "name")?)))
            .collect()
    }

    /// Selects tokens, with the time at the database if it has a clock of its own.
    fn select_tokens(&self) -> QueryBuilder<'static> {
        let clock = match self.readers() {
            DbPool::Sqlite(_) => "NULL",
            DbPool::Postgres(_) => DATABASE_CLOCK,
        };
        QueryBuilder::new(format!(
            "SELECT {TOKEN_COLUMNS}, {clock} AS database_now FROM tokens"
        ))
    }

    /// The time by which tokens are said to expire: the database's on PostgreSQL, else this machine's.
    pub async fn expiry_clock(&self) -> Result<Timestamp> {
        match self.readers() {
            DbPool::Sqlite(_) => Ok(crate::now()),
            DbPool::Postgres(_) => {
                let query = QueryBuilder::new(format!("SELECT {DATABASE_CLOCK}"));
                let asked = query.build_query_scalar().fetch_one(self.readers());
                let millis: i64 = self
                    .while_active(async { asked.await.map_err(read_error) })
                    .await?;
                Timestamp::from_millisecond(millis).map_err(Error::internal)
            }
        }
    }

    async fn fetch_token(&self, query: QueryBuilder<'_>) -> Result<Option<TokenRow>> {
        // Whoever may not be let in must not be because nobody can be asked.
        let row = self
            .while_active(async {
                let row = query.build().fetch_optional(self.readers()).await;
                row.map_err(read_error)
            })
            .await?;
        row.map(|row| token_from_row(&row)).transpose()
    }

    /// Tokens, newest first.
    pub async fn token_list(&self, filter: TokenFilter, page: PageRequest) -> Result<ListPage<TokenRow>> {
        let mut query = self.select_tokens();
        query.push(" WHERE 1 = 1");
        if !filter.include_sessions {
            query.push(" AND session_id IS NULL");
        }
        if !filter.include_revoked {
            query.push(" AND revoked_at IS NULL");
        }
        if let Some(project) = &filter.project {
            query.push(" AND project_id = ").push_bind(project.as_str());
        }
        self.fetch_page(query, &LIST, &page).await
    }

    /// Revokes a token. Returns false if there is none or it was revoked before.
    pub async fn token_revoke(&self, id: &TokenId) -> Result<bool> {
        self.write(RevokeToken(id.clone())).await
    }

    /// Deletes the tokens created for a session. Returns how many there were.
    pub async fn tokens_revoke_of_session(&self, session: &SessionId) -> Result<u64> {
        self.write(DeleteSessionTokens(session.clone())).await
    }
}

fn token_from_row(row: &DbRow) -> Result<TokenRow> {
    let database_now: Option<i64> = row.try_get("database_now").map_err(read_error)?;
    let own_now = crate::now().as_millisecond();
    Ok(TokenRow {
        clock_ahead_ms: database_now.map_or(0, |now| now.saturating_sub(own_now)),
        token_id: parsed(row, "token_id")?,
        name: text(row, "name")?,
        scope: parsed(row, "scope")?,
        project_id: optional_parsed(row, "project_id")?,
        session_id: optional_parsed(row, "session_id")?,
        created_at: time(row, "created_at")?,
        expires_at: optional_time(row, "expires_at")?,
        revoked_at: optional_time(row, "revoked_at")?,
    })
}

struct InsertToken(NewToken);

impl StoreWrite for InsertToken {
    type Out = ();
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        let token = &self.0;
        query(
            "INSERT INTO tokens (token_id, name, scope, project_id, session_id, hash, created_at, expires_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(token.token_id.as_str())
        .bind(&token.name)
        .bind(token.scope.as_str())
        .bind(token.project_id.as_ref().map(ProjectId::as_str))
        .bind(token.session_id.as_ref().map(SessionId::as_str))
        .bind(hex::encode(token.hash))
        .bind(tx.now_millis())
        .bind(token.expires_at.map(Timestamp::as_millisecond))
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}

struct RevokeToken(TokenId);

impl StoreWrite for RevokeToken {
    type Out = bool;
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut WriteTx) -> Result<bool, WriteError> {
        let done = query("UPDATE tokens SET revoked_at = $2 WHERE token_id = $1 AND revoked_at IS NULL")
            .bind(self.0.as_str())
            .bind(tx.now_millis())
            .execute(&mut tx.db)
            .await?;
        tx.touched.tokens = true;
        tx.revoked_tokens.push(self.0.clone());
        Ok(done.rows_affected() > 0)
    }
}

struct DeleteSessionTokens(SessionId);

impl StoreWrite for DeleteSessionTokens {
    type Out = u64;
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut WriteTx) -> Result<u64, WriteError> {
        // Deleted, not marked as revoked: every session has some, and nobody looks them up afterwards.
        let done = query("DELETE FROM tokens WHERE session_id = $1")
            .bind(self.0.as_str())
            .execute(&mut tx.db)
            .await?;
        tx.touched.tokens = true;
        Ok(done.rows_affected())
    }
}
