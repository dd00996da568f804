//! Which functions are lent, and how a session begins.

use std::{fmt::Display, future::Future, sync::Arc};

use futures::future::BoxFuture;
use schemars::JsonSchema;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::{Error, Event, Oubliette, Session};

/// Requests worked on at once unless the program says otherwise.
const CONCURRENCY: usize = 256;

pub(crate) type Run = Arc<dyn Fn(Value) -> BoxFuture<'static, Result<Value, String>> + Send + Sync>;
pub(crate) type OnEvent = Arc<dyn Fn(&Event) + Send + Sync>;

/// The functions a program lends, under one name.
#[must_use = "nothing is lent before `start`"]
pub struct Lend {
    pub(crate) client: Oubliette,
    pub(crate) caller_id: String,
    pub(crate) tools: Vec<Tool>,
    pub(crate) on_event: Option<OnEvent>,
    pub(crate) concurrency: usize,
}

#[derive(Clone)]
pub(crate) struct Tool {
    name: String,
    description: String,
    schema: Value,
    pub(crate) run: Run,
}

impl std::fmt::Debug for Lend {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let tools: Vec<_> = self.tools.iter().map(|tool| &tool.name).collect();
        f.debug_struct("Lend")
            .field("caller_id", &self.caller_id)
            .field("tools", &tools)
            .finish_non_exhaustive()
    }
}

/// What to say to the agent, and to which.
#[derive(Debug, Clone, Default)]
pub struct Message(Map<String, Value>);

impl From<&str> for Message {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl From<String> for Message {
    fn from(text: String) -> Self {
        Self::new(text)
    }
}

impl Message {
    /// A message to a new session of the default agent.
    pub fn new(text: impl Into<String>) -> Self {
        Self::default().with("message", text.into())
    }

    /// To a session that is already there.
    #[must_use]
    pub fn session(self, session_id: impl Into<String>) -> Self {
        self.with("session_id", session_id.into())
    }

    /// To this agent.
    #[must_use]
    pub fn agent(self, slug: impl Into<String>) -> Self {
        self.with("agent", slug.into())
    }

    /// In this project.
    #[must_use]
    pub fn project(self, project_id: impl Into<String>) -> Self {
        self.with("project_id", project_id.into())
    }

    /// In this workspace.
    #[must_use]
    pub fn workspace(self, workspace_id: impl Into<String>) -> Self {
        self.with("workspace_id", workspace_id.into())
    }

    /// Any other argument of `session_message`.
    #[must_use]
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.0.insert(field.into(), value.into());
        self
    }

    pub(crate) fn session_id(&self) -> Option<&str> {
        self.0.get("session_id").and_then(Value::as_str)
    }

    pub(crate) fn into_value(self) -> Value {
        Value::Object(self.0)
    }
}

impl Lend {
    pub(crate) fn new(client: Oubliette, caller_id: String) -> Self {
        Self {
            client,
            caller_id,
            tools: Vec::new(),
            on_event: None,
            concurrency: CONCURRENCY,
        }
    }

    /// Lends a function. Its schema comes from its argument's type; its result goes back as JSON, its
    /// error as the tool's error text.
    pub fn tool<A, R, E, F, Fut>(
        self,
        name: impl Into<String>,
        description: impl Into<String>,
        run: F,
    ) -> Self
    where
        A: DeserializeOwned + JsonSchema,
        R: Serialize,
        E: Display,
        F: Fn(A) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<R, E>> + Send + 'static,
    {
        let schema = object_schema(schemars::schema_for!(A).to_value());
        self.raw_tool(name, description, schema, move |arguments| {
            let running = serde_json::from_value::<A>(arguments).map(&run);
            async move {
                let result = running.map_err(|why| format!("wrong arguments: {why}"))?.await;
                let result = result.map_err(|why| why.to_string())?;
                serde_json::to_value(result).map_err(|why| format!("the result is not JSON: {why}"))
            }
        })
    }

    /// Lends a function with a schema of its own, on plain JSON.
    pub fn raw_tool<F, Fut>(
        mut self,
        name: impl Into<String>,
        description: impl Into<String>,
        schema: Value,
        run: F,
    ) -> Self
    where
        F: Fn(Value) -> Fut + Send + Sync + 'static,
        Fut: Future<Output = Result<Value, String>> + Send + 'static,
    {
        let run: Run = Arc::new(move |arguments| Box::pin(run(arguments)));
        self.tools.push(Tool {
            name: name.into(),
            description: description.into(),
            schema,
            run,
        });
        self
    }

    /// Hears every event of the session, in order. Must not block: the stream is read where it runs.
    pub fn on_event(mut self, hear: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.on_event = Some(Arc::new(hear));
        self
    }

    /// How many requests are worked on at once; more wait their turn.
    pub fn concurrency(mut self, most: usize) -> Self {
        self.concurrency = most.max(1);
        self
    }

    /// Sends the message with the tools declared, and serves them from then on.
    pub async fn start(self, message: impl Into<Message>) -> Result<Session, Error> {
        Session::start(self, message.into()).await
    }

    /// The `context` of `session_message`.
    pub(crate) fn context(&self) -> Value {
        let declared = |tool: &Tool| json!({ "name": tool.name, "description": tool.description, "inputSchema": tool.schema });
        let tools: Vec<_> = self.tools.iter().map(declared).collect();
        json!({ "caller_id": self.caller_id, "caller_tools": tools })
    }

    pub(crate) fn find(&self, name: &str) -> Option<&Tool> {
        self.tools.iter().find(|tool| tool.name == name)
    }
}

/// A tool's schema must be of type object: a type that is anything goes (`Value`) or nothing (`()`) takes
/// an object all the same.
fn object_schema(mut schema: Value) -> Value {
    match schema.as_object_mut() {
        Some(object) if object.get("type").is_some_and(|t| t == "object") => {
            object.remove("$schema");
            object.remove("title");
            schema
        }
        _ => json!({ "type": "object" }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[derive(serde::Deserialize, JsonSchema)]
    #[allow(dead_code)]
    struct Note {
        /// What to show.
        message: String,
        urgent: Option<bool>,
    }

    #[test]
    fn the_schema_is_the_arguments_type() {
        let client = Oubliette::connect("http://localhost:1", "t").unwrap();
        let lend = client
            .lend("myapp")
            .tool("notify", "Shows", async |_: Note| Ok::<_, String>(()))
            .tool("any", "Anything", async |_: Value| Ok::<_, String>(()));
        let context = lend.context();
        assert_eq!(context["caller_id"], "myapp");
        let schema = &context["caller_tools"][0]["inputSchema"];
        assert_eq!(schema["type"], "object");
        assert_eq!(
            schema["properties"]["message"],
            json!({"type":"string","description":"What to show."})
        );
        assert_eq!(schema["required"], json!(["message"]));
        assert_eq!(
            context["caller_tools"][1]["inputSchema"],
            json!({"type":"object"})
        );
    }
}
