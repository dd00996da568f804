//! `oubliette agent …`.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    Context,
    client::Client,
    files,
    names::set,
    output::{field, listing, pretty},
};

/// List, show, write and delete agents: agents/<slug>/agent.json in the home.
#[derive(Debug, clap::Subcommand)]
pub enum Agent {
    /// List agents.
    List {
        /// At most so many.
        #[arg(long, value_name = "N")]
        limit: Option<u32>,
    },
    /// Show an agent's definition.
    Get {
        /// Which.
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
        /// What to call it (default: the name of its folder or file).
        #[arg(long)]
        slug: Option<String>,
        /// Another file to keep beside it; may be given again.
        #[arg(long = "with", value_name = "FILE")]
        with: Vec<PathBuf>,
    },
    /// Make a new agent to start from, and say where its file is.
    New {
        /// What to call it, as in code-reviewer.
        slug: String,
        /// What people call it (default: made from the slug).
        #[arg(long)]
        name: Option<String>,
        /// Its system prompt.
        #[arg(long)]
        prompt: Option<String>,
        /// Its model, as in anthropic/claude-sonnet-4-5.
        #[arg(long)]
        model: Option<String>,
        /// A catalog entry it uses; may be given again.
        #[arg(long = "use", value_name = "ID")]
        uses: Vec<String>,
    },
    /// Delete an agent.
    Delete {
        /// Which.
        slug: String,
    },
}

/// Runs it.
pub async fn run(command: Agent, context: Context) -> Result<()> {
    let client = Client::connect(&context.home).await?;
    let done = act(command, &context, &client).await;
    client.close().await;
    done
}

async fn act(command: Agent, context: &Context, client: &Client) -> Result<()> {
    let output = context.output;
    match command {
        Agent::List { limit } => {
            let list = client.list("agent_list", "agents", json!({}), limit).await?;
            output.result(&list, shown_list);
        }
        Agent::Get { slug } => {
            let agent = client.call("agent_get", json!({ "slug": slug })).await?;
            output.result(&agent, |agent| pretty(&agent["definition"]));
            if let Some(error) = agent["error"].as_str() {
                output.hint(&format!("a later edit is broken and not in use: {error}"));
            }
        }
        Agent::Put { file, slug, with } => {
            let file = if file.is_dir() {
                file.join("agent.json")
            } else {
                file
            };
            let slug = slug
                .or_else(|| files::suggested(&file, "agent.json"))
                .filter(|s| s != "-");
            let slug = slug.ok_or_else(|| Error::invalid("say what to call it with --slug"))?;
            let definition = files::object(&file)?;
            let beside = beside(&file, &definition, &with)?;
            let mut arguments = json!({ "slug": slug, "definition": definition });
            set(
                &mut arguments,
                "files",
                Some(beside).filter(|files| !files.is_empty()),
            );
            let put = client.call("agent_put", arguments).await?;
            output.result(&put, |put| {
                format!("agent {} is in use from now on", field(put, "slug"))
            });
        }
        Agent::New {
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
            let definition = template(&slug, name, prompt, model, &uses);
            let made = client
                .call("agent_put", json!({ "slug": slug, "definition": definition }))
                .await?;
            let path = context.home.agents_dir().join(&slug).join("agent.json");
            output.result(&made, |_| format!("{}", path.display()));
            output.hint(&format!(
                "edit that file; the server takes it up as you save. Then: oubliette chat --agent {slug}"
            ));
        }
        Agent::Delete { slug } => {
            let gone = client.call("agent_delete", json!({ "slug": slug })).await?;
            output.result(&gone, |gone| format!("agent {} is deleted", field(gone, "slug")));
        }
    }
    Ok(())
}

/// Agents in a table, broken ones marked.
pub fn shown_list(list: &Value) -> String {
    let mut agents = list["agents"].as_array().cloned().unwrap_or_default();
    for agent in &mut agents {
        let runtime = &agent["definition"]["runtime"];
        agent["runtime"] = match runtime["command"][0].as_str() {
            Some(program) => json!(Path::new(program).file_name().map(|n| n.to_string_lossy())),
            None => json!("built in"),
        };
        agent["model"] = agent["definition"]["model"].take();
        if agent["error"].is_string() {
            agent["description"] = json!(format!("broken edit: {}", field(agent, "error")));
        }
    }
    let columns = [
        ("AGENT", "slug"),
        ("NAME", "name"),
        ("RUNTIME", "runtime"),
        ("MODEL", "model"),
        ("DESCRIPTION", "description"),
    ];
    listing(
        &agents,
        &columns,
        "No agent yet. Make one with `oubliette agent new SLUG`.",
    )
}

/// The files that go with a definition: its script, and what was named.
fn beside(file: &Path, definition: &Value, with: &[PathBuf]) -> Result<BTreeMap<String, String>> {
    let mut files = BTreeMap::new();
    let script = definition["model"]
        .as_str()
        .and_then(|model| model.strip_prefix("script:"));
    if let (Some(script), Some(folder)) = (script, file.parent()) {
        let path = folder.join(script);
        // From stdin there is no beside; the script may be in the home already.
        if !script.contains('/') && file.as_os_str() != "-" && path.is_file() {
            files.insert(script.to_owned(), files::text(&path)?);
        }
    }
    for path in with {
        let name = path.file_name().and_then(|name| name.to_str());
        let name = name.ok_or_else(|| Error::invalid(format!("{} has no file name", path.display())))?;
        files.insert(name.to_owned(), files::text(path)?);
    }
    Ok(files)
}

fn template(
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
