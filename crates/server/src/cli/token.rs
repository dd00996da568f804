//! `oubliette token …`.

use oubliette_protocol::{Result, Scope, duration::Span};
use serde_json::json;

use super::{
    Context,
    client::Client,
    names::{self, set},
    output::{field, listing},
};

/// Create, list and revoke tokens.
#[derive(Debug, clap::Subcommand)]
pub enum Token {
    /// Create a token; it is shown once.
    #[command(
        after_help = "Example: oubliette token create --name ci --scope write --project website --expires 30d"
    )]
    Create {
        /// What people call it.
        #[arg(long)]
        name: String,
        /// How far it reaches: read, write or admin.
        #[arg(long)]
        scope: Scope,
        /// The one project it sees, by id or name.
        #[arg(long, value_name = "PROJECT")]
        project: Option<String>,
        /// How long it lives, as in 30d.
        #[arg(long, value_name = "DURATION", value_parser = duration)]
        expires: Option<Span>,
    },
    /// List tokens; the tokens themselves are not shown.
    List,
    /// Revoke a token, at once.
    Revoke {
        /// Its id, as `list` shows it.
        id: String,
    },
}

fn duration(text: &str) -> Result<Span, String> {
    text.parse().map_err(|e: oubliette_protocol::Error| e.message)
}

/// Runs it.
pub async fn run(token: Token, context: Context) -> Result<()> {
    let client = Client::connect(&context.home).await?;
    let done = act(token, &context, &client).await;
    client.close().await;
    done
}

async fn act(token: Token, context: &Context, client: &Client) -> Result<()> {
    match token {
        Token::Create {
            name,
            scope,
            project,
            expires,
        } => {
            let mut arguments = json!({ "name": name, "scope": scope });
            set(
                &mut arguments,
                "project_id",
                names::maybe_project(client, project.as_deref()).await?,
            );
            set(&mut arguments, "expires_in", expires);
            let made = client.call("token_create", arguments).await?;
            context.output.result(&made, |made| field(made, "token"));
            context.output.hint(&format!(
                "{} ({}); it is shown this once",
                field(&made, "token_id"),
                field(&made, "scope")
            ));
        }
        Token::List => {
            let list = client.list("token_list", "tokens", json!({}), None).await?;
            context.output.result(&list, |list| {
                let columns = [
                    ("ID", "token_id"),
                    ("NAME", "name"),
                    ("SCOPE", "scope"),
                    ("PROJECT", "project_id"),
                    ("CREATED", "created_at"),
                    ("EXPIRES", "expires_at"),
                ];
                listing(
                    list["tokens"].as_array().map_or(&[], Vec::as_slice),
                    &columns,
                    "No token.",
                )
            });
        }
        Token::Revoke { id } => {
            let gone = client.call("token_revoke", json!({ "token_id": id })).await?;
            context
                .output
                .result(&gone, |gone| format!("{} is revoked", field(gone, "token_id")));
        }
    }
    Ok(())
}
