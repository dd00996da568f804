//! `agent.json`: the definition of an agent, with its runtime, sandbox and tools.

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor},
};

use crate::{CatalogId, Slug, id::quoted, strict::FieldError};

/// Maximum size of an `agent.json` or `tool.json`, in bytes.
pub const MAX_DEFINITION_BYTES: usize = 1024 * 1024;

/// The content of an `agent.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentDefinition {
    /// Display name, 1 to 200 bytes.
    pub name: String,
    /// What the agent is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// System prompt, 1 byte to 256 KiB.
    pub prompt: String,
    /// Model: `<provider>/<model>`, or `script:<file>` for a script file beside agent.json. At most 300 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// Program that runs the agent. Default: the built-in one.
    #[serde(default)]
    pub runtime: AgentRuntime,
    /// How the agent's own permission requests (ACP) are answered. Default: allow.
    #[serde(default)]
    pub permissions: PermissionPolicy,
    /// Slugs of the agents that child sessions of this agent may run, besides itself.
    #[serde(default)]
    pub children: Vec<Slug>,
    /// Environment variables of the agent process.
    #[serde(default)]
    pub env: IndexMap<String, String>,
    /// Sandbox settings.
    #[serde(default)]
    pub sandbox: AgentSandboxSettings,
    /// Catalog entries, allow-list and aliases of its tools.
    #[serde(default)]
    pub tools: AgentToolSettings,
}

/// Program that runs an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum AgentRuntime {
    /// The built-in agent, `oubliette-agent`. With braces, because serde accepts unknown fields beside the tag of a
    /// unit variant in spite of `deny_unknown_fields`.
    Builtin {},
    /// Any program that speaks ACP on stdio.
    Acp {
        /// Program and its arguments.
        command: Vec<String>,
        /// Environment variables, in addition to the agent's `env`.
        #[serde(default)]
        env: IndexMap<String, String>,
        /// Absolute host paths that are visible inside, read-only; only those that `[trust] read_only` covers.
        #[serde(default)]
        read_only: Vec<String>,
    },
}

impl Default for AgentRuntime {
    fn default() -> Self {
        Self::Builtin {}
    }
}

/// How an agent's own permission requests (ACP) are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PermissionPolicy {
    /// All are granted; the sandbox is what limits the agent.
    #[default]
    Allow,
    /// All are refused.
    Deny,
}

/// Sandbox settings of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentSandboxSettings {
    /// Network access. Default: none.
    #[serde(default)]
    pub network: NetworkAccess,
}

/// Network access of a sandbox, ordered from least to most.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum NetworkAccess {
    /// No network: only the relay socket and the model forwarder.
    #[default]
    None,
    /// HTTP and HTTPS through the server's proxy.
    Proxy,
    /// The host's network; only if `[trust] host_network` is true.
    Host,
}

/// The tools of an agent: which catalog entries it uses, what is allowed, denied and renamed.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentToolSettings {
    /// Ids of the catalog entries it uses. When two tools would get one name, the earlier entry has it.
    #[serde(default, rename = "use")]
    pub uses: Vec<CatalogId>,
    /// Catalog tools it may call: canonical name, alias, `<id>_<tool>` or `@<id>/*`. `["*"]`, missing or empty: all.
    #[serde(default)]
    pub allowed: Vec<String>,
    /// Tools it may never call, of any source; wins over `allowed`.
    #[serde(default)]
    pub denied: Vec<String>,
    /// Other names for catalog tools: alias to `@<id>/<tool>`.
    #[serde(default, deserialize_with = "unique_keys")]
    pub aliases: IndexMap<String, String>,
}

/// Reads a map and refuses a key that appears twice, since it is not known which of the two values was meant; serde
/// would keep the last.
fn unique_keys<'de, D: Deserializer<'de>>(from: D) -> Result<IndexMap<String, String>, D::Error> {
    struct UniqueKeysVisitor;

    impl<'de> Visitor<'de> for UniqueKeysVisitor {
        type Value = IndexMap<String, String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a map of strings")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
            let mut map = IndexMap::new();
            while let Some((key, value)) = from.next_entry::<String, String>()? {
                if map.contains_key(&key) {
                    return Err(serde::de::Error::custom(format!(
                        "{} appears twice",
                        quoted(&key)
                    )));
                }
                map.insert(key, value);
            }
            Ok(map)
        }
    }

    from.deserialize_map(UniqueKeysVisitor)
}

