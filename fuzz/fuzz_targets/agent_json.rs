//! `agent.json`: a definition that parses still parses after being serialised.
#![no_main]

use libfuzzer_sys::fuzz_target;
use oubliette_protocol::agent::AgentDefinition;

fuzz_target!(|text: &str| {
    let Ok(agent) = AgentDefinition::parse(text) else {
        return;
    };
    let written = serde_json::to_string(&agent).expect("a definition is JSON");
    assert!(AgentDefinition::parse(&written).is_ok(), "{written}");
});
