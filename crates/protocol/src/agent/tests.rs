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
            r#","runtime":{"kind":"acp","command":["x"],"program":{"npm":"a@1.0.0"}}"#,
            "runtime.command",
            "keep one",
        ),
        (
            r#","runtime":{"kind":"acp","program":{"npm":"a"}}"#,
            "runtime.program.npm",
            "exact version",
        ),
        (
            r#","runtime":{"kind":"acp","program":{"npm":"a@1.0.0","x":1}}"#,
            "runtime",
            "unknown field",
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
        (
            r#","sandbox":{"network":"proxy","egress":["a.org","https://b.org"]}"#,
            "sandbox.egress[1]",
            "without a scheme",
        ),
        (
            r#","sandbox":{"network":"proxy","egress":null}"#,
            "sandbox.egress",
            "invalid type: null",
        ),
        (
            r#","sandbox":{"egress":["a.org"]}"#,
            "sandbox.egress",
            "\"network\": \"proxy\"",
        ),
        (
            r#","sandbox":{"network":"host","egress":[]}"#,
            "sandbox.egress",
            "\"network\": \"proxy\"",
        ),
        (
            r#","sandbox":{"upstreams":["a","b/c"]}"#,
            "sandbox.upstreams[1]",
            "letters, digits",
        ),
        (
            r#","sandbox":{"upstreams":["a","a"]}"#,
            "sandbox.upstreams[1]",
            "twice",
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
