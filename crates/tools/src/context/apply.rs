//! Applies an edit of agent.json or of a tool.json to a running context.
//!
//! Rules first, and at once: from the moment [`AgentContext::apply`] returns, nothing that the edit forbids can
//! be called. Then the servers: only those that are new, removed or changed are started or stopped,
//! concurrently; the others run on undisturbed.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering},
};

use futures::future::join_all;
use oubliette_protocol::{CatalogId, Result, agent::AgentDefinition, catalog::ToolDefinition};

use super::{AgentContext, AppliedDefinition, running_entry::RunningEntry};
use crate::upstream::StartHold;

impl AgentContext {
    /// Applies the tools of an edited definition and catalog: `catalog` holds the entries of `use`, `catalog_ids`
    /// every id of the catalog. An edit that asks for more of the host than `trust` allows is refused and changes
    /// nothing. The future completes when new servers are ready or red; if it is dropped, the next edit does
    /// what is left to do.
    pub fn apply(
        self: &Arc<Self>,
        definition: Arc<AgentDefinition>,
        catalog: &[Arc<ToolDefinition>],
        catalog_ids: Arc<HashSet<CatalogId>>,
    ) -> Result<impl Future<Output = ()> + Send + use<>> {
        let applied = AppliedDefinition::new(&self.spec, definition, catalog, catalog_ids)?;
        let before = self.applied.swap(Arc::new(applied));
        self.rebuild_registry();
        // `denied` may hide tools of any source, and the registry only notices changes of catalog tools.
        if before.definition.tools != self.definition().tools {
            self.changes.send_modify(|version| *version += 1);
        }
        let context = self.clone();
        Ok(async move { context.converge_servers().await })
    }

    /// Starts and stops servers until they match the definition applied last, be it by this edit or a later one.
    async fn converge_servers(&self) {
        let started = {
            let _one_at_a_time = self.change_lock.lock().await;
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let applied = self.applied.load_full();
            let (stopping, started) = self.replace_changed(&applied.used);
            self.rebuild_registry();
            join_all(stopping.into_iter().map(StoppingEntry::stop)).await;
            started
        };
        join_all(started.iter().map(|server| server.wait_first_start())).await;
        self.rebuild_registry();
    }

    /// Starts an entry for every id that has none or one with another definition, and returns the entries to
    /// stop and those started. No call is refused meanwhile: one to a changed server waits for its successor.
    fn replace_changed(&self, used: &[Arc<ToolDefinition>]) -> (Vec<StoppingEntry>, Vec<Arc<RunningEntry>>) {
        let mut servers = self.servers.write();
        let mut before = std::mem::take(&mut *servers);
        let mut started = Vec::new();
        let mut stopping = Vec::new();
        for tool in used {
            let old = before.shift_remove(tool.id());
            if let Some(old) = old.as_ref().filter(|old| old.definition() == tool) {
                servers.insert(tool.id().clone(), old.clone());
                continue;
            }
            let (server, hold) = self.start(tool, old.as_deref());
            servers.insert(tool.id().clone(), server.clone());
            started.push(server);
            stopping.extend(old.map(|entry| StoppingEntry {
                entry,
                why: "its definition changed",
                successor_hold: hold,
            }));
        }
        stopping.extend(before.into_values().map(|entry| StoppingEntry {
            entry,
            why: "the agent does not use it any more",
            successor_hold: None,
        }));
        (stopping, started)
    }
}

/// An entry that was removed from the context and has to be stopped.
struct StoppingEntry {
    entry: Arc<RunningEntry>,
    why: &'static str,
    /// Dropping it lets the successor start.
    successor_hold: Option<StartHold>,
}

impl StoppingEntry {
    async fn stop(self) {
        self.entry.stop(self.why).await;
        drop(self.successor_hold);
    }
}
