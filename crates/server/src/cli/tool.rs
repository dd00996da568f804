//! `oubliette tool …`: the catalog, and the tools of agents and sessions.

use std::path::PathBuf;

use oubliette_protocol::{Error, Result, agent::NetworkAccess, catalog::ServerIsolation};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{
    CommandContext, CommandOutcome,
    client::ActionClient,
    explain, files,
    import::{self, ImportOptions},
    output::{field_text, format_listing, format_table, pretty_json},
    resolve,
    style::{AnsiStyle, fold_to_line, strip_control_chars},
};

/// The catalog's tool servers and built-ins, and the tools of sessions and agents.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ToolCommand {
    /// List the catalog; or the tools of an agent or a session.
    List {
        /// The tools this agent would have.
        #[arg(long, conflicts_with = "session")]
        agent: Option<String>,
        /// The tools this session has, and the status of its tool servers.
        #[arg(long, value_name = "ID")]
        session: Option<String>,
        /// List at most this many catalog entries, 1 to 1000 (default: all).
        #[arg(long, value_name = "N")]
        limit: Option<u32>,
    },
    /// Show a catalog entry.
    Get {
        /// The entry's id.
        id: String,
    },
    /// Create or replace a catalog entry from a tool.json.
    Put {
        /// A tool.json, its folder, or - for stdin.
        file: PathBuf,
        /// The entry's id (default: the file's "id", else the name of its folder or of the file).
        #[arg(long)]
        id: Option<String>,
    },
    /// Add the MCP servers of another client's configuration (an mcpServers block).
    #[command(
        after_help = "Takes the files of Claude, Cursor, VS Code, OpenCode and Gemini as they are.\n\nExamples:\n  \
        oubliette tool add ~/.cursor/mcp.json\n  \
        echo '{\"mcpServers\":{\"time\":{\"command\":\"uvx\",\"args\":[\"mcp-server-time\"]}}}' | oubliette tool add - --network proxy"
    )]
    Add {
        /// A JSON file, or - for stdin.
        file: PathBuf,
        /// Network access of the servers that are started: none (the default), proxy or host.
        #[arg(long, value_parser = parse_enum::<NetworkAccess>, value_name = "NETWORK")]
        network: Option<NetworkAccess>,
        /// Where they run: sandbox (the default), or host for entries listed in [trust] host_tools.
        #[arg(long, value_parser = parse_enum::<ServerIsolation>, value_name = "WHERE")]
        isolation: Option<ServerIsolation>,
        /// Replace entries with the same id.
        #[arg(long)]
        replace: bool,
    },
    /// Start a catalog entry in a temporary workspace, list its tools and the time it took.
    Test {
        /// The entry's id.
        id: String,
    },
    /// Say in a sentence whether an agent may call a tool, and by which rule.
    Explain {
        /// The agent.
        agent: String,
        /// Any name of the tool: alias, canonical or <id>_<tool>.
        tool: String,
        /// Answer for this running session, instead of starting the agent's servers.
        #[arg(long, value_name = "ID")]
        session: Option<String>,
        /// Start no servers: answer from the definitions alone.
        #[arg(long)]
        no_start: bool,
    },
    /// Call a tool of a session, with the same checks as a call by its agent.
    #[command(after_help = "Example: oubliette tool call last read '{\"path\": \"README.md\"}'")]
    Call {
        /// The session, or `last`.
        session: String,
        /// Any name of the tool.
        tool: String,
        /// Its arguments, a JSON object; - reads them from stdin.
        #[arg(default_value = "{}")]
        arguments: String,
    },
    /// Restart a tool server of a session.
    Restart {
        /// The session, or `last`.
        session: String,
        /// The server's catalog id.
        server: String,
    },
    /// Delete a catalog entry.
    Delete {
        /// The entry's id.
        id: String,
    },
}

/// Parses an enum by its name in definitions, such as `proxy`.
fn parse_enum<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(json!(text)).map_err(|e| e.to_string())
}

/// Runs `oubliette tool`.
pub(crate) async fn run(command: ToolCommand, context: CommandContext) -> Result<CommandOutcome> {
    match command {
        ToolCommand::Test { id } => explain::test_entry(&id, &context)
            .await
            .map(|()| CommandOutcome::Done),
        ToolCommand::Explain {
            agent,
            tool,
            session,
            no_start,
        } => {
            let asked = explain::explain_tool(&agent, &tool, session.as_deref(), no_start, &context);
            asked.await.map(|()| CommandOutcome::Done)
        }
        ToolCommand::Call { .. }
        | ToolCommand::Restart { .. }
        | ToolCommand::List { session: Some(_), .. } => {
            let client = ActionClient::connect_running(&context.home).await?;
            execute(command, &context, &client).await
        }
        ToolCommand::List { .. }
        | ToolCommand::Get { .. }
        | ToolCommand::Put { .. }
        | ToolCommand::Add { .. }
        | ToolCommand::Delete { .. } => {
            let client = ActionClient::connect(&context.home).await?;
            let done = execute(command, &context, &client).await;
            client.close().await;
            done
        }
    }
}

