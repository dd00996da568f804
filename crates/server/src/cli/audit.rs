//! `oubliette audit`.

use oubliette_protocol::Result;
use serde_json::json;

use super::{
    Context,
    client::Client,
    names::{self, set},
    output::listing,
};

/// Who changed what, newest first.
#[derive(Debug, clap::Args)]
#[command(args_conflicts_with_subcommands = true)]
pub struct Audit {
    #[command(subcommand)]
    list: Option<List>,
    #[command(flatten)]
    filter: Filter,
}

/// The same, by its full name.
#[derive(Debug, clap::Subcommand)]
enum List {
    /// List entries (what `audit` alone does).
    List(Filter),
}

#[derive(Debug, clap::Args)]
struct Filter {
    /// At most so many.
    #[arg(long, value_name = "N", default_value_t = 100)]
    limit: u32,
    /// Entries before this `next_cursor`.
    #[arg(long, value_name = "CURSOR")]
    cursor: Option<String>,
    /// Only this action, as in token_create.
    #[arg(long, value_name = "ACTION")]
    action: Option<String>,
    /// Only with this outcome: ok, or an error's code.
    #[arg(long, value_name = "OUTCOME")]
    outcome: Option<String>,
    /// Only in this project, by id or name.
    #[arg(long, value_name = "PROJECT")]
    project: Option<String>,
    /// Only by this token.
    #[arg(long, value_name = "ID")]
    token: Option<String>,
    /// Only from inside this session.
    #[arg(long, value_name = "ID")]
    session: Option<String>,
}

/// Runs it.
pub async fn run(command: Audit, context: Context) -> Result<()> {
    let client = Client::connect(&context.home).await?;
    let filter = match command.list {
        Some(List::List(filter)) => filter,
        None => command.filter,
    };
    let done = list(filter, &context, &client).await;
    client.close().await;
    done
}

async fn list(filter: Filter, context: &Context, client: &Client) -> Result<()> {
    let mut arguments = json!({ "limit": filter.limit });
    set(&mut arguments, "cursor", filter.cursor);
    set(&mut arguments, "action", filter.action);
    set(&mut arguments, "outcome", filter.outcome);
    set(
        &mut arguments,
        "project_id",
        names::maybe_project(client, filter.project.as_deref()).await?,
    );
    set(&mut arguments, "token_id", filter.token);
    set(&mut arguments, "session_id", filter.session);
    let page = client.call("audit_list", arguments).await?;
    context.output.result(&page, |page| {
        let columns = [
            ("TIME", "ts"),
            ("ACTION", "action"),
            ("OUTCOME", "outcome"),
            ("BY", "token_id"),
            ("TARGET", "target"),
        ];
        let mut entries = page["entries"].as_array().cloned().unwrap_or_default();
        for entry in &mut entries {
            if entry["token_id"].is_null() {
                entry["token_id"] = json!("the owner");
            }
        }
        listing(&entries, &columns, "Nothing was changed yet.")
    });
    Ok(())
}
