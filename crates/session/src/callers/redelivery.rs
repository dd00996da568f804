//! Reads caller tool requests back from the event log, to deliver them again after a reconnect.

use std::{collections::VecDeque, sync::Arc};

use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use oubliette_protocol::{Error, Result, SessionId, event::SessionEvent};
use oubliette_store::EventLog;

/// The most events read at once.
const MAX_PAGE_EVENTS: usize = 256;
/// How many events may be read on average for each wanted one.
const MAX_READ_PER_WANTED: usize = 4;

/// The events at these ascending indexes, in order. Only one page is in memory at a time.
pub(super) fn read_events_at(
    log: EventLog,
    session: SessionId,
    wanted: VecDeque<i64>,
) -> impl Stream<Item = Result<Arc<SessionEvent>>> + Send {
    let pages = stream::try_unfold((log, session, wanted), |(log, session, mut wanted)| async move {
        let Some(&first) = wanted.front() else {
            return Result::<_, Error>::Ok(None);
        };
        let mut page = log.read(&session, first - 1, read_length(&wanted)).await?;
        let end = page.last().map_or(first, |event| event.index);
        page.retain(|event| wanted.binary_search(&event.index).is_ok());
        wanted.drain(..wanted.partition_point(|index| *index <= end));
        Ok(Some((page, (log, session, wanted))))
    });
    pages.map_ok(|page| stream::iter(page).map(Ok)).try_flatten()
}

/// How many events to read from the first wanted index on, so that neighbouring ones are read together.
fn read_length(wanted: &VecDeque<i64>) -> usize {
    let Some(first) = wanted.front() else { return 0 };
    let width = |last: &i64| usize::try_from(last - first + 1).unwrap_or(usize::MAX);
    // The widest range that satisfies both limits; widths increase with the count.
    let mut together = wanted
        .iter()
        .take(MAX_PAGE_EVENTS)
        .enumerate()
        .map(|(n, last)| (n + 1, width(last)))
        .filter(|(count, width)| *width <= MAX_PAGE_EVENTS && *width <= count * MAX_READ_PER_WANTED);
    together.next_back().map_or(1, |(_, width)| width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbouring_events_are_read_together() {
        let span = |wanted: &[i64]| super::read_length(&wanted.iter().copied().collect());
        assert_eq!(span(&[]), 0);
        assert_eq!(span(&[7]), 1);
        assert_eq!(span(&[7, 8, 9]), 3);
        assert_eq!(span(&[7, 14]), 8);
        assert_eq!(span(&[7, 15]), 1, "too far apart");
        assert_eq!(span(&[7, 5000]), 1);
        assert_eq!(span(&(0..1000).collect::<Vec<_>>()), MAX_PAGE_EVENTS);
        assert_eq!(span(&(0..1000).map(|n| n * 4).collect::<Vec<_>>()), 253);
    }
}
