//! Tests of the import of other clients' configurations.

use super::*;
use proptest::prelude::*;

fn import(block: Value) -> Vec<ImportedServer> {
    import_servers(&block, ImportOptions::default()).unwrap()
}

#[test]
fn every_clients_format_is_read() {
    let claude = json!({"mcpServers": {"File System": {"command": "mcp-files", "args": ["/workspace"], "env": {"A": "b"}}}});
    let [one] = &import(claude)[..] else { panic!() };
    assert_eq!(one.id.as_str(), "file-system");
    assert_eq!(one.definition["command"], "mcp-files");
    assert_eq!(one.definition["transport"], "stdio");
    assert!(
        one.notes.iter().any(|n| n.contains("file-system")),
        "{:?}",
        one.notes
    );

    let vscode = json!({"servers": {"web": {"type": "http", "url": "https://h/mcp", "headers": {"X": "y"}}}, "inputs": []});
    assert_eq!(
        import(vscode)[0].definition,
        json!({"id": "web", "kind": "mcp", "transport": "http", "endpoint": "https://h/mcp", "headers": {"X": "y"}})
    );

    let opencode = json!({"mcp": {"l": {"type": "local", "command": ["node", "s.js"], "environment": {"K": "{env:K}"}, "enabled": false}}});
    let one = &import(opencode)[0];
    assert_eq!(
        (&one.definition["command"], &one.definition["args"]),
        (&json!("node"), &json!(["s.js"]))
    );
    assert_eq!(one.definition["env"]["K"], "${env:K}");

    let gemini = json!({"mcpServers": {"g": {"httpUrl": "http://h/mcp", "timeout": 5000}}});
    let one = &import(gemini)[0];
    assert_eq!(one.definition["endpoint"], "http://h/mcp");
    assert!(one.notes.iter().any(|n| n.contains("timeout")));

    assert_eq!(
        import(json!({"a": {"url": "ws://h/x"}}))[0].definition["transport"],
        "ws"
    );
}

#[test]
fn a_command_that_fetches_a_package_can_become_a_program() {
    let block = json!({"mcpServers": {"e": {"command": "npx", "args": ["-y", "@s/x", "/workspace"]}}});
    let one = &import(block)[0];
    let package = one.package.as_ref().unwrap();
    assert_eq!(
        (package.request.to_string().as_str(), &package.args[..]),
        ("npm:@s/x", &["/workspace".to_owned()][..])
    );
    assert!(one.notes.is_empty(), "{:?}", one.notes);
    let words = ["uvx", "Mcp_Server.Time"].map(str::to_owned);
    let one = import_command(&words, None, ImportOptions::default()).unwrap();
    assert_eq!(one.id.as_str(), "mcp-server-time");
    assert!(import_command(&["uvx".into(), "./x".into()], None, ImportOptions::default()).is_err());
    let one = import_command(&["/opt/My-Server".into()], None, ImportOptions::default()).unwrap();
    assert!(one.id.as_str() == "my-server" && one.package.is_none());
}

#[test]
fn a_path_that_no_sandbox_sees_is_named() {
    for path in ["/Users/me/Desktop", "C:\\Users\\me", "~/notes", "/path/to/dir"] {
        let block = json!({"mcpServers": {"f": {"command": "npx", "args": ["-y", "@s/files", path]}}});
        let notes = &import(block.clone())[0].notes;
        assert!(
            notes.len() == 1 && notes[0].contains(path) && notes[0].contains("/workspace"),
            "{notes:?}"
        );
        let on_host = ImportOptions {
            isolation: Some(ServerIsolation::Host),
            ..ImportOptions::default()
        };
        assert!(
            import_servers(&block, on_host).unwrap()[0].notes.is_empty(),
            "{path}"
        );
    }
    let block = json!({"mcpServers": {"f": {"command": "npx", "args": ["-y", "@s/db", "--db=/home/me/x.db", "--url=https://h/home/"],
        "env": {"MEMORY_FILE_PATH": "/Users/me/memory.json", "LEVEL": "2"}}}});
    let notes = &import(block)[0].notes;
    assert!(
        notes.len() == 2
            && notes[0].contains("see /Users/me/memory.json:")
            && notes[1].contains("see /home/me/x.db:"),
        "{notes:?}"
    );
    for word in [
        "/workspace",
        "/usr/share/dict",
        "--dir=x",
        "c:",
        "https://h/home/",
    ] {
        let block = json!({"mcpServers": {"f": {"command": "mcp-files", "args": [word]}}});
        assert!(import(block)[0].notes.is_empty(), "{word}");
    }
}

#[test]
fn environment_references_are_rewritten() {
    let block = json!({"mcpServers": {"a": {"url": "https://h", "headers": {"Authorization": "Bearer ${TOKEN}", "K": "$KEY"}}}});
    let one = &import(block)[0];
    assert_eq!(one.definition["headers"]["Authorization"], "Bearer ${env:TOKEN}");
    assert_eq!(one.definition["headers"]["K"], "${env:KEY}");
    assert!(one.notes.iter().any(|n| n.contains("TOKEN")) && one.notes.iter().any(|n| n.contains("KEY")));
}

#[test]
fn invalid_servers_are_refused_with_name_and_reason() {
    for (block, reason) in [
        (json!({}), "mcpServers"),
        (json!({"mcpServers": {}}), "mcpServers"),
        (json!({"mcpServers": {"a": {}}}), "neither"),
        (
            json!({"mcpServers": {"a": {"command": "x", "url": "http://h"}}}),
            "keep one",
        ),
        (
            json!({"mcpServers": {"a": {"type": "sse", "url": "http://h/sse"}}}),
            "SSE",
        ),
        (
            json!({"mcpServers": {"a": {"command": "x", "env": {"K": "${input:k}"}}}}),
            "input",
        ),
        (
            json!({"mcpServers": {"a b": {"command": "x"}, "a-b": {"command": "y"}}}),
            "a-b",
        ),
        (json!({"mcpServers": {"!!": {"command": "x"}}}), "!!"),
        (
            json!({"mcpServers": {"a": {"command": "x", "args": "y"}}}),
            "args",
        ),
        (
            json!({"mcpServers": {"a": {"command": "x", "env": {"BAD NAME": "y"}}}}),
            "env",
        ),
    ] {
        let error = import_servers(&block, ImportOptions::default()).unwrap_err();
        assert!(error.message.contains(reason), "{block}: {}", error.message);
    }
}

#[test]
fn a_command_that_downloads_needs_network_access() {
    let block = json!({"mcpServers": {"e": {"command": "npx", "args": ["-y", "github:a/b"]}}});
    let one = &import(block.clone())[0];
    assert!(
        one.package.is_none() && one.notes[0].contains("--network proxy"),
        "{:?}",
        one.notes
    );
    let with = import_servers(
        &block,
        ImportOptions {
            network: Some(NetworkAccess::Proxy),
            isolation: None,
        },
    )
    .unwrap();
    assert!(with[0].notes.iter().all(|note| !note.contains("--network proxy")));
    assert_eq!(with[0].definition["network"], "proxy");
}

proptest! {
    #[test]
    fn no_block_panics(text in "\\PC{0,200}") {
        if let Ok(value) = serde_json::from_str::<Value>(&text) {
            let _ = import_servers(&value, ImportOptions::default());
        }
    }

    #[test]
    fn no_name_panics(name in "\\PC{0,60}") {
        let _ = import_servers(&json!({"mcpServers": {name: {"command": "x"}}}), ImportOptions::default());
    }
}