impl AgentDefinition {
    /// Parses and checks an `agent.json`, except whether the catalog has the entries it uses.
    pub fn parse(text: &str) -> Result<Self, FieldError> {
        let definition: Self = crate::strict::from_str(text)?;
        definition.check()?;
        Ok(definition)
    }

    /// Checks lengths, names and paths, which serde does not.
    pub fn check(&self) -> Result<(), FieldError> {
        let check_length =
            |field: &str, text: &str, max: usize| match text.trim().is_empty() || text.len() > max {
                true => Err(FieldError::at(field, format!("must be 1 to {max} bytes of text"))),
                false => Ok(()),
            };
        check_length("name", &self.name, 200)?;
        check_length("prompt", &self.prompt, 256 * 1024)?;
        if let Some(model) = &self.model {
            check_length("model", model, 300)?;
            if let Some(file) = model.strip_prefix("script:") {
                check_file_name(file).map_err(|why| FieldError::at("model", why))?;
            }
        }
        if let AgentRuntime::Acp {
            command,
            env,
            read_only,
        } = &self.runtime
        {
            if command.first().is_none_or(|program| program.is_empty()) {
                return Err(FieldError::at("runtime.command", "must name a program"));
            }
            check_env("runtime.env", env)?;
            for (i, path) in read_only.iter().enumerate() {
                check_absolute_path(path)
                    .map_err(|why| FieldError::at(format!("runtime.read_only[{i}]"), why))?;
            }
        }
        check_env("env", &self.env)?;
        self.tools.check()
    }

    /// The file name of a `script:` model.
    pub fn script(&self) -> Option<&str> {
        self.model.as_deref()?.strip_prefix("script:")
    }
}

impl AgentToolSettings {
    fn check(&self) -> Result<(), FieldError> {
        const MAX_ENTRIES: usize = 10_000;
        for (field, count) in [
            ("tools.use", self.uses.len()),
            ("tools.allowed", self.allowed.len()),
            ("tools.denied", self.denied.len()),
            ("tools.aliases", self.aliases.len()),
        ] {
            if count > MAX_ENTRIES {
                return Err(FieldError::at(
                    field,
                    format!("has {count} entries; at most {MAX_ENTRIES} are allowed"),
                ));
            }
        }
        for (i, id) in self.uses.iter().enumerate() {
            if self.uses[..i].contains(id) {
                return Err(FieldError::at(
                    format!("tools.use[{i}]"),
                    format!("{id} is listed twice"),
                ));
            }
        }
        for (list, names) in [("allowed", &self.allowed), ("denied", &self.denied)] {
            for (i, name) in names.iter().enumerate() {
                if name.is_empty() || name.len() > 200 {
                    return Err(FieldError::at(
                        format!("tools.{list}[{i}]"),
                        "must be 1 to 200 bytes",
                    ));
                }
            }
        }
        for (alias, target) in &self.aliases {
            let shown: String = alias.chars().take(80).collect();
            let field = format!("tools.aliases.{shown}");
            if alias.is_empty() || alias.len() > 64 || !alias.bytes().all(is_tool_name_byte) {
                return Err(FieldError::at(
                    field,
                    "an alias is 1 to 64 of letters, digits, _ and -",
                ));
            }
            let one = split_canonical_name(target).filter(|(_, tool)| *tool != "*");
            let Some((id, _)) = one else {
                return Err(FieldError::at(field, "must point to a tool as @<id>/<tool>"));
            };
            if !self.uses.iter().any(|u| u.as_str() == id) {
                return Err(FieldError::at(
                    field,
                    format!("points to {id}, which tools.use does not list"),
                ));
            }
        }
        Ok(())
    }
}

/// Whether a byte may be part of a tool's listed name.
pub fn is_tool_name_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'-'
}

/// Splits a canonical name `@<id>/<tool>` into id and tool.
pub fn split_canonical_name(name: &str) -> Option<(&str, &str)> {
    let (id, tool) = name.strip_prefix('@')?.split_once('/')?;
    (!id.is_empty() && !tool.is_empty()).then_some((id, tool))
}

/// Maximum length of the value of a variable in a definition, in bytes: Linux's own limit of one argument.
const MAX_ENV_VALUE_BYTES: usize = 128 * 1024;

/// Checks the value of an environment variable: at most `max_bytes` bytes, without NUL.
pub fn check_env_value(value: &str, max_bytes: usize) -> Result<(), String> {
    match value.contains('\0') || value.len() > max_bytes {
        true => Err(format!("must hold no NUL and at most {} KiB", max_bytes / 1024)),
        false => Ok(()),
    }
}

