//! An `agent.json`: what is accepted is accepted again after being written.
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
