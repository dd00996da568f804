//! Built-in tools: which one an entry is, and what it may access.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{CatalogId, strict::FieldError};

/// Definition of a built-in tool.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub struct BuiltinDefinition {
    /// Address of this file's JSON Schema, for editors; not read.
    #[serde(rename = "$schema", default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// Catalog id, the same as the name of its folder.
    pub id: CatalogId,
    /// What the entry is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Which built-in it is and what it may access.
    #[serde(alias = "builtin_policy")]
    pub builtin_policy: BuiltinPolicy,
}

/// Which built-in tool it is, and what it may read, write or run.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(
    tag = "name",
    rename_all = "snake_case",
    rename_all_fields = "camelCase",
    deny_unknown_fields
)]
pub enum BuiltinPolicy {
    /// Reads files.
    FsRead {
        /// Paths it may read beneath: relative to the workspace, or absolute as seen in the sandbox.
        #[serde(alias = "allowed_paths")]
        allowed_paths: Vec<String>,
    },
    /// Writes files.
    FsWrite {
        /// Paths it may write beneath: relative to the workspace, or absolute as seen in the sandbox.
        #[serde(alias = "allowed_paths")]
        allowed_paths: Vec<String>,
    },
    /// Runs commands in the sandbox.
    ShellExec {
        /// Commands it may run; each is matched word by word against the beginning of `argv`.
        #[serde(alias = "allowed_commands")]
        allowed_commands: Vec<String>,
        /// Names of environment variables a call may set. Default: none.
        #[serde(default, alias = "allowed_env")]
        allowed_env: Vec<String>,
        /// Timeout of one command, in ms, 1 to 3600000. Default: 10000.
        #[serde(default = "default_command_timeout_ms", alias = "timeout_ms")]
        #[schemars(range(min = 1, max = 3_600_000))]
        timeout_ms: u64,
        /// Whether `argv` is one line that is run with `sh -c`. Default: false.
        #[serde(default)]
        shell: bool,
    },
}

impl BuiltinPolicy {
    /// The built-in's name, which is also its tool's name.
    pub fn tool(&self) -> &'static str {
        match self {
            BuiltinPolicy::FsRead { .. } => "fs_read",
            BuiltinPolicy::FsWrite { .. } => "fs_write",
            BuiltinPolicy::ShellExec { .. } => "shell_exec",
        }
    }

    pub(super) fn check(&self) -> Result<(), FieldError> {
        match self {
            BuiltinPolicy::FsRead { allowed_paths } | BuiltinPolicy::FsWrite { allowed_paths } => {
                for (i, path) in allowed_paths.iter().enumerate() {
                    if path.is_empty() || path.contains('\0') || path.split('/').any(|part| part == "..") {
                        let field = format!("builtinPolicy.allowedPaths[{i}]");
                        return Err(FieldError::at(field, "must be a path without .."));
                    }
                }
                Ok(())
            }
            BuiltinPolicy::ShellExec {
                allowed_commands,
                allowed_env,
                timeout_ms,
                ..
            } => {
                if let Some(i) = allowed_commands
                    .iter()
                    .position(|c| c.split_whitespace().next().is_none())
                {
                    return Err(FieldError::at(
                        format!("builtinPolicy.allowedCommands[{i}]"),
                        "must name a command",
                    ));
                }
                for (i, name) in allowed_env.iter().enumerate() {
                    crate::agent::check_env_name(name)
                        .map_err(|why| FieldError::at(format!("builtinPolicy.allowedEnv[{i}]"), why))?;
                }
                match (1..=3_600_000).contains(timeout_ms) {
                    true => Ok(()),
                    false => Err(FieldError::at(
                        "builtinPolicy.timeoutMs",
                        "must be 1 to 3600000 milliseconds",
                    )),
                }
            }
        }
    }
}

fn default_command_timeout_ms() -> u64 {
    10_000
}
