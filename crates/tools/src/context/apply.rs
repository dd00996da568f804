//! An edit of agent.json or of a tool.json, taken into a running context.
//!
//! Rules first, and at once: from the moment [`Context::apply`] returns, nothing that the edit forbids can
//! be called. Servers follow: whatever the context is to have by then, only the ones that are new, gone or
//! changed are started or stopped, side by side; the others do not notice.

use std::{
    collections::{HashMap, HashSet},
    sync::{Arc, atomic::Ordering},
};

use futures::future::join_all;
use oubliette_protocol::{CatalogId, Result, agent::AgentDefinition, catalog::ToolDefinition};

use super::{Context, Governed, server::Server};

impl Context {
    /// Applies the tools of an edited definition and catalog: `catalog` holds the entries of `use`, `known`
    /// every id there is. Refused whole when it asks for more of the host than it may have. The future ends
    /// when new servers are ready or red; dropped, the next change does what is left to do.
    pub fn apply(
        self: &Arc<Self>,
        definition: Arc<AgentDefinition>,
        catalog: &[Arc<ToolDefinition>],
        known: Arc<HashSet<CatalogId>>,
    ) -> Result<impl Future<Output = ()> + Send + use<>> {
        let governed = Governed::new(&self.spec, definition, catalog, known)?;
        let before = self.governed.swap(Arc::new(governed));
        self.rebuild();
        // What is denied may be of any source, and the registry knows only the catalog's tools.
        if before.definition.tools != self.definition().tools {
            self.changes.send_modify(|version| *version += 1);
        }
        let context = self.clone();
        Ok(async move { context.converge().await })
    }

    /// Brings the servers in line with what the agent is to have now, whoever asked for it.
    async fn converge(&self) {
        let started = {
            let _one_at_a_time = self.changing.lock().await;
            if self.closed.load(Ordering::Acquire) {
                return;
            }
            let governed = self.governed.load_full();
            let wanted: HashMap<&CatalogId, &Arc<ToolDefinition>> =
                governed.used.iter().map(|tool| (tool.id(), tool)).collect();
            let surplus = self.take_out(|server| wanted.get(server.id()) != Some(&server.definition()));
            join_all(surplus.iter().map(|server| {
                server.stop(match wanted.contains_key(server.id()) {
                    true => "its definition changed",
                    false => "the agent does not use it any more",
                })
            }))
            .await;
            let mut started = Vec::new();
            for tool in &governed.used {
                if !self.servers.read().contains_key(tool.id()) {
                    let server = self.start(tool);
                    self.servers.write().insert(tool.id().clone(), server.clone());
                    started.push(server);
                }
            }
            started
        };
        self.rebuild();
        join_all(started.iter().map(|server| server.settled())).await;
        self.rebuild();
    }

    /// Takes servers away from those that can be called.
    fn take_out(&self, surplus: impl Fn(&Server) -> bool) -> Vec<Arc<Server>> {
        let mut servers = self.servers.write();
        let ids: Vec<CatalogId> = servers
            .values()
            .filter(|server| surplus(server))
            .map(|server| server.id().clone())
            .collect();
        ids.iter().filter_map(|id| servers.shift_remove(id)).collect()
    }
}
