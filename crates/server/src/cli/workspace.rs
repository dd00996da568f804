//! `oubliette workspace …`.

use oubliette_protocol::Result;
use serde_json::json;

use super::{
    Context,
    client::Client,
    names::{self, set, variable},
    output::{field, fields, listing},
    style::{Paint, clean},
};

/// Create, list, compare and delete workspaces: the folders sessions work in.
#[derive(Debug, clap::Subcommand)]
pub enum Workspace {
    /// List the workspaces of a project.
    List {
        /// The project's id or name; the only project when left out.
        #[arg(long, value_name = "PROJECT")]
        project: Option<String>,
        /// At most so many.
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
        /// What people call it.
        #[arg(long)]
        name: Option<String>,
        /// A git URL its first files come from.
        #[arg(long, value_name = "URL")]
        git: Option<String>,
        /// A branch, tag or commit of that repository.
        #[arg(long = "ref", value_name = "REF", requires = "git")]
        reference: Option<String>,
        /// A variable on top of the project's environment; may be given again.
        #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
        env: Vec<(String, String)>,
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

/// Runs it.
pub async fn run(command: Workspace, context: Context) -> Result<()> {
    let client = Client::connect(&context.home).await?;
    let done = act(command, &context, &client).await;
    client.close().await;
    done
}

async fn act(command: Workspace, context: &Context, client: &Client) -> Result<()> {
    let output = context.output;
    match command {
        Workspace::List { project, limit } => {
            let mut arguments = json!({});
            set(
                &mut arguments,
                "project_id",
                Some(names::project_or_only(client, project.as_deref()).await?),
            );
            let list = client
                .list("workspace_list", "workspaces", arguments, limit)
                .await?;
            output.result(&list, |list| {
                let columns = [
                    ("ID", "workspace_id"),
                    ("NAME", "name"),
                    ("DEFAULT", "default"),
                    ("CREATED", "created_at"),
                    ("SOURCE", "source"),
                ];
                listing(
                    list["workspaces"].as_array().map_or(&[], Vec::as_slice),
                    &columns,
                    "No workspace.",
                )
            });
        }
        Workspace::Create {
            project,
            name,
            git,
            reference,
            env,
        } => {
            let mut arguments = json!({});
            set(
                &mut arguments,
                "project_id",
                Some(names::project_or_only(client, project.as_deref()).await?),
            );
            set(&mut arguments, "name", name);
            if let Some(git) = git {
                let mut source = json!({ "git": git });
                set(&mut source, "ref", reference);
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
            output.result(&made, |made| {
                fields(
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
        Workspace::Diff { id } => {
            let diff = client
                .call("workspace_diff", json!({ "workspace_id": id }))
                .await?;
            output.result(&diff, |diff| coloured(&field(diff, "diff")));
            if diff["truncated"] == true {
                output.hint("the diff is longer than this; the rest was left out");
            }
        }
        Workspace::Delete { id } => {
            let gone = client
                .call("workspace_delete", json!({ "workspace_id": id }))
                .await?;
            output.result(&gone, |gone| {
                format!("{} is deleted", field(gone, "workspace_id"))
            });
        }
    }
    Ok(())
}

fn coloured(diff: &str) -> String {
    if diff.is_empty() {
        return "Nothing changed.".into();
    }
    let paint = Paint::stdout();
    let line = |line: &str| {
        let text = clean(line);
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
