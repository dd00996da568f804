//! Tokens: their hashes, never themselves. What happens to one survives a power cut.

use jiff::Timestamp;
use oubliette_protocol::{ProjectId, Result, Scope, SessionId, TokenId};
use sqlx::{QueryBuilder, Sqlite, sqlite::SqliteRow};

use super::row::{maybe, maybe_time, parsed, text, time};
use crate::{
    fault::{Fault, read_error},
    page::{Page, Paged},
    store::Store,
    writer::{Survives, Tx, Write},
};

const LIST: &str = "tokens";
const COLUMNS: &str =
    "SELECT token_id, name, scope, project_id, session_id, created_at, expires_at, revoked_at FROM tokens";

/// A token to keep.
#[derive(Debug, Clone)]
pub struct NewToken {
    /// Its name among tokens.
    pub token_id: TokenId,
    /// Its name among people.
    pub name: String,
    /// How far it reaches.
    pub scope: Scope,
    /// The one project it is bound to.
    pub project_id: Option<ProjectId>,
    /// When it ends.
    pub expires_at: Option<Timestamp>,
    /// What it is recognized by.
    pub hash: [u8; 32],
    /// The session it was made for.
    pub session_id: Option<SessionId>,
}

/// A token that is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TokenRow {
    /// Its name among tokens.
    pub token_id: TokenId,
    /// Its name among people.
    pub name: String,
    /// How far it reaches.
    pub scope: Scope,
    /// The one project it is bound to.
    pub project_id: Option<ProjectId>,
    /// The session it was made for.
    pub session_id: Option<SessionId>,
    /// When it was made.
    pub created_at: Timestamp,
    /// When it ends; whoever uses it must look.
    pub expires_at: Option<Timestamp>,
    /// When it was revoked.
    pub revoked_at: Option<Timestamp>,
}

/// Which tokens to list.
#[derive(Debug, Clone, Default)]
pub struct TokenFilter {
    /// Those bound to this project.
    pub project: Option<ProjectId>,
    /// Revoked ones too.
    pub include_revoked: bool,
    /// Those made for sessions too.
    pub include_sessions: bool,
}

impl Store {
    /// Keeps a token; `conflict` if its id or hash is there already.
    pub async fn token_insert(&self, token: NewToken) -> Result<()> {
        self.write(Insert(token)).await
    }

    /// The token with this hash, unless it was revoked. Expiry is the caller's to check.
    pub async fn token_by_hash(&self, hash: &[u8; 32]) -> Result<Option<TokenRow>> {
        let moment = match self.remembered().tokens.get(hash) {
            Ok(row) => return Ok(Some(row)),
            Err(moment) => moment,
        };
        const SQL: &str =
            "SELECT token_id, name, scope, project_id, session_id, created_at, expires_at, revoked_at
             FROM tokens WHERE hash = $1 AND revoked_at IS NULL";
        let row = sqlx::query(SQL)
            .bind(hex::encode(hash))
            .fetch_optional(self.readers())
            .await;
        let Some(row) = row.map_err(read_error)? else {
            return Ok(None);
        };
        let row = token(&row)?;
        self.remembered().tokens.keep(moment, *hash, row.clone());
        Ok(Some(row))
    }

    /// One token, revoked or not.
    pub async fn token_get(&self, id: &TokenId) -> Result<Option<TokenRow>> {
        let mut query = QueryBuilder::<Sqlite>::new(COLUMNS);
        query.push(" WHERE token_id = ").push_bind(id.as_str());
        let row = query.build().fetch_optional(self.readers()).await;
        row.map_err(read_error)?.map(|row| token(&row)).transpose()
    }

    /// Tokens, newest first.
    pub async fn token_list(&self, filter: TokenFilter, page: Page) -> Result<Paged<TokenRow>> {
        let (limit, after) = (page.rows()?, page.after::<TokenId>(LIST)?);
        let mut query = QueryBuilder::<Sqlite>::new(COLUMNS);
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
        if let Some(after) = after {
            query.push(" AND token_id < ").push_bind(after.as_str());
        }
        query
            .push(" ORDER BY token_id DESC LIMIT ")
            .push_bind(limit as i64 + 1);
        let rows = query
            .build()
            .fetch_all(self.readers())
            .await
            .map_err(read_error)?;
        let tokens = rows.iter().map(token).collect::<Result<Vec<_>>>()?;
        Ok(Paged::cut(tokens, limit, LIST, |row| row.token_id.to_string()))
    }

    /// Revokes a token. False: there is none, or it was revoked before.
    pub async fn token_revoke(&self, id: &TokenId) -> Result<bool> {
        self.write(Revoke(id.clone())).await
    }

    /// Takes away the tokens made for a session. Gives how many there were.
    pub async fn tokens_revoke_of_session(&self, session: &SessionId) -> Result<u64> {
        self.write(RevokeOfSession(session.clone())).await
    }
}

fn token(row: &SqliteRow) -> Result<TokenRow> {
    Ok(TokenRow {
        token_id: parsed(row, "token_id")?,
        name: text(row, "name")?,
        scope: parsed(row, "scope")?,
        project_id: maybe(row, "project_id")?,
        session_id: maybe(row, "session_id")?,
        created_at: time(row, "created_at")?,
        expires_at: maybe_time(row, "expires_at")?,
        revoked_at: maybe_time(row, "revoked_at")?,
    })
}

struct Insert(NewToken);

impl Write for Insert {
    type Out = ();
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        let token = &self.0;
        sqlx::query(
            "INSERT INTO tokens (token_id, name, scope, project_id, session_id, hash, created_at, expires_at)
             VALUES ($1, $2, $3, $4, $5, $6, $7, $8)",
        )
        .bind(token.token_id.as_str())
        .bind(&token.name)
        .bind(token.scope.as_str())
        .bind(token.project_id.as_ref().map(ProjectId::as_str))
        .bind(token.session_id.as_ref().map(SessionId::as_str))
        .bind(hex::encode(token.hash))
        .bind(tx.millis())
        .bind(token.expires_at.map(Timestamp::as_millisecond))
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}

struct Revoke(TokenId);

impl Write for Revoke {
    type Out = bool;
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut Tx) -> Result<bool, Fault> {
        let done =
            sqlx::query("UPDATE tokens SET revoked_at = $2 WHERE token_id = $1 AND revoked_at IS NULL")
                .bind(self.0.as_str())
                .bind(tx.millis())
                .execute(&mut tx.db)
                .await?;
        tx.touched.tokens = true;
        Ok(done.rows_affected() > 0)
    }
}

struct RevokeOfSession(SessionId);

impl Write for RevokeOfSession {
    type Out = u64;
    const SURVIVES: Survives = Survives::PowerCut;

    async fn apply(&self, tx: &mut Tx) -> Result<u64, Fault> {
        // Removed, not marked: every session has some, and nobody will ask for them by name.
        let done = sqlx::query("DELETE FROM tokens WHERE session_id = $1")
            .bind(self.0.as_str())
            .execute(&mut tx.db)
            .await?;
        tx.touched.tokens = true;
        Ok(done.rows_affected())
    }
}
