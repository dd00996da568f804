//! Console logins: which session cookie belongs to which token. Only the hash of a cookie is stored. A login
//! grants nothing by itself: the caller must also check that its token is still valid.

use std::time::Duration;

use oubliette_protocol::{Result, TokenId};

use super::row::parsed;
use crate::{
    db::{QueryBuilder, postgres::lease::DATABASE_CLOCK, query},
    db_error::{WriteError, read_error},
    store::Store,
    writer::{StoreWrite, WriteTx},
};

/// Maximum stored logins; beyond it the oldest are deleted.
const MAX_LOGINS: i64 = 10_000;

impl Store {
    /// Stores a login: the cookie's hash and its token.
    pub async fn login_insert(&self, hash: &[u8; 32], token: &TokenId) -> Result<()> {
        self.write(InsertLogin {
            hash: hex::encode(hash),
            token: token.clone(),
        })
        .await
    }

    /// The token of the login with this cookie hash, if the login is younger than `life`.
    pub async fn login_token(&self, hash: &[u8; 32], life: Duration) -> Result<Option<TokenId>> {
        let life = i64::try_from(life.as_millis()).unwrap_or(i64::MAX);
        let row = self
            .while_active(async {
                let mut query = QueryBuilder::new("SELECT token_id FROM logins WHERE hash = ");
                query.push_bind(hex::encode(hash)).push(" AND created_at > ");
                match self.cluster() {
                    // Servers of a cluster write the database's time.
                    Some(_) => query.push(DATABASE_CLOCK).push(" - ").push_bind(life),
                    None => query.push_bind(crate::now().as_millisecond().saturating_sub(life)),
                };
                let row = query.build().fetch_optional(self.readers()).await;
                row.map_err(read_error)
            })
            .await?;
        row.as_ref().map(|row| parsed(row, "token_id")).transpose()
    }

    /// Deletes a login.
    pub async fn login_delete(&self, hash: &[u8; 32]) -> Result<()> {
        self.write(DeleteLogin(hex::encode(hash))).await
    }
}

struct InsertLogin {
    hash: String,
    token: TokenId,
}

impl StoreWrite for InsertLogin {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        query("INSERT INTO logins (hash, token_id, created_at) VALUES ($1, $2, $3)")
            .bind(&self.hash)
            .bind(self.token.as_str())
            .bind(tx.now_millis())
            .execute(&mut tx.db)
            .await?;
        query(
            "DELETE FROM logins WHERE hash IN
             (SELECT hash FROM logins ORDER BY created_at DESC, hash LIMIT 100 OFFSET $1)",
        )
        .bind(MAX_LOGINS)
        .execute(&mut tx.db)
        .await?;
        Ok(())
    }
}

struct DeleteLogin(String);

impl StoreWrite for DeleteLogin {
    type Out = ();

    async fn apply(&self, tx: &mut WriteTx) -> Result<(), WriteError> {
        query("DELETE FROM logins WHERE hash = $1")
            .bind(&self.0)
            .execute(&mut tx.db)
            .await?;
        Ok(())
    }
}
