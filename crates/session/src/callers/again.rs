//! Requests read back from the log, for a caller that was away.

use std::{collections::VecDeque, sync::Arc};

use futures::{Stream, StreamExt as _, TryStreamExt as _, stream};
use oubliette_protocol::{Error, Result, SessionId, event::Event};
use oubliette_store::EventLog;

/// Most events read at once.
const PAGE: usize = 256;
/// How many events may be read for each one that is wanted.
const SPARSE: usize = 4;

/// The events at these indexes, in their order. One page is held at a time, however many there are.
pub(super) fn read(
    log: EventLog,
    session: SessionId,
    wanted: VecDeque<i64>,
) -> impl Stream<Item = Result<Arc<Event>>> + Send {
    let pages = stream::try_unfold((log, session, wanted), |(log, session, mut wanted)| async move {
        let Some(&first) = wanted.front() else {
            return Result::<_, Error>::Ok(None);
        };
        let mut page = log.read(&session, first - 1, span(&wanted)).await?;
        let end = page.last().map_or(first, |event| event.index);
        page.retain(|event| wanted.binary_search(&event.index).is_ok());
        wanted.drain(..wanted.partition_point(|index| *index <= end));
        Ok(Some((page, (log, session, wanted))))
    });
    pages.map_ok(|page| stream::iter(page).map(Ok)).try_flatten()
}

/// How many events to read from the first on: those that lie together are read together.
fn span(wanted: &VecDeque<i64>) -> usize {
    let Some(first) = wanted.front() else { return 0 };
    let width = |last: &i64| usize::try_from(last - first + 1).unwrap_or(usize::MAX);
    // The widest of them; widths only grow.
    let mut together = wanted
        .iter()
        .take(PAGE)
        .enumerate()
        .map(|(n, last)| (n + 1, width(last)))
        .filter(|(count, width)| *width <= PAGE && *width <= count * SPARSE);
    together.next_back().map_or(1, |(_, width)| width)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_lies_together_is_read_together() {
        let span = |wanted: &[i64]| super::span(&wanted.iter().copied().collect());
        assert_eq!(span(&[]), 0);
        assert_eq!(span(&[7]), 1);
        assert_eq!(span(&[7, 8, 9]), 3);
        assert_eq!(span(&[7, 14]), 8);
        assert_eq!(span(&[7, 15]), 1, "too far apart");
        assert_eq!(span(&[7, 5000]), 1);
        assert_eq!(span(&(0..1000).collect::<Vec<_>>()), PAGE);
        assert_eq!(span(&(0..1000).map(|n| n * 4).collect::<Vec<_>>()), 253);
    }
}
