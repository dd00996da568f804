//! `oubliette project …`.

use oubliette_protocol::{Result, Scope};
use serde_json::{Value, json};

use super::{
    Context,
    client::Client,
    names::{self, set, variable},
    output::{field, fields, listing},
};

/// Create, list, show, change and delete projects.
#[derive(Debug, clap::Subcommand)]
pub enum Project {
    /// List projects.
    List {
        /// Only names with this in them.
        #[arg(long, value_name = "TEXT")]
        name_contains: Option<String>,
        /// At most so many.
        #[arg(long, value_name = "N")]
        limit: Option<u32>,
    },
    /// Show a project.
    Get {
        /// Its id or name.
        project: String,
    },
    /// Create a project with its default workspace.
    #[command(after_help = "Example: oubliette project create website --agent assistant --env NODE_ENV=test")]
    Create {
        /// What people call it.
        #[arg(required_unless_present = "named", conflicts_with = "named")]
        name: Option<String>,
        /// The same, as an option.
        #[arg(long = "name", value_name = "NAME", hide = true)]
        named: Option<String>,
        /// The rest.
        #[command(flatten)]
        settings: Box<Settings>,
    },
    /// Change what is given of a project.
    Update {
        /// Its id or name.
        project: String,
        /// A new name.
        #[arg(long)]
        name: Option<String>,
        /// No agent when none is named.
        #[arg(long, conflicts_with = "agent")]
        no_agent: bool,
        /// No more keys for its sessions.
        #[arg(long, conflicts_with = "api_key")]
        no_api_key: bool,
        /// The rest.
        #[command(flatten)]
        settings: Box<Settings>,
    },
    /// Delete a project, its workspaces and their files.
    Delete {
        /// Its id or name.
        project: String,
    },
}

/// What a project may have besides a name.
#[derive(Debug, clap::Args)]
pub struct Settings {
    /// What it is for.
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// The agent its sessions run when none is named.
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    /// A variable of its agents' environment; may be given again. Values are never shown.
    #[arg(long, value_name = "NAME=VALUE", value_parser = variable)]
    env: Vec<(String, String)>,
    /// Give each of its sessions a key of this scope to Oubliette's own tools.
    #[arg(long, value_name = "SCOPE")]
    api_key: Option<Scope>,
    /// What its sandboxes may reach: none, proxy or host.
    #[arg(long, value_name = "NETWORK")]
    network: Option<String>,
    /// The sandbox driver.
    #[arg(long)]
    driver: Option<String>,
    /// Memory of a sandbox, in MiB.
    #[arg(long, value_name = "MIB")]
    memory_mb: Option<u64>,
    /// Processors of a sandbox.
    #[arg(long, value_name = "N")]
    cpus: Option<f64>,
    /// Processes of a sandbox.
    #[arg(long, value_name = "N")]
    pids: Option<u64>,
    /// Size of a workspace, in MiB.
    #[arg(long, value_name = "MIB")]
    workspace_mb: Option<u64>,
    /// How deep sessions may start sessions.
    #[arg(long, value_name = "N")]
    max_depth: Option<u32>,
    /// How many sessions may be active.
    #[arg(long, value_name = "N")]
    max_sessions: Option<u32>,
}

impl Settings {
    fn into_arguments(self) -> Value {
        let mut arguments = json!({});
        set(&mut arguments, "description", self.description);
        set(&mut arguments, "agent", self.agent);
        if !self.env.is_empty() {
            arguments["env"] = self
                .env
                .into_iter()
                .map(|(k, v)| (k, json!(v)))
                .collect::<serde_json::Map<_, _>>()
                .into();
        }
        set(
            &mut arguments,
            "api_key",
            self.api_key.map(|scope| json!({ "scope": scope })),
        );
        let mut sandbox = json!({});
        set(&mut sandbox, "network", self.network);
        set(&mut sandbox, "driver", self.driver);
        set(&mut sandbox, "memory_mb", self.memory_mb);
        set(&mut sandbox, "cpus", self.cpus);
        set(&mut sandbox, "pids", self.pids);
        set(&mut sandbox, "workspace_mb", self.workspace_mb);
        let mut limits = json!({});
        set(&mut limits, "max_depth", self.max_depth);
        set(&mut limits, "max_sessions", self.max_sessions);
        for (name, group) in [("sandbox", sandbox), ("limits", limits)] {
            if group != json!({}) {
                arguments[name] = group;
            }
        }
        arguments
    }
}

/// Runs it.
pub async fn run(command: Project, context: Context) -> Result<()> {
    let client = Client::connect(&context.home).await?;
    let done = act(command, &context, &client).await;
    client.close().await;
    done
}

async fn act(command: Project, context: &Context, client: &Client) -> Result<()> {
    let output = context.output;
    match command {
        Project::List { name_contains, limit } => {
            let mut arguments = json!({});
            set(&mut arguments, "name_contains", name_contains);
            let list = client.list("project_list", "projects", arguments, limit).await?;
            output.result(&list, |list| {
                let columns = [
                    ("ID", "project_id"),
                    ("NAME", "name"),
                    ("AGENT", "agent"),
                    ("CREATED", "created_at"),
                    ("DESCRIPTION", "description"),
                ];
                let none = "No project yet. Make one with `oubliette project create NAME`.";
                listing(
                    list["projects"].as_array().map_or(&[], Vec::as_slice),
                    &columns,
                    none,
                )
            });
        }
        Project::Get { project } => {
            let id = names::project(client, &project).await?;
            output.result(
                &client.call("project_get", json!({ "project_id": id })).await?,
                shown,
            );
        }
        Project::Create {
            name,
            named,
            settings,
        } => {
            let mut arguments = settings.into_arguments();
            set(&mut arguments, "name", name.or(named));
            output.result(&client.call("project_create", arguments).await?, shown);
        }
        Project::Update {
            project,
            name,
            no_agent,
            no_api_key,
            settings,
        } => {
            let mut arguments = settings.into_arguments();
            set(&mut arguments, "name", name);
            for (field, none) in [("agent", no_agent), ("api_key", no_api_key)] {
                if none {
                    arguments[field] = Value::Null;
                }
            }
            arguments["project_id"] = json!(names::project(client, &project).await?);
            output.result(&client.call("project_update", arguments).await?, shown);
        }
        Project::Delete { project } => {
            let id = names::project(client, &project).await?;
            let gone = client.call("project_delete", json!({ "project_id": id })).await?;
            output.result(&gone, |gone| format!("{} is deleted", field(gone, "project_id")));
        }
    }
    Ok(())
}

fn shown(project: &Value) -> String {
    let names = [
        "project_id",
        "name",
        "description",
        "agent",
        "env",
        "api_key",
        "sandbox",
        "limits",
        "default_workspace_id",
        "created_at",
        "updated_at",
    ];
    fields(project, &names)
}
