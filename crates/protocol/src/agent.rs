//! `agent.json`: what an agent is, which runtime it has and which tools it may use.

use indexmap::IndexMap;
use schemars::JsonSchema;
use serde::{
    Deserialize, Deserializer, Serialize,
    de::{MapAccess, Visitor},
};

use crate::{CatalogId, Slug, id::quoted, strict::Refusal};

/// Largest `agent.json` or `tool.json` read, in bytes.
pub const MAX_DEFINITION_BYTES: usize = 1024 * 1024;

/// A whole `agent.json`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentDefinition {
    /// What people call it.
    pub name: String,
    /// What it is for.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub description: String,
    /// Its system prompt.
    pub prompt: String,
    /// `<provider>/<model>`, or `script:<file>` beside agent.json.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model: Option<String>,
    /// What runs it.
    #[serde(default)]
    pub runtime: Runtime,
    /// How its own permission requests are answered.
    #[serde(default)]
    pub permissions: Permissions,
    /// Agents its child sessions may run, besides itself.
    #[serde(default)]
    pub children: Vec<Slug>,
    /// Environment of the agent process.
    #[serde(default)]
    pub env: IndexMap<String, String>,
    /// Its sandbox.
    #[serde(default)]
    pub sandbox: AgentSandbox,
    /// Its tools.
    #[serde(default)]
    pub tools: AgentTools,
}

/// What runs an agent.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "lowercase", deny_unknown_fields)]
pub enum Runtime {
    /// `oubliette-agent`. With braces: of a bare variant serde would let any field pass.
    Builtin {},
    /// Any ACP agent.
    Acp {
        /// Program and arguments.
        command: Vec<String>,
        /// Environment besides the agent's.
        #[serde(default)]
        env: IndexMap<String, String>,
        /// Host paths it needs to see, as far as `[trust] read_only` lists them.
        #[serde(default)]
        read_only: Vec<String>,
    },
}

impl Default for Runtime {
    fn default() -> Self {
        Self::Builtin {}
    }
}

/// How an agent's own permission requests are answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Permissions {
    /// Yes: the sandbox bounds it.
    #[default]
    Allow,
    /// No.
    Deny,
}

/// An agent's sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentSandbox {
    /// What it can reach.
    #[serde(default)]
    pub network: Network,
}

/// What a sandbox can reach.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Default, Serialize, Deserialize, JsonSchema,
)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum Network {
    /// Nothing but the relay socket and the model forwarder.
    #[default]
    None,
    /// HTTP and HTTPS through the server.
    Proxy,
    /// The host's network, by trust.
    Host,
}

/// An agent's tools.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct AgentTools {
    /// Catalog entries it uses, in order.
    #[serde(default, rename = "use")]
    pub uses: Vec<CatalogId>,
    /// Which of their tools it may call; `["*"]`, missing or empty: all.
    #[serde(default)]
    pub allowed: Vec<String>,
    /// What it may never call, of any source.
    #[serde(default)]
    pub denied: Vec<String>,
    /// Other names for tools: alias → `@<id>/<tool>`.
    #[serde(default, deserialize_with = "each_once")]
    pub aliases: IndexMap<String, String>,
}

/// A map whose every key stands there once: of two targets for one alias neither is the one that was meant.
fn each_once<'de, D: Deserializer<'de>>(from: D) -> Result<IndexMap<String, String>, D::Error> {
    struct Once;

    impl<'de> Visitor<'de> for Once {
        type Value = IndexMap<String, String>;

        fn expecting(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
            f.write_str("a map of texts")
        }

        fn visit_map<A: MapAccess<'de>>(self, mut from: A) -> Result<Self::Value, A::Error> {
            let mut map = IndexMap::new();
            while let Some((key, value)) = from.next_entry::<String, String>()? {
                if map.contains_key(&key) {
                    return Err(serde::de::Error::custom(format!(
                        "{} stands there twice",
                        quoted(&key)
                    )));
                }
                map.insert(key, value);
            }
            Ok(map)
        }
    }

    from.deserialize_map(Once)
}

impl AgentDefinition {
    /// Reads and checks an `agent.json` without looking at the catalog.
    pub fn parse(text: &str) -> Result<Self, Refusal> {
        let definition: Self = crate::strict::from_str(text)?;
        definition.check()?;
        Ok(definition)
    }

    /// Checks what serde cannot.
    pub fn check(&self) -> Result<(), Refusal> {
        let filled = |field: &str, text: &str, most: usize| match text.trim().is_empty() || text.len() > most
        {
            true => Err(Refusal::at(field, format!("must be 1 to {most} bytes of text"))),
            false => Ok(()),
        };
        filled("name", &self.name, 200)?;
        filled("prompt", &self.prompt, 256 * 1024)?;
        if let Some(model) = &self.model {
            filled("model", model, 300)?;
            if let Some(file) = model.strip_prefix("script:") {
                plain_file_name(file).map_err(|why| Refusal::at("model", why))?;
            }
        }
        if let Runtime::Acp {
            command,
            env,
            read_only,
        } = &self.runtime
        {
            if command.first().is_none_or(|program| program.is_empty()) {
                return Err(Refusal::at("runtime.command", "must name a program"));
            }
            check_env("runtime.env", env)?;
            for (i, path) in read_only.iter().enumerate() {
                absolute_path(path).map_err(|why| Refusal::at(format!("runtime.read_only[{i}]"), why))?;
            }
        }
        check_env("env", &self.env)?;
        self.tools.check()
    }

