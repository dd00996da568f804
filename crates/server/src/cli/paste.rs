//! An `mcpServers` block, as other clients keep it, as catalog entries.
//!
//! Read are the shapes people have: `mcpServers` (Claude, Cursor, Gemini), `servers` (VS Code), `mcp`
//! (OpenCode), or the servers alone. What Oubliette has no place for is left out and said.

use oubliette_protocol::{
    CatalogId, Error, Object, Result,
    agent::Network,
    catalog::{Isolation, ToolDefinition},
};
use serde_json::{Value, json};

/// One server of a block, as a catalog entry.
#[derive(Debug, Clone, PartialEq)]
pub struct Pasted {
    /// Its catalog id.
    pub id: CatalogId,
    /// Its tool.json, checked.
    pub definition: Value,
    /// What whoever pasted it should know.
    pub notes: Vec<String>,
}

/// What a block does not say.
#[derive(Debug, Clone, Copy, Default)]
pub struct Wishes {
    /// What servers that are started may reach.
    pub network: Option<Network>,
    /// Where they run.
    pub isolation: Option<Isolation>,
}

/// Reads a block. All of it is good, or none of it is taken.
pub fn read(block: &Value, wishes: Wishes) -> Result<Vec<Pasted>> {
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
    let mut pasted: Vec<Pasted> = Vec::new();
    for (name, server) in servers {
        let one = one(name, server, wishes).map_err(|e| {
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

fn one(name: &str, server: &Value, wishes: Wishes) -> Result<Pasted> {
    let Some(given) = server.as_object() else {
        return Err(Error::invalid("is not an object"));
    };
    let mut rest = given.clone();
    let mut notes = Vec::new();
    let id: CatalogId = slug(name)?;
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
        (Some(command), None) => stdio(command, &mut rest, wishes, &mut notes)?,
        (None, Some(url)) => remote(&url, &kind, &mut rest, &mut notes)?,
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
    Ok(Pasted {
        id,
        definition,
        notes,
    })
}

fn stdio(command: Value, rest: &mut Object, wishes: Wishes, notes: &mut Vec<String>) -> Result<Value> {
    let (program, mut args) = match command {
        Value::String(program) => (program, Vec::new()),
        // OpenCode keeps program and arguments in one list.
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
    let args = args.into_iter().map(referring).collect::<Result<Vec<_>>>()?;
    let env = map(rest.remove("env").or_else(|| rest.remove("environment")), "env")?;
    let network = wishes.network.unwrap_or_default();
    let fetches = ["npx", "uvx", "bunx", "pnpm", "pipx", "docker"];
    let base = program.rsplit('/').next().unwrap_or_default();
    if fetches.contains(&base) && network == Network::None {
        notes.push(format!("{base} fetches what it runs, and sandboxes have no network: add it with --network proxy, or install the server and name its program"));
    }
    for name in referred(&env) {
        notes.push(format!("${{env:{name}}} is read from the server's environment once [trust] env in oubliette.toml lists {name}"));
    }
    let mut definition = json!({
        "transport": "stdio", "command": program, "args": args, "env": env, "network": network,
    });
    if let Some(isolation) = wishes.isolation {
        definition["isolation"] = json!(isolation);
    }
    Ok(definition)
}

fn remote(url: &Value, kind: &str, rest: &mut Object, notes: &mut Vec<String>) -> Result<Value> {
    let url = url
        .as_str()
        .ok_or_else(|| Error::invalid("its URL is not text"))?;
    let headers = map(
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
    for name in referred(&headers) {
        notes.push(format!("${{env:{name}}} is read from the server's environment once [trust] env in oubliette.toml lists {name}"));
    }
    Ok(json!({ "transport": transport, "endpoint": url, "headers": headers }))
}

/// A map of texts.
fn map(value: Option<Value>, field: &str) -> Result<Object> {
    match value {
        None | Some(Value::Null) => Ok(Object::new()),
        Some(Value::Object(map)) => map
            .into_iter()
            .map(|(name, value)| Ok((name, referring(value)?)))
            .collect(),
        Some(_) => Err(Error::invalid(format!("{field} is not an object"))),
    }
}

/// A text with references to the environment as Oubliette writes them: `$NAME`, `${NAME}` and `{env:NAME}`
/// are other clients' ways.
fn referring(value: Value) -> Result<Value> {
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

/// Names of variables that are referred to.
fn referred(map: &Object) -> Vec<String> {
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

/// The id a name becomes.
fn slug(name: &str) -> Result<CatalogId> {
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

    fn pasted(block: Value) -> Vec<Pasted> {
        read(&block, Wishes::default()).unwrap()
    }

    #[test]
    fn every_clients_shape_is_read() {
        let claude = json!({"mcpServers": {"File System": {"command": "mcp-files", "args": ["/workspace"], "env": {"A": "b"}}}});
        let [one] = &pasted(claude)[..] else { panic!() };
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
            pasted(vscode)[0].definition,
            json!({"id": "web", "kind": "mcp", "transport": "http", "endpoint": "https://h/mcp", "headers": {"X": "y"}})
        );

        let opencode = json!({"mcp": {"l": {"type": "local", "command": ["node", "s.js"], "environment": {"K": "{env:K}"}, "enabled": false}}});
        let one = &pasted(opencode)[0];
        assert_eq!(
            (&one.definition["command"], &one.definition["args"]),
            (&json!("node"), &json!(["s.js"]))
        );
        assert_eq!(one.definition["env"]["K"], "${env:K}");

        let gemini = json!({"mcpServers": {"g": {"httpUrl": "http://h/mcp", "timeout": 5000}}});
        let one = &pasted(gemini)[0];
        assert_eq!(one.definition["endpoint"], "http://h/mcp");
        assert!(one.notes.iter().any(|n| n.contains("timeout")));

        assert_eq!(
            pasted(json!({"a": {"url": "ws://h/x"}}))[0].definition["transport"],
            "ws"
        );
    }

    #[test]
    fn references_are_the_servers() {
        let block = json!({"mcpServers": {"a": {"url": "https://h", "headers": {"Authorization": "Bearer ${TOKEN}", "K": "$KEY"}}}});
        let one = &pasted(block)[0];
        assert_eq!(one.definition["headers"]["Authorization"], "Bearer ${env:TOKEN}");
        assert_eq!(one.definition["headers"]["K"], "${env:KEY}");
        assert!(one.notes.iter().any(|n| n.contains("TOKEN")) && one.notes.iter().any(|n| n.contains("KEY")));
    }

    #[test]
    fn what_cannot_work_is_refused_with_its_name_and_reason() {
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
            let error = read(&block, Wishes::default()).unwrap_err();
            assert!(error.message.contains(reason), "{block}: {}", error.message);
        }
    }

    #[test]
    fn a_server_that_is_fetched_needs_the_network() {
        let block = json!({"mcpServers": {"e": {"command": "npx", "args": ["-y", "x"]}}});
        assert!(pasted(block.clone())[0].notes[0].contains("--network proxy"));
        let with = read(
            &block,
            Wishes {
                network: Some(Network::Proxy),
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
                let _ = read(&value, Wishes::default());
            }
        }

        #[test]
        fn no_name_panics(name in "\\PC{0,60}") {
            let _ = read(&json!({"mcpServers": {name: {"command": "x"}}}), Wishes::default());
        }
    }
}
