//! `agent.json`: the definition of an agent, with its runtime, sandbox and tools.

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor},
};

use crate::{
    CatalogId, Slug,
    egress::{self, HostPattern},
    id::quoted,
    program::ProgramSpec,
    rule_entry::{RuleEntry, compile_conditions},
    strict::FieldError,
};

/// Maximum size of an `agent.json` or `tool.json`, in bytes.
pub const MAX_DEFINITION_BYTES: usize = 1024 * 1024;

/// The content of an `agent.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentDefinition {
    /// Address of this file's JSON Schema, for editors; not read.
    #[serde(rename = "$schema", default, skip_serializing_if = "Option::is_none")]
    pub schema: Option<String>,
    /// Display name, 1 to 200 bytes.
    #[schemars(length(min = 1, max = 200))]
    pub name: String,
    /// What the agent is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// System prompt, 1 byte to 256 KiB.
    #[schemars(length(min = 1, max = 262_144))]
    pub prompt: String,
    /// Model: `<provider>/<model>`, or `script:<file>` for a script file beside agent.json. At most 300 bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1, max = 300))]
    pub model: Option<String>,
    /// Program that runs the agent. Default: the built-in one.
    #[serde(default)]
    pub runtime: AgentRuntime,
    /// How the agent's own permission requests (ACP) are answered. Those about tools that Oubliette governs are always
    /// granted: each call is checked by itself. Default: allow.
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
#[allow(clippy::large_enum_variant, reason = "definitions are few and shared")]
pub enum AgentRuntime {
    /// The built-in agent, `oubliette-agent`.
    // With braces, because serde accepts unknown fields beside the tag of a unit variant in spite of `deny_unknown_fields`.
    Builtin {},
    /// Any program that speaks ACP on stdio.
    Acp {
        /// Program of the host and its arguments. Either this or `program`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        command: Vec<String>,
        /// Pinned package to install and run. Either this or `command`.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        program: Option<ProgramSpec>,
        /// Further arguments. Default: none.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        args: Vec<String>,
        /// Environment variables, in addition to the agent's `env`.
        #[serde(default)]
        env: IndexMap<String, String>,
        /// Absolute host paths that are visible inside, read-only; only those that `[trust] read_only` covers.
        #[serde(default, alias = "readOnly")]
        read_only: Vec<String>,
        /// How the agent is given its tools. Default: stdio.
        #[serde(
            default,
            alias = "mcpTransport",
            skip_serializing_if = "McpTransport::is_default"
        )]
        mcp_transport: McpTransport,
    },
}

/// How an ACP agent is given its tools: as which kind of MCP server `oubliette-client` is named to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum McpTransport {
    /// A command that the agent starts.
    #[default]
    Stdio,
    /// A server at `http://127.0.0.1:19997/mcp` in the sandbox, with a bearer token; for agents that take MCP servers only
    /// over HTTP.
    Http,
}

impl McpTransport {
    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

impl AgentRuntime {
    /// The package that the agent is run from, if it is one.
    pub fn program(&self) -> Option<&ProgramSpec> {
        match self {
            Self::Acp { program, .. } => program.as_ref(),
            Self::Builtin {} => None,
        }
    }
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
    /// All others are granted too; the sandbox is what limits the agent.
    #[default]
    Allow,
    /// All others are refused.
    Deny,
    /// A person is asked about each of the others: it becomes an approval.
    Ask,
}

/// Sandbox settings of an agent.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentSandboxSettings {
    /// Network access. Default: none.
    #[serde(default)]
    pub network: NetworkAccess,
    /// With `network: "proxy"`, the only hosts the agent reaches: `host`, `*.domain`, each with an optional `:port`; at most
    /// 256. `[]`: none. Missing: every public host. It opens nothing that `[egress] allow` keeps closed.
    #[serde(
        default,
        deserialize_with = "egress::some_list",
        skip_serializing_if = "Option::is_none"
    )]
    pub egress: Option<Vec<HostPattern>>,
    /// Names of `[upstreams.NAME]` sections in oubliette.toml: the services the agent reaches at
    /// `http://127.0.0.1:19999/NAME/`, with a credential added outside; at most 64. Default: none.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub upstreams: Vec<String>,
    /// The container image of the agent, its tool servers and its commands, such as `debian:12` or `name@sha256:…`; at most
    /// 300 bytes. Only with a sandbox driver that has images. Default: the project's, else the server's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
}

