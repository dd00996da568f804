//! `session_events`: reads a session's log from an index on, and can wait for the first new event.

use std::time::Duration;

use oubliette_protocol::{Error, Principal, Result, event::SessionStatus};

use crate::{
    Sessions,
    request::{EventsQuery, EventsReply, IncludeChildren},
};

/// The most events in one reply.
pub(crate) const MAX_EVENTS: usize = 1_000;
/// The longest wait for the first event.
pub(crate) const MAX_WAIT: Duration = Duration::from_millis(50_000);

/// Checks how many events a reader asks for and how long it wants to wait; for this log and the debugger's.
pub fn check_events_bounds(max_events: usize, wait: Duration) -> Result<()> {
    if max_events == 0 || max_events > MAX_EVENTS {
        return Err(Error::invalid(format!("max_events must be 1 to {MAX_EVENTS}")));
    }
    if wait > MAX_WAIT {
        return Err(Error::invalid(format!(
            "wait_ms must be at most {}",
            MAX_WAIT.as_millis()
        )));
    }
    Ok(())
}

impl Sessions {
    /// Returns the events after an index. With a wait, returns as soon as there is one.
    pub async fn events(&self, principal: &Principal, query: EventsQuery) -> Result<EventsReply> {
        check_events_bounds(query.max_events, query.wait)?;
        let row = self.visible_row(principal, &query.session_id).await?;
        // An ended session logs nothing more, so there is nothing to wait for.
        let wait = if row.status == SessionStatus::Ended {
            Duration::ZERO
        } else {
            query.wait
        };
        let log = self.deps.store.events();
        let since = query.since_index.max(-1);
        let events = log.poll(&query.session_id, since, query.max_events, wait).await?;
        let last_index = events.last().map_or(query.since_index, |event| event.index);
        let children = match query.children {
            IncludeChildren::No => None,
            IncludeChildren::Yes => Some(self.child_events(principal, &query).await?),
        };
        // Read after the events, so that the status is not older than they are.
        let status = match self.in_memory(&query.session_id) {
            Some(live) => live.status(),
            None => self.visible_row(principal, &query.session_id).await?.status,
        };
        Ok(EventsReply {
            events,
            last_index,
            status,
            children,
        })
    }
}