async fn execute(
    command: ToolCommand,
    context: &CommandContext,
    client: &ActionClient,
) -> Result<CommandOutcome> {
    let output = context.output;
    match command {
        ToolCommand::List {
            agent: Some(agent), ..
        } => {
            let list = client.call("tool_list", json!({ "agent": agent })).await?;
            output.print_result(&list, format_tool_list);
        }
        ToolCommand::List {
            session: Some(session),
            ..
        } => {
            let id = resolve::session_id(client, &session).await?;
            let list = client.call("tool_list", json!({ "session_id": id })).await?;
            output.print_result(&list, format_tool_list);
        }
        ToolCommand::List { limit, .. } => {
            let list = client.list("catalog_list", "entries", json!({}), limit).await?;
            output.print_result(&list, format_catalog);
        }
        ToolCommand::Get { id } => {
            let entry = client.call("catalog_get", json!({ "id": id })).await?;
            output.print_result(&entry, |entry| pretty_json(&entry["definition"]));
            if let Some(error) = entry["error"].as_str() {
                output.print_hint(&format!("a later edit is broken and not in use: {error}"));
            }
        }
        ToolCommand::Put { file, id } => {
            let file = if file.is_dir() {
                file.join("tool.json")
            } else {
                file
            };
            let mut definition = files::read_json_object(&file)?;
            let named = definition["id"].as_str().map(str::to_owned);
            let id = id
                .or(named)
                .or_else(|| files::suggested_name(&file, "tool.json"))
                .filter(|id| id != "-");
            let id =
                id.ok_or_else(|| Error::invalid("say what to call it with --id, or give it an \"id\""))?;
            definition["id"] = json!(id);
            let put = client
                .call("catalog_put", json!({ "id": id, "definition": definition }))
                .await?;
            output.print_result(&put, |put| format!("{} is in the catalog", field_text(put, "id")));
        }
        ToolCommand::Add {
            file,
            network,
            isolation,
            replace,
        } => {
            let block = files::read_json_object(&file)?;
            add_servers(
                &block,
                ImportOptions { network, isolation },
                replace,
                context,
                client,
            )
            .await?;
        }
        ToolCommand::Call {
            session,
            tool,
            arguments,
        } => {
            let arguments: Value = match arguments.as_str() {
                "-" => files::read_json_object("-".as_ref())?,
                text => serde_json::from_str(text).map_err(|e| {
                    Error::invalid(format!(
                        "the arguments are not JSON: {e}; quote them as '{{\"name\": \"value\"}}'"
                    ))
                })?,
            };
            let id = resolve::session_id(client, &session).await?;
            let call = json!({ "session_id": id, "tool": tool, "arguments": arguments });
            let result = client.call("tool_call", call).await?;
            output.print_result(&result, format_call_result);
            if result["isError"] == true {
                eprintln!(
                    "{} {} returned an error result",
                    AnsiStyle::stderr().red("error:"),
                    strip_control_chars(&tool)
                );
                return Ok(CommandOutcome::Failed);
            }
        }
        ToolCommand::Restart { session, server } => {
            let id = resolve::session_id(client, &session).await?;
            let done = client
                .call(
                    "tool_server_restart",
                    json!({ "session_id": id, "server": server }),
                )
                .await?;
            output.print_result(&done, |done| {
                format!("{} was restarted", field_text(done, "server"))
            });
        }
        ToolCommand::Delete { id } => {
            let gone = client.call("catalog_delete", json!({ "id": id })).await?;
            output.print_result(&gone, |gone| format!("{} is deleted", field_text(gone, "id")));
        }
        ToolCommand::Test { .. } | ToolCommand::Explain { .. } => {}
    }
    Ok(CommandOutcome::Done)
}

