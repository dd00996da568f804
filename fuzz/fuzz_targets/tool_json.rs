//! `tool.json`: a definition that parses still parses after being serialised.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oubliette_protocol::catalog::ToolDefinition;

fuzz_target!(|text: &str| {
    let Ok(tool) = ToolDefinition::parse(text) else {
        return;
    };
    let written = serde_json::to_string(&tool).expect("a definition is JSON");
    assert!(ToolDefinition::parse(&written).is_ok(), "{written}");
});
