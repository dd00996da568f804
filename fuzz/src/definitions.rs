//! Definitions in files, and what callers declare.

use std::collections::HashSet;

use oubliette_protocol::{
    agent::AgentDefinition,
    argument_schema::CHECK_STACK_BYTES,
    caller::{CallerContext, DeclaredTool, MAX_FULL_NAME, full_name},
    catalog::ToolDefinition,
};
use serde_json::Value;

use crate::with_text;

/// `agent.json`: a definition that parses still parses after being serialised.
pub fn agent_json(bytes: &[u8]) {
    with_text(bytes, |text| {
        if let Ok(agent) = AgentDefinition::parse(text) {
            let written = serde_json::to_string(&agent).expect("a definition is JSON");
            assert!(AgentDefinition::parse(&written).is_ok(), "{written}");
        }
    });
}

/// `tool.json`: a definition that parses still parses after being serialised.
pub fn tool_json(bytes: &[u8]) {
    with_text(bytes, |text| {
        if let Ok(tool) = ToolDefinition::parse(text) {
            let written = serde_json::to_string(&tool).expect("a definition is JSON");
            assert!(ToolDefinition::parse(&written).is_ok(), "{written}");
        }
    });
}

/// A caller's declaration: one that passes the check has unique names of valid form and length, and its tools check
/// arguments without a panic.
pub fn declaration(bytes: &[u8]) {
    let Ok(context) = serde_json::from_slice::<CallerContext>(bytes) else {
        return;
    };
    on_large_stack(|| check_declaration(context));
}

fn check_declaration(context: CallerContext) {
    let Ok(declaration) = context.check() else { return };
    let mut names = HashSet::new();
    for tool in &declaration.tools {
        let name = full_name(&declaration.caller_id, &tool.name);
        assert!(name.len() <= MAX_FULL_NAME);
        assert!(
            name.bytes()
                .all(|b| b.is_ascii_alphanumeric() || b == b'_' || b == b'-')
        );
        assert!(names.insert(name));
        let _ = tool.check_arguments(&serde_json::json!({}));
        let _ = tool.check_arguments(&tool.input_schema);
    }
}

/// A schema on the first line, arguments on each that follows: a schema that is accepted decides about any arguments, in
/// time, and an error is of bounded length.
pub fn schema(bytes: &[u8]) {
    let mut lines = bytes.split(|byte| *byte == b'\n');
    let Some(Ok(schema)) = lines.next().map(serde_json::from_slice) else {
        return;
    };
    let tool = DeclaredTool {
        name: "tool".into(),
        description: None,
        input_schema: Some(schema),
    };
    let context = CallerContext {
        caller_id: "caller".into(),
        caller_tools: vec![tool],
    };
    let arguments: Vec<Value> = lines
        .filter_map(|line| serde_json::from_slice(line).ok())
        .collect();
    on_large_stack(|| match context.check() {
        Ok(declaration) => {
            for arguments in &arguments {
                let tool = &declaration.tools[0];
                if let Err(error) = tool.check_arguments(arguments) {
                    assert!(error.message.len() <= MAX_ERROR_BYTES, "{}", error.message.len());
                }
            }
        }
        Err(error) => assert!(error.message.len() <= MAX_ERROR_BYTES, "{}", error.message.len()),
    });
}

/// Most of what is said about a schema or arguments, in bytes.
const MAX_ERROR_BYTES: usize = 4 * 1024;

/// Runs what the server runs on a thread with so much stack.
fn on_large_stack(work: impl FnOnce() + Send) {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().stack_size(CHECK_STACK_BYTES);
        let thread = thread.spawn_scoped(scope, work).expect("a thread is made");
        if let Err(panic) = thread.join() {
            std::panic::resume_unwind(panic);
        }
    });
}
