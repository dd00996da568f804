//! The tools of the session as the server last told them, and the address of each name.

use std::{collections::HashMap, sync::Arc};

use oubliette_protocol::{
    CallerId,
    caller::DeclaredTool,
    relay::CallerToolsConfig,
    tool::{OWN_PREFIX, ToolAddress, ToolSpec, any_object_schema},
};
use parking_lot::Mutex;
use rmcp::model::{JsonObject, Tool};
use serde_json::Value;
use tokio::sync::watch;

/// The answer to `agent_tools`: the agent's catalog tools and the base tools.
#[derive(Debug, Default, PartialEq)]
pub(crate) struct AgentTools {
    pub(crate) tools: Vec<ToolSpec>,
    pub(crate) base: Vec<ToolSpec>,
}

/// The tools of all sources. Readers take a snapshot; writers replace the tools of one source at a time.
pub(crate) struct SessionTools {
    sources: Mutex<ToolsBySource>,
    /// Incremented when the list differs from the one the agent was shown.
    changes: watch::Sender<u64>,
    /// True once the tools have been loaded from the server for the first time.
    loaded: watch::Sender<bool>,
}

#[derive(Default)]
struct ToolsBySource {
    /// In the order they were declared.
    callers: Vec<(CallerId, Vec<DeclaredTool>)>,
    /// The declarations a new connection has sent so far, while it still loads: until it is done the agent keeps the
    /// tools it had.
    loading: Option<Vec<(CallerId, Vec<DeclaredTool>)>>,
    agent: AgentTools,
    oubliette: Vec<ToolSpec>,
    list: Arc<ListedTools>,
    /// Whether an agent has been shown the list.
    shown: bool,
}

/// The list that an agent is shown.
#[derive(Default)]
struct ListedTools {
    tools: Vec<Tool>,
    addresses: HashMap<String, ToolAddress>,
}

impl Default for SessionTools {
    fn default() -> Self {
        Self {
            sources: Mutex::default(),
            changes: watch::Sender::new(0),
            loaded: watch::Sender::new(false),
        }
    }
}

impl SessionTools {
    /// The tools to show; from now on a change of the list is notified.
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

    /// The tool that a call of this name is for. A name that is not listed is sent to the server as well, which decides.
    pub(crate) fn address(&self, name: &str, has_key: bool) -> ToolAddress {
        if let Some(address) = self.sources.lock().list.addresses.get(name) {
            return address.clone();
        }
        match name.strip_prefix(OWN_PREFIX) {
            Some(own) if has_key => ToolAddress::Oubliette(own.into()),
            _ => ToolAddress::Catalog(name.into()),
        }
    }

    /// Changes with each later change of the list.
    pub(crate) fn changes(&self) -> watch::Receiver<u64> {
        self.changes.subscribe()
    }

    /// Becomes true when the tools have been loaded for the first time.
    pub(crate) fn loaded(&self) -> watch::Receiver<bool> {
        self.loaded.subscribe()
    }

    /// A new connection starts to send its callers' declarations.
    pub(crate) fn begin_loading(&self) {
        self.sources.lock().loading = Some(Vec::new());
    }

    /// Replaces the tools of a caller that declared, changed or withdrew them.
    pub(crate) fn set_caller_tools(&self, config: CallerToolsConfig) {
        self.change(|sources| {
            let callers = sources.loading.as_mut().unwrap_or(&mut sources.callers);
            let known = callers.iter().position(|(id, _)| *id == config.caller_id);
            match (known, config.tools.is_empty()) {
                (Some(at), true) => drop(callers.remove(at)),
                (Some(at), false) => callers[at].1 = config.tools,
                (None, true) => {}
                (None, false) => callers.push((config.caller_id, config.tools)),
            }
        });
    }

    /// Ends what [`SessionTools::begin_loading`] began. Oubliette's own tools stay as they were unless given.
    pub(crate) fn finish_loading(&self, agent: AgentTools, oubliette: Option<Vec<ToolSpec>>) {
        self.change(|sources| {
            if let Some(callers) = sources.loading.take() {
                sources.callers = callers;
            }
            sources.agent = agent;
            if let Some(oubliette) = oubliette {
                sources.oubliette = oubliette;
            }
        });
        self.loaded.send_replace(true);
    }

    /// Replaces the agent's catalog tools and the base tools.
    pub(crate) fn set_agent_tools(&self, agent: AgentTools) {
        self.change(|sources| sources.agent = agent);
    }

    fn change(&self, edit: impl FnOnce(&mut ToolsBySource)) {
        let mut sources = self.sources.lock();
        edit(&mut sources);
        let list = sources.build();
        if list.tools == sources.list.tools {
            // The addresses may still differ in the name they carry.
            sources.list = Arc::new(list);
            return;
        }
        sources.list = Arc::new(list);
        let notify = sources.shown;
        drop(sources);
        if notify {
            self.changes.send_modify(|version| *version += 1);
        }
    }
}

