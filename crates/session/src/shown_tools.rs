//! [`ShownTools`]: which tools the agent of one session has been shown, as its `oubliette-client` reports it.
//!
//! An agent inside may report anything. It concerns only itself: how long its next prompt waits, and which of its own
//! permission requests are left to the tool plane.

use std::{collections::HashSet, sync::Arc, time::Instant};

use oubliette_protocol::{caller::full_name, tool::OWN_PREFIX};
use oubliette_tools::{CallerTools as _, ToolPlane};
use tokio::sync::watch;

use crate::callers::CallerRelay;

/// The most names of one listing that are kept; the tool plane has fewer.
const MAX_NAMES: usize = 20_000;
/// The longest name that is kept, in bytes.
const MAX_NAME_BYTES: usize = 256;

/// The names of a listing.
pub(crate) type ListedNames = Arc<HashSet<String>>;

/// What the running agent's client has done so far.
#[derive(Debug, Clone, Default)]
struct ListingState {
    /// Whether a client has connected since the agent was started.
    connected: bool,
    /// The names of the last listing; `None` until the agent has listed its tools.
    names: Option<ListedNames>,
    /// When it listed them again; `None` while it has listed them at most once.
    relisted_at: Option<Instant>,
}

/// The tools that the running agent of one session knows.
#[derive(Debug, Default)]
pub(crate) struct ShownTools(watch::Sender<ListingState>);

impl ShownTools {
    /// Forgets everything, because another agent process is started.
    pub(crate) fn reset(&self) {
        self.0.send_replace(ListingState::default());
    }

    /// A client has connected to the session's relay socket.
    pub(crate) fn note_connected(&self) {
        self.0.send_modify(|state| state.connected = true);
    }

    /// The agent was shown these tools.
    pub(crate) fn note_listed(&self, names: Vec<String>) {
        let kept = names.into_iter().filter(|name| name.len() <= MAX_NAME_BYTES);
        let names = Arc::new(kept.take(MAX_NAMES).collect());
        self.0.send_modify(|state| {
            if state.names.replace(names).is_some() {
                state.relisted_at = Some(Instant::now());
            }
        });
    }

    /// Whether a client has connected since the agent was started.
    pub(crate) fn is_connected(&self) -> bool {
        self.0.borrow().connected
    }

    /// The names of the last listing; `None` until the agent has listed its tools.
    pub(crate) fn names(&self) -> Option<ListedNames> {
        self.0.borrow().names.clone()
    }

    /// When the agent last listed its tools again; `None` while it has listed them at most once.
    pub(crate) fn relisted_at(&self) -> Option<Instant> {
        self.0.borrow().relisted_at
    }

    /// Waits until the agent has listed exactly the tools it should know now. Returns at once when it has listed none
    /// yet: then it will list those of now.
    pub(crate) async fn wait_current(&self, plane: &ToolPlane, callers: &CallerRelay) {
        let mut state = self.0.subscribe();
        let mut changed = (plane.changes(), callers.changes());
        loop {
            if self.is_current(plane, callers) {
                return;
            }
            tokio::select! {
                _ = state.changed() => {}
                _ = changed.0.changed() => {}
                _ = changed.1.changed() => {}
            }
        }
    }

    /// Whether the agent has listed exactly the tools it should know now, or none yet.
    pub(crate) fn is_current(&self, plane: &ToolPlane, callers: &CallerRelay) -> bool {
        let Some(listed) = self.names() else { return true };
        let expected = expected_names(plane, callers);
        // Oubliette's own tools are listed by the key once and do not change; a caller's id is never `oubliette`.
        let others = listed.iter().filter(|name| !name.starts_with(OWN_PREFIX));
        others.clone().count() == expected.len() && others.into_iter().all(|name| expected.contains(name))
    }
}

/// The names of base tools, lent tools and catalog tools an agent is shown now.
fn expected_names(plane: &ToolPlane, callers: &CallerRelay) -> HashSet<String> {
    let mut names: HashSet<String> = plane.base_tools().into_iter().map(|tool| tool.name).collect();
    names.extend(plane.agent_tools().into_iter().map(|tool| tool.name));
    for declaration in callers.declarations() {
        let lent = declaration
            .tools
            .iter()
            .map(|tool| full_name(&declaration.caller_id, &tool.name));
        names.extend(lent.filter(|name| !plane.denies(name)));
    }
    names.retain(|name| !name.starts_with(OWN_PREFIX));
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_listing_is_forgotten_when_another_agent_is_started() {
        let listing = ShownTools::default();
        assert!(!listing.is_connected() && listing.names().is_none());
        listing.note_connected();
        listing.note_listed(vec!["a".into(), "x".repeat(MAX_NAME_BYTES + 1)]);
        assert_eq!(listing.names().unwrap().len(), 1);
        assert!(listing.relisted_at().is_none(), "the first listing is none again");
        listing.note_listed(vec!["b".into()]);
        assert!(listing.relisted_at().is_some());
        listing.reset();
        assert!(!listing.is_connected() && listing.names().is_none() && listing.relisted_at().is_none());
    }
}
