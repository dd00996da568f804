//! The command line without a running server: usage, output formats, definitions, client configurations.

#![allow(clippy::unwrap_used, clippy::expect_used)]

mod cli_support;

use cli_support::CliHome;
use serde_json::json;

#[test]
fn wrong_usage_exits_with_2_and_prints_usage() {
    let home = CliHome::new();
    for args in [
        &["token", "create"][..],
        &["nonsense"],
        &["project", "get"],
        &["session", "list", "--status", "odd"],
        &["run"],
    ] {
        let said = home.run(args);
        assert_eq!((said.code, said.stdout.as_str()), (2, ""), "{args:?}: {said:?}");
        assert!(
            said.stderr.contains("Usage") || said.stderr.contains("error:"),
            "{said:?}"
        );
    }
    let said = home.run(&["token", "create", "--json"]);
    assert_eq!(said.code, 2);
    assert_eq!(said.json()["error"]["code"], "invalid_argument");
    let bare = home.run(&[]);
    assert_eq!(bare.code, 2);
    assert!(bare.stderr.contains("Usage"), "{bare:?}");
    assert!(!home.path().exists(), "wrong usage makes nothing");
}

#[test]
fn help_has_examples_and_exit_codes() {
    let home = CliHome::new();
    let help = home.run(&["--help"]).expect_success().stdout;
    assert!(help.starts_with("Coding agents in sandboxes"), "{help}");
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
        let help = home.run(&[command, "--help"]).expect_success().stdout;
        assert!(help.contains("oubliette "), "{command} has an example:\n{help}");
    }
    assert!(
        home.run(&["--version"])
            .expect_success()
            .stdout
            .starts_with("oubliette ")
    );
}

#[test]
fn json_and_home_options_work_before_and_after_the_command() {
    let home = CliHome::new();
    let before = home.run(&["--json", "project", "list"]).expect_success().json();
    let after = home.run(&["project", "list", "--json"]).expect_success().json();
    assert_eq!(before, json!({ "projects": [] }));
    assert_eq!(before, after);
    let mut command = std::process::Command::new(cli_support::PROGRAM);
    command
        .args(["project", "list", "--json", "--home"])
        .arg(home.path());
    assert_eq!(
        cli_support::run_to_end(command, "").expect_success().json(),
        before
    );
}

#[test]
fn a_failure_exits_with_1_and_is_on_stderr_and_as_json_on_stdout() {
    let home = CliHome::new();
    let said = home.run(&["project", "get", "no such", "--json"]);
    assert_eq!(said.expect_error_code(), "not_found");
    assert!(
        said.stderr.starts_with("error: ") && said.stderr.contains("project list"),
        "{said:?}"
    );
    let plain = home.run(&["project", "get", "no such"]);
    assert_eq!((plain.code, plain.stdout.as_str()), (1, ""));
}

#[test]
fn projects_are_created_changed_and_deleted_without_a_server() {
    let home = CliHome::new();
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
    let table = home.run(&["project", "list"]).expect_success().stdout;
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
    home.run(&["project", "delete", "site"]).expect_success();
    assert_eq!(
        home.run(&["project", "get", id, "--json"]).expect_error_code(),
        "not_found"
    );
}

#[test]
fn workspaces_belong_to_the_only_project_or_a_named_one() {
    let home = CliHome::new();
    assert!(home.run(&["workspace", "list"]).stderr.contains("project create"));
    home.run(&["project", "create", "one"]).expect_success();
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
    assert!(
        home.run(&["workspace", "diff", id])
            .expect_success()
            .stdout
            .contains("+fresh")
    );
    home.run(&["project", "create", "two"]).expect_success();
    assert!(home.run(&["workspace", "create"]).stderr.contains("--project"));
    home.run(&["workspace", "create", "--project", "two"])
        .expect_success();
    home.run(&["workspace", "delete", id]).expect_success();
}

#[test]
fn tokens_are_shown_once() {
    let home = CliHome::new();
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
        .expect_success();
    let token = said.stdout.trim();
    assert!(token.starts_with("oub_"), "{said:?}");
    assert!(
        home.run(&["token", "list"])
            .expect_success()
            .stdout
            .contains("ci")
    );
    let list = home.json(&["token", "list"]);
    assert!(!list.to_string().contains(token));
    let id = list["tokens"][0]["token_id"].as_str().unwrap();
    home.run(&["token", "revoke", id]).expect_success();
    assert_eq!(
        home.run(&["token", "list"]).expect_success().stdout,
        "No token.\n"
    );
}

