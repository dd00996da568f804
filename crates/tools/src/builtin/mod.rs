//! Oubliette's own file and shell tools, each bounded by its catalog entry's policy.
//!
//! `path` reads what a call asked for; `beneath` opens it with the kernel's help, so that no link and no
//! race leads out; `fs_read` and `fs_write` are the file tools, `room` bounds what is written and `sweep`
//! removes what a killed server left half-written; `shell_exec` runs commands in the sandbox,
//! `words` decides which ones, `capture` bounds what they say.

mod beneath;
mod capture;
mod fs_read;
mod fs_write;
mod path;
mod room;
mod shell_exec;
mod sweep;
mod words;

use std::{path::PathBuf, sync::Arc};

use oubliette_protocol::{
    Error, Object, Result,
    catalog::{Builtin as Definition, BuiltinPolicy},
    tool::CallResult,
};
use oubliette_sandbox::{Limits, Sandbox};
use serde_json::{Value, json};

use crate::{CallContext, Permit, registry::ToolInfo};

pub use self::sweep::sweep;
use self::{path::Allowed, room::Room, words::Commands};

/// Where a built-in works.
pub struct Place {
    /// The session's workspace on the host.
    pub workspace: PathBuf,
    /// Where commands run.
    pub sandbox: Arc<dyn Sandbox>,
    /// How much of the machine a command may use.
    pub limits: Limits,
    /// For logs.
    pub label: String,
}

/// One built-in of an agent.
pub struct Builtin {
    info: Arc<ToolInfo>,
    place: Place,
    kind: Kind,
}

enum Kind {
    Read(Arc<Allowed>),
    Write(Arc<Allowed>, Arc<Room>),
    Shell(Commands),
}

impl Builtin {
    /// A built-in with its policy made ready.
    pub fn new(definition: &Definition, place: Place) -> Self {
        let kind = match &definition.builtin_policy {
            BuiltinPolicy::FsRead { allowed_paths } => Kind::Read(Allowed::new(allowed_paths).into()),
            BuiltinPolicy::FsWrite { allowed_paths } => Kind::Write(
                Allowed::new(allowed_paths).into(),
                Room::new(place.limits.workspace_mb).into(),
            ),
            policy @ BuiltinPolicy::ShellExec { .. } => Kind::Shell(Commands::new(policy)),
        };
        Self {
            info: info(definition),
            place,
            kind,
        }
    }

    /// The tool as it is registered.
    pub fn info(&self) -> Arc<ToolInfo> {
        self.info.clone()
    }

    /// Calls it.
    pub async fn call(&self, permit: Permit, arguments: Object, ctx: &CallContext) -> Result<CallResult> {
        // The permit is spent: it was for this one call.
        drop(permit);
        let workspace = self.place.workspace.clone();
        match &self.kind {
            Kind::Read(allowed) => {
                let (allowed, asked) = (allowed.clone(), read(arguments)?);
                blocking(move || fs_read::run(&workspace, &allowed, asked)).await
            }
            Kind::Write(allowed, room) => {
                let (allowed, room, asked) = (allowed.clone(), room.clone(), read(arguments)?);
                blocking(move || fs_write::run(&workspace, &allowed, &room, asked)).await
            }
            Kind::Shell(commands) => shell_exec::run(&self.place, commands, read(arguments)?, ctx).await,
        }
    }
}

fn read<T: serde::de::DeserializeOwned>(arguments: Object) -> Result<T> {
    oubliette_protocol::strict::arguments(Value::Object(arguments))
}

async fn blocking(work: impl FnOnce() -> Result<CallResult> + Send + 'static) -> Result<CallResult> {
    tokio::task::spawn_blocking(work).await.map_err(Error::internal)?
}

/// A built-in as it is registered: its description says what the policy opens.
pub fn info(definition: &Definition) -> Arc<ToolInfo> {
    let (what, input_schema) = match &definition.builtin_policy {
        BuiltinPolicy::FsRead { allowed_paths } => (
            format!("Reads a file of the workspace, beneath: {}.", list(allowed_paths)),
            fs_read::schema(),
        ),
        BuiltinPolicy::FsWrite { allowed_paths } => (
            format!(
                "Writes a file of the workspace, beneath: {}. Parents are made.",
                list(allowed_paths)
            ),
            fs_write::schema(),
        ),
        BuiltinPolicy::ShellExec {
            allowed_commands,
            allowed_env,
            shell,
            ..
        } => {
            let how = if *shell {
                "argv is joined and run by sh -c"
            } else {
                "no shell interprets it"
            };
            let what = format!(
                "Runs a command in the sandbox; {how}. Commands: {}.",
                list(allowed_commands)
            );
            (what, shell_exec::schema(allowed_env))
        }
    };
    let description = match definition.description.as_str() {
        "" => what,
        own => format!("{own} {what}"),
    };
    let name = definition.builtin_policy.tool().into();
    Arc::new(ToolInfo {
        name,
        description,
        input_schema: input_schema.into(),
        note: None,
    })
}

fn list(items: &[String]) -> String {
    const MOST: usize = 40;
    let shown = items
        .iter()
        .take(MOST)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    match items.len() {
        0 => "nothing".into(),
        n if n > MOST => format!("{shown} and {} more", n - MOST),
        _ => shown,
    }
}

/// A schema of type object that admits no other fields.
fn object_schema(properties: Value, required: &[&str]) -> Value {
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}
