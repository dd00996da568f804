//! `oubliette program …`: packages that are installed for agents and tool servers.

use std::{
    collections::HashMap,
    convert::Infallible,
    time::{Duration, Instant},
};

use oubliette_protocol::{
    Result,
    catalog::{ToolDefinition, Transport},
};
use serde_json::{Value, json};

use super::{
    CommandContext,
    client::ActionClient,
    output::{OutputFormat, field_text, format_listing},
};

/// How often the progress of an installation is asked for.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(700);
/// How often the number of fetched files is said again while a step goes on.
const COUNT_INTERVAL: Duration = Duration::from_secs(10);

/// Pinned npm and PyPI packages, installed in a sandbox.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ProgramCommand {
    /// Install a package; one that is installed is checked.
    #[command(
        after_help = "Examples:\n  oubliette program install npm:@modelcontextprotocol/server-everything@2026.8.31\n  \
        oubliette program install pypi:mcp-server-time==2026.10.19"
    )]
    Install {
        /// npm:NAME@VERSION or pypi:NAME==VERSION.
        package: String,
        /// A command that the package must have.
        #[arg(long, value_name = "COMMAND")]
        bin: Option<String>,
        /// Run the package's install scripts, in the sandbox of the installation.
        #[arg(long)]
        scripts: bool,
    },
    /// List the installed programs.
    List,
    /// Remove a program that no definition uses.
    Remove {
        /// The program's id, as `list` shows it.
        program_id: String,
    },
}

/// Runs `oubliette program`.
pub(crate) async fn run(command: ProgramCommand, context: CommandContext) -> Result<()> {
    let client = ActionClient::connect(&context).await?;
    let done = execute(command, &context, &client).await;
    client.close().await;
    done
}

async fn execute(command: ProgramCommand, context: &CommandContext, client: &ActionClient) -> Result<()> {
    let output = context.output;
    match command {
        ProgramCommand::Install {
            package,
            bin,
            scripts,
        } => {
            let arguments = json!({ "package": package, "bin": bin, "scripts": scripts });
            let program = call_with_progress(client, "program_install", arguments, output).await?;
            output.print_result(&program, |program| {
                let megabytes = program["bytes"].as_u64().unwrap_or(0) / (1024 * 1024);
                format!(
                    "{} is installed as {}, {megabytes} MiB",
                    field_text(program, "package"),
                    field_text(program, "program_id")
                )
            });
            print_notes(&program, output);
        }
        ProgramCommand::List => {
            let list = client.call("program_list", json!({})).await?;
            output.print_result(&list, format_programs);
        }
        ProgramCommand::Remove { program_id } => {
            let gone = client
                .call("program_remove", json!({ "program_id": program_id }))
                .await?;
            output.print_result(&gone, |gone| {
                format!("{} is removed", field_text(gone, "program_id"))
            });
        }
    }
    Ok(())
}

fn format_programs(list: &Value) -> String {
    let mut programs = list["programs"].as_array().cloned().unwrap_or_default();
    for program in &mut programs {
        let megabytes = program["bytes"].as_u64().unwrap_or(0) / (1024 * 1024);
        program["size"] = json!(format!("{megabytes} MiB"));
        let users = program["used_by"].as_array().into_iter().flatten();
        let users: Vec<&str> = users.filter_map(Value::as_str).collect();
        program["users"] = json!(users.join(", "));
    }
    let columns = [
        ("PROGRAM", "program_id"),
        ("PACKAGE", "package"),
        ("SIZE", "size"),
        ("USED BY", "users"),
    ];
    format_listing(
        &programs,
        &columns,
        "No programs are installed. Install one with `oubliette program install npm:NAME@VERSION`.",
    )
}

/// Prints the `notes` of a result as hints.
pub(crate) fn print_notes(result: &Value, output: OutputFormat) {
    for note in result["notes"]
        .as_array()
        .into_iter()
        .flatten()
        .filter_map(Value::as_str)
    {
        output.print_hint(note);
    }
}

/// Installs the program of a catalog entry, if it is one that is not installed.
pub(crate) async fn ensure_installed(definition: &ToolDefinition, context: &CommandContext) -> Result<()> {
    let ToolDefinition::Mcp(server) = definition else {
        return Ok(());
    };
    let Transport::Stdio(stdio) = &server.transport else {
        return Ok(());
    };
    let Some(spec) = &stdio.program else {
        return Ok(());
    };
    let client = ActionClient::connect(context).await?;
    let arguments = json!({ "package": spec.to_string(), "bin": spec.bin, "scripts": spec.scripts });
    let installed = call_with_progress(&client, "program_install", arguments, context.output).await;
    client.close().await;
    installed.map(drop)
}

/// Performs an action that may install programs, and prints meanwhile how far they are.
pub(crate) async fn call_with_progress(
    client: &ActionClient,
    action: &str,
    arguments: Value,
    output: OutputFormat,
) -> Result<Value> {
    with_progress(client, output, client.call(action, arguments)).await
}

/// Does work that may install programs, and prints meanwhile how far they are.
pub(crate) async fn with_progress<T>(
    client: &ActionClient,
    output: OutputFormat,
    work: impl Future<Output = Result<T>>,
) -> Result<T> {
    tokio::select! {
        result = work => result,
        never = report_progress(client, output) => match never {},
    }
}

/// Prints each step of every installation, until it is dropped.
async fn report_progress(client: &ActionClient, output: OutputFormat) -> Infallible {
    let mut reports: HashMap<String, StepReports> = HashMap::new();
    loop {
        tokio::time::sleep(PROGRESS_INTERVAL).await;
        let Ok(list) = client.call("program_list", json!({})).await else {
            continue;
        };
        for one in list["installing"].as_array().into_iter().flatten() {
            let (package, step) = (field_text(one, "package"), field_text(one, "step"));
            let fetched = one["fetched"].as_u64().unwrap_or(0);
            let reports = reports.entry(package.clone()).or_default();
            if let Some(said) = reports.next(&step, fetched, Instant::now()) {
                output.print_hint(&format!("{package}: {said}"));
            }
        }
    }
}

/// What was said of an installation: each of its steps once, and of a long one from time to time how far it is.
#[derive(Default)]
struct StepReports {
    step: String,
    fetched: u64,
    said_at: Option<Instant>,
}

impl StepReports {
    /// What is to be said now, if anything.
    fn next(&mut self, step: &str, fetched: u64, now: Instant) -> Option<String> {
        let is_new = self.step != step;
        let due = self
            .said_at
            .is_none_or(|said| now.duration_since(said) >= COUNT_INTERVAL);
        if !is_new && (self.fetched == fetched || !due) {
            return None;
        }
        *self = Self {
            step: step.to_owned(),
            fetched,
            said_at: Some(now),
        };
        Some(match is_new {
            true => step.to_owned(),
            false => format!("{step}, {fetched} files fetched"),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_step_is_said_once_and_a_long_one_from_time_to_time() {
        let began = Instant::now();
        let mut reports = StepReports::default();
        let mut said = Vec::new();
        for (second, step, fetched) in [
            (0, "looking it up", 0),
            (1, "downloading", 0),
            (2, "downloading", 3),
            (9, "downloading", 40),
            (12, "downloading", 60),
            (13, "downloading", 61),
            (30, "downloading", 61),
            (31, "hashing", 70),
            (60, "hashing", 70),
        ] {
            said.extend(reports.next(step, fetched, began + Duration::from_secs(second)));
        }
        let expected = [
            "looking it up",
            "downloading",
            "downloading, 60 files fetched",
            "downloading, 61 files fetched",
            "hashing",
        ];
        assert_eq!(said, expected);
    }
}
