//! The declaration of lent functions, and the message that starts a session with them.

use std::{fmt::Display, future::Future, sync::Arc};

use futures::future::BoxFuture;
use schemars::JsonSchema;
use serde::{Serialize, de::DeserializeOwned};
use serde_json::{Map, Value, json};

use crate::{Error, Event, Oubliette, Session};

/// The default for how many requests run at once.
const DEFAULT_CONCURRENCY: usize = 256;

pub(crate) type ToolFunction = Arc<dyn Fn(Value) -> BoxFuture<'static, Result<Value, String>> + Send + Sync>;
pub(crate) type EventCallback = Arc<dyn Fn(&Event) + Send + Sync>;

/// The functions a program lends to an agent, under one caller id.
#[must_use = "nothing is lent before `start`"]
pub struct Lend {
    pub(crate) client: Oubliette,
    pub(crate) caller_id: String,
    pub(crate) tools: Vec<LentFunction>,
    pub(crate) on_event: Option<EventCallback>,
    pub(crate) concurrency: usize,
}

#[derive(Clone)]
pub(crate) struct LentFunction {
    name: String,
    description: String,
    schema: Value,
    pub(crate) run: ToolFunction,
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

/// A message to an agent: its text, and which session, agent, project or workspace it is for.
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

    /// Sends it to an existing session.
    #[must_use]
    pub fn session(self, session_id: impl Into<String>) -> Self {
        self.with("session_id", session_id.into())
    }

    /// Starts the session with this agent, by its slug.
    #[must_use]
    pub fn agent(self, slug: impl Into<String>) -> Self {
        self.with("agent", slug.into())
    }

    /// Starts the session in this project.
    #[must_use]
    pub fn project(self, project_id: impl Into<String>) -> Self {
        self.with("project_id", project_id.into())
    }

    /// Starts the session in this workspace.
    #[must_use]
    pub fn workspace(self, workspace_id: impl Into<String>) -> Self {
        self.with("workspace_id", workspace_id.into())
    }

    /// Sets any other argument of `session_message`.
    #[must_use]
    pub fn with(mut self, field: &str, value: impl Into<Value>) -> Self {
        self.0.insert(field.into(), value.into());
        self
    }

    /// Sets an argument, unless the program has set it.
    pub(crate) fn with_default(mut self, field: &str, value: Value) -> Self {
        self.0.entry(field).or_insert(value);
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
            concurrency: DEFAULT_CONCURRENCY,
        }
    }

    /// Lends a function. The tool's input schema is made from the argument type; the result is sent back as
    /// JSON, an error as the tool's error text.
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

    /// Lends a function that takes and returns JSON, with this input schema.
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
        let run: ToolFunction = Arc::new(move |arguments| Box::pin(run(arguments)));
        self.tools.push(LentFunction {
            name: name.into(),
            description: description.into(),
            schema,
            run,
        });
        self
    }

    /// Calls a function for every event of the session, in order. It must not block: it runs on the task that
    /// reads the stream.
    pub fn on_event(mut self, hear: impl Fn(&Event) + Send + Sync + 'static) -> Self {
        self.on_event = Some(Arc::new(hear));
        self
    }

    /// Limits how many requests run at once (default 256, at least 1); further ones wait.
    pub fn concurrency(mut self, most: usize) -> Self {
        self.concurrency = most.max(1);
        self
    }

    /// Sends the message, which declares the tools, and answers requests for them until the [`Session`] is
    /// dropped.
    pub async fn start(self, message: impl Into<Message>) -> Result<Session, Error> {
        Session::start(self, message.into()).await
    }

    /// The `context` argument of `session_message`: caller id and tool declarations.
    pub(crate) fn context(&self) -> Value {
        let declared = |tool: &LentFunction| json!({ "name": tool.name, "description": tool.description, "inputSchema": tool.schema });
        let tools: Vec<_> = self.tools.iter().map(declared).collect();
        json!({ "caller_id": self.caller_id, "caller_tools": tools })
    }

    pub(crate) fn find_tool(&self, name: &str) -> Option<&LentFunction> {
        self.tools.iter().find(|tool| tool.name == name)
    }
}

/// The schema of a type as a tool's input schema, which must be of type object. For other types, such as
/// `Value` and `()`, it is an object with any fields.
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
    fn the_input_schema_is_made_from_the_argument_type() {
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
