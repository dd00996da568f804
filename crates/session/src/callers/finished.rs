//! The last requests that ended: enough to tell a repeated answer from a late one, and no more.

use std::collections::{HashMap, VecDeque};

use oubliette_protocol::RequestId;

use super::book::Owner;

/// How many are remembered; older ones are as good as unknown.
const MOST: usize = 256;

/// How a request ended, as far as a second answer is concerned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Fate {
    /// It was answered, with a result or an error.
    Answered,
    /// It timed out, was cancelled, or its caller left.
    Lost,
}

/// See the module.
#[derive(Debug, Default)]
pub(super) struct Finished {
    order: VecDeque<RequestId>,
    fates: HashMap<RequestId, (Owner, Fate)>,
}

impl Finished {
    /// Remembers one, forgetting the oldest.
    pub(super) fn remember(&mut self, request_id: &RequestId, owner: Owner, fate: Fate) {
        if self.order.len() == MOST
            && let Some(oldest) = self.order.pop_front()
        {
            self.fates.remove(&oldest);
        }
        self.order.push_back(request_id.clone());
        self.fates.insert(request_id.clone(), (owner, fate));
    }

    /// How many are remembered.
    #[cfg(test)]
    pub(super) fn len(&self) -> usize {
        self.fates.len()
    }

    /// Whose it was and how it ended.
    pub(super) fn get(&self, request_id: &RequestId) -> Option<(&Owner, Fate)> {
        self.fates.get(request_id).map(|(owner, fate)| (owner, *fate))
    }
}
