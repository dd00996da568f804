//! `oubliette mcp-config`: prints the configuration that connects an MCP client to this server.

use clap::ValueEnum;
use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    CommandContext, CommandOutcome,
    output::{OutputFormat, pretty_json, print_line},
    server_url,
};

/// Printed in place of the token when none is given.
pub(crate) const TOKEN_PLACEHOLDER: &str = "oub_YOUR_TOKEN";
/// The variable that holds the token, for clients that read one.
const TOKEN_VARIABLE: &str = "OUBLIETTE_TOKEN";

/// Arguments of `oubliette mcp-config`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "What is printed is the whole file, or what to add to it; where it goes is said on stderr.\n\n\
    Examples:\n  oubliette mcp-config claude-code\n  \
    oubliette mcp-config cursor --token \"$(oubliette token create --name cursor --scope write)\" > .cursor/mcp.json"
)]
pub(crate) struct McpConfigArgs {
    /// The client.
    #[arg(value_enum)]
    client: McpClient,
    /// The token to put into the configuration (default: a placeholder); `oubliette token create` makes one.
    #[arg(long)]
    token: Option<String>,
    /// The server's name in the client: letters, digits, - and _.
    #[arg(long, default_value = "oubliette")]
    name: String,
}

/// An MCP client whose configuration format is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum McpClient {
    /// Claude Code.
    ClaudeCode,
    /// Claude Desktop.
    ClaudeDesktop,
    /// Cursor.
    Cursor,
    /// VS Code.
    #[value(name = "vscode", alias = "vs-code")]
    VsCode,
    /// OpenCode.
    #[value(name = "opencode", alias = "open-code")]
    OpenCode,
    /// Codex.
    Codex,
    /// Gemini CLI.
    Gemini,
}

/// Text to paste into a client's configuration, and where it goes.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct ClientSnippet {
    /// `shell`, `json` or `toml`.
    pub format: &'static str,
    /// The file, or the terminal, it is pasted into.
    pub place: &'static str,
    /// The text.
    pub text: String,
    /// What else the user has to do or have.
    pub note: Option<String>,
}

/// What a client has to know of the server.
#[derive(Debug, Clone)]
pub(crate) struct ServerEntry {
    /// The server's name in the client.
    pub name: String,
    /// The URL of its MCP endpoint, which ends in `/mcp`.
    pub url: String,
    /// The token; a placeholder is printed without one.
    pub token: Option<String>,
}

impl ServerEntry {
    fn bearer(&self) -> String {
        format!("Bearer {}", self.token.as_deref().unwrap_or(TOKEN_PLACEHOLDER))
    }

    fn keyed_by_name(&self, entry: Value) -> Value {
        let mut servers = serde_json::Map::new();
        servers.insert(self.name.clone(), entry);
        servers.into()
    }
}

impl McpClient {
    /// The text for this client.
    pub(crate) fn snippet(self, server: &ServerEntry) -> ClientSnippet {
        let headers = json!({ "Authorization": server.bearer() });
        let json = |place: &'static str, value: Value| ClientSnippet {
            format: "json",
            place,
            text: pretty_json(&value),
            note: None,
        };
        match self {
            McpClient::ClaudeCode => ClientSnippet {
                format: "shell",
                place: "a terminal",
                text: format!(
                    "claude mcp add --transport http {} {} --header {}",
                    shell_quote(&server.name),
                    shell_quote(&server.url),
                    shell_quote(&format!("Authorization: {}", server.bearer()))
                ),
                note: None,
            },
            McpClient::ClaudeDesktop => {
                // Claude Desktop only starts local servers, so mcp-remote forwards to the URL. The header's value is
                // in a variable because some systems split arguments at a space.
                let mut args = vec![
                    "-y",
                    "mcp-remote",
                    &server.url,
                    "--header",
                    "Authorization:${OUBLIETTE_AUTH}",
                ];
                if server.url.starts_with("http://") {
                    args.push("--allow-http");
                }
                let entry =
                    json!({ "command": "npx", "args": args, "env": { "OUBLIETTE_AUTH": server.bearer() } });
                ClientSnippet {
                    note: Some("it reaches HTTP servers through mcp-remote, which needs Node".into()),
                    ..json(
                        "claude_desktop_config.json (Settings, Developer, Edit Config)",
                        json!({ "mcpServers": server.keyed_by_name(entry) }),
                    )
                }
            }
            McpClient::Cursor => {
                let entry = json!({ "url": server.url, "headers": headers });
                json(
                    "~/.cursor/mcp.json, or .cursor/mcp.json in a project",
                    json!({ "mcpServers": server.keyed_by_name(entry) }),
                )
            }
            McpClient::VsCode => {
                let mut value = json!({});
                let mut headers = headers;
                if server.token.is_none() {
                    headers["Authorization"] = json!("Bearer ${input:oubliette-token}");
                    value["inputs"] = json!([{
                        "type": "promptString", "id": "oubliette-token", "description": "Oubliette token", "password": true,
                    }]);
                }
                value["servers"] =
                    server.keyed_by_name(json!({ "type": "http", "url": server.url, "headers": headers }));
                json(
                    ".vscode/mcp.json, or the file of `MCP: Open User Configuration`",
                    value,
                )
            }
            McpClient::OpenCode => {
                let entry = json!({ "type": "remote", "url": server.url, "enabled": true, "headers": headers, "oauth": false });
                let value = json!({ "$schema": "https://opencode.ai/config.json", "mcp": server.keyed_by_name(entry) });
                json(
                    "~/.config/opencode/opencode.json, or opencode.json in a project",
                    value,
                )
            }
            McpClient::Codex => {
                let table = format!(
                    "[mcp_servers.{}]\nurl = {}\n",
                    server.name,
                    toml_string(&server.url)
                );
                let (text, note) = match &server.token {
                    Some(_) => (
                        format!(
                            "{table}http_headers = {{ Authorization = {} }}",
                            toml_string(&server.bearer())
                        ),
                        None,
                    ),
                    None => (
                        format!("{table}bearer_token_env_var = {}", toml_string(TOKEN_VARIABLE)),
                        Some(format!("start it with the token in {TOKEN_VARIABLE}")),
                    ),
                };
                ClientSnippet {
                    format: "toml",
                    place: "~/.codex/config.toml",
                    text,
                    note,
                }
            }
            McpClient::Gemini => {
                let entry = json!({ "httpUrl": server.url, "headers": headers });
                json(
                    "~/.gemini/settings.json",
                    json!({ "mcpServers": server.keyed_by_name(entry) }),
                )
            }
        }
    }

    /// The client's name on the command line.
    fn value_name(self) -> String {
        self.to_possible_value()
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default()
    }
}