    /// The script file of a `script:` model.
    pub fn script(&self) -> Option<&str> {
        self.model.as_deref()?.strip_prefix("script:")
    }
}

impl AgentTools {
    fn check(&self) -> Result<(), Refusal> {
        const MOST: usize = 10_000;
        for (field, count) in [
            ("tools.use", self.uses.len()),
            ("tools.allowed", self.allowed.len()),
            ("tools.denied", self.denied.len()),
            ("tools.aliases", self.aliases.len()),
        ] {
            if count > MOST {
                return Err(Refusal::at(
                    field,
                    format!("has {count} entries; at most {MOST} are allowed"),
                ));
            }
        }
        for (i, id) in self.uses.iter().enumerate() {
            if self.uses[..i].contains(id) {
                return Err(Refusal::at(
                    format!("tools.use[{i}]"),
                    format!("{id} is listed twice"),
                ));
            }
        }
        for (list, names) in [("allowed", &self.allowed), ("denied", &self.denied)] {
            for (i, name) in names.iter().enumerate() {
                if name.is_empty() || name.len() > 200 {
                    return Err(Refusal::at(
                        format!("tools.{list}[{i}]"),
                        "must be 1 to 200 bytes",
                    ));
                }
            }
        }
        for (alias, target) in &self.aliases {
            let shown: String = alias.chars().take(80).collect();
            let field = format!("tools.aliases.{shown}");
            if alias.is_empty() || alias.len() > 64 || !alias.bytes().all(tool_name_byte) {
                return Err(Refusal::at(
                    field,
                    "an alias is 1 to 64 of letters, digits, _ and -",
                ));
            }
            let one = split_canonical(target).filter(|(_, tool)| *tool != "*");
            let Some((id, _)) = one else {
                return Err(Refusal::at(field, "must point to a tool as @<id>/<tool>"));
            };
            if !self.uses.iter().any(|u| u.as_str() == id) {
                return Err(Refusal::at(
                    field,
                    format!("points to {id}, which tools.use does not list"),
                ));
            }
        }
        Ok(())
    }
}

/// Whether a byte may stand in a tool's listed name.
pub fn tool_name_byte(b: u8) -> bool {
    b.is_ascii_alphanumeric() || b == b'_' || b == b'-'
}

/// `@<id>/<tool>` in its two parts.
pub fn split_canonical(name: &str) -> Option<(&str, &str)> {
    let (id, tool) = name.strip_prefix('@')?.split_once('/')?;
    (!id.is_empty() && !tool.is_empty()).then_some((id, tool))
}

pub(crate) fn check_env(field: &str, env: &IndexMap<String, String>) -> Result<(), Refusal> {
    for (name, value) in env {
        env_name(name).map_err(|why| Refusal::at(format!("{field}.{name}"), why))?;
        if value.contains('\0') || value.len() > 128 * 1024 {
            return Err(Refusal::at(
                format!("{field}.{name}"),
                "must hold no NUL and at most 128 KiB",
            ));
        }
    }
    Ok(())
}

/// Whether a name may name an environment variable.
pub fn env_name(name: &str) -> Result<(), &'static str> {
    let mut bytes = name.bytes();
    let first = bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_');
    match first && name.len() <= 200 && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_') {
        true => Ok(()),
        false => Err("an environment name is letters, digits and _, not starting with a digit"),
    }
}

pub(crate) fn absolute_path(path: &str) -> Result<(), &'static str> {
    let clean = path.starts_with('/') && !path.contains('\0') && path.split('/').all(|part| part != "..");
    if clean {
        Ok(())
    } else {
        Err("must be an absolute path without ..")
    }
}

/// Whether a name is one plain file name, with no way out of its folder.
pub fn plain_file_name(name: &str) -> Result<(), &'static str> {
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

    fn parse(extra: &str) -> Result<AgentDefinition, Refusal> {
        AgentDefinition::parse(&format!(r#"{{"name":"W","prompt":"p"{extra}}}"#))
    }

    #[test]
    fn the_least_agent_has_a_name_and_a_prompt() {
        let agent = parse("").unwrap();
        assert_eq!(agent.runtime, Runtime::Builtin {});
        assert_eq!(agent.sandbox.network, Network::None);
        assert!(
            AgentDefinition::parse(r#"{"name":"W"}"#)
                .unwrap_err()
                .to_string()
                .contains("prompt")
        );
    }

    #[test]
    fn a_refusal_names_field_and_reason() {
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
            let refusal = parse(extra).unwrap_err();
            assert_eq!(refusal.field, field, "{extra}: {refusal}");
            assert!(refusal.reason.contains(reason), "{extra}: {refusal}");
        }
    }

    proptest! {
        #[test]
        fn no_text_panics(text in "\\PC{0,200}") {
            let _ = AgentDefinition::parse(&text);
        }
    }
}
