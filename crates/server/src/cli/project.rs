//! `oubliette project …`: create, list, show, change and delete projects.

use oubliette_protocol::{Result, Scope, WorkspacePolicy};
use serde_json::{Value, json};

use super::{
    CommandContext,
    client::ActionClient,
    output::{field_text, format_fields, format_listing},
    resolve::{self, parse_variable, set_if_some},
};

/// Create, list, show, change and delete projects.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ProjectCommand {
    /// List projects.
    List {
        /// Only projects whose name contains this text.
        #[arg(long, value_name = "TEXT")]
        name_contains: Option<String>,
        /// List at most this many, 1 to 1000 (default: all).
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
        /// The project's name.
        #[arg(required_unless_present = "named", conflicts_with = "named")]
        name: Option<String>,
        /// The project's name, given as an option.
        #[arg(long = "name", value_name = "NAME", hide = true)]
        named: Option<String>,
        /// The rest.
        #[command(flatten)]
        settings: Box<ProjectSettings>,
    },
    /// Change the settings of a project that are given; the others stay.
    Update {
        /// Its id or name.
        project: String,
        /// A new name.
        #[arg(long)]
        name: Option<String>,
        /// Remove the default agent.
        #[arg(long, conflicts_with = "agent")]
        no_agent: bool,
        /// Give its sessions no key to Oubliette's own tools any more.
        #[arg(long, conflicts_with = "api_key")]
        no_api_key: bool,
        /// The rest.
        #[command(flatten)]
        settings: Box<ProjectSettings>,
    },
    /// Delete a project, its workspaces and their files.
    Delete {
        /// Its id or name.
        project: String,
    },
}

/// The settings of a project besides its name.
#[derive(Debug, clap::Args)]
pub(crate) struct ProjectSettings {
    /// What the project is for.
    #[arg(long, value_name = "TEXT")]
    description: Option<String>,
    /// The agent of its sessions when none is named.
    #[arg(long, value_name = "AGENT")]
    agent: Option<String>,
    /// An environment variable of its agents; may be repeated. Values are never shown.
    #[arg(long, value_name = "NAME=VALUE", value_parser = parse_variable)]
    env: Vec<(String, String)>,
    /// Give each of its sessions a key of this scope to Oubliette's own tools.
    #[arg(long, value_name = "SCOPE")]
    api_key: Option<Scope>,
    /// Network access of its sandboxes: none, proxy or host.
    #[arg(long, value_name = "NETWORK")]
    network: Option<String>,
    /// The sandbox driver: the one this server is configured with.
    #[arg(long)]
    driver: Option<String>,
    /// Memory limit of a sandbox, in MiB.
    #[arg(long, value_name = "MIB")]
    memory_mb: Option<u64>,
    /// Processor limit of a sandbox, in cores, such as 1.5.
    #[arg(long, value_name = "N")]
    cpus: Option<f64>,
    /// Maximum number of processes in a sandbox.
    #[arg(long, value_name = "N")]
    pids: Option<u64>,
    /// What a session may have on disk, its workspace included, in MiB.
    #[arg(long, value_name = "MIB")]
    workspace_mb: Option<u64>,
    /// How many levels deep sessions may start further sessions.
    #[arg(long, value_name = "N")]
    max_depth: Option<u32>,
    /// Maximum number of active sessions.
    #[arg(long, value_name = "N")]
    max_sessions: Option<u32>,
    /// Tokens that models may use in a day.
    #[arg(long, value_name = "N")]
    tokens_per_day: Option<u64>,
    /// What models may cost in a day, in US dollars.
    #[arg(long, value_name = "USD")]
    cost_usd_per_day: Option<f64>,
    /// Where sessions work that name no workspace: shared or own.
    #[arg(long, value_name = "POLICY")]
    workspaces: Option<WorkspacePolicy>,
    /// Tool calls an agent may make in a turn.
    #[arg(long, value_name = "N")]
    tool_calls_per_turn: Option<u64>,
}