#[test]
fn agents_are_created_replaced_and_deleted() {
    let home = CliHome::new();
    let said = home
        .run(&["agent", "new", "code-reviewer", "--model", "openai/gpt-5"])
        .expect_success();
    assert!(std::path::Path::new(said.stdout.trim()).is_file(), "{said:?}");
    let shown = home.json(&["agent", "get", "code-reviewer"]);
    assert_eq!(
        (&shown["name"], &shown["definition"]["model"]),
        (&json!("Code Reviewer"), &json!("openai/gpt-5"))
    );
    assert_eq!(
        home.run(&["agent", "new", "code-reviewer", "--json"])
            .expect_error_code(),
        "conflict"
    );
    home.put_scripted_agent("scripted", json!([[{ "say": "hi" }]]));
    let script = home.path().join("agents/scripted/turns.json");
    assert!(script.is_file(), "the script comes along");
    let piped = home.run_with_stdin(
        &["agent", "put", "-", "--slug", "piped"],
        r#"{"name": "P", "prompt": "p"}"#,
    );
    piped.expect_success();
    let wrong = home.run_with_stdin(
        &["agent", "put", "-", "--slug", "x", "--json"],
        r#"{"name": "P", "promt": "p"}"#,
    );
    assert_eq!(wrong.expect_error_code(), "invalid_argument");
    assert!(wrong.stderr.contains("promt"), "{wrong:?}");
    assert!(
        home.run_with_stdin(&["agent", "put", "-"], "{}")
            .stderr
            .contains("--slug")
    );
    let slugs = home.json(&["agent", "list"])["agents"]
        .as_array()
        .unwrap()
        .iter()
        .map(|a| a["slug"].clone())
        .collect::<Vec<_>>();
    assert_eq!(slugs, ["code-reviewer", "piped", "scripted"]);
    home.run(&["agent", "delete", "piped"]).expect_success();
    assert_eq!(
        home.run(&["agent", "get", "piped", "--json"]).expect_error_code(),
        "not_found"
    );
}

#[test]
fn an_mcp_servers_block_becomes_catalog_entries_or_none_of_it_does() {
    let home = CliHome::new();
    let block = json!({"mcpServers": {
        "Time": {"command": "uvx", "args": ["git+https://example.com/x"], "env": {"TZ": "${TZ}"}},
        "docs": {"url": "https://example.com/mcp", "headers": {"X-Key": "$DOCS_KEY"}},
    }})
    .to_string();
    let added = home
        .run_with_stdin(&["tool", "add", "-", "--json"], &block)
        .expect_success()
        .json();
    assert_eq!(added["entries"].as_array().unwrap().len(), 2);
    assert!(added["notes"].to_string().contains("--network proxy"), "{added}");
    let time = home.json(&["tool", "get", "time"]);
    assert_eq!(
        (&time["transport"], &time["definition"]["env"]["TZ"]),
        (&json!("stdio"), &json!("${env:TZ}"))
    );
    let again = home.run_with_stdin(&["tool", "add", "-", "--json"], &block);
    assert_eq!(again.expect_error_code(), "conflict");
    home.run_with_stdin(&["tool", "add", "-", "--replace", "--network", "proxy"], &block)
        .expect_success();
    assert_eq!(
        home.json(&["tool", "get", "time"])["definition"]["network"],
        "proxy"
    );
    let half =
        json!({"mcpServers": {"good": {"command": "x"}, "bad": {"type": "sse", "url": "http://h/sse"}}})
            .to_string();
    let refused = home.run_with_stdin(&["tool", "add", "-", "--json"], &half);
    assert_eq!(refused.expect_error_code(), "invalid_argument");
    assert!(
        refused.stderr.contains("bad") && refused.stderr.contains("SSE"),
        "{refused:?}"
    );
    assert_eq!(
        home.run(&["tool", "get", "good", "--json"]).expect_error_code(),
        "not_found"
    );
    assert!(
        home.run(&["tool", "list"])
            .expect_success()
            .stdout
            .contains("https://example.com/mcp")
    );
    home.run(&["tool", "delete", "docs"]).expect_success();
}

