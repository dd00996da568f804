//! The command line on a home whose server is stopped: usage, output, definitions, what to paste where.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cli_support;

use cli_support::Home;
use serde_json::json;

#[test]
fn wrong_usage_is_2_and_says_what_is_right() {
    let home = Home::new();
    for args in [
        &["token", "create"][..],
        &["nonsense"],
        &["project", "get"],
        &["session", "list", "--status", "odd"],
        &["run"],
    ] {
        let said = home.run(args);
        assert_eq!((said.code, said.out.as_str()), (2, ""), "{args:?}: {said:?}");
        assert!(
            said.err.contains("Usage") || said.err.contains("error:"),
            "{said:?}"
        );
    }
    let said = home.run(&["token", "create", "--json"]);
    assert_eq!(said.code, 2);
    assert_eq!(said.json()["error"]["code"], "invalid_argument");
    let bare = home.run(&[]);
    assert_eq!(bare.code, 2);
    assert!(bare.err.contains("Usage"), "{bare:?}");
    assert!(!home.path().exists(), "wrong usage makes nothing");
}

#[test]
fn help_teaches() {
    let home = Home::new();
    let help = home.run(&["--help"]).good().out;
    for word in [
        "oubliette up",
        "oubliette run --agent demo",
        "mcp-config",
        "doctor",
        "Exit codes",
    ] {
        assert!(help.contains(word), "{word}:\n{help}");
    }
    for command in ["run", "chat", "completions", "mcp-config"] {
        let help = home.run(&[command, "--help"]).good().out;
        assert!(help.contains("oubliette "), "{command} has an example:\n{help}");
    }
    assert!(home.run(&["--version"]).good().out.starts_with("oubliette "));
}

#[test]
fn json_and_home_go_before_or_after_the_command() {
    let home = Home::new();
    let before = home.run(&["--json", "project", "list"]).good().json();
    let after = home.run(&["project", "list", "--json"]).good().json();
    assert_eq!(before, json!({ "projects": [] }));
    assert_eq!(before, after);
    let mut command = std::process::Command::new(cli_support::PROGRAM);
    command
        .args(["project", "list", "--json", "--home"])
        .arg(home.path());
    assert_eq!(cli_support::finish(command, "").good().json(), before);
}

#[test]
fn a_failure_is_1_told_on_stderr_and_as_an_object() {
    let home = Home::new();
    let said = home.run(&["project", "get", "no such", "--json"]);
    assert_eq!(said.refused(), "not_found");
    assert!(
        said.err.starts_with("error: ") && said.err.contains("project list"),
        "{said:?}"
    );
    let plain = home.run(&["project", "get", "no such"]);
    assert_eq!((plain.code, plain.out.as_str()), (1, ""));
}

#[test]
fn projects_live_and_die_without_a_server() {
    let home = Home::new();
    let made = home.json(&[
        "project",
        "create",
        "website",
        "--env",
        "SECRET=hunter2",
        "--memory-mb",
        "256",
        "--max-sessions",
        "3",
    ]);
    assert!(!made.to_string().contains("hunter2"));
    assert_eq!(
        (&made["sandbox"]["memory_mb"], &made["limits"]["max_sessions"]),
        (&json!(256), &json!(3))
    );
    assert_eq!(
        home.json(&["project", "create", "--name", "other"])["name"],
        "other"
    );
    let id = made["project_id"].as_str().unwrap();
    assert_eq!(
        home.json(&["project", "get", "website"]),
        home.json(&["project", "get", id])
    );
    let changed = home.json(&[
        "project",
        "update",
        "website",
        "--name",
        "site",
        "--description",
        "Ours.",
    ]);
    assert_eq!(
        (&changed["name"], &changed["description"]),
        (&json!("site"), &json!("Ours."))
    );
    let table = home.run(&["project", "list"]).good().out;
    assert!(
        table.starts_with("ID ") && table.contains("site") && table.contains("other"),
        "{table}"
    );
    assert_eq!(
        home.json(&["project", "list", "--limit", "1"])["projects"]
            .as_array()
            .unwrap()
            .len(),
        1
    );
    home.run(&["project", "delete", "site"]).good();
    assert_eq!(home.run(&["project", "get", id, "--json"]).refused(), "not_found");
}

