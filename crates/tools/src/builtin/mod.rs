//! The built-in file and shell tools, each limited by its catalog entry's policy.
//!
//! `path` parses the path of a call; `beneath` opens it with `openat2`, so that no link and no race leads out of
//! the workspace; `fs_read` and `fs_write` are the file tools, `quota` limits what is written and `unfinished`
//! removes temporary files that a killed server left; `shell_exec` runs commands in the sandbox,
//! `command_policy` decides which ones, `capture` bounds the output that is kept. `fuzzing` is the fuzz target of the
//! policies.

mod beneath;
mod capture;
mod command_policy;
mod fs_read;
mod fs_write;
mod fuzzing;
mod path;
mod quota;
mod shell_exec;
mod unfinished;

use std::{path::PathBuf, sync::Arc};

use oubliette_protocol::{
    Error, JsonObject, Result,
    catalog::{BuiltinDefinition as Definition, BuiltinPolicy},
    tool::CallResult,
};
use oubliette_sandbox::{ResourceLimits, SandboxDriver, SandboxGroup};
use serde_json::{Value, json};

use crate::{CallContext, Permit, registry::ToolInfo};

#[doc(hidden)]
pub use self::fuzzing::fuzz_policy;
pub use self::unfinished::remove_unfinished_writes;
use self::{command_policy::CommandPolicy, path::AllowedPaths, quota::WorkspaceQuota};

/// What a built-in tool runs with: its workspace, sandbox and limits.
pub struct BuiltinSetup {
    /// The session's workspace on the host.
    pub workspace: PathBuf,
    /// The sandbox driver that runs commands.
    pub sandbox: Arc<dyn SandboxDriver>,
    /// The resource limits of a command; `workspace_mb` also limits `fs_write`.
    pub limits: ResourceLimits,
    /// The session's group of sandboxes.
    pub group: Option<SandboxGroup>,
    /// The sandbox's label in logs.
    pub label: String,
}

/// One built-in tool of an agent.
pub struct BuiltinTool {
    info: Arc<ToolInfo>,
    setup: BuiltinSetup,
    kind: BuiltinKind,
}

enum BuiltinKind {
    Read(Arc<AllowedPaths>),
    Write(Arc<AllowedPaths>, Arc<WorkspaceQuota>),
    Shell(CommandPolicy),
}

impl BuiltinTool {
    /// Creates a built-in with its policy compiled.
    pub fn new(definition: &Definition, setup: BuiltinSetup) -> Self {
        let kind = match &definition.builtin_policy {
            BuiltinPolicy::FsRead { allowed_paths } => {
                BuiltinKind::Read(AllowedPaths::new(allowed_paths).into())
            }
            BuiltinPolicy::FsWrite { allowed_paths } => BuiltinKind::Write(
                AllowedPaths::new(allowed_paths).into(),
                WorkspaceQuota::new(setup.limits.workspace_mb).into(),
            ),
            policy @ BuiltinPolicy::ShellExec { .. } => BuiltinKind::Shell(CommandPolicy::new(policy)),
        };
        Self {
            info: tool_info(definition),
            setup,
            kind,
        }
    }

    /// The tool as it is registered.
    pub fn info(&self) -> Arc<ToolInfo> {
        self.info.clone()
    }

    /// Calls the tool.
    pub async fn call(&self, permit: Permit, arguments: JsonObject, ctx: &CallContext) -> Result<CallResult> {
        // The permit is used up: it was for this one call.
        drop(permit);
        let workspace = self.setup.workspace.clone();
        match &self.kind {
            BuiltinKind::Read(allowed) => {
                let (allowed, arguments) = (allowed.clone(), parse_arguments(arguments)?);
                run_blocking(move || fs_read::run(&workspace, &allowed, arguments)).await
            }
            BuiltinKind::Write(allowed, quota) => {
                let (allowed, quota, arguments) =
                    (allowed.clone(), quota.clone(), parse_arguments(arguments)?);
                run_blocking(move || fs_write::run(&workspace, &allowed, &quota, arguments)).await
            }
            BuiltinKind::Shell(commands) => {
                shell_exec::run(&self.setup, commands, parse_arguments(arguments)?, ctx).await
            }
        }
    }
}

fn parse_arguments<T: serde::de::DeserializeOwned>(arguments: JsonObject) -> Result<T> {
    oubliette_protocol::strict::parse_arguments(Value::Object(arguments))
}

/// Runs work that blocks on the file system, on a thread that may.
async fn run_blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    tokio::task::spawn_blocking(work).await.map_err(Error::internal)?
}

/// A built-in as it is registered: its description lists what the policy allows.
pub(crate) fn tool_info(definition: &Definition) -> Arc<ToolInfo> {
    let (what, input_schema) = match &definition.builtin_policy {
        BuiltinPolicy::FsRead { allowed_paths } => (
            format!(
                "Reads a file of the workspace, beneath: {}.",
                join_limited(allowed_paths)
            ),
            fs_read::schema(),
        ),
        BuiltinPolicy::FsWrite { allowed_paths } => (
            format!(
                "Writes a file of the workspace, beneath: {}. Parents are made.",
                join_limited(allowed_paths)
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
                join_limited(allowed_commands)
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

fn join_limited(items: &[String]) -> String {
    const MAX_SHOWN: usize = 40;
    let shown = items
        .iter()
        .take(MAX_SHOWN)
        .map(String::as_str)
        .collect::<Vec<_>>()
        .join(", ");
    match items.len() {
        0 => "nothing".into(),
        n if n > MAX_SHOWN => format!("{shown} and {} more", n - MAX_SHOWN),
        _ => shown,
    }
}

/// A JSON schema of type object without additional properties.
fn object_schema(properties: Value, required: &[&str]) -> Value {
    json!({ "type": "object", "properties": properties, "required": required, "additionalProperties": false })
}
