//! `[limits]`: what sessions may take of the server's memory and of its database.

use oubliette_protocol::Result;

use super::{field_error, raw::RawLimits};

const MIB: u64 = 1024 * 1024;
/// What the largest legal call takes on its way, its result included, fits into this.
const LEAST_BUFFER_MB: u64 = 64;
const LARGEST_MB: u64 = 1024 * 1024;

/// The section, validated.
#[derive(Debug, Clone, Copy)]
pub struct SessionShares {
    /// What is kept in memory on behalf of one session, in bytes.
    pub session_buffer_bytes: usize,
    /// What is kept in memory on behalf of all sessions together, in bytes.
    pub server_buffer_bytes: usize,
    /// The largest event log of one session, in bytes of JSON.
    pub session_log_bytes: u64,
}

impl SessionShares {
    pub(super) fn resolve(raw: &RawLimits) -> Result<Self> {
        let session = raw.session_buffer_mb.unwrap_or(64);
        let session = bounded("session_buffer_mb", session, LEAST_BUFFER_MB)?;
        let server = raw.server_buffer_mb.unwrap_or(512);
        let server = match raw.server_buffer_mb {
            Some(_) => bounded("server_buffer_mb", server, session)?,
            None => server.max(session),
        };
        Ok(Self {
            session_buffer_bytes: (session * MIB) as usize,
            server_buffer_bytes: (server * MIB) as usize,
            session_log_bytes: bounded("session_log_mb", raw.session_log_mb.unwrap_or(512), 1)? * MIB,
        })
    }
}

fn bounded(setting: &str, given: u64, least: u64) -> Result<u64> {
    match (least..=LARGEST_MB).contains(&given) {
        true => Ok(given),
        false => Err(field_error(
            &format!("limits.{setting}"),
            format!("must be {least} to {LARGEST_MB}"),
        )),
    }
}