#[test]
fn workspaces_belong_to_the_only_project_or_a_named_one() {
    let home = Home::new();
    assert!(home.run(&["workspace", "list"]).err.contains("project create"));
    home.run(&["project", "create", "one"]).good();
    let made = home.json(&["workspace", "create", "--name", "scratch"]);
    let id = made["workspace_id"].as_str().unwrap();
    assert_eq!(
        home.json(&["workspace", "list"])["workspaces"]
            .as_array()
            .unwrap()
            .len(),
        2
    );
    let folder = home
        .path()
        .join("projects")
        .join(made["project_id"].as_str().unwrap())
        .join("workspaces")
        .join(id);
    std::fs::write(folder.join("new.txt"), "fresh\n").unwrap();
    assert!(home.run(&["workspace", "diff", id]).good().out.contains("+fresh"));
    home.run(&["project", "create", "two"]).good();
    assert!(home.run(&["workspace", "create"]).err.contains("--project"));
    home.run(&["workspace", "create", "--project", "two"]).good();
    home.run(&["workspace", "delete", id]).good();
}

#[test]
fn tokens_are_shown_once() {
    let home = Home::new();
    let said = home
        .run(&[
            "token",
            "create",
            "--name",
            "ci",
            "--scope",
            "read",
            "--expires",
            "30d",
        ])
        .good();
    let token = said.out.trim();
    assert!(token.starts_with("oub_"), "{said:?}");
    assert!(home.run(&["token", "list"]).good().out.contains("ci"));
    let list = home.json(&["token", "list"]);
    assert!(!list.to_string().contains(token));
    let id = list["tokens"][0]["token_id"].as_str().unwrap();
    home.run(&["token", "revoke", id]).good();
    assert_eq!(home.run(&["token", "list"]).good().out, "No token.\n");
}