pub(crate) fn check_env(field: &str, env: &IndexMap<String, String>) -> Result<(), FieldError> {
    for (name, value) in env {
        check_env_name(name).map_err(|why| FieldError::at(format!("{field}.{name}"), why))?;
        check_env_value(value, MAX_ENV_VALUE_BYTES)
            .map_err(|why| FieldError::at(format!("{field}.{name}"), why))?;
    }
    Ok(())
}

/// Checks the name of an environment variable: letters, digits and _, not starting with a digit, at most 200 bytes.
pub fn check_env_name(name: &str) -> Result<(), &'static str> {
    let mut bytes = name.bytes();
    let first = bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    match first && name.len() <= 200 && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        true => Ok(()),
        false => Err("an environment name is letters, digits and _, not starting with a digit"),
    }
}

pub(crate) fn check_absolute_path(path: &str) -> Result<(), &'static str> {
    let clean = path.starts_with('/') && !path.contains('\0') && path.split('/').all(|part| part != "..");
    if clean {
        Ok(())
    } else {
        Err("must be an absolute path without ..")
    }
}

/// Checks that a name is a plain file name that cannot lead out of its folder: letters, digits, _, - and ., not
/// starting with a dot, at most 100 bytes.
pub fn check_file_name(name: &str) -> Result<(), &'static str> {
    let plain = !name.is_empty()
        && name.len() <= 100
        && !name.starts_with('.')
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
    if plain {
        Ok(())
    } else {
        Err("must be a plain file name of letters, digits, _, - and .")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn parse(extra: &str) -> Result<AgentDefinition, FieldError> {
        AgentDefinition::parse(&format!(r#"{{"name":"W","prompt":"p"{extra}}}"#))
    }

    #[test]
    fn name_and_prompt_are_the_only_required_fields() {
        let agent = parse("").unwrap();
        assert_eq!(agent.runtime, AgentRuntime::Builtin {});
        assert_eq!(agent.sandbox.network, NetworkAccess::None);
        assert!(
            AgentDefinition::parse(r#"{"name":"W"}"#)
                .unwrap_err()
                .to_string()
                .contains("prompt")
        );
    }

    #[test]
    fn errors_name_field_and_reason() {
        let cases = [
            (r#","tool":{}"#, "tool", "unknown field"),
            (r#","tools":{"use":["A"]}"#, "tools.use[0]", "not a catalog id"),
            (r#","tools":{"use":["a","a"]}"#, "tools.use[1]", "twice"),
            (
                r#","tools":{"aliases":{"r":"read"}}"#,
                "tools.aliases.r",
                "@<id>/<tool>",
            ),
            (
                r#","tools":{"aliases":{"r":"@b/x"}}"#,
                "tools.aliases.r",
                "does not list",
            ),
            (
                r#","tools":{"use":["a"],"aliases":{"r":"@a/*"}}"#,
                "tools.aliases.r",
                "@<id>/<tool>",
            ),
            (
                r#","tools":{"aliases":{"r":"s","s":"r"}}"#,
                "tools.aliases.r",
                "@<id>/<tool>",
            ),
            (
                r#","tools":{"use":["a"],"aliases":{"r":"@a/x","r":"@a/y"}}"#,
                "tools.aliases",
                "twice",
            ),
            (
                r#","runtime":{"kind":"builtin","model":"x"}"#,
                "runtime",
                "unknown field",
            ),
            (
                r#","runtime":{"kind":"acp","command":[]}"#,
                "runtime.command",
                "program",
            ),
            (
                r#","runtime":{"kind":"acp","command":["x"],"read_only":["/a/../b"]}"#,
                "runtime.read_only[0]",
                "absolute",
            ),
            (r#","env":{"A B":"x"}"#, "env.A B", "environment name"),
            (r#","model":"script:../x.json""#, "model", "plain file name"),
            (
                r#","sandbox":{"network":"all"}"#,
                "sandbox.network",
                "unknown variant",
            ),
        ];
        for (extra, field, reason) in cases {
            let error = parse(extra).unwrap_err();
            assert_eq!(error.field, field, "{extra}: {error}");
            assert!(error.reason.contains(reason), "{extra}: {error}");
        }
    }

    proptest! {
        #[test]
        fn parsing_never_panics(text in "\\PC{0,200}") {
            let _ = AgentDefinition::parse(&text);
        }
    }
}
