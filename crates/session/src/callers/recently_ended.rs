//! The requests that ended last, remembered to tell a repeated answer from a late or unknown one.

use std::collections::{HashMap, VecDeque};

use oubliette_protocol::RequestId;

use super::book::PrincipalId;

/// How many requests are remembered; an answer to an older one is refused as unknown.
const MAX_REMEMBERED: usize = 256;

/// Whether a request ended with an answer; decides how a second answer is refused.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum RecentEnding {
    /// The caller answered, with a result or an error.
    Answered,
    /// It timed out, was cancelled, or its caller disconnected.
    Unanswered,
}

/// The last [`MAX_REMEMBERED`] ended requests, with the principal that could answer each.
#[derive(Debug, Default)]
pub(super) struct RecentlyEnded {
    order: VecDeque<RequestId>,
    endings: HashMap<RequestId, (PrincipalId, RecentEnding)>,
}

impl RecentlyEnded {
    /// Adds a request; when the limit is reached, the oldest is removed.
    pub(super) fn remember(&mut self, request_id: &RequestId, owner: PrincipalId, ending: RecentEnding) {
        if self.order.len() == MAX_REMEMBERED
            && let Some(oldest) = self.order.pop_front()
        {
            self.endings.remove(&oldest);
        }
        self.order.push_back(request_id.clone());
        self.endings.insert(request_id.clone(), (owner, ending));
    }

    /// How many are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.endings.len()
    }

    /// The principal that could answer a request, and how it ended; `None` when it is not remembered.
    pub(super) fn get(&self, request_id: &RequestId) -> Option<(&PrincipalId, RecentEnding)> {
        self.endings
            .get(request_id)
            .map(|(owner, ending)| (owner, *ending))
    }
}