/// Runs `oubliette mcp-config`.
pub(crate) async fn run(args: McpConfigArgs, context: CommandContext) -> Result<CommandOutcome> {
    let base = match &context.url {
        Some(url) => check_url(url)?,
        None => match super::ContextFile::load(&context.home)? {
            // Of the server that commands act on.
            file if file.current.is_some() => {
                file.get(file.current.as_deref().unwrap_or_default())?.url.clone()
            }
            _ => server_url::lookup(&context.home).await?,
        },
    };
    let base = base.trim_end_matches('/');
    let url = if base.ends_with("/mcp") {
        base.to_owned()
    } else {
        format!("{base}/mcp")
    };
    if args.name.is_empty()
        || !args
            .name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b == b'-' || b == b'_')
    {
        return Err(Error::invalid("--name is letters, digits, - and _"));
    }
    if args
        .token
        .as_deref()
        .is_some_and(|t| t.is_empty() || !t.bytes().all(|b| b.is_ascii_graphic()))
    {
        return Err(Error::invalid(
            "--token is not a token; make one with `oubliette token create`",
        ));
    }
    let server = ServerEntry {
        name: args.name,
        url,
        token: args.token,
    };
    let paste = args.client.snippet(&server);
    if context.output == OutputFormat::Json {
        let mut shape = json!({
            "client": args.client.value_name(), "format": paste.format, "place": paste.place, "url": server.url, "text": paste.text,
        });
        if paste.format == "json" {
            shape["config"] = serde_json::from_str(&paste.text).map_err(Error::internal)?;
        }
        if let Some(note) = &paste.note {
            shape["note"] = json!(note);
        }
        print_line(&shape.to_string());
        return Ok(CommandOutcome::Done);
    }
    print_line(&paste.text);
    match paste.format {
        "shell" => context.output.print_hint("run that in a terminal"),
        _ => context.output.print_hint(&format!("goes into {}", paste.place)),
    }
    if let Some(note) = &paste.note {
        context.output.print_hint(note);
    }
    if server.token.is_none() {
        let name = args.client.value_name();
        context.output.print_hint(&format!(
            "make a token for it with: oubliette token create --name {name} --scope write"
        ));
    }
    Ok(CommandOutcome::Done)
}

fn check_url(url: &str) -> Result<String> {
    let good = (url.starts_with("http://") || url.starts_with("https://"))
        && url.bytes().all(|b| b.is_ascii_graphic());
    match good {
        true => Ok(url.to_owned()),
        false => Err(Error::invalid("--url must start with http:// or https://")),
    }
}

/// Quotes a word for a POSIX shell, if it needs quotes.
pub(crate) fn shell_quote(word: &str) -> String {
    match word
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_./:=@".contains(&b))
    {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

fn toml_string(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(token: Option<&str>) -> ServerEntry {
        ServerEntry {
            name: "oubliette".into(),
            url: "http://127.0.0.1:8080/mcp".into(),
            token: token.map(str::to_owned),
        }
    }

    #[test]
    fn every_client_gets_the_url_and_a_place_for_the_token() {
        for client in McpClient::value_variants() {
            for token in [None, Some("oub_abc")] {
                let paste = client.snippet(&server(token));
                assert!(paste.text.contains("http://127.0.0.1:8080/mcp"), "{client:?}");
                if let Some(token) = token {
                    assert!(paste.text.contains(token), "{client:?}");
                }
                match paste.format {
                    "json" => drop(serde_json::from_str::<Value>(&paste.text).unwrap()),
                    "toml" => drop(paste.text.parse::<toml::Table>().unwrap()),
                    _ => {}
                }
            }
        }
    }

    #[test]
    fn a_quoted_word_stays_one_word_in_a_shell() {
        assert_eq!(shell_quote("plain"), "plain");
        assert_eq!(shell_quote("it's $HOME"), r"'it'\''s $HOME'");
    }
}