#[test]
fn agents_are_made_put_and_removed() {
    let home = Home::new();
    let said = home
        .run(&["agent", "new", "code-reviewer", "--model", "openai/gpt-5"])
        .good();
    assert!(std::path::Path::new(said.out.trim()).is_file(), "{said:?}");
    let shown = home.json(&["agent", "get", "code-reviewer"]);
    assert_eq!(
        (&shown["name"], &shown["definition"]["model"]),
        (&json!("Code Reviewer"), &json!("openai/gpt-5"))
    );
    assert_eq!(
        home.run(&["agent", "new", "code-reviewer", "--json"]).refused(),
        "conflict"
    );
    home.script("scripted", json!([[{ "say": "hi" }]]));
    let script = home.path().join("agents/scripted/turns.json");
    assert!(script.is_file(), "the script comes along");
    let piped = home.run_with(
        &["agent", "put", "-", "--slug", "piped"],
        r#"{"name": "P", "prompt": "p"}"#,
    );
    piped.good();
    let wrong = home.run_with(
        &["agent", "put", "-", "--slug", "x", "--json"],
        r#"{"name": "P", "promt": "p"}"#,
    );
    assert_eq!(wrong.refused(), "invalid_argument");
    assert!(wrong.err.contains("promt"), "{wrong:?}");
    assert!(home.run_with(&["agent", "put", "-"], "{}").err.contains("--slug"));
    let slugs = home.json(&["agent", "list"])["agents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|a| a["slug"].clone())
        .collect::<Vec<_>>();
    assert_eq!(slugs, ["code-reviewer", "piped", "scripted"]);
    home.run(&["agent", "delete", "piped"]).good();
    assert_eq!(
        home.run(&["agent", "get", "piped", "--json"]).refused(),
        "not_found"
    );
}

#[test]
fn an_mcp_servers_block_becomes_catalog_entries_or_none_of_it_does() {
    let home = Home::new();
    let block = json!({"mcpServers": {
        "Time": {"command": "uvx", "args": ["mcp-server-time"], "env": {"TZ": "${TZ}"}},
        "docs": {"url": "https://example.com/mcp", "headers": {"X-Key": "$DOCS_KEY"}},
    }})
    .to_string();
    let added = home
        .run_with(&["tool", "add", "-", "--json"], &block)
        .good()
        .json();
    assert_eq!(added["entries"].as_array().unwrap().len(), 2);
    assert!(added["notes"].to_string().contains("--network proxy"), "{added}");
    let time = home.json(&["tool", "get", "time"]);
    assert_eq!(
        (&time["transport"], &time["definition"]["env"]["TZ"]),
        (&json!("stdio"), &json!("${env:TZ}"))
    );
    let again = home.run_with(&["tool", "add", "-", "--json"], &block);
    assert_eq!(again.refused(), "conflict");
    home.run_with(&["tool", "add", "-", "--replace", "--network", "proxy"], &block)
        .good();
    assert_eq!(
        home.json(&["tool", "get", "time"])["definition"]["network"],
        "proxy"
    );
    let half =
        json!({"mcpServers": {"good": {"command": "x"}, "bad": {"type": "sse", "url": "http://h/sse"}}})
            .to_string();
    let refused = home.run_with(&["tool", "add", "-", "--json"], &half);
    assert_eq!(refused.refused(), "invalid_argument");
    assert!(
        refused.err.contains("bad") && refused.err.contains("SSE"),
        "{refused:?}"
    );
    assert_eq!(
        home.run(&["tool", "get", "good", "--json"]).refused(),
        "not_found"
    );
    assert!(
        home.run(&["tool", "list"])
            .good()
            .out
            .contains("https://example.com/mcp")
    );
    home.run(&["tool", "delete", "docs"]).good();
}

#[test]
fn a_tool_is_explained_in_a_sentence_and_tried_out() {
    cli_support::siblings();
    let home = Home::new();
    let reader =
        r#"{"id":"reader","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["."]}}"#;
    home.run_with(&["tool", "put", "-"], reader).good();
    let agent = r#"{"name":"W","prompt":"p","tools":{"use":["reader"],"allowed":["read"],"denied":["project_list"],"aliases":{"read":"@reader/fs_read"}}}"#;
    home.run_with(&["agent", "put", "-", "--slug", "writer"], agent)
        .good();
    let sentence = |tool: &str| home.run(&["tool", "explain", "writer", tool]).good().out;
    assert!(
        sentence("read").starts_with("writer may call read (@reader/fs_read, from the catalog)"),
        "{}",
        sentence("read")
    );
    assert!(sentence("session_message").contains("base tool"));
    assert!(
        sentence("project_list").contains("may not call")
            && sentence("project_list").contains("tools.denied")
    );
    assert!(sentence("raed").contains("no tool"));
    let told = home.json(&["tool", "explain", "writer", "reader_fs_read"]);
    assert_eq!(
        (&told["allowed"], &told["available"], &told["canonical"]),
        (&json!(true), &json!(true), &json!("@reader/fs_read"))
    );
    let tried = home.json(&["tool", "test", "reader"]);
    assert_eq!(
        (&tried["status"], &tried["tools"][0]["name"]),
        (&json!("green"), &json!("@reader/fs_read"))
    );
    assert!(tried["took_ms"].is_u64());
    home.run_with(&["tool", "put", "-", "--id", "broken"], r#"{"kind":"mcp","transport":"stdio","command":"/bin/sh","args":["-c","echo no such database >&2; exit 3"]}"#)
        .good();
    let broken = home.run(&["tool", "test", "broken", "--json"]);
    assert_eq!(broken.refused(), "unavailable");
    assert!(
        broken.err.contains("no such database"),
        "its stderr is told: {broken:?}"
    );
}

#[test]
fn what_was_changed_is_in_the_audit_log() {
    let home = Home::new();
    home.run(&["project", "create", "one"]).good();
    let entries = home.json(&["audit"]);
    assert_eq!(entries["entries"][0]["action"], "project_create");
    assert_eq!(
        home.json(&["audit", "list", "--action", "token_create"]),
        json!({ "entries": [] })
    );
    assert!(
        home.run(&["audit", "--limit", "1"])
            .good()
            .out
            .contains("the owner")
    );
}

#[test]
fn what_needs_a_server_says_how_to_start_one() {
    let home = Home::new();
    for args in [
        &["run", "hi"][..],
        &["chat"],
        &["session", "list"],
        &["session", "debug", "last"],
        &["tool", "call", "last", "x"],
    ] {
        let said = home.run(args);
        assert_eq!(said.code, 1, "{said:?}");
        assert!(
            said.err.contains("oubliette --home") && said.err.contains(" up`"),
            "{said:?}"
        );
    }
    assert_eq!(home.run(&["session", "list", "--json"]).refused(), "unavailable");
}

#[test]
fn commands_at_once_wait_for_each_other() {
    let home = Home::new();
    let names: Vec<String> = (0..4).map(|n| format!("p{n}")).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| home.run(&["project", "create", name]).good());
        }
    });
    assert_eq!(
        home.json(&["project", "list"])["projects"]
            .as_array()
            .unwrap()
            .len(),
        4
    );
}

