//! Translation of database errors: whether the transaction survives, and what the caller is told.

use oubliette_protocol::Error;
use sqlx::{error::ErrorKind, postgres::PgDatabaseError};

/// Why a write failed.
#[derive(Debug, Clone)]
pub(crate) enum WriteError {
    /// Only this write is refused; the other writes of its group are unaffected.
    Refused(Error),
    /// The whole transaction failed, including the writes before this one.
    Broken(Error),
    /// The connection broke, and with it the transaction. At a commit it is not known whether it was in time.
    Disconnected(Error),
    /// Whether the transaction was committed is not known and cannot be found out.
    OutcomeUnknown(Error),
}

impl WriteError {
    /// The error for the caller.
    pub(crate) fn into_error(self) -> Error {
        match self {
            WriteError::Refused(error)
            | WriteError::Broken(error)
            | WriteError::Disconnected(error)
            | WriteError::OutcomeUnknown(error) => error,
        }
    }
}

impl From<Error> for WriteError {
    fn from(error: Error) -> Self {
        WriteError::Refused(error)
    }
}

impl From<sqlx::Error> for WriteError {
    fn from(error: sqlx::Error) -> Self {
        match explain(&error) {
            WriteError::Refused(explained) => WriteError::Refused(explained.with_cause(error)),
            WriteError::Broken(explained) => WriteError::Broken(explained.with_cause(error)),
            WriteError::Disconnected(explained) => WriteError::Disconnected(explained.with_cause(error)),
            WriteError::OutcomeUnknown(explained) => WriteError::OutcomeUnknown(explained.with_cause(error)),
        }
    }
}

/// What a database error means, without it as the cause.
fn explain(error: &sqlx::Error) -> WriteError {
    let refused = WriteError::Refused;
    let broken = |message: &str| WriteError::Broken(Error::unavailable(message));
    if let sqlx::Error::Database(cause) = error {
        match cause.kind() {
            ErrorKind::UniqueViolation => return refused(Error::conflict("it is there already")),
            ErrorKind::ForeignKeyViolation => {
                return refused(Error::not_found("what it belongs to is not there (any more)"));
            }
            _ => {}
        }
        if cause.try_downcast_ref::<PgDatabaseError>().is_some() {
            return explain_state(&cause.code().unwrap_or_default());
        }
    }
    match primary_code(error) {
        Some(code::BUSY | code::LOCKED) => {
            broken("the database is held by another program: close that program and try again")
        }
        Some(code::FULL) => broken("the disk is full: free some space and try again"),
        Some(code::READONLY | code::PERM) => {
            broken("the database cannot be written: give the server's user the right to it")
        }
        Some(code::CORRUPT | code::NOTADB) => {
            broken("the database is damaged: stop the server, put a backup in its place and start again")
        }
        Some(code::IOERR | code::CANTOPEN) => {
            broken("the database's disk does not answer as it should: look at the server's log")
        }
        Some(code::NOMEM | code::INTERRUPT) => broken("the database ran out of memory: try again"),
        Some(code::TOOBIG) => refused(Error::limit_exceeded("this is too large to be stored")),
        Some(_) => refused(Error::internal("an unexpected database error")),
        None => match error {
            sqlx::Error::PoolTimedOut => broken("the database is too busy to answer: try again"),
            sqlx::Error::PoolClosed | sqlx::Error::WorkerCrashed => broken("the database is closed"),
            // Only of PostgreSQL.
            sqlx::Error::Io(_) | sqlx::Error::Tls(_) | sqlx::Error::Protocol(_) => {
                WriteError::Disconnected(Error::unavailable(
                    "the connection to the database is broken: see that PostgreSQL runs, and try again",
                ))
            }
            _ => refused(Error::internal("an unexpected database error")),
        },
    }
}

/// What an SQLSTATE of PostgreSQL means.
fn explain_state(state: &str) -> WriteError {
    let broken = |message: &str| WriteError::Broken(Error::unavailable(message));
    match state {
        "53100" => broken("the disk of the database is full: free some space and try again"),
        "53200" | "53300" | "53400" => {
            broken("the database has no memory or connection left: look at PostgreSQL's log, and try again")
        }
        "25006" => broken("the database can only be read: the server needs the address of the primary"),
        "57P01" | "57P02" | "57P03" | "57P05" | "25P03" => WriteError::Disconnected(Error::unavailable(
            "PostgreSQL has ended the connection or is starting: try again",
        )),
        "40001" | "40P01" | "55P03" | "57014" => broken("the database is too busy to answer: try again"),
        "42501" => broken("the database cannot be written: give the server's user the right to its tables"),
        _ if state.starts_with("08") => WriteError::Disconnected(Error::unavailable(
            "the connection to the database is broken: see that PostgreSQL runs, and try again",
        )),
        _ if state.starts_with("54") => {
            WriteError::Refused(Error::limit_exceeded("this is too large to be stored"))
        }
        _ if state.starts_with("XX") || state.starts_with("58") => {
            broken("the database is damaged or its disk fails: look at PostgreSQL's log")
        }
        _ => WriteError::Refused(Error::internal("an unexpected database error")),
    }
}

/// The error for the caller of a failed read.
pub(crate) fn read_error(error: sqlx::Error) -> Error {
    WriteError::from(error).into_error()
}

/// SQLite's primary result code: the low byte of the extended one.
pub(crate) fn primary_code(error: &sqlx::Error) -> Option<i32> {
    let sqlx::Error::Database(cause) = error else {
        return None;
    };
    cause.code()?.parse::<i32>().ok().map(|code| code & 0xff)
}

/// SQLite's primary result codes.
pub(crate) mod code {
    pub(crate) const PERM: i32 = 3;
    pub(crate) const BUSY: i32 = 5;
    pub(crate) const LOCKED: i32 = 6;
    pub(crate) const NOMEM: i32 = 7;
    pub(crate) const READONLY: i32 = 8;
    pub(crate) const INTERRUPT: i32 = 9;
    pub(crate) const IOERR: i32 = 10;
    pub(crate) const CORRUPT: i32 = 11;
    pub(crate) const FULL: i32 = 13;
    pub(crate) const CANTOPEN: i32 = 14;
    pub(crate) const TOOBIG: i32 = 18;
    pub(crate) const NOTADB: i32 = 26;
}