/// Adds every server of another client's configuration to the catalog. All are checked before any is written.
async fn add_servers(
    block: &Value,
    options: ImportOptions,
    replace: bool,
    context: &CommandContext,
    client: &ActionClient,
) -> Result<()> {
    let pasted = import::import_servers(block, options)?;
    if !replace {
        let there = client.list("catalog_list", "entries", json!({}), None).await?;
        let there = there["entries"].as_array().map_or(&[][..], Vec::as_slice);
        let taken: Vec<&str> = pasted
            .iter()
            .map(|p| p.id.as_str())
            .filter(|id| there.iter().any(|e| e["id"] == *id))
            .collect();
        if !taken.is_empty() {
            return Err(Error::conflict(format!(
                "the catalog has {} already; nothing was added. Give --replace to replace",
                taken.join(", ")
            )));
        }
    }
    let mut entries = Vec::new();
    for one in &pasted {
        entries.push(
            client
                .call(
                    "catalog_put",
                    json!({ "id": one.id, "definition": one.definition }),
                )
                .await?,
        );
    }
    let notes: Vec<String> = pasted
        .iter()
        .flat_map(|p| p.notes.iter().map(|note| format!("{}: {note}", p.id)))
        .collect();
    context
        .output
        .print_result(&json!({ "entries": entries, "notes": notes }), |_| {
            let ids: Vec<&str> = pasted.iter().map(|p| p.id.as_str()).collect();
            format!("added {}", ids.join(", "))
        });
    for note in &notes {
        context.output.print_hint(note);
    }
    if let Some(first) = pasted.first() {
        context
            .output
            .print_hint(&format!("try it with: oubliette tool test {}", first.id));
    }
    Ok(())
}

/// Formats the answer of `catalog_list` as a table; entries with a broken edit show its error.
fn format_catalog(list: &Value) -> String {
    let mut entries = list["entries"].as_array().cloned().unwrap_or_default();
    for entry in &mut entries {
        let definition = entry["definition"].take();
        let what = match entry["transport"].as_str() {
            Some("stdio") => {
                let args = definition["args"]
                    .as_array()
                    .into_iter()
                    .flatten()
                    .filter_map(Value::as_str);
                std::iter::once(definition["command"].as_str().unwrap_or_default())
                    .chain(args)
                    .collect::<Vec<_>>()
                    .join(" ")
            }
            Some("builtin") => field_text(&definition["builtinPolicy"], "name"),
            _ => field_text(&definition, "endpoint"),
        };
        entry["what"] = match entry["error"].as_str() {
            Some(error) => json!(format!("broken edit: {error}")),
            None => json!(what),
        };
        entry["description"] = definition["description"].clone();
    }
    let columns = [
        ("ID", "id"),
        ("TRANSPORT", "transport"),
        ("WHAT", "what"),
        ("DESCRIPTION", "description"),
    ];
    format_listing(
        &entries,
        &columns,
        "The catalog is empty. Add to it with `oubliette tool add FILE`.",
    )
}

/// Formats the answer of `tool_list` as two tables, of tools and of servers.
pub(crate) fn format_tool_list(list: &Value) -> String {
    let paint = AnsiStyle::stdout();
    let tools = list["tools"].as_array().map_or(&[][..], Vec::as_slice);
    let rows = tools.iter().map(|tool| {
        let state = match (tool["allowed"] == true, tool["available"] == true) {
            (true, true) => "yes",
            (true, false) => "unavailable",
            (false, _) => "not allowed",
        };
        let source = match tool["server"].as_str() {
            Some(server) => format!("{} {server}", field_text(tool, "source")),
            None => field_text(tool, "source"),
        };
        vec![
            field_text(tool, "name"),
            state.into(),
            source,
            field_text(tool, "reason"),
            fold_to_line(&field_text(tool, "description"), 100),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let mut text = match rows.is_empty() {
        true => "No tools.".to_owned(),
        false => format_table(&["TOOL", "CALLABLE", "SOURCE", "WHY", "DESCRIPTION"], &rows),
    };
    let servers = list["servers"].as_array().map_or(&[][..], Vec::as_slice);
    if !servers.is_empty() {
        let columns = [
            ("SERVER", "id"),
            ("TRANSPORT", "transport"),
            ("LIGHT", "status"),
            ("TOOLS", "tools"),
            ("CHECKED", "last_check"),
            ("ERROR", "error"),
        ];
        text.push_str("\n\n");
        text.push_str(&format_listing(servers, &columns, ""));
    }
    if servers.iter().any(|s| s["status"] == "red") {
        text.push_str(&format!(
            "\n{}",
            paint.dim("bring a red one back with: oubliette tool restart SESSION SERVER")
        ));
    }
    text
}

/// Formats a tool's result: text blocks as text, binary ones as their size, others as JSON.
fn format_call_result(result: &Value) -> String {
    let blocks = result["content"].as_array().map_or(&[][..], Vec::as_slice);
    let shown = blocks.iter().map(|block| match block["text"].as_str() {
        Some(text) => strip_control_chars(text).into_owned(),
        None => match (block["type"].as_str(), block["data"].as_str()) {
            (Some(kind), Some(data)) => format!("[{kind}, {} characters of base64]", data.len()),
            _ => block.to_string(),
        },
    });
    match blocks.is_empty() {
        true => pretty_json(&result["structuredContent"]),
        false => shown.collect::<Vec<_>>().join("\n").trim_end().to_owned(),
    }
}
