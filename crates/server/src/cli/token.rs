//! `oubliette token …`: create, list and revoke tokens.

use oubliette_protocol::{Result, Scope, duration::HumanDuration};
use serde_json::json;

use super::{
    CommandContext,
    client::ActionClient,
    output::{field_text, format_listing},
    resolve::{self, set_if_some},
};

/// Create, list and revoke tokens.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum TokenCommand {
    /// Create a token; it is shown once.
    #[command(
        after_help = "Example: oubliette token create --name ci --scope write --project website --expires 30d"
    )]
    Create {
        /// The token's name.
        #[arg(long)]
        name: String,
        /// What it may do: read, write or admin.
        #[arg(long)]
        scope: Scope,
        /// Limit it to this project, by id or name (default: all projects).
        #[arg(long, value_name = "PROJECT")]
        project: Option<String>,
        /// When it expires, such as 30d or 12h from now (default: never).
        #[arg(long, value_name = "DURATION", value_parser = parse_duration)]
        expires: Option<HumanDuration>,
    },
    /// List tokens; the tokens themselves are not shown.
    List,
    /// Revoke a token; it stops working at once.
    Revoke {
        /// The token's id, as shown by `token list`.
        id: String,
    },
}

fn parse_duration(text: &str) -> Result<HumanDuration, String> {
    text.parse().map_err(|e: oubliette_protocol::Error| e.message)
}

/// Runs `oubliette token`.
pub(crate) async fn run(token: TokenCommand, context: CommandContext) -> Result<()> {
    let client = ActionClient::connect(&context).await?;
    let done = execute(token, &context, &client).await;
    client.close().await;
    done
}

async fn execute(token: TokenCommand, context: &CommandContext, client: &ActionClient) -> Result<()> {
    match token {
        TokenCommand::Create {
            name,
            scope,
            project,
            expires,
        } => {
            let mut arguments = json!({ "name": name, "scope": scope });
            set_if_some(
                &mut arguments,
                "project_id",
                resolve::optional_project_id(client, project.as_deref()).await?,
            );
            set_if_some(&mut arguments, "expires_in", expires);
            let made = client.call("token_create", arguments).await?;
            context
                .output
                .print_result(&made, |made| field_text(made, "token"));
            context.output.print_hint(&format!(
                "{} ({}); it is shown this once",
                field_text(&made, "token_id"),
                field_text(&made, "scope")
            ));
        }
        TokenCommand::List => {
            let list = client.list("token_list", "tokens", json!({}), None).await?;
            context.output.print_result(&list, |list| {
                let columns = [
                    ("ID", "token_id"),
                    ("NAME", "name"),
                    ("SCOPE", "scope"),
                    ("PROJECT", "project_id"),
                    ("CREATED", "created_at"),
                    ("EXPIRES", "expires_at"),
                ];
                format_listing(
                    list["tokens"].as_array().map_or(&[], Vec::as_slice),
                    &columns,
                    "No token.",
                )
            });
        }
        TokenCommand::Revoke { id } => {
            let gone = client.call("token_revoke", json!({ "token_id": id })).await?;
            context.output.print_result(&gone, |gone| {
                format!("{} is revoked", field_text(gone, "token_id"))
            });
        }
    }
    Ok(())
}