impl ToolsBySource {
    /// The list with every name once; of two sources with the same name, the one added first here keeps it.
    fn build(&self) -> ListedTools {
        let mut list = ListedTools::default();
        for spec in &self.agent.base {
            list.add(spec.name.clone(), spec, ToolAddress::Base(spec.name.clone()));
        }
        for (caller_id, tools) in &self.callers {
            for tool in tools {
                let spec = ToolSpec {
                    name: format!("{caller_id}_{}", tool.name),
                    description: tool.description.clone().unwrap_or_default(),
                    input_schema: tool.input_schema.clone().unwrap_or_else(any_object_schema),
                };
                let address = ToolAddress::Caller {
                    caller_id: Some(caller_id.clone()),
                    tool: tool.name.clone(),
                };
                list.add(spec.name.clone(), &spec, address);
            }
        }
        for spec in &self.agent.tools {
            list.add(spec.name.clone(), spec, ToolAddress::Catalog(spec.name.clone()));
        }
        for spec in &self.oubliette {
            list.add(
                format!("{OWN_PREFIX}{}", spec.name),
                spec,
                ToolAddress::Oubliette(spec.name.clone()),
            );
        }
        list
    }
}

impl ListedTools {
    fn add(&mut self, name: String, spec: &ToolSpec, address: ToolAddress) {
        if self.addresses.contains_key(&name) {
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
        self.addresses.insert(name, address);
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
            input_schema: any_object_schema(),
        };
        names.iter().map(spec).collect()
    }

    fn names(tools: &SessionTools) -> Vec<String> {
        tools.list().iter().map(|tool| tool.name.to_string()).collect()
    }

    #[test]
    fn every_source_is_listed_under_its_prefix() {
        let tools = SessionTools::default();
        tools.begin_loading();
        tools.set_caller_tools(config("myapp", &["send"]));
        assert!(
            names(&tools).is_empty(),
            "nothing is shown before the connection has sent everything"
        );
        let agent = AgentTools {
            tools: specs(&["read"]),
            base: specs(&["session_message"]),
        };
        tools.finish_loading(agent, Some(specs(&["project_list"])));
        assert_eq!(
            names(&tools),
            ["session_message", "myapp_send", "read", "oubliette_project_list"]
        );
        assert_eq!(tools.address("read", false), ToolAddress::Catalog("read".into()));
        assert_eq!(
            tools.address("session_message", false),
            ToolAddress::Base("session_message".into())
        );
        assert_eq!(
            tools.address("oubliette_project_list", true),
            ToolAddress::Oubliette("project_list".into())
        );
        assert_eq!(
            tools.address("oubliette_other", true),
            ToolAddress::Oubliette("other".into())
        );
        assert_eq!(
            tools.address("oubliette_other", false),
            ToolAddress::Catalog("oubliette_other".into())
        );
        assert_eq!(
            tools.address("@files/read", true),
            ToolAddress::Catalog("@files/read".into())
        );
        let caller = ToolAddress::Caller {
            caller_id: Some("myapp".parse().unwrap()),
            tool: "send".into(),
        };
        assert_eq!(tools.address("myapp_send", false), caller);
    }

    #[test]
    fn a_change_is_notified_once_and_only_after_a_list_was_shown() {
        let tools = SessionTools::default();
        let changes = tools.changes();
        tools.begin_loading();
        tools.finish_loading(AgentTools::default(), None);
        tools.set_caller_tools(config("a", &["x"]));
        assert!(!changes.has_changed().unwrap());
        names(&tools);
        tools.set_caller_tools(config("a", &["x"]));
        assert!(
            !changes.has_changed().unwrap(),
            "the same declaration again is no change"
        );
        tools.set_caller_tools(config("a", &["x", "y"]));
        assert!(changes.has_changed().unwrap());
        tools.set_caller_tools(config("a", &[]));
        assert!(names(&tools).is_empty());
    }

    #[test]
    fn a_new_connection_replaces_callers_only_when_loading_is_finished() {
        let tools = SessionTools::default();
        tools.begin_loading();
        tools.set_caller_tools(config("old", &["x"]));
        tools.finish_loading(AgentTools::default(), Some(specs(&["p"])));
        tools.begin_loading();
        tools.set_caller_tools(config("new", &["y"]));
        assert_eq!(names(&tools), ["old_x", "oubliette_p"]);
        tools.finish_loading(AgentTools::default(), None);
        assert_eq!(names(&tools), ["new_y", "oubliette_p"]);
    }

    #[test]
    fn a_name_of_two_sources_is_listed_once() {
        let tools = SessionTools::default();
        tools.set_caller_tools(config("a", &["x"]));
        tools.set_agent_tools(AgentTools {
            tools: specs(&["a_x", "a_x"]),
            base: vec![],
        });
        assert_eq!(names(&tools), ["a_x"]);
        assert!(matches!(tools.address("a_x", false), ToolAddress::Caller { .. }));
    }
}
