//! `oubliette audit`: lists the audit log.

use oubliette_protocol::Result;
use serde_json::{Value, json};

use super::{
    CommandContext,
    client::ActionClient,
    output::format_listing,
    resolve::{self, set_if_some},
    style::fold_to_line,
    turn_display::format_arguments,
};

/// How much of an entry's detail a line shows, in columns; `--json` has all of it.
const MAX_DETAIL: usize = 100;

/// Arguments of `oubliette audit`, which lists with or without the word `list`.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub(crate) struct AuditArgs {
    #[command(subcommand)]
    list: Option<AuditCommand>,
    #[command(flatten)]
    filter: AuditFilterArgs,
}

/// The subcommand `list`, for symmetry with the other commands.
#[derive(Debug, clap::Subcommand)]
enum AuditCommand {
    /// List entries (what `audit` alone does).
    List(AuditFilterArgs),
}

/// Which entries to list.
#[derive(Debug, clap::Args)]
struct AuditFilterArgs {
    /// List at most this many, 1 to 1000.
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u32,
    /// Continue after a page: its `next_cursor`.
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
    /// Only entries of this action, such as token_create.
    #[arg(long, value_name = "ACTION")]
    action: Option<String>,
    /// Only entries with this outcome: ok, or an error code such as not_found.
    #[arg(long, value_name = "OUTCOME")]
    outcome: Option<String>,
    /// Only entries in this project, by id or name.
    #[arg(long, value_name = "PROJECT")]
    project: Option<String>,
    /// Only entries by the token with this id.
    #[arg(long, value_name = "ID")]
    token: Option<String>,
    /// Only entries by the agent of this session.
    #[arg(long, value_name = "ID")]
    session: Option<String>,
}

/// Runs `oubliette audit`.
pub(crate) async fn run(command: AuditArgs, context: CommandContext) -> Result<()> {
    let client = ActionClient::connect(&context).await?;
    let filter = match command.list {
        Some(AuditCommand::List(filter)) => filter,
        None => command.filter,
    };
    let done = print_entries(filter, &context, &client).await;
    client.close().await;
    done
}

async fn print_entries(
    filter: AuditFilterArgs,
    context: &CommandContext,
    client: &ActionClient,
) -> Result<()> {
    let mut arguments = json!({ "limit": filter.limit });
    set_if_some(&mut arguments, "cursor", filter.cursor);
    set_if_some(&mut arguments, "action", filter.action);
    set_if_some(&mut arguments, "outcome", filter.outcome);
    set_if_some(
        &mut arguments,
        "project_id",
        resolve::optional_project_id(client, filter.project.as_deref()).await?,
    );
    set_if_some(&mut arguments, "token_id", filter.token);
    set_if_some(&mut arguments, "session_id", filter.session);
    let page = client.call("audit_list", arguments).await?;
    context.output.print_result(&page, |page| {
        let columns = [
            ("TIME", "ts"),
            ("ACTION", "action"),
            ("OUTCOME", "outcome"),
            ("BY", "principal"),
            ("TARGET", "target"),
            ("DETAIL", "detail"),
        ];
        let mut entries = page["entries"].as_array().cloned().unwrap_or_default();
        for entry in &mut entries {
            if entry["principal"] == "owner" {
                entry["principal"] = json!("the owner");
            }
            if let Value::Object(detail) = &mut entry["detail"] {
                detail.retain(|_, value| !value.is_null());
            }
            entry["detail"] = json!(fold_to_line(&format_arguments(&entry["detail"]), MAX_DETAIL));
        }
        format_listing(&entries, &columns, "Nothing was changed yet.")
    });
    Ok(())
}
