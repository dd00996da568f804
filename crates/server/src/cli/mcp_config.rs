//! `oubliette mcp-config`: what to paste into an MCP client.

use clap::ValueEnum;
use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    Context, Verdict, address,
    output::{Output, pretty, say},
};

/// What stands where a token belongs.
pub const PLACEHOLDER: &str = "oub_YOUR_TOKEN";
/// The variable that holds the token, for clients that read one.
const VARIABLE: &str = "OUBLIETTE_TOKEN";

/// For which client.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "What is printed is the whole file, or what to add to it; where it goes is said on stderr.\n\n\
    Examples:\n  oubliette mcp-config claude-code\n  \
    oubliette mcp-config cursor --token \"$(oubliette token create --name cursor --scope write)\" > .cursor/mcp.json"
)]
pub struct Args {
    /// The client.
    #[arg(value_enum)]
    client: McpClient,
    /// The token to put into it (default: a placeholder). `oubliette token create` makes one.
    #[arg(long)]
    token: Option<String>,
    /// The server's URL as the client sees it (default: the running server's, else the configured one).
    #[arg(long)]
    url: Option<String>,
    /// What the client calls the server.
    #[arg(long, default_value = "oubliette")]
    name: String,
}

/// An MCP client with a configuration of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum McpClient {
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

/// What to paste, and where.
#[derive(Debug, Clone, PartialEq)]
pub struct Paste {
    /// `shell`, `json` or `toml`.
    pub format: &'static str,
    /// Where it goes.
    pub place: &'static str,
    /// The text.
    pub text: String,
    /// What else to do.
    pub note: Option<String>,
}

/// Where a client finds the server, and what it shows there.
#[derive(Debug, Clone)]
pub struct Server {
    /// What the client calls it.
    pub name: String,
    /// Its `/mcp`.
    pub url: String,
    /// The token, if it is known.
    pub token: Option<String>,
}

impl Server {
    fn bearer(&self) -> String {
        format!("Bearer {}", self.token.as_deref().unwrap_or(PLACEHOLDER))
    }

    fn named(&self, entry: Value) -> Value {
        let mut servers = serde_json::Map::new();
        servers.insert(self.name.clone(), entry);
        servers.into()
    }
}

impl McpClient {
    /// What to paste into this client.
    pub fn paste(self, server: &Server) -> Paste {
        let headers = json!({ "Authorization": server.bearer() });
        let json = |place: &'static str, value: Value| Paste {
            format: "json",
            place,
            text: pretty(&value),
            note: None,
        };
        match self {
            McpClient::ClaudeCode => Paste {
                format: "shell",
                place: "a terminal",
                text: format!(
                    "claude mcp add --transport http {} {} --header {}",
                    quoted(&server.name),
                    quoted(&server.url),
                    quoted(&format!("Authorization: {}", server.bearer()))
                ),
                note: None,
            },
            McpClient::ClaudeDesktop => {
                // It starts servers and cannot send headers itself; the header's space is kept out of the
                // arguments because some systems split them there.
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
                Paste {
                    note: Some("it reaches HTTP servers through mcp-remote, which needs Node".into()),
                    ..json(
                        "claude_desktop_config.json (Settings, Developer, Edit Config)",
                        json!({ "mcpServers": server.named(entry) }),
                    )
                }
            }
            McpClient::Cursor => {
                let entry = json!({ "url": server.url, "headers": headers });
                json(
                    "~/.cursor/mcp.json, or .cursor/mcp.json in a project",
                    json!({ "mcpServers": server.named(entry) }),
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
                    server.named(json!({ "type": "http", "url": server.url, "headers": headers }));
                json(
                    ".vscode/mcp.json, or the file of `MCP: Open User Configuration`",
                    value,
                )
            }
            McpClient::OpenCode => {
                let entry = json!({ "type": "remote", "url": server.url, "enabled": true, "headers": headers, "oauth": false });
                let value =
                    json!({ "$schema": "https://opencode.ai/config.json", "mcp": server.named(entry) });
                json(
                    "~/.config/opencode/opencode.json, or opencode.json in a project",
                    value,
                )
            }
            McpClient::Codex => {
                let table = format!(
                    "[mcp_servers.{}]\nurl = {}\n",
                    server.name,
                    toml_text(&server.url)
                );
                let (text, note) = match &server.token {
                    Some(_) => (
                        format!(
                            "{table}http_headers = {{ Authorization = {} }}",
                            toml_text(&server.bearer())
                        ),
                        None,
                    ),
                    None => (
                        format!("{table}bearer_token_env_var = {}", toml_text(VARIABLE)),
                        Some(format!("start it with the token in {VARIABLE}")),
                    ),
                };
                Paste {
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
                    json!({ "mcpServers": server.named(entry) }),
                )
            }
        }
    }

    fn word(self) -> String {
        self.to_possible_value()
            .map(|value| value.get_name().to_owned())
            .unwrap_or_default()
    }
}

/// Runs it.
pub async fn run(args: Args, context: Context) -> Result<Verdict> {
    let base = match args.url {
        Some(url) => checked(&url)?,
        None => address::of(&context.home).await?,
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
    let server = Server {
        name: args.name,
        url,
        token: args.token,
    };
    let paste = args.client.paste(&server);
    if context.output == Output::Json {
        let mut shape = json!({
            "client": args.client.word(), "format": paste.format, "place": paste.place, "url": server.url, "text": paste.text,
        });
        if paste.format == "json" {
            shape["config"] = serde_json::from_str(&paste.text).map_err(Error::internal)?;
        }
        if let Some(note) = &paste.note {
            shape["note"] = json!(note);
        }
        say(&shape.to_string());
        return Ok(Verdict::Done);
    }
    say(&paste.text);
    match paste.format {
        "shell" => context.output.hint("run that in a terminal"),
        _ => context.output.hint(&format!("goes into {}", paste.place)),
    }
    if let Some(note) = &paste.note {
        context.output.hint(note);
    }
    if server.token.is_none() {
        let name = args.client.word();
        context.output.hint(&format!(
            "make a token for it with: oubliette token create --name {name} --scope write"
        ));
    }
    Ok(Verdict::Done)
}

fn checked(url: &str) -> Result<String> {
    let good = (url.starts_with("http://") || url.starts_with("https://"))
        && url.bytes().all(|b| b.is_ascii_graphic());
    match good {
        true => Ok(url.to_owned()),
        false => Err(Error::invalid("--url must start with http:// or https://")),
    }
}

/// A word for a shell.
fn quoted(word: &str) -> String {
    match word
        .bytes()
        .all(|b| b.is_ascii_alphanumeric() || b"-_./:=@".contains(&b))
    {
        true => word.to_owned(),
        false => format!("'{}'", word.replace('\'', r"'\''")),
    }
}

fn toml_text(text: &str) -> String {
    toml::Value::String(text.to_owned()).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn server(token: Option<&str>) -> Server {
        Server {
            name: "oubliette".into(),
            url: "http://127.0.0.1:8080/mcp".into(),
            token: token.map(str::to_owned),
        }
    }

    #[test]
    fn every_client_gets_the_url_and_a_place_for_the_token() {
        for client in McpClient::value_variants() {
            for token in [None, Some("oub_abc")] {
                let paste = client.paste(&server(token));
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
    fn a_shells_word_stays_one_word() {
        assert_eq!(quoted("plain"), "plain");
        assert_eq!(quoted("it's $HOME"), r"'it'\''s $HOME'");
    }
}
