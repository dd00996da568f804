//! An edit of agent.json or of a tool.json, taken into a running context.
//!
//! Rules first, and at once: from the moment [`Context::apply`] returns, nothing that the edit forbids can
//! be called. Servers follow: whatever the context is to have by then, only the ones that are new, gone or
//! changed are started or stopped, side by side; the others do not notice.

use std::{
    collections::HashSet,
    sync::{Arc, atomic::Ordering},
};

use futures::future::join_all;
use oubliette_protocol::{CatalogId, Result, agent::AgentDefinition, catalog::ToolDefinition};

use super::{Context, Governed, server::Server};
use crate::upstream::Hold;

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
            let (leaving, started) = self.exchange(&governed.used);
            self.rebuild();
            join_all(leaving.into_iter().map(Leaving::end)).await;
            started
        };
        join_all(started.iter().map(|server| server.settled())).await;
        self.rebuild();
    }

    /// Puts a server that is to start in every place where there is none or another one. Nobody is turned
    /// away meanwhile: who calls a tool of one that was changed waits for its successor.
    fn exchange(&self, used: &[Arc<ToolDefinition>]) -> (Vec<Leaving>, Vec<Arc<Server>>) {
        let mut servers = self.servers.write();
        let mut before = std::mem::take(&mut *servers);
        let mut started = Vec::new();
        let mut leaving = Vec::new();
        for tool in used {
            let old = before.shift_remove(tool.id());
            if let Some(old) = old.as_ref().filter(|old| old.definition() == tool) {
                servers.insert(tool.id().clone(), old.clone());
                continue;
            }
            let (server, hold) = self.start(tool, old.as_deref());
            servers.insert(tool.id().clone(), server.clone());
            started.push(server);
            leaving.extend(old.map(|server| Leaving {
                server,
                why: "its definition changed",
                hold,
            }));
        }
        leaving.extend(before.into_values().map(|server| Leaving {
            server,
            why: "the agent does not use it any more",
            hold: None,
        }));
        (leaving, started)
    }
}

/// A server that nobody can call any more.
struct Leaving {
    server: Arc<Server>,
    why: &'static str,
    /// Its successor starts when this is dropped.
    hold: Option<Hold>,
}

impl Leaving {
    async fn end(self) {
        self.server.stop(self.why).await;
        drop(self.hold);
    }
}
