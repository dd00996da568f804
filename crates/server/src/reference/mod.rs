//! The reference pages of the book, made from the code: the tree of commands, the schemas of definitions and of the
//! configuration, the actions, the event types, the error codes and the metrics. `cargo xtask docs` writes them into
//! `docs/src`; `tests/book.rs` fails when one is not current.
//!
//! - [`commands`]: the command line. [`fields`]: JSON Schemas as tables of fields.
//! - [`definitions`]: agent.json, tool.json and oubliette.toml.
//! - [`wire`]: tools, events, error codes, HTTP routes and metrics.

mod commands;
mod definitions;
mod fields;
mod wire;

use clap::CommandFactory as _;
use schemars::{JsonSchema, generate::SchemaSettings};
use serde_json::Value;

use crate::{cli::CommandLine, schemas::file_schemas};

/// One page of the reference.
pub struct ReferencePage {
    /// Its file in `docs/src`.
    pub file: String,
    /// Its text: Markdown, or a JSON Schema.
    pub text: String,
}

/// Every page, in the order of the book, then the schemas of files.
pub fn pages() -> Vec<ReferencePage> {
    let pages = [
        ("reference-commands.md", commands::page()),
        ("reference-agent-json.md", definitions::agent_page()),
        ("reference-tool-json.md", definitions::tool_page()),
        ("reference-config.md", definitions::config_page()),
        ("reference-tools.md", wire::tools_page()),
        ("reference-events.md", wire::events_page()),
        ("reference-debugger.md", wire::debugger_page()),
        ("reference-errors.md", wire::errors_page()),
        ("reference-http.md", wire::http_page()),
        ("reference-metrics.md", wire::metrics_page()),
    ];
    let pages = pages.into_iter().map(|(file, text)| ReferencePage {
        file: file.to_owned(),
        text: format!("<!-- Made from the code by `cargo xtask docs`. Edits are lost. -->\n\n{text}"),
    });
    let schemas = file_schemas().iter().map(|schema| ReferencePage {
        file: format!("schemas/{}", schema.file),
        text: schema.text.clone(),
    });
    pages.chain(schemas).collect()
}

/// The tree of commands of `oubliette`, for man pages.
pub fn command_tree() -> clap::Command {
    CommandLine::command()
}

/// The JSON Schema of what Oubliette writes as a type: fields that are always written are required. With everything inline.
fn written_schema<T: JsonSchema>() -> Value {
    let settings = SchemaSettings::draft2020_12().for_serialize().with(|settings| {
        settings.inline_subschemas = true;
        settings.meta_schema = None;
    });
    settings.into_generator().into_root_schema_for::<T>().to_value()
}
