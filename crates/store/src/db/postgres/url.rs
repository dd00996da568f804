//! The address of a PostgreSQL database.

use std::{fmt, str::FromStr};

use sqlx::{ConnectOptions, postgres::PgConnectOptions};

use super::open_error::PostgresOpenError;

/// The parameters an address may have; they are libpq's.
const PARAMETERS: [&str; 18] = [
    "sslmode",
    "ssl-mode",
    "sslrootcert",
    "ssl-root-cert",
    "ssl-ca",
    "sslcert",
    "ssl-cert",
    "sslkey",
    "ssl-key",
    "statement-cache-capacity",
    "host",
    "hostaddr",
    "port",
    "dbname",
    "user",
    "password",
    "application_name",
    "options",
];
/// Prepared statements a connection keeps.
const STATEMENT_CACHE: usize = 128;

/// The address of a PostgreSQL database: `postgres://USER:PASSWORD@HOST:PORT/DATABASE?sslmode=require`. Shown without its
/// password and parameters.
#[derive(Clone)]
pub struct DatabaseUrl {
    options: Box<PgConnectOptions>,
    shown: String,
}

impl DatabaseUrl {
    /// How to connect.
    pub(crate) fn connect_options(&self) -> PgConnectOptions {
        (*self.options).clone()
    }

    /// The name of the user who connects.
    pub(crate) fn user(&self) -> &str {
        self.options.get_username()
    }
}

impl FromStr for DatabaseUrl {
    type Err = PostgresOpenError;

    fn from_str(text: &str) -> Result<Self, PostgresOpenError> {
        let bad = |problem: &str| PostgresOpenError::BadUrl(problem.to_owned());
        if !text.starts_with("postgres://") && !text.starts_with("postgresql://") {
            return Err(bad("it does not begin with postgres://"));
        }
        // Checked here because sqlx writes the value of a parameter it does not know to the log, which may be a password
        // under a misspelt name.
        let parameters = text.split_once('?').map_or("", |(_, parameters)| parameters);
        for parameter in parameters.split('&').filter(|parameter| !parameter.is_empty()) {
            let name = parameter.split('=').next().unwrap_or_default();
            let is_known =
                PARAMETERS.contains(&name) || (name.starts_with("options[") && name.ends_with(']'));
            if !is_known {
                return Err(bad(&format!(
                    "it has a parameter that is not known; known are {}",
                    PARAMETERS.join(", ")
                )));
            }
        }
        // The parser's message is not passed on: it may quote a part of the address.
        let options = PgConnectOptions::from_str(text)
            .map_err(|_| bad("a part of it cannot be read; characters such as @ : / ? # % in a password are written as %40 %3A %2F %3F %23 %25"))?
            .application_name("oubliette")
            .statement_cache_capacity(STATEMENT_CACHE)
            .disable_statement_logging();
        let host = match options.get_socket() {
            Some(socket) => socket.display().to_string(),
            None => options.get_host().to_owned(),
        };
        let shown = format!(
            "postgres://{}@{}:{}/{}",
            options.get_username(),
            host,
            options.get_port(),
            options.get_database().unwrap_or(options.get_username())
        );
        Ok(Self {
            options: Box::new(options),
            shown,
        })
    }
}

impl fmt::Display for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

impl fmt::Debug for DatabaseUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.shown)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_password_is_never_shown() {
        for text in [
            "postgres://me:hunter2@db.example:5433/o?sslmode=require",
            "postgresql://me@db.example:5433/o?password=hunter2",
        ] {
            let url: DatabaseUrl = text.parse().unwrap();
            assert_eq!(url.to_string(), "postgres://me@db.example:5433/o");
            assert!(!format!("{url:?}").contains("hunter2"));
        }
        for text in [
            "mysql://me:hunter2@h/d",
            "postgres://me:hunter2@h:port/d",
            "postgres://me@h/d?pasword=hunter2",
            "postgres://me:hunter2@h/d?hunter2=x",
            "hunter2",
        ] {
            let error = text.parse::<DatabaseUrl>().unwrap_err();
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error}");
        }
    }
}
