use super::*;
use proptest::prelude::*;

#[test]
fn every_example_of_the_contract_parses_and_serializes_back() {
    for text in [
        r#"{"id":"files","kind":"mcp","transport":"stdio","command":"x","args":[],"env":{},"isolation":"sandbox","network":"none","read_only":[],"timeouts":{"startupMs":10000,"requestMs":60000},"healthCheck":{"intervalMs":5000,"timeoutMs":2000,"failures":3},"restart":{"maxAttempts":5}}"#,
        r#"{"id":"time","kind":"mcp","transport":"stdio","program":{"pypi":"mcp-server-time==2026.1.26"},"args":["--x"],"cache_mb":64}"#,
        r#"{"id":"net","kind":"mcp","transport":"stdio","command":"x","network":"proxy","egress":["api.github.com","*.npmjs.org:443"]}"#,
        r#"{"id":"remote","kind":"mcp","transport":"ws","endpoint":"ws://h/x"}"#,
        r#"{"id":"raw","kind":"mcp","transport":"tcp","endpoint":"host:1"}"#,
        r#"{"id":"web","kind":"mcp","transport":"http","endpoint":"http://h/mcp","headers":{}}"#,
        r#"{"id":"reader","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["notes/"]}}"#,
        r#"{"id":"writer","kind":"builtin","builtinPolicy":{"name":"fs_write","allowedPaths":["out/"]}}"#,
        r#"{"id":"shell","kind":"builtin","builtinPolicy":{"name":"shell_exec","allowedCommands":["git status","ls"],"allowedEnv":[],"timeoutMs":10000}}"#,
    ] {
        let definition = ToolDefinition::parse(text).unwrap();
        let again = serde_json::to_value(&definition).unwrap();
        assert_eq!(ToolDefinition::from_value(again).unwrap(), definition);
    }
}

#[test]
fn errors_name_the_field() {
    for (text, field) in [
        (
            r#"{"id":"a","kind":"mcp","transport":"tcp","endpoint":"h:1","headers":{}}"#,
            "headers",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"tcp","endpoint":"h"}"#,
            "endpoint",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"http","endpoint":"ftp://h"}"#,
            "endpoint",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","command":""}"#,
            "command",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","command":"x","program":{"npm":"a@1.0.0"}}"#,
            "command",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","program":{"npm":"a@latest"}}"#,
            "program.npm",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","program":{"pypi":"a==1","bin":"/bin/sh"}}"#,
            "program.bin",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","program":{"npm":"a@1.0.0","version":"2"}}"#,
            "program.version",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","program":{"npm":"a@1.0.0"},"isolation":"host"}"#,
            "isolation",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","command":"x","cache_mb":0}"#,
            "cache_mb",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","command":"x","network":"proxy","egress":["a:b"]}"#,
            "egress[0]",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","command":"x","network":"proxy","egress":null}"#,
            "egress",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","command":"x","egress":["a.org"]}"#,
            "egress",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"stdio","command":"x","network":"proxy","isolation":"host","egress":[]}"#,
            "egress",
        ),
        (
            r#"{"id":"a","kind":"mcp","transport":"tcp","endpoint":"h:1","egress":[]}"#,
            "egress",
        ),
        (
            r#"{"id":"a","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["../x"]}}"#,
            "builtinPolicy.allowedPaths[0]",
        ),
        (
            r#"{"id":"a","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":[]},"x":1}"#,
            "x",
        ),
    ] {
        assert_eq!(ToolDefinition::parse(text).unwrap_err().field, field, "{text}");
    }
    assert!(ToolDefinition::parse("[]").is_err());
    assert!(ToolDefinition::parse(r#"{"id":"a","kind":"wasm"}"#).is_err());
}

proptest! {
    #[test]
    fn parsing_never_panics(text in "\\PC{0,200}") {
        let _ = ToolDefinition::parse(&text);
    }
}
