//! Every sentence of `oubliette tool explain`, word for word.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod plane_support;

use oubliette_protocol::{
    agent::AgentDefinition,
    tool::{HealthStatus, ListedTool, ToolList, ToolReason, ToolRule, ToolSource},
};
use oubliette_tools::{explain, preview};
use plane_support::{definition_of, reader, stdio_server};
use serde_json::{Value, json};

fn agent(tools: Value) -> AgentDefinition {
    AgentDefinition::parse(&json!({"name":"W","prompt":"p","tools":tools}).to_string()).unwrap()
}

/// An agent that runs nowhere: built-ins are known, servers are not.
fn previewed(definition: &AgentDefinition) -> ToolList {
    let catalog = [reader("files"), stdio_server("srv", json!({}))].map(|tool| definition_of(tool).into());
    preview(definition, &catalog)
}

/// Its servers up, but with no tools.
fn up(definition: &AgentDefinition) -> ToolList {
    let mut list = previewed(definition);
    list.servers
        .iter_mut()
        .for_each(|row| row.status = HealthStatus::Green);
    list
}

fn says(definition: &AgentDefinition, list: &ToolList, tool: &str) -> String {
    explain(&"writer".parse().unwrap(), definition, list, tool)
}

fn row(name: &str, source: ToolSource, reason: impl Into<ToolReason>) -> ListedTool {
    let reason = reason.into();
    ListedTool {
        name: name.into(),
        canonical: name.into(),
        aliases: Vec::new(),
        source,
        server: None,
        allowed: reason.rule.allows(),
        available: reason.unavailable.is_none(),
        reason,
        description: String::new(),
        input_schema: json!({}),
    }
}

#[test]
fn a_tool_of_an_agent_with_rules() {
    let definition = agent(json!({"use":["files","srv"],"allowed":["@files/*","s"],
        "denied":["files_x*","oubliette_token_*"],"aliases":{"read":"@files/fs_read","s":"@srv/echo"}}));
    let list = previewed(&definition);
    for (tool, sentence) in [
        (
            "read",
            r#"writer may call read (@files/fs_read, from the catalog): it is allowed by "@files/*" in tools.allowed."#,
        ),
        (
            "s",
            r#"writer may call s (@srv/echo, from the catalog): it is allowed by "s" in tools.allowed. A call would not reach it: it is started with a session."#,
        ),
        (
            "@srv/other",
            r#"writer may not call "@srv/other": it is not named in tools.allowed. Whether srv has such a tool is not known: it is started with a session."#,
        ),
        (
            "files_xy",
            r#"writer may not call "files_xy": it is denied by "files_x*" in tools.denied."#,
        ),
        (
            "@other/x",
            r#"writer may not call "@other/x": tools.use does not name "other"."#,
        ),
        ("raed", r#"writer has no tool "raed". Did you mean read?"#),
        ("nothing_like_it", r#"writer has no tool "nothing_like_it"."#),
        (
            "oubliette_project_list",
            r#"writer may call "oubliette_project_list" as far as its key reaches: one of Oubliette's own tools, listed to sessions that have an OUBLIETTE_API_KEY."#,
        ),
        (
            "oubliette_token_create",
            r#"writer may not call "oubliette_token_create": it is denied by "oubliette_token_*" in tools.denied."#,
        ),
    ] {
        assert_eq!(says(&definition, &list, tool), sentence);
    }
    let list = up(&definition);
    assert_eq!(
        says(&definition, &list, "files_nothing"),
        r#"writer cannot call "files_nothing": files has no such tool."#
    );
    assert_eq!(
        says(&definition, &list, "srv_nothing"),
        r#"writer cannot call "srv_nothing": srv has no such tool, and it is not named in tools.allowed."#
    );
}

#[test]
fn a_tool_of_an_agent_without_rules() {
    let definition = agent(json!({"use":["files","srv"]}));
    let list = previewed(&definition);
    assert_eq!(
        says(&definition, &list, "files_fs_read"),
        "writer may call files_fs_read (@files/fs_read, from the catalog): tools.allowed is empty, so all of tools.use is allowed."
    );
    assert_eq!(
        says(&definition, &list, "@srv/echo"),
        r#"writer may call "@srv/echo" if srv has such a tool, which is not known: it is started with a session. The rule: tools.allowed is empty, so all of tools.use is allowed."#
    );
}

#[test]
fn a_tool_of_another_source_and_one_put_right() {
    let definition = agent(json!({}));
    let all_of_use = |unavailable: Option<&str>, note: Option<&str>| ToolReason {
        rule: ToolRule::AllOfUse,
        unavailable: unavailable.map(str::to_owned),
        notes: note.map(str::to_owned).into_iter().collect(),
    };
    let down = "its server srv is down: it ended: exit code 3\nstderr: no database.\n";
    let list = ToolList {
        tools: vec![
            row("session_message", ToolSource::Base, ToolRule::BaseTool),
            row(
                "project_list",
                ToolSource::Base,
                ToolRule::Denied("project_list".into()),
            ),
            row("myapp_send", ToolSource::Caller, ToolRule::Lent),
            row("oubliette_x", ToolSource::Oubliette, ToolRule::WithinKey),
            row(
                "srv_odd",
                ToolSource::Catalog,
                all_of_use(None, Some("its schema is replaced")),
            ),
            row("srv_off", ToolSource::Catalog, all_of_use(Some(down), None)),
        ],
        servers: Vec::new(),
    };
    // As the command line gets it from a running session.
    let list: ToolList = serde_json::from_value(serde_json::to_value(list).unwrap()).unwrap();
    for (tool, sentence) in [
        (
            "session_message",
            "writer may call session_message: it is a base tool of every agent.",
        ),
        (
            "project_list",
            r#"writer may not call project_list: it is denied by "project_list" in tools.denied."#,
        ),
        (
            "myapp_send",
            "writer may call myapp_send: it is lent by its caller's declaration.",
        ),
        (
            "oubliette_x",
            "writer may call oubliette_x: it is within reach of the agent's key.",
        ),
        (
            "srv_odd",
            "writer may call srv_odd (srv_odd, from the catalog): tools.allowed is empty, so all of tools.use is allowed. Note: its schema is replaced.",
        ),
        (
            "srv_off",
            "writer may call srv_off (srv_off, from the catalog): tools.allowed is empty, so all of tools.use is allowed. A call would not reach it: its server srv is down: it ended: exit code 3; stderr: no database.",
        ),
    ] {
        assert_eq!(says(&definition, &list, tool), sentence);
    }
}

#[test]
fn a_listed_reason_is_words_and_parts_on_the_wire() {
    let reason = ToolReason {
        rule: ToolRule::Allowed("@srv/*".into()),
        unavailable: Some("its server srv is down; note: not really".into()),
        notes: vec!["its schema is replaced".into(), "x means @b/x".into()],
    };
    let wire = serde_json::to_value(row("srv_x", ToolSource::Catalog, reason.clone())).unwrap();
    assert_eq!(
        wire["reason"],
        "allowed by \"@srv/*\" in tools.allowed; unavailable: its server srv is down; note: not really; \
         note: its schema is replaced; note: x means @b/x"
    );
    assert_eq!(wire["reasonDetail"]["rule"], json!({"allowed":"@srv/*"}));
    let read: ListedTool = serde_json::from_value(wire).unwrap();
    assert_eq!(read.reason, reason, "parts are read, not the words");
}