/// Maximum length of an image's name.
const MAX_IMAGE_BYTES: usize = 300;

/// Checks that a text has the form of an image's name: registry, path, tag, digest. Whether there is such an image is the
/// engine's to say.
pub fn check_image(field: &str, image: &str) -> Result<(), FieldError> {
    let allowed = |b: u8| b.is_ascii_alphanumeric() || b"._-/:@".contains(&b);
    let begins = image.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric());
    let plain = begins && image.bytes().all(allowed) && !image.contains("..") && !image.contains("//");
    match plain && image.len() <= MAX_IMAGE_BYTES {
        true => Ok(()),
        false => Err(FieldError::at(
            field,
            "is not an image such as \"debian:12\" or \"registry.example/team/image@sha256:…\"",
        )),
    }
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
    /// An entry `{"tool", "when"}` holds for calls whose arguments are valid against the JSON Schema `when`.
    #[serde(default)]
    pub allowed: Vec<RuleEntry>,
    /// Tools it may never call, of any source: names, or patterns with `*`; wins over `ask` and `allowed`. An entry may
    /// have a `when`.
    #[serde(default)]
    pub denied: Vec<RuleEntry>,
    /// Tools whose calls wait for a person's approval, of any source, as far as they are allowed: names, or patterns
    /// with `*`. An entry may have a `when`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub ask: Vec<RuleEntry>,
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
            program,
            args,
            env,
            read_only,
            mcp_transport: _,
        } = &self.runtime
        {
            match program {
                Some(_) if !command.is_empty() => {
                    return Err(FieldError::at(
                        "runtime.command",
                        "an agent has a command or a program; keep one of them",
                    ));
                }
                Some(program) => program.check("runtime.program")?,
                None if command.first().is_none_or(|program| program.is_empty()) => {
                    return Err(FieldError::at(
                        "runtime.command",
                        "must name a program: give a `command`, or a package as `program`",
                    ));
                }
                None => {}
            }
            if let Some(i) = args.iter().position(|arg| arg.contains('\0')) {
                return Err(FieldError::at(format!("runtime.args[{i}]"), "must hold no NUL"));
            }
            check_env("runtime.env", env)?;
            for (i, path) in read_only.iter().enumerate() {
                check_absolute_path(path)
                    .map_err(|why| FieldError::at(format!("runtime.read_only[{i}]"), why))?;
            }
        }
        check_env("env", &self.env)?;
        let sandbox = &self.sandbox;
        egress::check_list("sandbox.egress", sandbox.egress.as_deref(), sandbox.network)?;
        egress::check_upstreams("sandbox.upstreams", &sandbox.upstreams)?;
        if let Some(image) = &sandbox.image {
            check_image("sandbox.image", image)?;
        }
        self.tools.check()
    }

    /// The file name of a `script:` model.
    pub fn script(&self) -> Option<&str> {
        self.model.as_deref()?.strip_prefix("script:")
    }
}

impl AgentToolSettings {
    /// Compiles the conditions of its rules, where they are not compiled yet. [`AgentDefinition::check`] does it.
    pub fn compile_conditions(&self) -> Result<(), FieldError> {
        compile_conditions(self.rule_entries())
    }

    /// Every entry of its rules, with its field.
    fn rule_entries(&self) -> impl Iterator<Item = (String, &RuleEntry)> {
        [
            ("allowed", &self.allowed),
            ("denied", &self.denied),
            ("ask", &self.ask),
        ]
        .into_iter()
        .flat_map(|(list, entries)| {
            let field = move |i: usize| format!("tools.{list}[{i}]");
            entries
                .iter()
                .enumerate()
                .map(move |(i, entry)| (field(i), entry))
        })
    }

    fn check(&self) -> Result<(), FieldError> {
        const MAX_ENTRIES: usize = 10_000;
        for (field, count) in [
            ("tools.use", self.uses.len()),
            ("tools.allowed", self.allowed.len()),
            ("tools.denied", self.denied.len()),
            ("tools.ask", self.ask.len()),
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
        for (field, entry) in self.rule_entries() {
            if entry.tool.is_empty() || entry.tool.len() > 200 {
                return Err(FieldError::at(field, "must be 1 to 200 bytes"));
            }
        }
        self.compile_conditions()?;
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
mod tests;
