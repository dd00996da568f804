//! `oubliette tool …`: the catalog, and the tools of sessions.

use std::path::PathBuf;

use oubliette_protocol::{Error, Result, agent::Network, catalog::Isolation};
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use super::{
    Context, Verdict,
    client::Client,
    explain, files, names,
    output::{field, listing, pretty, table},
    paste::{self, Wishes},
    style::{Paint, clean, fold},
};

/// The catalog's tool servers and built-ins, and the tools of sessions and agents.
#[derive(Debug, clap::Subcommand)]
pub enum Tool {
    /// List the catalog; or the tools of an agent or a session.
    List {
        /// The tools this agent would have.
        #[arg(long, conflicts_with = "session")]
        agent: Option<String>,
        /// The tools this session has, with every server's light.
        #[arg(long, value_name = "ID")]
        session: Option<String>,
        /// At most so many catalog entries.
        #[arg(long, value_name = "N")]
        limit: Option<u32>,
    },
    /// Show a catalog entry.
    Get {
        /// Which.
        id: String,
    },
    /// Create or replace a catalog entry from a tool.json.
    Put {
        /// A tool.json, its folder, or - for stdin.
        file: PathBuf,
        /// What to call it (default: its `id`, else the name of its folder or file).
        #[arg(long)]
        id: Option<String>,
    },
    /// Add the servers of an mcpServers block, as other clients keep it.
    #[command(
        after_help = "Takes the files of Claude, Cursor, VS Code, OpenCode and Gemini as they are.\n\nExamples:\n  \
        oubliette tool add ~/.cursor/mcp.json\n  \
        echo '{\"mcpServers\":{\"time\":{\"command\":\"uvx\",\"args\":[\"mcp-server-time\"]}}}' | oubliette tool add - --network proxy"
    )]
    Add {
        /// A JSON file, or - for stdin.
        file: PathBuf,
        /// What servers that are started may reach: none, proxy or host.
        #[arg(long, value_parser = word::<Network>, value_name = "NETWORK")]
        network: Option<Network>,
        /// Where they run: sandbox, or host as far as [trust] host_tools lists them.
        #[arg(long, value_parser = word::<Isolation>, value_name = "WHERE")]
        isolation: Option<Isolation>,
        /// Replace entries that are there already.
        #[arg(long)]
        replace: bool,
    },
    /// Start a catalog entry in a throw-away context, list its tools, say how long it took.
    Test {
        /// Which.
        id: String,
    },
    /// Say in a sentence whether an agent may call a tool, and by which rule.
    Explain {
        /// The agent.
        agent: String,
        /// Any name of the tool: alias, canonical or <id>_<tool>.
        tool: String,
        /// As this session has it now, instead of starting the agent's servers to see.
        #[arg(long, value_name = "ID")]
        session: Option<String>,
        /// Start nothing: tell only what the definitions say.
        #[arg(long)]
        no_start: bool,
    },
    /// Call a tool of a session, through the same gate as its agent.
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
        /// Which.
        id: String,
    },
}

/// One of the words a definition knows.
fn word<T: DeserializeOwned>(text: &str) -> Result<T, String> {
    serde_json::from_value(json!(text)).map_err(|e| e.to_string())
}

/// Runs it.
pub async fn run(command: Tool, context: Context) -> Result<Verdict> {
    match command {
        Tool::Test { id } => explain::test(&id, &context).await.map(|()| Verdict::Done),
        Tool::Explain {
            agent,
            tool,
            session,
            no_start,
        } => {
            let asked = explain::explain(&agent, &tool, session.as_deref(), no_start, &context);
            asked.await.map(|()| Verdict::Done)
        }
        Tool::Call { .. } | Tool::Restart { .. } | Tool::List { session: Some(_), .. } => {
            let client = Client::running(&context.home).await?;
            act(command, &context, &client).await
        }
        Tool::List { .. } | Tool::Get { .. } | Tool::Put { .. } | Tool::Add { .. } | Tool::Delete { .. } => {
            let client = Client::connect(&context.home).await?;
            let done = act(command, &context, &client).await;
            client.close().await;
            done
        }
    }
}

