//! `session_events`: the log from an index on, waited for if need be.

use std::time::Duration;

use oubliette_protocol::{Error, Principal, Result, event::Status};

use crate::{
    Sessions,
    request::{Children, EventsQuery, EventsReply},
};

/// Most events in one answer.
pub const MAX_EVENTS: usize = 1_000;
/// Longest wait for the first one.
pub const MAX_WAIT: Duration = Duration::from_millis(50_000);

impl Sessions {
    /// Events past an index. With a wait, returns at the first.
    pub async fn events(&self, principal: &Principal, query: EventsQuery) -> Result<EventsReply> {
        if query.max_events == 0 || query.max_events > MAX_EVENTS {
            return Err(Error::invalid(format!("max_events must be 1 to {MAX_EVENTS}")));
        }
        if query.wait > MAX_WAIT {
            return Err(Error::invalid(format!(
                "wait_ms must be at most {}",
                MAX_WAIT.as_millis()
            )));
        }
        let row = self.row(principal, &query.session_id).await?;
        // An ended session says nothing more: waiting would only keep its reader.
        let wait = if row.status == Status::Ended {
            Duration::ZERO
        } else {
            query.wait
        };
        let log = self.deps.store.events();
        let since = query.since_index.max(-1);
        let events = log.poll(&query.session_id, since, query.max_events, wait).await?;
        let last_index = events.last().map_or(query.since_index, |event| event.index);
        let children = match query.children {
            Children::Hidden => None,
            Children::Included => Some(self.child_events(principal, &query).await?),
        };
        // Read after the events, so that it is not older than they are.
        let status = match self.in_memory(&query.session_id) {
            Some(live) => live.status(),
            None => self.row(principal, &query.session_id).await?.status,
        };
        Ok(EventsReply {
            events,
            last_index,
            status,
            children,
        })
    }
}
