//! Every sentence of `oubliette tool explain`, word for word.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod plane_support;

use oubliette_protocol::{
    agent::AgentDefinition,
    tool::{HealthStatus, ListedTool, ToolList, ToolReason, ToolRule, ToolSource},
};
use oubliette_tools::{explain, explain_call, preview};
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
        rules: Vec::new(),
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

#[tokio::test]
async fn rules_on_arguments_are_explained_and_applied_to_given_ones() {
    let etc = json!({"properties":{"path":{"pattern":"^/etc/"}},"required":["path"]});
    let notes = json!({"properties":{"path":{"pattern":"^notes/"}},"required":["path"]});
    let definition = agent(json!({"use":["files"],
        "allowed":[{"tool":"@files/fs_read","when":notes}],
        "denied":[{"tool":"*_read","when":etc}]}));
    let list = previewed(&definition);
    let sentence = says(&definition, &list, "files_fs_read");
    assert_eq!(
        sentence,
        r#"writer may call files_fs_read (@files/fs_read, from the catalog): it is allowed by "@files/fs_read" in tools.allowed with arguments that fit its `when`. tools.denied denies calls with arguments that fit {"properties":{"path":{"pattern":"^/etc/"}},"required":["path"]}. tools.allowed allows calls with arguments that fit {"properties":{"path":{"pattern":"^notes/"}},"required":["path"]}."#
    );
    let slug = "writer".parse().unwrap();
    for (path, expected) in [
        ("notes/a", "With these arguments it may be called."),
        (
            "other",
            "With these arguments it may not be called: its arguments fit no `when` of tools.allowed",
        ),
        (
            "/etc/passwd",
            r#"With these arguments it may not be called: it is denied by "*_read" in tools.denied"#,
        ),
    ] {
        let arguments = json!({"path":path}).as_object().unwrap().clone();
        let said = explain_call(&slug, &definition, &list, "@files/fs_read", arguments)
            .await
            .unwrap();
        assert!(said.starts_with(&sentence) && said.contains(expected), "{said}");
    }
    assert_eq!(list.tools[0].rules.len(), 2);
    assert_eq!(
        serde_json::to_value(&list.tools[0].rules[0]).unwrap(),
        json!({"list":"denied","entry":{"tool":"*_read","when":etc}})
    );
}

#[tokio::test]
async fn rules_on_arguments_are_applied_to_tools_that_are_not_in_the_list() {
    let loud = json!({"properties":{"loud":{"const":true}},"required":["loud"]});
    let entry = json!({"tool":"*","when":loud});
    let definition = agent(json!({"use":["srv"],"ask":[entry]}));
    let list = previewed(&definition);
    let slug = "writer".parse().unwrap();
    let asks = format!("Calls with arguments that fit {loud} wait for a person's approval (tools.ask).");
    for (tool, begins) in [
        (
            "@srv/echo",
            r#"writer may call "@srv/echo" if srv has such a tool"#,
        ),
        (
            "project_list",
            "writer may call project_list: it is a base tool of every agent.",
        ),
        (
            "oubliette_project_list",
            r#"writer may call "oubliette_project_list" as far as its key reaches"#,
        ),
        (
            "myapp_send",
            r#"writer has no tool "myapp_send" unless a caller lends it."#,
        ),
    ] {
        let said = says(&definition, &list, tool);
        assert!(said.starts_with(begins) && said.ends_with(&asks), "{said}");
        for (arguments, expected) in [
            (
                json!({"loud":true}),
                format!(
                    "With these arguments it may be called once a person has allowed it, by {entry} in tools.ask."
                ),
            ),
            (json!({}), "With these arguments it may be called.".to_owned()),
        ] {
            let arguments = arguments.as_object().unwrap().clone();
            let judged = explain_call(&slug, &definition, &list, tool, arguments)
                .await
                .unwrap();
            assert_eq!(judged, format!("{said} {expected}"));
        }
    }
    // Without a rule that touches it there is nothing more to say.
    let plain = agent(json!({}));
    assert_eq!(
        says(&plain, &previewed(&plain), "myapp_send"),
        r#"writer has no tool "myapp_send"."#
    );
}
