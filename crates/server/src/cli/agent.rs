//! `oubliette agent …`: list, show, write and delete agent definitions.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    CommandContext, ServerTarget, agent_test,
    client::ActionClient,
    files,
    output::{field_text, format_listing, mark_broken, pretty_json},
    program,
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
    /// List presets: ready definitions of well-known agents.
    Presets,
    /// Create an agent from a preset, install its package and test it.
    #[command(
        after_help = "Examples:\n  oubliette agent add claude\n  oubliette agent add opencode --slug writer \
        --model openrouter/qwen/qwen3-coder"
    )]
    Add {
        /// The preset's name, as `agent presets` shows it.
        preset: String,
        /// The agent's slug (default: the preset's name).
        #[arg(long)]
        slug: Option<String>,
        /// Its model: a provider of oubliette.toml and the model's name there (default: the preset's).
        #[arg(long, value_name = "PROVIDER/MODEL")]
        model: Option<String>,
    },
    /// Run one turn of an agent: how long each step takes, which tools it sees, and what to do about what fails.
    Test {
        /// The agent's slug.
        slug: String,
        /// What to ask it.
        prompt: Option<String>,
    },
    /// Delete an agent.
    Delete {
        /// The agent's slug.
        slug: String,
    },
}

/// Runs `oubliette agent`.
pub(crate) async fn run(command: AgentCommand, context: CommandContext) -> Result<()> {
    let client = ActionClient::connect(&context).await?;
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
            if matches!(context.target, ServerTarget::Remote(_)) {
                output.print_result(&made, |_| format!("agent {slug} is in use from now on"));
                return Ok(());
            }
            let path = context.home.agents_dir().join(&slug).join("agent.json");
            if !path.exists() {
                output.print_result(&made, |_| format!("agent {slug} is in use from now on"));
                output.print_hint(
                    "it is in the database: `oubliette library pull DIR` writes it as a file, `library push DIR` takes your edits",
                );
                return Ok(());
            }
            output.print_result(&made, |_| format!("{}", path.display()));
            output.print_hint(&format!(
                "edit that file; the server takes it up as you save. Then: oubliette chat --agent {slug}"
            ));
        }
        AgentCommand::Presets => {
            let list = client.call("preset_list", json!({})).await?;
            output.print_result(&list, format_presets);
        }
        AgentCommand::Add { preset, slug, model } => {
            let slug = slug.unwrap_or_else(|| preset.clone());
            add_preset(client, context, &preset, &slug, model).await?;
        }
        AgentCommand::Test { slug, prompt } => {
            let prompt = prompt.as_deref().unwrap_or(agent_test::DEFAULT_PROMPT);
            let test = agent_test::run(client, &slug, prompt);
            let report = program::with_progress(client, output, test).await?;
            output.print_result(&report, agent_test::format_report);
            check_report(&slug, &report)?;
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

/// Writes an agent from a preset, installs its package and tests it.
async fn add_preset(
    client: &ActionClient,
    context: &CommandContext,
    preset: &str,
    slug: &str,
    model: Option<String>,
) -> Result<()> {
    let output = context.output;
    if client.call("agent_get", json!({ "slug": slug })).await.is_ok() {
        return Err(Error::conflict(format!(
            "there is an agent {slug} already; choose another name with --slug"
        )));
    }
    let mut arguments = json!({ "name": preset });
    set_if_some(&mut arguments, "model", model);
    let listed = client.call("preset_list", arguments).await?;
    let preset = &listed["presets"][0];
    let definition = &preset["definition"];
    let written = json!({ "slug": slug, "definition": definition, "files": preset["files"] });
    client.call("agent_put", written).await?;
    output.print_hint(&format!(
        "agent {slug} is written; its package is installed, if it is not yet, and one turn is tried"
    ));
    let test = agent_test::run(client, slug, agent_test::DEFAULT_PROMPT);
    let report = program::with_progress(client, output, test).await?;
    output.print_result(&report, agent_test::format_report);
    check_report(slug, &report)
}

/// Fails if the test of an agent failed.
fn check_report(slug: &str, report: &Value) -> Result<()> {
    match report["ok"] == true {
        true => Ok(()),
        false => Err(Error::unavailable(format!(
            "agent {slug} does not work yet; after what the lines above name is done, try again with `oubliette agent test \
             {slug}`"
        ))),
    }
}

/// Formats the answer of `preset_list`.
fn format_presets(list: &Value) -> String {
    let one = |preset: &Value| {
        let mut lines = vec![format!(
            "{}: {} ({})",
            field_text(preset, "name"),
            field_text(preset, "description"),
            preset_package(preset)
        )];
        for (word, field) in [("needs", "needs"), ("note", "limits")] {
            let texts = preset[field]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(Value::as_str);
            lines.extend(texts.map(|text| format!("    {word}: {text}")));
        }
        lines.join("\n")
    };
    let presets = list["presets"].as_array().into_iter().flatten();
    presets.map(one).collect::<Vec<_>>().join("\n")
}

/// The pinned package of a preset.
fn preset_package(preset: &Value) -> &str {
    let program = &preset["definition"]["runtime"]["program"];
    program["npm"]
        .as_str()
        .or_else(|| program["pypi"].as_str())
        .unwrap_or_default()
}

/// Formats the answer of `agent_list` as a table; agents with a broken edit show its error.
pub(crate) fn format_agents(list: &Value) -> String {
    let mut agents = list["agents"].as_array().cloned().unwrap_or_default();
    for agent in &mut agents {
        let runtime = &agent["definition"]["runtime"];
        let package = runtime["program"]["npm"]
            .as_str()
            .or_else(|| runtime["program"]["pypi"].as_str());
        agent["runtime"] = match (runtime["command"][0].as_str(), package) {
            (Some(program), _) => json!(Path::new(program).file_name().map(|n| n.to_string_lossy())),
            (None, Some(package)) => json!(package),
            (None, None) => json!("built in"),
        };
        agent["model"] = agent["definition"]["model"].take();
        if agent["error"].is_string() {
            let what = if agent["usable"] == false {
                "broken, not in use"
            } else {
                "broken edit"
            };
            agent["description"] = json!(format!("✗ {what}: {}", field_text(agent, "error")));
        }
        if agent["usable"] == false {
            agent["runtime"] = Value::Null;
        }
    }
    let columns = [
        ("AGENT", "slug"),
        ("NAME", "name"),
        ("RUNTIME", "runtime"),
        ("MODEL", "model"),
        ("DESCRIPTION", "description"),
    ];
    let none = "No agent yet. Make one with `oubliette agent new SLUG`.";
    mark_broken(&agents, format_listing(&agents, &columns, none))
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
