//! The tools as they are now, and what a name means.

use std::{collections::HashMap, sync::Arc};

use oubliette_protocol::{
    CallerId,
    caller::DeclaredTool,
    relay::CallerToolsConfig,
    tool::{ToolSpec, any_object},
};
use parking_lot::Mutex;
use rmcp::model::{JsonObject, Tool};
use serde_json::Value;
use tokio::sync::watch;

use crate::outcome::Source;

/// What Oubliette's own tools are called here: `oubliette_<name>`.
pub(crate) const OWN_PREFIX: &str = "oubliette_";

/// Where a call goes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Route {
    /// A caller's tool, by its own name.
    Caller { caller_id: CallerId, tool: String },
    /// One of Oubliette's own, unprefixed.
    Own(String),
    /// A base tool: its name is the relay's method.
    Base(String),
    /// Anything else: the server knows the agent's names, aliases and canonical ones too.
    Agent(String),
}

impl Route {
    /// Where its answers come from.
    pub(crate) fn source(&self) -> Source {
        match self {
            Self::Caller { .. } => Source::Caller,
            Self::Agent(_) => Source::Catalog,
            Self::Own(_) | Self::Base(_) => Source::Data,
        }
    }
}

/// What the server says this agent has.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct AgentTools {
    pub(crate) tools: Vec<ToolSpec>,
    pub(crate) base: Vec<ToolSpec>,
}

/// The tools of all sources. Readers take a snapshot; writers replace one source at a time.
pub(crate) struct Registry {
    sources: Mutex<Sources>,
    /// Bumped when the list is no longer the one an agent was shown.
    changes: watch::Sender<u64>,
    /// True once the list has been learnt from the server for the first time.
    learnt: watch::Sender<bool>,
}

#[derive(Default)]
struct Sources {
    /// In the order they were declared.
    callers: Vec<(CallerId, Vec<DeclaredTool>)>,
    /// Declarations of a new connection, until it has told all it knows: until then the agent keeps the
    /// tools it had.
    incoming: Option<Vec<(CallerId, Vec<DeclaredTool>)>>,
    agent: AgentTools,
    own: Vec<ToolSpec>,
    list: Arc<List>,
    shown: bool,
}

/// A list as an agent is shown it.
#[derive(Default)]
struct List {
    tools: Vec<Tool>,
    routes: HashMap<String, Route>,
}

impl Default for Registry {
    fn default() -> Self {
        Self {
            sources: Mutex::default(),
            changes: watch::Sender::new(0),
            learnt: watch::Sender::new(false),
        }
    }
}

impl Registry {
    /// The tools to show; from now on a change is worth telling.
    pub(crate) fn list(&self) -> Vec<Tool> {
        let mut sources = self.sources.lock();
        sources.shown = true;
        sources.list.tools.clone()
    }

    /// One tool by its listed name.
    pub(crate) fn get(&self, name: &str) -> Option<Tool> {
        let list = self.sources.lock().list.clone();
        list.tools.iter().find(|tool| tool.name == name).cloned()
    }

    /// Where a call of this name goes. Names that are not listed are the server's to judge.
    pub(crate) fn route(&self, name: &str, has_key: bool) -> Route {
        if let Some(route) = self.sources.lock().list.routes.get(name) {
            return route.clone();
        }
        match name.strip_prefix(OWN_PREFIX) {
            Some(own) if has_key => Route::Own(own.into()),
            _ => Route::Agent(name.into()),
        }
    }

    /// Tells of each later change of the list.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Becomes true when the list has been learnt for the first time.
    pub(crate) fn learnt(&self) -> watch::Receiver<bool> {
        self.learnt.subscribe()
    }

    /// A new connection begins to tell its callers.
    pub(crate) fn begin(&self) {
        self.sources.lock().incoming = Some(Vec::new());
    }

    /// A caller declared, changed or withdrew its tools.
    pub(crate) fn caller(&self, config: CallerToolsConfig) {
        self.change(|sources| {
            let callers = sources.incoming.as_mut().unwrap_or(&mut sources.callers);
            let known = callers.iter().position(|(id, _)| *id == config.caller_id);
            match (known, config.tools.is_empty()) {
                (Some(at), true) => drop(callers.remove(at)),
                (Some(at), false) => callers[at].1 = config.tools,
                (None, true) => {}
                (None, false) => callers.push((config.caller_id, config.tools)),
            }
        });
    }

    /// The agent's tools, as first told by a connection; ends what [`Registry::begin`] began.
    pub(crate) fn commit(&self, agent: AgentTools, own: Option<Vec<ToolSpec>>) {
        self.change(|sources| {
            if let Some(callers) = sources.incoming.take() {
                sources.callers = callers;
            }
            sources.agent = agent;
            if let Some(own) = own {
                sources.own = own;
            }
        });
        self.learnt.send_replace(true);
    }

    /// The agent's tools changed.
    pub(crate) fn agent(&self, agent: AgentTools) {
        self.change(|sources| sources.agent = agent);
    }

    fn change(&self, edit: impl FnOnce(&mut Sources)) {
        let mut sources = self.sources.lock();
        edit(&mut sources);
        let list = sources.build();
        if list.tools == sources.list.tools {
            // Routes may differ in what they carry, never in the names.
            sources.list = Arc::new(list);
            return;
        }
        sources.list = Arc::new(list);
        let tell = sources.shown;
        drop(sources);
        if tell {
            self.changes.send_modify(|version| *version += 1);
        }
    }
}

