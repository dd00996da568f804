//! Converts the MCP servers in another client's configuration file to catalog entries.
//!
//! The servers may be under `mcpServers` (Claude, Cursor, Gemini), `servers` (VS Code), `mcp` (OpenCode), or be the
//! whole object. Fields that a catalog entry cannot hold are left out and named in a note.

use oubliette_protocol::{
    CatalogId, Error, JsonObject, Result,
    agent::NetworkAccess,
    catalog::{ServerIsolation, ToolDefinition},
};
use serde_json::{Value, json};

/// One server of the configuration, as a catalog entry.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ImportedServer {
    /// Its catalog id.
    pub id: CatalogId,
    /// Its tool.json, validated.
    pub definition: Value,
    /// What the user should know: fields left out, an id that differs from the name, variables to allow.
    pub notes: Vec<String>,
}

/// What a client's configuration does not say; applies to servers that are started, not to remote ones.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct ImportOptions {
    /// Network access; none if not given.
    pub network: Option<NetworkAccess>,
    /// Sandbox or host; the catalog's default if not given.
    pub isolation: Option<ServerIsolation>,
}

/// Converts all servers of a configuration; the first one that cannot be converted fails the whole.
pub(crate) fn import_servers(block: &Value, options: ImportOptions) -> Result<Vec<ImportedServer>> {
    let servers = ["mcpServers", "mcp_servers", "servers", "mcp"]
        .iter()
        .find_map(|key| block[*key].as_object());
    let servers = servers.or_else(|| {
        block
            .as_object()
            .filter(|all| !all.is_empty() && all.values().all(is_server))
    });
    let servers = servers.filter(|servers| !servers.is_empty()).ok_or_else(|| {
        Error::invalid(
            "no servers in it: expected {\"mcpServers\": {\"name\": {\"command\": …} or {\"url\": …}}}",
        )
    })?;
    let mut pasted: Vec<ImportedServer> = Vec::new();
    for (name, server) in servers {
        let one = import_server(name, server, options).map_err(|e| {
            Error::invalid(format!("{}: {}", oubliette_protocol::id::quoted(name), e.message))
        })?;
        if let Some(other) = pasted.iter().find(|other| other.id == one.id) {
            return Err(Error::invalid(format!(
                "two of its servers would both be called {}",
                other.id
            )));
        }
        pasted.push(one);
    }
    Ok(pasted)
}

fn is_server(value: &Value) -> bool {
    ["command", "url", "httpUrl", "serverUrl"]
        .iter()
        .any(|key| value.get(key).is_some())
}

fn import_server(name: &str, server: &Value, options: ImportOptions) -> Result<ImportedServer> {
    let Some(given) = server.as_object() else {
        return Err(Error::invalid("is not an object"));
    };
    let mut rest = given.clone();
    let mut notes = Vec::new();
    let id: CatalogId = catalog_id(name)?;
    let kind = rest.remove("type").or_else(|| rest.remove("transport"));
    let kind = kind
        .as_ref()
        .and_then(Value::as_str)
        .unwrap_or_default()
        .to_ascii_lowercase();
    let url = ["httpUrl", "url", "serverUrl", "endpoint"]
        .iter()
        .find_map(|key| rest.remove(*key));
    let mut definition = match (rest.remove("command"), url) {
        (Some(_), Some(_)) => return Err(Error::invalid("has a command and a URL; keep one of them")),
        (Some(command), None) => stdio_definition(command, &mut rest, options, &mut notes)?,
        (None, Some(url)) => remote_definition(&url, &kind, &mut rest, &mut notes)?,
        (None, None) => return Err(Error::invalid("has neither a command nor a URL")),
    };
    if let Some(about) = rest.remove("description").filter(Value::is_string) {
        definition["description"] = about;
    }
    if rest.remove("disabled") == Some(json!(true)) || rest.remove("enabled") == Some(json!(false)) {
        notes.push("it was switched off there; here an agent has it when its `use` names it".into());
    }
    if !rest.is_empty() {
        notes.push(format!(
            "left out: {}",
            rest.keys().cloned().collect::<Vec<_>>().join(", ")
        ));
    }
    definition["id"] = json!(id);
    definition["kind"] = json!("mcp");
    ToolDefinition::from_value(definition.clone()).map_err(|e| Error::invalid(e.to_string()))?;
    if id.as_str() != name {
        notes.push(format!("called {id} here, because ids are a-z, 0-9 and -"));
    }
    Ok(ImportedServer {
        id,
        definition,
        notes,
    })
}

fn stdio_definition(
    command: Value,
    rest: &mut JsonObject,
    options: ImportOptions,
    notes: &mut Vec<String>,
) -> Result<Value> {
    let (program, mut args) = match command {
        Value::String(program) => (program, Vec::new()),
        // OpenCode has program and arguments in one list.
        Value::Array(words) => {
            let mut words = words.into_iter();
            let program = words.next().and_then(|w| w.as_str().map(str::to_owned));
            (
                program.ok_or_else(|| Error::invalid("command is empty"))?,
                words.collect(),
            )
        }
        _ => return Err(Error::invalid("command is not text")),
    };
    match rest.remove("args") {
        Some(Value::Array(more)) => args.extend(more),
        None | Some(Value::Null) => {}
        Some(_) => return Err(Error::invalid("args is not a list")),
    }
    let args = args
        .into_iter()
        .map(rewrite_env_reference)
        .collect::<Result<Vec<_>>>()?;
    let env = string_map(rest.remove("env").or_else(|| rest.remove("environment")), "env")?;
    let network = options.network.unwrap_or_default();
    let fetches = ["npx", "uvx", "bunx", "pnpm", "pipx", "docker"];
    let base = program.rsplit('/').next().unwrap_or_default();
    if fetches.contains(&base) && network == NetworkAccess::None {
        notes.push(format!("{base} fetches what it runs, and sandboxes have no network: add it with --network proxy, or install the server and name its program"));
    }
    for name in env_references(&env) {
        notes.push(format!("${{env:{name}}} is read from the server's environment once [trust] env in oubliette.toml lists {name}"));
    }
    let mut definition = json!({
        "transport": "stdio", "command": program, "args": args, "env": env, "network": network,
    });
    if let Some(isolation) = options.isolation {
        definition["isolation"] = json!(isolation);
    }
    Ok(definition)
}