impl ProjectSettings {
    /// The arguments of `project_create` and `project_update`, without those not given.
    fn into_arguments(self) -> Value {
        let mut arguments = json!({});
        set_if_some(&mut arguments, "description", self.description);
        set_if_some(&mut arguments, "agent", self.agent);
        set_if_some(&mut arguments, "workspaces", self.workspaces);
        if !self.env.is_empty() {
            arguments["env"] = self
                .env
                .into_iter()
                .map(|(k, v)| (k, json!(v)))
                .collect::<serde_json::Map<_, _>>()
                .into();
        }
        set_if_some(
            &mut arguments,
            "api_key",
            self.api_key.map(|scope| json!({ "scope": scope })),
        );
        let mut sandbox = json!({});
        set_if_some(&mut sandbox, "network", self.network);
        set_if_some(&mut sandbox, "driver", self.driver);
        set_if_some(&mut sandbox, "memory_mb", self.memory_mb);
        set_if_some(&mut sandbox, "cpus", self.cpus);
        set_if_some(&mut sandbox, "pids", self.pids);
        set_if_some(&mut sandbox, "workspace_mb", self.workspace_mb);
        let mut limits = json!({});
        set_if_some(&mut limits, "max_depth", self.max_depth);
        set_if_some(&mut limits, "max_sessions", self.max_sessions);
        set_if_some(&mut limits, "tokens_per_day", self.tokens_per_day);
        set_if_some(&mut limits, "cost_usd_per_day", self.cost_usd_per_day);
        set_if_some(&mut limits, "tool_calls_per_turn", self.tool_calls_per_turn);
        for (name, group) in [("sandbox", sandbox), ("limits", limits)] {
            if group != json!({}) {
                arguments[name] = group;
            }
        }
        arguments
    }
}

/// Runs `oubliette project`.
pub(crate) async fn run(command: ProjectCommand, context: CommandContext) -> Result<()> {
    let client = ActionClient::connect(&context).await?;
    let done = execute(command, &context, &client).await;
    client.close().await;
    done
}

async fn execute(command: ProjectCommand, context: &CommandContext, client: &ActionClient) -> Result<()> {
    let output = context.output;
    match command {
        ProjectCommand::List { name_contains, limit } => {
            let mut arguments = json!({});
            set_if_some(&mut arguments, "name_contains", name_contains);
            let list = client.list("project_list", "projects", arguments, limit).await?;
            output.print_result(&list, |list| {
                let columns = [
                    ("ID", "project_id"),
                    ("NAME", "name"),
                    ("AGENT", "agent"),
                    ("CREATED", "created_at"),
                    ("DESCRIPTION", "description"),
                ];
                let none = "No project yet. Make one with `oubliette project create NAME`.";
                format_listing(
                    list["projects"].as_array().map_or(&[], Vec::as_slice),
                    &columns,
                    none,
                )
            });
        }
        ProjectCommand::Get { project } => {
            let id = resolve::project_id(client, &project).await?;
            output.print_result(
                &client.call("project_get", json!({ "project_id": id })).await?,
                format_project,
            );
        }
        ProjectCommand::Create {
            name,
            named,
            settings,
        } => {
            let mut arguments = settings.into_arguments();
            set_if_some(&mut arguments, "name", name.or(named));
            output.print_result(&client.call("project_create", arguments).await?, format_project);
        }
        ProjectCommand::Update {
            project,
            name,
            no_agent,
            no_api_key,
            settings,
        } => {
            let mut arguments = settings.into_arguments();
            set_if_some(&mut arguments, "name", name);
            for (field, none) in [("agent", no_agent), ("api_key", no_api_key)] {
                if none {
                    arguments[field] = Value::Null;
                }
            }
            arguments["project_id"] = json!(resolve::project_id(client, &project).await?);
            output.print_result(&client.call("project_update", arguments).await?, format_project);
        }
        ProjectCommand::Delete { project } => {
            let id = resolve::project_id(client, &project).await?;
            let gone = client.call("project_delete", json!({ "project_id": id })).await?;
            output.print_result(&gone, |gone| {
                format!("{} is deleted", field_text(gone, "project_id"))
            });
        }
    }
    Ok(())
}

fn format_project(project: &Value) -> String {
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
        "workspaces",
        "created_at",
        "updated_at",
    ];
    format_fields(project, &names)
}