#[test]
fn tool_explain_prints_a_sentence_and_tool_test_starts_the_entry() {
    cli_support::build_sibling_programs();
    let home = CliHome::new();
    let reader =
        r#"{"id":"reader","kind":"builtin","builtinPolicy":{"name":"fs_read","allowedPaths":["."]}}"#;
    home.run_with_stdin(&["tool", "put", "-"], reader)
        .expect_success();
    let agent = r#"{"name":"W","prompt":"p","tools":{"use":["reader"],"allowed":["read"],"denied":["project_list"],"aliases":{"read":"@reader/fs_read"}}}"#;
    home.run_with_stdin(&["agent", "put", "-", "--slug", "writer"], agent)
        .expect_success();
    let sentence = |tool: &str| {
        home.run(&["tool", "explain", "writer", tool])
            .expect_success()
            .stdout
    };
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
    home.run_with_stdin(&["tool", "put", "-", "--id", "broken"], r#"{"kind":"mcp","transport":"stdio","command":"/bin/sh","args":["-c","echo no such database >&2; exit 3"]}"#)
        .expect_success();
    let broken = home.run(&["tool", "test", "broken", "--json"]);
    assert_eq!(broken.expect_error_code(), "unavailable");
    assert!(
        broken.stderr.contains("no such database"),
        "its stderr is told: {broken:?}"
    );
}

#[test]
fn changes_are_in_the_audit_log() {
    let home = CliHome::new();
    home.run(&["project", "create", "one"]).expect_success();
    let entries = home.json(&["audit"]);
    assert_eq!(entries["entries"][0]["action"], "project_create");
    assert_eq!(
        home.json(&["audit", "list", "--action", "token_create"]),
        json!({ "entries": [] })
    );
    assert!(
        home.run(&["audit", "--limit", "1"])
            .expect_success()
            .stdout
            .contains("the owner")
    );
}

#[test]
fn commands_that_need_a_server_say_how_to_start_one() {
    let home = CliHome::new();
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
            said.stderr.contains("oubliette --home") && said.stderr.contains(" up`"),
            "{said:?}"
        );
    }
    assert_eq!(
        home.run(&["session", "list", "--json"]).expect_error_code(),
        "unavailable"
    );
}

#[test]
fn concurrent_commands_wait_for_each_other() {
    let home = CliHome::new();
    let names: Vec<String> = (0..4).map(|n| format!("p{n}")).collect();
    std::thread::scope(|scope| {
        for name in &names {
            scope.spawn(|| home.run(&["project", "create", name]).expect_success());
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
fn control_characters_in_an_agents_description_are_not_printed() {
    let home = CliHome::new();
    let agent = json!({ "name": "N", "prompt": "p", "description": "\u{1b}[2Jgone\u{202e}" }).to_string();
    home.run_with_stdin(&["agent", "put", "-", "--slug", "odd"], &agent)
        .expect_success();
    let out = home.run(&["agent", "list"]).expect_success().stdout;
    assert!(
        out.contains("gone") && !out.contains('\u{1b}') && !out.contains('\u{202e}'),
        "{out:?}"
    );
}

#[test]
fn doctor_reports_failed_checks_with_remedies() {
    cli_support::build_sibling_programs();
    let home = CliHome::new();
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
    for name in ["config", "port", "sandbox", "git", "oubliette-client"] {
        find(&none, name);
    }
    home.run(&["project", "create", "one"]).expect_success();
    let good = home.run(&["doctor", "--json"]);
    assert_eq!(find(&good.json(), "database")["ok"], true);
    home.run(&["agent", "new", "keyless", "--model", "nowhere/m"])
        .expect_success();
    let agent = find(&home.run(&["doctor", "--json"]).json(), "agent keyless");
    assert_eq!(agent["ok"], false);
    assert!(
        agent["remedy"].as_str().unwrap().contains("[providers.nowhere]"),
        "{agent}"
    );
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
        text.stdout.contains("✗ database") && text.stdout.contains("→"),
        "{}",
        text.stdout
    );
    use std::os::unix::fs::PermissionsExt as _;
    std::fs::set_permissions(home.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    assert!(home.run(&["doctor"]).stdout.contains("chmod 700"));
}

#[test]
fn every_client_gets_a_config_in_its_own_format() {
    let home = CliHome::new();
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
            let plain = home.run(&["mcp-config", client]).expect_success();
            assert!(plain.stderr.contains("token create"), "{plain:?}");
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
                .expect_success();
            let told = format!(
                "{}\n\n{}\n\n{}",
                plain.stdout.trim_end(),
                plain.stderr.trim_end(),
                with.stdout.trim_end()
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
            .expect_error_code(),
        "invalid_argument"
    );
}

#[test]
fn every_shell_gets_completions() {
    let home = CliHome::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = home.run(&["completions", shell]).expect_success().stdout;
        assert!(
            script.contains("OUBLIETTE_COMPLETE")
                && script.contains("_CLAP") != (shell == "fish" || shell == "powershell"),
            "{shell}: {script}"
        );
    }
    assert_eq!(home.run(&["completions", "tcsh"]).code, 2);
}