async fn act(command: Tool, context: &Context, client: &Client) -> Result<Verdict> {
    let output = context.output;
    match command {
        Tool::List {
            agent: Some(agent), ..
        } => {
            let list = client.call("tool_list", json!({ "agent": agent })).await?;
            output.result(&list, shown_tools);
        }
        Tool::List {
            session: Some(session),
            ..
        } => {
            let id = names::session(client, &session).await?;
            let list = client.call("tool_list", json!({ "session_id": id })).await?;
            output.result(&list, shown_tools);
        }
        Tool::List { limit, .. } => {
            let list = client.list("catalog_list", "entries", json!({}), limit).await?;
            output.result(&list, shown_catalog);
        }
        Tool::Get { id } => {
            let entry = client.call("catalog_get", json!({ "id": id })).await?;
            output.result(&entry, |entry| pretty(&entry["definition"]));
            if let Some(error) = entry["error"].as_str() {
                output.hint(&format!("a later edit is broken and not in use: {error}"));
            }
        }
        Tool::Put { file, id } => {
            let file = if file.is_dir() {
                file.join("tool.json")
            } else {
                file
            };
            let mut definition = files::object(&file)?;
            let named = definition["id"].as_str().map(str::to_owned);
            let id = id
                .or(named)
                .or_else(|| files::suggested(&file, "tool.json"))
                .filter(|id| id != "-");
            let id =
                id.ok_or_else(|| Error::invalid("say what to call it with --id, or give it an \"id\""))?;
            definition["id"] = json!(id);
            let put = client
                .call("catalog_put", json!({ "id": id, "definition": definition }))
                .await?;
            output.result(&put, |put| format!("{} is in the catalog", field(put, "id")));
        }
        Tool::Add {
            file,
            network,
            isolation,
            replace,
        } => {
            let block = files::object(&file)?;
            add(&block, Wishes { network, isolation }, replace, context, client).await?;
        }
        Tool::Call {
            session,
            tool,
            arguments,
        } => {
            let arguments: Value = match arguments.as_str() {
                "-" => files::object("-".as_ref())?,
                text => serde_json::from_str(text).map_err(|e| {
                    Error::invalid(format!(
                        "the arguments are not JSON: {e}; quote them as '{{\"name\": \"value\"}}'"
                    ))
                })?,
            };
            let id = names::session(client, &session).await?;
            let call = json!({ "session_id": id, "tool": tool, "arguments": arguments });
            let result = client.call("tool_call", call).await?;
            output.result(&result, called);
            if result["isError"] == true {
                eprintln!(
                    "{} {} says that it failed",
                    Paint::stderr().red("error:"),
                    clean(&tool)
                );
                return Ok(Verdict::Failed);
            }
        }
        Tool::Restart { session, server } => {
            let id = names::session(client, &session).await?;
            let done = client
                .call(
                    "tool_server_restart",
                    json!({ "session_id": id, "server": server }),
                )
                .await?;
            output.result(&done, |done| format!("{} was restarted", field(done, "server")));
        }
        Tool::Delete { id } => {
            let gone = client.call("catalog_delete", json!({ "id": id })).await?;
            output.result(&gone, |gone| format!("{} is deleted", field(gone, "id")));
        }
        Tool::Test { .. } | Tool::Explain { .. } => {}
    }
    Ok(Verdict::Done)
}

/// Adds a block: everything in it is checked before anything is written.
async fn add(block: &Value, wishes: Wishes, replace: bool, context: &Context, client: &Client) -> Result<()> {
    let pasted = paste::read(block, wishes)?;
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
        .result(&json!({ "entries": entries, "notes": notes }), |_| {
            let ids: Vec<&str> = pasted.iter().map(|p| p.id.as_str()).collect();
            format!("added {}", ids.join(", "))
        });
    for note in &notes {
        context.output.hint(note);
    }
    if let Some(first) = pasted.first() {
        context
            .output
            .hint(&format!("try it with: oubliette tool test {}", first.id));
    }
    Ok(())
}

fn shown_catalog(list: &Value) -> String {
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
            Some("builtin") => field(&definition["builtinPolicy"], "name"),
            _ => field(&definition, "endpoint"),
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
    listing(
        &entries,
        &columns,
        "The catalog is empty. Add to it with `oubliette tool add FILE`.",
    )
}

/// Tools and servers of a session or an agent.
pub fn shown_tools(list: &Value) -> String {
    let paint = Paint::stdout();
    let tools = list["tools"].as_array().map_or(&[][..], Vec::as_slice);
    let rows = tools.iter().map(|tool| {
        let state = match (tool["allowed"] == true, tool["available"] == true) {
            (true, true) => "yes",
            (true, false) => "unavailable",
            (false, _) => "not allowed",
        };
        let source = match tool["server"].as_str() {
            Some(server) => format!("{} {server}", field(tool, "source")),
            None => field(tool, "source"),
        };
        vec![
            field(tool, "name"),
            state.into(),
            source,
            field(tool, "reason"),
            fold(&field(tool, "description"), 100),
        ]
    });
    let rows: Vec<Vec<String>> = rows.collect();
    let mut text = match rows.is_empty() {
        true => "No tools.".to_owned(),
        false => table(&["TOOL", "CALLABLE", "SOURCE", "WHY", "DESCRIPTION"], &rows),
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
        text.push_str(&listing(servers, &columns, ""));
    }
    if servers.iter().any(|s| s["status"] == "red") {
        text.push_str(&format!(
            "\n{}",
            paint.dim("bring a red one back with: oubliette tool restart SESSION SERVER")
        ));
    }
    text
}

/// A tool's result: its text as it is, anything else as JSON.
fn called(result: &Value) -> String {
    let blocks = result["content"].as_array().map_or(&[][..], Vec::as_slice);
    let shown = blocks.iter().map(|block| match block["text"].as_str() {
        Some(text) => clean(text).into_owned(),
        None => match (block["type"].as_str(), block["data"].as_str()) {
            (Some(kind), Some(data)) => format!("[{kind}, {} characters of base64]", data.len()),
            _ => block.to_string(),
        },
    });
    match blocks.is_empty() {
        true => pretty(&result["structuredContent"]),
        false => shown.collect::<Vec<_>>().join("\n").trim_end().to_owned(),
    }
}
