//! The console's logins: which cookie stands for which token. A cookie is kept as its hash alone, and is
//! worth nothing without its token: whoever asks looks at that too.

use std::time::Duration;

use oubliette_protocol::{Result, TokenId};

use super::row::parsed;
use crate::{
    fault::{Fault, read_error},
    store::Store,
    writer::{Tx, Write},
};

/// Logins kept at once; the oldest goes first.
const MOST: i64 = 10_000;

impl Store {
    /// Notes a login.
    pub async fn login_insert(&self, hash: &[u8; 32], token: &TokenId) -> Result<()> {
        self.write(Insert {
            hash: hex::encode(hash),
            token: token.clone(),
        })
        .await
    }

    /// The token behind a cookie that is not older than this.
    pub async fn login_token(&self, hash: &[u8; 32], life: Duration) -> Result<Option<TokenId>> {
        let life = i64::try_from(life.as_millis()).unwrap_or(i64::MAX);
        let row = sqlx::query("SELECT token_id FROM logins WHERE hash = $1 AND created_at > $2")
            .bind(hex::encode(hash))
            .bind(crate::now().as_millisecond().saturating_sub(life))
            .fetch_optional(self.readers())
            .await
            .map_err(read_error)?;
        row.as_ref().map(|row| parsed(row, "token_id")).transpose()
    }

    /// Forgets a login.
    pub async fn login_delete(&self, hash: &[u8; 32]) -> Result<()> {
        self.write(Delete(hex::encode(hash))).await
    }
}

struct Insert {
    hash: String,
    token: TokenId,
}

impl Write for Insert {
    type Out = ();

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        sqlx::query("INSERT INTO logins (hash, token_id, created_at) VALUES ($1, $2, $3)")
            .bind(&self.hash)
            .bind(self.token.as_str())
            .bind(tx.millis())
            .execute(&mut tx.db)
            .await?;
        sqlx::query(
            "DELETE FROM logins WHERE hash IN
             (SELECT hash FROM logins ORDER BY created_at DESC, hash LIMIT 100 OFFSET $1)",
        )
        .bind(MOST)
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}

struct Delete(String);

impl Write for Delete {
    type Out = ();

    async fn apply(&self, tx: &mut Tx) -> Result<(), Fault> {
        sqlx::query("DELETE FROM logins WHERE hash = $1")
            .bind(&self.0)
            .execute(&mut tx.db)
            .await?;
        Ok(())
    }
}
