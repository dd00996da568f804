//! Converts the MCP servers in another client's configuration file to catalog entries.
//!
//! The servers may be under `mcpServers` (Claude, Cursor, Gemini), `servers` (VS Code), `mcp` (OpenCode), or be the
//! whole object. Fields that a catalog entry cannot hold are left out and named in a note. [`package_command`] reads
//! commands that fetch a package, such as `npx`: they can become programs.

mod package_command;

use std::collections::BTreeSet;

use oubliette_protocol::{
    CatalogId, Error, JsonObject, Result,
    agent::NetworkAccess,
    catalog::{ServerIsolation, ToolDefinition},
};
use serde_json::{Value, json};

pub(crate) use package_command::PackageCommand;
use package_command::parse_package_command;

/// One server of the configuration, as a catalog entry.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ImportedServer {
    /// Its catalog id.
    pub id: CatalogId,
    /// Its tool.json, validated.
    pub definition: Value,
    /// The package that its command would fetch, if that can be a program.
    pub package: Option<PackageCommand>,
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

/// Converts one command line. `id`: of the entry; without it, the last part of the package's or program's name.
pub(crate) fn import_command(
    command: &[String],
    id: Option<CatalogId>,
    options: ImportOptions,
) -> Result<ImportedServer> {
    let Some((program, args)) = command.split_first() else {
        return Err(Error::invalid("command: must name a program"));
    };
    let package = match options.isolation {
        // On the host it stays the command it is.
        Some(ServerIsolation::Host) => None,
        Some(ServerIsolation::Sandbox) | None => parse_package_command(program, args).transpose().map_err(|error| {
            Error::invalid(format!(
                "command: {}. Give it as `{program} PACKAGE ARGUMENTS`; what only {program} itself can fetch is run as a command, by \
                 a tool.json with \"command\", \"args\" and \"network\": \"proxy\" (`oubliette tool put`)",
                error.message
            ))
        })?,
    };
    let id = match (id, &package) {
        (Some(id), _) => id,
        (None, Some(package)) => catalog_id(package.request.name.rsplit('/').next().unwrap_or_default())?,
        (None, None) => catalog_id(program.rsplit('/').next().unwrap_or_default())?,
    };
    let server = json!({ "command": program, "args": args });
    let mut imported = import_server(id.as_str(), &server, options)?;
    imported.package = package;
    Ok(imported)
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
        package: fetched_package(&definition, options, &mut notes),
        definition,
        notes,
    })
}

/// The package that a definition's command would fetch. One that cannot be a program stays a command, with a note.
fn fetched_package(
    definition: &Value,
    options: ImportOptions,
    notes: &mut Vec<String>,
) -> Option<PackageCommand> {
    if options.isolation == Some(ServerIsolation::Host) {
        return None;
    }
    let args: Vec<String> = definition["args"]
        .as_array()?
        .iter()
        .filter_map(|arg| arg.as_str().map(str::to_owned))
        .collect();
    match parse_package_command(definition["command"].as_str()?, &args)? {
        Ok(package) => Some(package),
        Err(error) => {
            notes.push(format!("stays a command: {}", error.message));
            None
        }
    }
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
    let base = program.rsplit('/').next().unwrap_or_default();
    let words: Vec<String> = args
        .iter()
        .filter_map(|arg| arg.as_str().map(str::to_owned))
        .collect();
    let in_sandbox = options.isolation != Some(ServerIsolation::Host);
    let fetches = match parse_package_command(&program, &words) {
        // It becomes a program, which is installed before it is started.
        Some(Ok(_)) => false,
        Some(Err(_)) => true,
        None => base == "docker",
    };
    if in_sandbox && fetches && network == NetworkAccess::None {
        notes.push(format!("{base} fetches what it runs, and sandboxes have no network: add it with --network proxy, or install the server and name its program"));
    }
    if in_sandbox {
        let values = env.values().filter_map(Value::as_str);
        let given = words.iter().map(|word| option_value(word)).chain(values);
        let unseen: BTreeSet<&str> = given.filter(|word| is_unseen_path(word)).collect();
        notes.extend(unseen.into_iter().map(|word| {
            format!(
                "a sandbox does not see {word}: name /workspace, which is the session's workspace, or show the path with \
                 `read_only` in tool.json and [trust] read_only in oubliette.toml"
            )
        }));
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

/// The value of an argument such as `--dir=/home/me`; any other argument as it is.
fn option_value(word: &str) -> &str {
    match word.split_once('=') {
        Some((option, value)) if option.starts_with('-') => value,
        _ => word,
    }
}

/// Whether a text is a path of a user's machine, which is not there in a sandbox: one in a directory that holds
/// users' files, as configurations of other clients name it. Of other paths nothing is known.
fn is_unseen_path(word: &str) -> bool {
    let drive = word.as_bytes();
    let on_drive = drive.len() > 2
        && drive[0].is_ascii_alphabetic()
        && drive[1] == b':'
        && matches!(drive[2], b'\\' | b'/');
    on_drive
        || [
            "/Users/",
            "/home/",
            "/root/",
            "/mnt/",
            "/media/",
            "/Volumes/",
            "/path/to/",
            "~/",
        ]
        .iter()
        .any(|start| word.starts_with(start))
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
mod tests;
