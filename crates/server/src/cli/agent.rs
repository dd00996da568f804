//! `oubliette agent …`: list, show, write and delete agent definitions.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    CommandContext,
    client::ActionClient,
    files,
    output::{field_text, format_listing, pretty_json},
    resolve::set_if_some,
};

/// List, show, write and delete agents: agents/<slug>/agent.json in the home.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum AgentCommand {
    /// List agents.
    List {
        /// List at most this many, 1 to 1000 (default: all).
        #[arg(long, value_name = "N")]
        limit: Option<u32>,
    },
    /// Show an agent's definition.
    Get {
        /// The agent's slug.
        slug: String,
    },
    /// Create or replace an agent from a file.
    #[command(
        after_help = "FILE is an agent.json, a folder that holds one, or - for stdin. A script:<file> model's \
        script is taken along from beside it.\n\nExamples:\n  oubliette agent put writer/agent.json\n  \
        oubliette agent put - --slug writer < agent.json"
    )]
    Put {
        /// An agent.json, its folder, or -.
        file: PathBuf,
        /// The agent's slug (default: the name of the file's folder, or of the file).
        #[arg(long)]
        slug: Option<String>,
        /// Another file to copy into the agent's folder; may be repeated.
        #[arg(long = "with", value_name = "FILE")]
        with: Vec<PathBuf>,
    },
    /// Create an agent from a template, and print the path of its agent.json.
    New {
        /// The agent's slug, such as code-reviewer.
        slug: String,
        /// Its display name (default: made from the slug).
        #[arg(long)]
        name: Option<String>,
        /// Its system prompt.
        #[arg(long)]
        prompt: Option<String>,
        /// Its model, such as anthropic/claude-sonnet-4-5.
        #[arg(long)]
        model: Option<String>,
        /// The id of a catalog entry it uses; may be repeated.
        #[arg(long = "use", value_name = "ID")]
        uses: Vec<String>,
    },
    /// Delete an agent.
    Delete {
        /// The agent's slug.
        slug: String,
    },
}

/// Runs `oubliette agent`.
pub(crate) async fn run(command: AgentCommand, context: CommandContext) -> Result<()> {
    let client = ActionClient::connect(&context.home).await?;
    let done = execute(command, &context, &client).await;
    client.close().await;
    done
}

async fn execute(command: AgentCommand, context: &CommandContext, client: &ActionClient) -> Result<()> {
    let output = context.output;
    match command {
        AgentCommand::List { limit } => {
            let list = client.list("agent_list", "agents", json!({}), limit).await?;
            output.print_result(&list, format_agents);
        }
        AgentCommand::Get { slug } => {
            let agent = client.call("agent_get", json!({ "slug": slug })).await?;
            output.print_result(&agent, |agent| pretty_json(&agent["definition"]));
            if let Some(error) = agent["error"].as_str() {
                output.print_hint(&format!("a later edit is broken and not in use: {error}"));
            }
        }
        AgentCommand::Put { file, slug, with } => {
            let file = if file.is_dir() {
                file.join("agent.json")
            } else {
                file
            };
            let slug = slug
                .or_else(|| files::suggested_name(&file, "agent.json"))
                .filter(|s| s != "-");
            let slug = slug.ok_or_else(|| Error::invalid("say what to call it with --slug"))?;
            let definition = files::read_json_object(&file)?;
            let beside = companion_files(&file, &definition, &with)?;
            let mut arguments = json!({ "slug": slug, "definition": definition });
            set_if_some(
                &mut arguments,
                "files",
                Some(beside).filter(|files| !files.is_empty()),
            );
            let put = client.call("agent_put", arguments).await?;
            output.print_result(&put, |put| {
                format!("agent {} is in use from now on", field_text(put, "slug"))
            });
        }
        AgentCommand::New {
            slug,
            name,
            prompt,
            model,
            uses,
        } => {
            if client.call("agent_get", json!({ "slug": slug })).await.is_ok() {
                return Err(Error::conflict(format!(
                    "there is an agent {slug} already; edit it, or choose another name"
                )));
            }
            let definition = definition_template(&slug, name, prompt, model, &uses);
            let made = client
                .call("agent_put", json!({ "slug": slug, "definition": definition }))
                .await?;
            let path = context.home.agents_dir().join(&slug).join("agent.json");
            output.print_result(&made, |_| format!("{}", path.display()));
            output.print_hint(&format!(
                "edit that file; the server takes it up as you save. Then: oubliette chat --agent {slug}"
            ));
        }
        AgentCommand::Delete { slug } => {
            let gone = client.call("agent_delete", json!({ "slug": slug })).await?;
            output.print_result(&gone, |gone| {
                format!("agent {} is deleted", field_text(gone, "slug"))
            });
        }
    }
    Ok(())
}

/// Formats the answer of `agent_list` as a table; agents with a broken edit show its error.
pub(crate) fn format_agents(list: &Value) -> String {
    let mut agents = list["agents"].as_array().cloned().unwrap_or_default();
    for agent in &mut agents {
        let runtime = &agent["definition"]["runtime"];
        agent["runtime"] = match runtime["command"][0].as_str() {
            Some(program) => json!(Path::new(program).file_name().map(|n| n.to_string_lossy())),
            None => json!("built in"),
        };
        agent["model"] = agent["definition"]["model"].take();
        if agent["error"].is_string() {
            agent["description"] = json!(format!("broken edit: {}", field_text(agent, "error")));
        }
    }
    let columns = [
        ("AGENT", "slug"),
        ("NAME", "name"),
        ("RUNTIME", "runtime"),
        ("MODEL", "model"),
        ("DESCRIPTION", "description"),
    ];
    format_listing(
        &agents,
        &columns,
        "No agent yet. Make one with `oubliette agent new SLUG`.",
    )
}

/// The files to store beside a definition, by name: the script its model names, and those given with `--with`.
fn companion_files(file: &Path, definition: &Value, with: &[PathBuf]) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let script = definition["model"]
        .as_str()
        .and_then(|model| model.strip_prefix("script:"));
    if let (Some(script), Some(folder)) = (script, file.parent()) {
        let path = folder.join(script);
        // A definition from stdin has no folder to take the script from; the home may have it already.
        if !script.contains('/') && file.as_os_str() != "-" && path.is_file() {
            files.insert(script.to_owned(), files::read_text(&path)?);
        }
    }
    for path in with {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| Error::invalid(format!("{} has no file name", path.display())))?;
        files.insert(name.to_owned(), files::read_text(path)?);
    }
    Ok(files)
}

/// The definition that `agent new` writes.
fn definition_template(
    slug: &str,
    name: Option<String>,
    prompt: Option<String>,
    model: Option<String>,
    uses: &[String],
) -> Value {
    let titled = || {
        let words = slug.split('-').filter(|w| !w.is_empty()).map(|word| {
            let mut letters = word.chars();
            letters
                .next()
                .map(|first| first.to_uppercase().chain(letters).collect::<String>())
                .unwrap_or_default()
        });
        words.collect::<Vec<_>>().join(" ")
    };
    json!({
        "name": name.unwrap_or_else(titled),
        "description": "",
        "prompt": prompt.unwrap_or_else(|| "You are a careful software engineer working in /workspace. Make small changes, \
            check them, and say briefly what you did.".into()),
        "model": model.unwrap_or_else(|| "anthropic/claude-sonnet-4-5".into()),
        "runtime": { "kind": "builtin" },
        "sandbox": { "network": "none" },
        "tools": { "use": uses, "allowed": ["*"], "denied": [], "aliases": {} },
    })
}
