//! `oubliette workspace …`: create, list, compare and delete workspaces.

use std::path::PathBuf;

use oubliette_protocol::Result;
use serde_json::json;

use super::{
    CommandContext,
    client::ActionClient,
    output::{field_text, format_fields, format_listing},
    resolve::{self, parse_variable, set_if_some},
    style::{AnsiStyle, strip_control_chars},
    workspace_sync::{self, WorkspaceSelector},
};

/// Create, list, compare and delete workspaces: the folders sessions work in.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum WorkspaceCommand {
    /// List the workspaces of a project.
    List {
        /// The project's id or name; the only project when left out.
        #[arg(long, value_name = "PROJECT")]
        project: Option<String>,
        /// List at most this many, 1 to 1000 (default: all).
        #[arg(long, value_name = "N")]
        limit: Option<u32>,
    },
    /// Create a workspace, empty or from a git repository.
    #[command(
        after_help = "Example: oubliette workspace create --git https://github.com/rust-lang/log --ref 0.4.22"
    )]
    Create {
        /// The project's id or name; the only project when left out.
        #[arg(long, value_name = "PROJECT")]
        project: Option<String>,
        /// The workspace's name.
        #[arg(long)]
        name: Option<String>,
        /// Clone this git URL into it.
        #[arg(long, value_name = "URL")]
        git: Option<String>,
        /// The branch, tag or commit to check out.
        #[arg(long = "ref", value_name = "REF", requires = "git")]
        reference: Option<String>,
        /// An environment variable that adds to or overrides the project's; may be repeated.
        #[arg(long, value_name = "NAME=VALUE", value_parser = parse_variable)]
        env: Vec<(String, String)>,
    },
    /// Copy a folder of this machine into a workspace: all but .git and what .gitignore names. Files of the same name are
    /// replaced, others stay.
    Push {
        /// The folder.
        dir: PathBuf,
        /// The workspace, by its id, or by its project.
        #[command(flatten)]
        selector: WorkspaceSelector,
    },
    /// Copy a workspace into a folder of this machine: all but .git and what .gitignore names. Files of the same name are
    /// replaced, others stay.
    Pull {
        /// The folder; made if it is missing.
        dir: PathBuf,
        /// The workspace, by its id, or by its project.
        #[command(flatten)]
        selector: WorkspaceSelector,
    },
    /// Show what changed in a workspace, as a git diff.
    Diff {
        /// Its id.
        id: String,
    },
    /// Delete a workspace and its files.
    Delete {
        /// Its id.
        id: String,
    },
}

/// Runs `oubliette workspace`.
pub(crate) async fn run(command: WorkspaceCommand, context: CommandContext) -> Result<()> {
    let client = match &command {
        // Files go through a server's doors.
        WorkspaceCommand::Push { .. } | WorkspaceCommand::Pull { .. } => {
            ActionClient::connect_running(&context).await?
        }
        _ => ActionClient::connect(&context).await?,
    };
    let done = execute(command, &context, &client).await;
    client.close().await;
    done
}

async fn execute(command: WorkspaceCommand, context: &CommandContext, client: &ActionClient) -> Result<()> {
    let output = context.output;
    match command {
        WorkspaceCommand::List { project, limit } => {
            let mut arguments = json!({});
            set_if_some(
                &mut arguments,
                "project_id",
                Some(resolve::project_id_or_only(client, project.as_deref()).await?),
            );
            let list = client
                .list("workspace_list", "workspaces", arguments, limit)
                .await?;
            output.print_result(&list, |list| {
                let columns = [
                    ("ID", "workspace_id"),
                    ("NAME", "name"),
                    ("DEFAULT", "default"),
                    ("CREATED", "created_at"),
                    ("SOURCE", "source"),
                ];
                format_listing(
                    list["workspaces"].as_array().map_or(&[], Vec::as_slice),
                    &columns,
                    "No workspace.",
                )
            });
        }
        WorkspaceCommand::Create {
            project,
            name,
            git,
            reference,
            env,
        } => {
            let mut arguments = json!({});
            set_if_some(
                &mut arguments,
                "project_id",
                Some(resolve::project_id_or_only(client, project.as_deref()).await?),
            );
            set_if_some(&mut arguments, "name", name);
            if let Some(git) = git {
                let mut source = json!({ "git": git });
                set_if_some(&mut source, "ref", reference);
                arguments["source"] = source;
            }
            if !env.is_empty() {
                arguments["env"] = env
                    .into_iter()
                    .map(|(k, v)| (k, json!(v)))
                    .collect::<serde_json::Map<_, _>>()
                    .into();
            }
            let made = client.call("workspace_create", arguments).await?;
            output.print_result(&made, |made| {
                format_fields(
                    made,
                    &[
                        "workspace_id",
                        "project_id",
                        "name",
                        "source",
                        "env",
                        "created_at",
                    ],
                )
            });
        }
        WorkspaceCommand::Push { dir, selector } => {
            let workspace = selector.resolve(client).await?;
            let pushed = workspace_sync::push(client, &dir, &workspace, output).await?;
            output.print_result(&pushed, |pushed| {
                format!(
                    "{} files are in workspace {workspace}",
                    field_text(pushed, "files")
                )
            });
        }
        WorkspaceCommand::Pull { dir, selector } => {
            let workspace = selector.resolve(client).await?;
            let pulled = workspace_sync::pull(client, &dir, &workspace, output).await?;
            output.print_result(&pulled, |pulled| {
                format!("{} files are in {}", field_text(pulled, "files"), dir.display())
            });
            if pulled["skipped"] != 0 {
                output.print_hint(&format!(
                    "{} links that lead outside were left out",
                    pulled["skipped"]
                ));
            }
        }
        WorkspaceCommand::Diff { id } => {
            let diff = client
                .call("workspace_diff", json!({ "workspace_id": id }))
                .await?;
            output.print_result(&diff, |diff| colour_diff(&field_text(diff, "diff")));
            if diff["truncated"] == true {
                output.print_hint("the diff is longer than this; the rest was left out");
            }
        }
        WorkspaceCommand::Delete { id } => {
            let gone = client
                .call("workspace_delete", json!({ "workspace_id": id }))
                .await?;
            output.print_result(&gone, |gone| {
                format!("{} is deleted", field_text(gone, "workspace_id"))
            });
        }
    }
    Ok(())
}

/// A diff with its lines coloured.
pub(crate) fn colour_diff(diff: &str) -> String {
    if diff.is_empty() {
        return "Nothing changed.".into();
    }
    let paint = AnsiStyle::stdout();
    let line = |line: &str| {
        let text = strip_control_chars(line);
        match line.as_bytes().first() {
            Some(b'+') => paint.green(&text),
            Some(b'-') => paint.red(&text),
            Some(b'@') => paint.cyan(&text),
            _ if line.starts_with("diff ") => paint.bold(&text),
            _ => text.into_owned(),
        }
    };
    diff.lines().map(line).collect::<Vec<_>>().join("\n")
}
