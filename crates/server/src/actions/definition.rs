//! What every action says of itself, once: MCP, REST, OpenAPI, the relay socket and the audit log all
//! read it from here.

use std::{borrow::Cow, sync::OnceLock};

use oubliette_protocol::{Error, Object, Result, Scope};
use schemars::{JsonSchema, generate::SchemaSettings};
use serde::de::DeserializeOwned;
use serde_json::Value;

use super::Call;

/// What an action is, apart from doing it.
#[derive(Debug)]
pub struct Definition {
    /// The tool's name.
    pub name: &'static str,
    /// For people and models.
    pub description: &'static str,
    /// The least scope.
    pub scope: Scope,
    /// What it does to the state.
    pub effect: Effect,
    /// Whose state.
    pub reach: Reach,
    /// Its arguments as a JSON schema.
    pub schema: fn() -> &'static Object,
}

/// What an action does to the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// Nothing.
    Read,
    /// Adds to it or changes it.
    Write,
    /// The same when repeated.
    Set,
    /// Takes something away.
    Delete,
    /// Many a second: audited behind the answer, not before it.
    Stream,
}

impl Effect {
    /// Whether it changes anything.
    pub fn changes(self) -> bool {
        self != Effect::Read
    }
}

/// Whose state an action touches.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reach {
    /// A project's, which the handler checks against the grant.
    Project,
    /// The whole server's: a token bound to a project may look, not change.
    Server,
}

/// One tool. Its fields are its arguments.
pub trait Tool: DeserializeOwned + JsonSchema + Send + 'static {
    /// Its name.
    const NAME: &'static str;
    /// What it does.
    const DESCRIPTION: &'static str;
    /// The least scope.
    const SCOPE: Scope;
    /// What it does to the state.
    const EFFECT: Effect;
    /// Whose state.
    const REACH: Reach = Reach::Project;

    /// What it acts on, for the audit log. Never a secret.
    fn target(&self) -> Option<Cow<'_, str>> {
        None
    }

    /// Does it.
    fn run(self, call: &Call<'_>) -> impl Future<Output = Result<Value>> + Send;

    /// Its definition.
    fn definition() -> Definition {
        Definition {
            name: Self::NAME,
            description: Self::DESCRIPTION,
            scope: Self::SCOPE,
            effect: Self::EFFECT,
            reach: Self::REACH,
            schema: schema_of::<Self>,
        }
    }
}

/// The schema of a tool's arguments, made once.
fn schema_of<T: JsonSchema + 'static>() -> &'static Object {
    // A generic function has one static for all its types, so the cache is keyed by type.
    static MADE: OnceLock<parking_lot::Mutex<std::collections::HashMap<std::any::TypeId, &'static Object>>> =
        OnceLock::new();
    let made = MADE.get_or_init(Default::default);
    made.lock()
        .entry(std::any::TypeId::of::<T>())
        .or_insert_with(|| Box::leak(Box::new(make_schema::<T>())))
}

fn make_schema<T: JsonSchema>() -> Object {
    let settings = SchemaSettings::draft2020_12().with(|s| {
        s.inline_subschemas = true;
        s.meta_schema = None;
    });
    let schema = settings.into_generator().into_root_schema_for::<T>();
    let mut object = match schema.to_value() {
        Value::Object(object) => object,
        _ => Object::new(),
    };
    object.remove("title");
    object.remove("description");
    object.insert("type".into(), "object".into());
    object
        .entry("properties")
        .or_insert_with(|| Value::Object(Object::new()));
    object
}

/// Reads a tool's arguments; an unknown or wrong one is refused by name.
pub fn arguments<T: DeserializeOwned>(arguments: Object) -> Result<T> {
    oubliette_protocol::strict::from_value(Value::Object(arguments)).map_err(|refusal| {
        let at = match refusal.field.as_str() {
            "" => String::new(),
            field => format!("{field}: "),
        };
        Error::invalid(format!("arguments: {at}{}", refusal.reason))
    })
}
