//! The pages of agent.json, tool.json and oubliette.toml, from the schemas of the types that read them.

use std::fmt::Write as _;

use oubliette_protocol::{agent::AgentDefinition, catalog::ToolDefinition};

use super::fields::{cell, description, field_table};
use crate::{
    config::{RawConfig, TEMPLATE},
    schemas::read_schema,
};

/// The page of agent.json.
pub(super) fn agent_page() -> String {
    let fields = field_table(&read_schema::<AgentDefinition>());
    format!(
        "# agent.json\n\nAn agent is the file `agents/<slug>/agent.json` in the home, written by hand, by `oubliette agent put`, by the \
         console or with the tool `agent_put`. A field that is unknown or wrong is refused with its name and the reason. Edits are \
         picked up while the server runs.\n\nFiles beside it: a script that `model` names as `script:<file>`, and `home/`, whose \
         files are the first files of the agent's home directory in each session.\n\n{}\n\n{SPELLING}\n\n{fields}\n{NAMES}",
        schema_hint("agent.json")
    )
}

/// The page of tool.json.
pub(super) fn tool_page() -> String {
    let fields = field_table(&read_schema::<ToolDefinition>());
    format!(
        "# tool.json\n\nA catalog entry is the file `tools/<id>/tool.json` in the home: an MCP server, or a built-in tool with its \
         policy. A field that is unknown or wrong is refused with its name and the reason. Edits are picked up while the server \
         runs, and only the server that changed is restarted.\n\n{}\n\n{SPELLING}\n\n{fields}\n{NAMES}",
        schema_hint("tool.json")
    )
}

const NAMES: &str = "Slugs and catalog ids are `[a-z0-9][a-z0-9-]{0,31}`, not `oubliette`, `session` or `project`. `${env:NAME}` in \
    environment values, headers and arguments is read from the server's environment, as far as `[trust] env` lists the name.\n";

const SPELLING: &str = "Fields are written as shown here, which is also the spelling that answers have. Each is read in snake_case and in \
    camelCase alike (`startupMs` or `startup_ms`, `read_only` or `readOnly`), but not in both at once.";

/// Says where the schema of a file is.
fn schema_hint(file: &str) -> String {
    format!(
        "An editor completes and checks it with `\"$schema\": \"http://127.0.0.1:8080/api/schemas/{file}\"` in the file: the server has \
         its JSON Schema there, without a token, and an installation has it in `share/oubliette/schemas/`."
    )
}

/// The page of oubliette.toml: its sections in the order of the file, then the file that the first run writes.
pub(super) fn config_page() -> String {
    let config = read_schema::<RawConfig>();
    let mut out = "# oubliette.toml\n\nThe server's configuration, in its home. Every section and nearly every key is optional; an \
        unknown one is refused. Durations are written `\"500ms\"`, `\"2s\"`, `\"5m\"`, `\"1h\"`, `\"30d\"`. All names are in \
        snake_case.\n\nAn editor completes and checks it with its JSON Schema, which the server has at \
        `/api/schemas/config.json`, without a token: for most editors by a first line \
        `#:schema http://127.0.0.1:8080/api/schemas/config.json`. A key `\"$schema\"` is accepted, too.\n"
        .to_owned();
    let sections = config["properties"].as_object().into_iter().flatten();
    for (name, section) in sections.filter(|(name, _)| !name.starts_with('$')) {
        let meaning = description(section).to_owned();
        let (heading, section) = if section["items"].is_object() {
            (format!("[[{name}]]"), &section["items"])
        } else if section["additionalProperties"].is_object() {
            (format!("[{name}.NAME]"), &section["additionalProperties"])
        } else {
            (format!("[{name}]"), section)
        };
        let _ = write!(out, "\n## `{heading}`\n\n");
        // After the section's name, which is the heading.
        if let Some((_, meaning)) = meaning.split_once("`: ") {
            let _ = write!(out, "{}.\n\n", cell(&capitalized(meaning.trim_end_matches('.'))));
        }
        out.push_str(&field_table(section));
    }
    let _ = write!(
        out,
        "\n## The file that the first run writes\n\nWhat is commented out shows the default.\n\n```toml\n{TEMPLATE}```\n"
    );
    out
}

/// Text that begins with a capital letter.
fn capitalized(text: &str) -> String {
    let mut chars = text.chars();
    let first = chars.next().map(|first| first.to_uppercase().to_string());
    first.unwrap_or_default() + chars.as_str()
}
