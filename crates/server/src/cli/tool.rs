//! `oubliette tool …`: the catalog, and the tools of agents and sessions.

use std::path::PathBuf;

use oubliette_protocol::{Error, Result, agent::NetworkAccess, catalog::ServerIsolation};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{
    CommandContext, CommandOutcome,
    client::ActionClient,
    explain, files,
    output::{field_text, format_listing, format_table, pretty_json},
    program, resolve,
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
    /// Add a tool server by the command that starts it, or the servers of another client's configuration.
    #[command(
        after_help = "npx, uvx, bunx and pipx commands become programs: pinned to the version found, installed once, and \
        tested.\nTakes the files of Claude, Cursor, VS Code, OpenCode and Gemini as they are.\n\nExamples:\n  \
        oubliette tool add -- npx -y @modelcontextprotocol/server-everything\n  \
        oubliette tool add ~/.cursor/mcp.json\n  \
        echo '{\"mcpServers\":{\"time\":{\"command\":\"uvx\",\"args\":[\"mcp-server-time\"]}}}' | oubliette tool add -"
    )]
    Add {
        /// A JSON file, or - for stdin.
        #[arg(required_unless_present = "command", conflicts_with = "command")]
        file: Option<PathBuf>,
        /// The command that starts a server, after --.
        #[arg(last = true, value_name = "COMMAND")]
        command: Vec<String>,
        /// The id of the command's entry (default: the last part of the package's name).
        #[arg(long, requires = "command")]
        id: Option<String>,
        /// Network access of the servers that are started: none (the default), proxy or host.
        #[arg(long, value_parser = parse_enum::<NetworkAccess>, value_name = "NETWORK")]
        network: Option<NetworkAccess>,
        /// Where they run: sandbox (the default), or host for entries listed in [trust] host_tools.
        #[arg(long, value_parser = parse_enum::<ServerIsolation>, value_name = "WHERE")]
        isolation: Option<ServerIsolation>,
        /// Replace entries with the same id.
        #[arg(long)]
        replace: bool,
        /// Do not start the new programs to see whether they work.
        #[arg(long)]
        no_test: bool,
        /// Run the install scripts of new programs, in the sandbox of the installation.
        #[arg(long)]
        scripts: bool,
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
        /// Say it for a call with these arguments too: a JSON object; - reads it from stdin.
        #[arg(long, value_name = "JSON")]
        arguments: Option<String>,
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
            arguments,
        } => {
            let question = explain::ExplainQuestion {
                agent: &agent,
                tool: &tool,
                session: session.as_deref(),
                no_start,
                arguments: arguments.as_deref(),
            };
            let explained = explain::explain_tool(question, &context).await;
            explained.map(|()| CommandOutcome::Done)
        }
        ToolCommand::Call { .. }
        | ToolCommand::Restart { .. }
        | ToolCommand::List { session: Some(_), .. } => {
            let client = ActionClient::connect_running(&context).await?;
            execute(command, &context, &client).await
        }
        ToolCommand::List { .. }
        | ToolCommand::Get { .. }
        | ToolCommand::Put { .. }
        | ToolCommand::Add { .. }
        | ToolCommand::Delete { .. } => {
            let client = ActionClient::connect(&context).await?;
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
            command,
            id,
            network,
            isolation,
            replace,
            no_test,
            scripts,
        } => {
            let mut arguments = json!({ "replace": replace, "test": !no_test, "scripts": scripts });
            match file {
                Some(file) => arguments["servers"] = files::read_json_object(&file)?,
                None => arguments["command"] = json!(command),
            }
            for (name, given) in [
                ("id", id.map(|id| json!(id))),
                ("network", network.map(|network| json!(network))),
                ("isolation", isolation.map(|isolation| json!(isolation))),
            ] {
                if let Some(value) = given {
                    arguments[name] = value;
                }
            }
            return add_servers(arguments, context, client).await;
        }
        ToolCommand::Call {
            session,
            tool,
            arguments,
        } => {
            let arguments = files::read_arguments(&arguments)?;
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

/// The command line of `tool add` with the `--` that is missing before a command, if that is what is wrong with it.
pub(crate) fn with_separator(args: impl Iterator<Item = String>) -> Option<String> {
    let args: Vec<String> = args.collect();
    let add = args.windows(2).position(|pair| pair == ["tool", "add"])? + 2;
    let begins =
        |word: &String| ["npx", "bunx", "uvx", "pipx", "npm", "node", "docker"].contains(&word.as_str());
    let command = add + args[add..].iter().position(begins)?;
    if args[add..command].iter().any(|word| word == "--") {
        return None;
    }
    let options = args[add..command].iter().map(|word| format!("{word} "));
    let (options, command) = (options.collect::<String>(), args[command..].join(" "));
    Some(format!("oubliette tool add {options}-- {command}"))
}

/// Adds tool servers to the catalog, and says what became of them.
async fn add_servers(
    arguments: Value,
    context: &CommandContext,
    client: &ActionClient,
) -> Result<CommandOutcome> {
    let output = context.output;
    let added = program::call_with_progress(client, "tool_add", arguments, output).await?;
    let rows = |field: &str| added[field].as_array().cloned().unwrap_or_default();
    let (entries, tests) = (rows("entries"), rows("tests"));
    output.print_result(&added, |_| {
        let ids: Vec<String> = entries.iter().map(|entry| field_text(entry, "id")).collect();
        let mut lines = vec![format!("added {}", ids.join(", "))];
        for test in tests.iter().filter(|test| test["ok"] == true) {
            let tools = test["tools"].as_array().map_or(0, Vec::len);
            lines.push(format!(
                "{} {} was ready in {} ms with {tools} tools",
                AnsiStyle::stdout().green("✓"),
                field_text(test, "id"),
                test["took_ms"]
            ));
        }
        lines.join("\n")
    });
    program::print_notes(&added, output);
    let failed: Vec<&Value> = tests.iter().filter(|test| test["ok"] != true).collect();
    for test in &failed {
        eprintln!(
            "{} {} is in the catalog, but could not be started: {}",
            AnsiStyle::stderr().red("error:"),
            field_text(test, "id"),
            strip_control_chars(&field_text(test, "error"))
        );
    }
    let untested = entries
        .iter()
        .find(|entry| !tests.iter().any(|test| test["id"] == entry["id"]));
    if let Some(entry) = untested {
        output.print_hint(&format!(
            "try it with: oubliette tool test {}",
            field_text(entry, "id")
        ));
    }
    Ok(match failed.is_empty() {
        true => CommandOutcome::Done,
        false => CommandOutcome::Failed,
    })
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
                let program = ["npm", "pypi"]
                    .iter()
                    .find_map(|registry| definition["program"][registry].as_str());
                std::iter::once(program.or(definition["command"].as_str()).unwrap_or_default())
                    .chain(args)
                    .collect::<Vec<_>>()
                    .join(" ")
            }
            Some("builtin") => field_text(&definition["builtinPolicy"], "name"),
            _ => field_text(&definition, "endpoint"),
        };
        entry["what"] = match entry["error"].as_str() {
            Some(error) if entry["usable"] == false => json!(format!("✗ broken, not in use: {error}")),
            Some(error) => json!(format!("✗ broken edit: {error}")),
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_without_its_separator_is_shown_with_it() {
        let shown = |line: &str| with_separator(line.split_whitespace().map(str::to_owned));
        assert_eq!(
            shown("--home h tool add --id e npx -y @s/x").as_deref(),
            Some("oubliette tool add --id e -- npx -y @s/x")
        );
        for line in ["tool add -- npx --y", "tool add file --what", "run npx -y x"] {
            assert_eq!(shown(line), None, "{line}");
        }
    }
}
