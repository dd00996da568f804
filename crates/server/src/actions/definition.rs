//! The definition of an action: name, description, scope, effect and argument schema. MCP, REST, OpenAPI, the relay
//! socket and the audit log all use it.

use std::{borrow::Cow, sync::OnceLock};

use oubliette_protocol::{Error, JsonObject, Result, Scope};
use schemars::{JsonSchema, Schema, SchemaGenerator, generate::SchemaSettings};
use serde::{Serialize, de::DeserializeOwned};
use serde_json::Value;

use super::ActionCall;
use crate::doors::body;

/// Everything about an action but its handler.
#[derive(Debug)]
pub struct ActionDefinition {
    /// Name of the action, which is also its MCP tool's.
    pub name: &'static str,
    /// What it does, for people and models.
    pub description: &'static str,
    /// Lowest scope that may perform it.
    pub scope: Scope,
    /// What it changes.
    pub effect: Effect,
    /// Whether it concerns a project or the whole server.
    pub state_owner: StateOwner,
    /// Maximum size of a REST request with its arguments, in bytes.
    pub max_body_bytes: usize,
    /// JSON schema of its arguments.
    pub schema: fn() -> &'static JsonObject,
    /// Makes the JSON schema of its result, with a generator that collects the types it refers to.
    pub result_schema: fn(&mut SchemaGenerator) -> Schema,
}

/// What an action changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Changes nothing; not audited.
    Read,
    /// Adds something; repeating it adds more.
    Write,
    /// Sets something; idempotent.
    Set,
    /// Removes something.
    Delete,
    /// Happens many times a second, so its audit entry is synchronised to the disk a moment after it is written.
    Stream,
}

impl Effect {
    /// Whether it changes anything, and so is audited.
    pub fn changes(self) -> bool {
        self != Effect::Read
    }
}

/// Whose state an action reads or changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StateOwner {
    /// A project's; the handler checks that the grant can see it.
    Project,
    /// The whole server's; a token bound to a project may read but not change it.
    Server,
}

/// An action: a struct whose fields are its arguments.
pub(crate) trait ActionHandler: DeserializeOwned + JsonSchema + Send + 'static {
    /// What it answers.
    type Output: Serialize + JsonSchema;

    /// Name of the action and of its MCP tool.
    const NAME: &'static str;
    /// What it does, for people and models.
    const DESCRIPTION: &'static str;
    /// Lowest scope that may perform it.
    const SCOPE: Scope;
    /// What it changes.
    const EFFECT: Effect;
    /// Whether it concerns a project or the whole server.
    const STATE_OWNER: StateOwner = StateOwner::Project;

    /// Maximum size of a REST request with its arguments, in bytes, for those who may perform it.
    const MAX_BODY_BYTES: usize = body::MAX_BODY_BYTES;

    /// The id or name of what it acts on, for the audit log. Never a secret.
    fn target(&self) -> Option<Cow<'_, str>> {
        None
    }

    /// Runs it; the grant's scope is already checked.
    fn run(self, call: &ActionCall<'_>) -> impl Future<Output = Result<Self::Output>> + Send;

    /// The definition made of the constants above.
    fn definition() -> ActionDefinition {
        ActionDefinition {
            name: Self::NAME,
            description: Self::DESCRIPTION,
            scope: Self::SCOPE,
            effect: Self::EFFECT,
            state_owner: Self::STATE_OWNER,
            max_body_bytes: Self::MAX_BODY_BYTES,
            schema: schema_of::<Self>,
            result_schema: |generator| generator.subschema_for::<Self::Output>(),
        }
    }
}

/// The argument schema of a type, generated once.
fn schema_of<T: JsonSchema + 'static>() -> &'static JsonObject {
    // A static in a generic function is shared by all its instances, so the cache is keyed by type.
    static SCHEMAS: OnceLock<
        parking_lot::Mutex<std::collections::HashMap<std::any::TypeId, &'static JsonObject>>,
    > = OnceLock::new();
    let schemas = SCHEMAS.get_or_init(Default::default);
    schemas
        .lock()
        .entry(std::any::TypeId::of::<T>())
        .or_insert_with(|| Box::leak(Box::new(generate_schema::<T>())))
}

fn generate_schema<T: JsonSchema>() -> JsonObject {
    let settings = SchemaSettings::draft2020_12().with(|s| {
        s.inline_subschemas = true;
        s.meta_schema = None;
    });
    let schema = settings.into_generator().into_root_schema_for::<T>();
    let mut object = match schema.to_value() {
        Value::Object(object) => object,
        _ => JsonObject::new(),
    };
    object.remove("title");
    object.remove("description");
    object.insert("type".into(), "object".into());
    object
        .entry("properties")
        .or_insert_with(|| Value::Object(JsonObject::new()));
    object
}

/// Parses an action's arguments; the error names an unknown or wrong field.
pub(crate) fn parse_arguments<T: DeserializeOwned>(arguments: JsonObject) -> Result<T> {
    oubliette_protocol::strict::from_value(Value::Object(arguments)).map_err(|error| {
        let at = match error.field.as_str() {
            "" => String::new(),
            field => format!("{field}: "),
        };
        Error::invalid(format!("arguments: {at}{}", error.reason))
    })
}