impl Sources {
    /// Every name once; where two sources claim one, the earlier here keeps it.
    fn build(&self) -> List {
        let mut list = List::default();
        for spec in &self.agent.base {
            list.add(spec.name.clone(), spec, Route::Base(spec.name.clone()));
        }
        for (caller_id, tools) in &self.callers {
            for tool in tools {
                let spec = ToolSpec {
                    name: format!("{caller_id}_{}", tool.name),
                    description: tool.description.clone().unwrap_or_default(),
                    input_schema: tool.input_schema.clone().unwrap_or_else(any_object),
                };
                let route = Route::Caller {
                    caller_id: caller_id.clone(),
                    tool: tool.name.clone(),
                };
                list.add(spec.name.clone(), &spec, route);
            }
        }
        for spec in &self.agent.tools {
            list.add(spec.name.clone(), spec, Route::Agent(spec.name.clone()));
        }
        for spec in &self.own {
            list.add(
                format!("{OWN_PREFIX}{}", spec.name),
                spec,
                Route::Own(spec.name.clone()),
            );
        }
        list
    }
}

impl List {
    fn add(&mut self, name: String, spec: &ToolSpec, route: Route) {
        if self.routes.contains_key(&name) {
            return;
        }
        let schema = match &spec.input_schema {
            Value::Object(schema) => schema.clone(),
            _ => JsonObject::from_iter([("type".to_owned(), "object".into())]),
        };
        let description = Some(spec.description.clone())
            .filter(|d| !d.is_empty())
            .map(Into::into);
        self.tools
            .push(Tool::new_with_raw(name.clone(), description, schema));
        self.routes.insert(name, route);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn config(caller: &str, tools: &[&str]) -> CallerToolsConfig {
        let tools = tools
            .iter()
            .map(|name| json!({ "name": name }))
            .collect::<Vec<_>>();
        serde_json::from_value(json!({ "caller_id": caller, "tools": tools })).unwrap()
    }

    fn specs(names: &[&str]) -> Vec<ToolSpec> {
        let spec = |name: &&str| ToolSpec {
            name: (*name).into(),
            description: String::new(),
            input_schema: any_object(),
        };
        names.iter().map(spec).collect()
    }

    fn names(registry: &Registry) -> Vec<String> {
        registry.list().iter().map(|tool| tool.name.to_string()).collect()
    }

    #[test]
    fn every_source_is_listed_under_its_prefix() {
        let registry = Registry::default();
        registry.begin();
        registry.caller(config("myapp", &["send"]));
        assert!(
            names(&registry).is_empty(),
            "nothing is shown before the connection has told all"
        );
        let agent = AgentTools {
            tools: specs(&["read"]),
            base: specs(&["session_message"]),
        };
        registry.commit(agent, Some(specs(&["project_list"])));
        assert_eq!(
            names(&registry),
            ["session_message", "myapp_send", "read", "oubliette_project_list"]
        );
        assert_eq!(registry.route("read", false), Route::Agent("read".into()));
        assert_eq!(
            registry.route("session_message", false),
            Route::Base("session_message".into())
        );
        assert_eq!(
            registry.route("oubliette_project_list", true),
            Route::Own("project_list".into())
        );
        assert_eq!(
            registry.route("oubliette_other", true),
            Route::Own("other".into())
        );
        assert_eq!(
            registry.route("oubliette_other", false),
            Route::Agent("oubliette_other".into())
        );
        assert_eq!(
            registry.route("@files/read", true),
            Route::Agent("@files/read".into())
        );
        let caller = Route::Caller {
            caller_id: "myapp".parse().unwrap(),
            tool: "send".into(),
        };
        assert_eq!(registry.route("myapp_send", false), caller);
    }

    #[test]
    fn a_change_is_told_once_and_only_after_a_list_was_shown() {
        let registry = Registry::default();
        let changes = registry.changes();
        registry.begin();
        registry.commit(AgentTools::default(), None);
        registry.caller(config("a", &["x"]));
        assert!(!changes.has_changed().unwrap());
        names(&registry);
        registry.caller(config("a", &["x"]));
        assert!(
            !changes.has_changed().unwrap(),
            "the same declaration again is no change"
        );
        registry.caller(config("a", &["x", "y"]));
        assert!(changes.has_changed().unwrap());
        registry.caller(config("a", &[]));
        assert!(names(&registry).is_empty());
    }

    #[test]
    fn a_new_connection_replaces_callers_only_when_it_has_told_all() {
        let registry = Registry::default();
        registry.begin();
        registry.caller(config("old", &["x"]));
        registry.commit(AgentTools::default(), Some(specs(&["p"])));
        registry.begin();
        registry.caller(config("new", &["y"]));
        assert_eq!(names(&registry), ["old_x", "oubliette_p"]);
        registry.commit(AgentTools::default(), None);
        assert_eq!(names(&registry), ["new_y", "oubliette_p"]);
    }

    #[test]
    fn a_name_claimed_twice_is_listed_once() {
        let registry = Registry::default();
        registry.caller(config("a", &["x"]));
        registry.agent(AgentTools {
            tools: specs(&["a_x", "a_x"]),
            base: vec![],
        });
        assert_eq!(names(&registry), ["a_x"]);
        assert!(matches!(registry.route("a_x", false), Route::Caller { .. }));
    }
}
