//! What a commit tells other servers: how far logs are, and which cached rows are stale. A notice carries no content:
//! whoever hears it reads the database.

use std::fmt::Write;

use oubliette_protocol::{SessionId, TokenId};

/// Maximum length of one notification, in bytes; PostgreSQL takes just less than 8000.
const MAX_PAYLOAD: usize = 7900;

/// One thing that a commit changed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum CommitNotice {
    /// A session's log is committed up to this index.
    Events(SessionId, i64),
    /// The debugger's log is committed up to this index.
    Debug(i64),
    /// A session was deleted.
    SessionDeleted(SessionId),
    /// Tokens were revoked.
    Tokens,
    /// A token was revoked.
    TokenRevoked(TokenId),
    /// Projects changed.
    Projects,
    /// Definitions of agents or catalog entries changed.
    Definitions,
    /// A server of the cluster is gone.
    Servers,
    /// The outbox of webhooks has something new.
    Outbox,
}

/// The payloads that carry these notices, a line each.
pub(crate) fn to_payloads(notices: &[CommitNotice]) -> Vec<String> {
    let mut payloads: Vec<String> = Vec::new();
    for notice in notices {
        let mut line = String::new();
        // Writing to a string does not fail.
        let _ = match notice {
            CommitNotice::Events(session, last) => write!(line, "e {session} {last}"),
            CommitNotice::Debug(last) => write!(line, "d {last}"),
            CommitNotice::SessionDeleted(session) => write!(line, "x {session}"),
            CommitNotice::Tokens => write!(line, "t"),
            CommitNotice::TokenRevoked(token) => write!(line, "r {token}"),
            CommitNotice::Projects => write!(line, "p"),
            CommitNotice::Definitions => write!(line, "l"),
            CommitNotice::Servers => write!(line, "s"),
            CommitNotice::Outbox => write!(line, "o"),
        };
        match payloads.last_mut() {
            Some(payload) if payload.len() + 1 + line.len() <= MAX_PAYLOAD => {
                payload.push('\n');
                payload.push_str(&line);
            }
            _ => payloads.push(line),
        }
    }
    payloads
}

/// The notices of a payload. What cannot be read is left out: a newer version may say more.
pub(crate) fn from_payload(payload: &str) -> Vec<CommitNotice> {
    let notice = |line: &str| {
        let words: Vec<&str> = line.split(' ').collect();
        match words.as_slice() {
            ["e", session, last] => Some(CommitNotice::Events(session.parse().ok()?, last.parse().ok()?)),
            ["d", last] => Some(CommitNotice::Debug(last.parse().ok()?)),
            ["x", session] => Some(CommitNotice::SessionDeleted(session.parse().ok()?)),
            ["r", token] => Some(CommitNotice::TokenRevoked(token.parse().ok()?)),
            ["t"] => Some(CommitNotice::Tokens),
            ["p"] => Some(CommitNotice::Projects),
            ["l"] => Some(CommitNotice::Definitions),
            ["s"] => Some(CommitNotice::Servers),
            ["o"] => Some(CommitNotice::Outbox),
            _ => None,
        }
    };
    payload.lines().filter_map(notice).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn notices_are_read_as_they_were_written_and_fit_their_payloads() {
        let mut notices = vec![
            CommitNotice::Tokens,
            CommitNotice::Projects,
            CommitNotice::Definitions,
            CommitNotice::Servers,
            CommitNotice::Outbox,
            CommitNotice::Debug(7),
        ];
        notices.push(CommitNotice::SessionDeleted(SessionId::generate()));
        notices.push(CommitNotice::TokenRevoked(TokenId::generate()));
        notices.extend((0..1000).map(|index| CommitNotice::Events(SessionId::generate(), index)));
        let payloads = to_payloads(&notices);
        assert!(payloads.len() > 1);
        assert!(payloads.iter().all(|payload| payload.len() <= MAX_PAYLOAD));
        let heard: Vec<CommitNotice> = payloads
            .iter()
            .flat_map(|payload| from_payload(payload))
            .collect();
        assert_eq!(heard, notices);
    }

    #[test]
    fn what_is_not_understood_is_left_out() {
        assert_eq!(
            from_payload("z 1\nd 3\ne nobody 4\nd x\n"),
            [CommitNotice::Debug(3)]
        );
    }
}