#[test]
fn nothing_an_agent_says_of_itself_acts_on_the_terminal() {
    let home = Home::new();
    let agent = json!({ "name": "N", "prompt": "p", "description": "\u{1b}[2Jgone\u{202e}" }).to_string();
    home.run_with(&["agent", "put", "-", "--slug", "odd"], &agent)
        .good();
    let out = home.run(&["agent", "list"]).good().out;
    assert!(
        out.contains("gone") && !out.contains('\u{1b}') && !out.contains('\u{202e}'),
        "{out:?}"
    );
}

#[test]
fn the_doctor_finds_what_is_wrong_and_its_remedy() {
    cli_support::siblings();
    let home = Home::new();
    let none = home.run(&["doctor", "--json"]).json();
    let find = |report: &serde_json::Value, name: &str| {
        report["checks"]
            .as_array()
            .unwrap()
            .iter()
            .find(|c| c["name"] == name)
            .cloned()
            .unwrap_or_else(|| panic!("{name}: {report}"))
    };
    assert!(!home.path().exists(), "looking makes nothing");
    assert_eq!(find(&none, "home")["remedy"], "oubliette up makes it");
    for name in [
        "config",
        "port",
        "sandbox",
        "git",
        "oubliette-client",
        "agent program opencode",
        "agent program droid",
    ] {
        find(&none, name);
    }
    home.run(&["project", "create", "one"]).good();
    let good = home.run(&["doctor", "--json"]);
    assert_eq!(find(&good.json(), "database")["ok"], true);
    assert_eq!(good.code == 0, good.json()["ok"] == true);

    std::fs::write(home.path().join("oubliette.toml"), "[server]\nlissten = 1\n").unwrap();
    let broken = home.run(&["doctor", "--json"]);
    assert_eq!(broken.code, 1);
    let config = find(&broken.json(), "config");
    assert!(config["detail"].as_str().unwrap().contains("lissten") && config["remedy"].is_string());
    std::fs::remove_file(home.path().join("oubliette.toml")).unwrap();

    std::fs::write(home.path().join("oubliette.db"), "not a database".repeat(1000)).unwrap();
    let text = home.run(&["doctor"]);
    assert_eq!(text.code, 1);
    assert!(
        text.out.contains("✗ database") && text.out.contains("→"),
        "{}",
        text.out
    );
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(home.run(&["doctor"]).out.contains("chmod 700"));
}

#[test]
fn every_client_gets_a_config_in_its_own_format() {
    let home = Home::new();
    let mut settings = insta::Settings::clone_current();
    settings.set_prepend_module_to_snapshot(false);
    settings.set_omit_expression(true);
    settings.bind(|| {
        for client in [
            "claude-code",
            "claude-desktop",
            "cursor",
            "vscode",
            "opencode",
            "codex",
            "gemini",
        ] {
            let plain = home.run(&["mcp-config", client]).good();
            assert!(plain.err.contains("token create"), "{plain:?}");
            let with = home
                .run(&[
                    "mcp-config",
                    client,
                    "--token",
                    "oub_abc",
                    "--url",
                    "https://example.com",
                    "--name",
                    "lab",
                ])
                .good();
            let told = format!(
                "{}\n\n{}\n\n{}",
                plain.out.trim_end(),
                plain.err.trim_end(),
                with.out.trim_end()
            );
            insta::assert_snapshot!(format!("mcp_config_{client}"), told);
        }
    });
    let shape = home.json(&["mcp-config", "cursor"]);
    assert_eq!(
        shape["config"]["mcpServers"]["oubliette"]["url"],
        "http://127.0.0.1:8080/mcp"
    );
    assert_eq!(home.run(&["mcp-config", "nobody"]).code, 2);
    assert_eq!(
        home.run(&["mcp-config", "cursor", "--url", "ftp://x", "--json"])
            .refused(),
        "invalid_argument"
    );
}

#[test]
fn every_shell_gets_completions() {
    let home = Home::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = home.run(&["completions", shell]).good().out;
        assert!(
            script.contains("mcp-config") && script.contains("workspace"),
            "{shell}"
        );
    }
    assert_eq!(home.run(&["completions", "tcsh"]).code, 2);
}