fn remote_definition(
    url: &Value,
    kind: &str,
    rest: &mut JsonObject,
    notes: &mut Vec<String>,
) -> Result<Value> {
    let url = url
        .as_str()
        .ok_or_else(|| Error::invalid("its URL is not text"))?;
    let headers = string_map(
        rest.remove("headers").or_else(|| rest.remove("http_headers")),
        "headers",
    )?;
    let transport = match kind {
        "sse" => {
            return Err(Error::invalid(
                "speaks the old SSE transport, which is not supported; most such servers serve streamable HTTP too, often at /mcp",
            ));
        }
        _ if url.starts_with("ws://") || url.starts_with("wss://") => "ws",
        "" | "http" | "streamable-http" | "streamablehttp" | "streamable_http" | "remote" => "http",
        other => return Err(Error::invalid(format!("its type {other:?} is not known"))),
    };
    if kind.is_empty() && url.trim_end_matches('/').ends_with("/sse") {
        notes.push(
            "its URL looks like the old SSE transport; if it does not connect, try the server's /mcp".into(),
        );
    }
    for name in env_references(&headers) {
        notes.push(format!("${{env:{name}}} is read from the server's environment once [trust] env in oubliette.toml lists {name}"));
    }
    Ok(json!({ "transport": transport, "endpoint": url, "headers": headers }))
}

/// The object of strings in the field `field`; empty when missing.
fn string_map(value: Option<Value>, field: &str) -> Result<JsonObject> {
    match value {
        None | Some(Value::Null) => Ok(JsonObject::new()),
        Some(Value::Object(map)) => map
            .into_iter()
            .map(|(name, value)| Ok((name, rewrite_env_reference(value)?)))
            .collect(),
        Some(_) => Err(Error::invalid(format!("{field} is not an object"))),
    }
}

/// Rewrites other clients' references to environment variables, `$NAME`, `${NAME}` and `{env:NAME}`, to Oubliette's
/// `${env:NAME}`. Only a reference that is the whole text, or follows `Bearer `, is recognised.
fn rewrite_env_reference(value: Value) -> Result<Value> {
    let text = match value {
        Value::String(text) => text,
        Value::Number(number) => number.to_string(),
        Value::Bool(flag) => flag.to_string(),
        _ => return Err(Error::invalid("has a value that is not text")),
    };
    if text.contains("${input:") {
        return Err(Error::invalid(
            "asks for an input; put ${env:NAME} or the value in its place",
        ));
    }
    let name = |t: &str| !t.is_empty() && t.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'_');
    let whole = text.strip_prefix("${").and_then(|t| t.strip_suffix('}'));
    let whole = whole.or_else(|| text.strip_prefix("{env:").and_then(|t| t.strip_suffix('}')));
    let whole = whole.or_else(|| text.strip_prefix('$')).filter(|t| name(t));
    Ok(match whole {
        Some(variable) => json!(format!("${{env:{variable}}}")),
        None => json!(
            text.replace("Bearer ${", "Bearer ${env:")
                .replace("${env:env:", "${env:")
        ),
    })
}

/// The names in all `${env:NAME}` references of a map's values.
fn env_references(map: &JsonObject) -> Vec<String> {
    let mut names = Vec::new();
    for text in map.values().filter_map(Value::as_str) {
        for part in text.split("${env:").skip(1) {
            if let Some((name, _)) = part.split_once('}')
                && !names.contains(&name.to_owned())
            {
                names.push(name.to_owned());
            }
        }
    }
    names
}

/// Makes a catalog id of a server's name: lower case, `-` for other characters, at most 32.
fn catalog_id(name: &str) -> Result<CatalogId> {
    let mut id = String::new();
    for c in name.chars() {
        match c {
            'a'..='z' | '0'..='9' => id.push(c),
            'A'..='Z' => id.push(c.to_ascii_lowercase()),
            _ if id.is_empty() || id.ends_with('-') => {}
            _ => id.push('-'),
        }
    }
    id.truncate(32);
    id.trim_end_matches('-')
        .parse()
        .map_err(|e: Error| Error::invalid(format!("cannot be a catalog id: {}", e.message)))
}

#[cfg(test)]
mod tests {
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
        let block = json!({"mcpServers": {"e": {"command": "npx", "args": ["-y", "x"]}}});
        assert!(import(block.clone())[0].notes[0].contains("--network proxy"));
        let with = import_servers(
            &block,
            ImportOptions {
                network: Some(NetworkAccess::Proxy),
                isolation: None,
            },
        )
        .unwrap();
        assert!(with[0].notes.is_empty());
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
}
