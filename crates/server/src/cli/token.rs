//! `oubliette token …`.

use oubliette_protocol::{Result, Scope, duration::Span};
use serde_json::{Value, json};

use super::{Context, client::Client, output::{field, table}};

/// Create, list and revoke tokens.
#[derive(Debug, clap::Subcommand)]
pub enum Token {
    /// Create a token; it is shown once.
    Create {
        /// What people call it.
        #[arg(long)]
        name: String,
        /// How far it reaches: read, write or admin.
        #[arg(long)]
        scope: Scope,
        /// The one project it sees.
        #[arg(long, value_name = "ID")]
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
        Token::Create { name, scope, project, expires } => {
            let mut arguments = json!({ "name": name, "scope": scope });
            if let Some(project) = project {
                arguments["project_id"] = json!(project);
            }
            if let Some(expires) = expires {
                arguments["expires_in"] = json!(expires);
            }
            let made = client.call("token_create", arguments).await?;
            context.output.result(&made, |made| field(made, "token"));
            if context.output == super::output::Output::Text {
                eprintln!("{} ({}); it is shown this once", field(&made, "token_id"), field(&made, "scope"));
            }
        }
        Token::List => {
            let mut all = Vec::new();
            let mut cursor = Value::Null;
            loop {
                let mut arguments = json!({ "limit": 1000 });
                if !cursor.is_null() {
                    arguments["cursor"] = cursor;
                }
                let page = client.call("token_list", arguments).await?;
                all.extend(page["tokens"].as_array().cloned().unwrap_or_default());
                cursor = page["next_cursor"].clone();
                if cursor.is_null() {
                    break;
                }
            }
            context.output.result(&json!({ "tokens": all }), |_| {
                let columns = ["token_id", "name", "scope", "project_id", "expires_at"];
                let rows: Vec<_> = all.iter().map(|t| columns.iter().map(|c| field(t, c)).collect()).collect();
                table(&["ID", "NAME", "SCOPE", "PROJECT", "EXPIRES"], &rows)
            });
        }
        Token::Revoke { id } => {
            let gone = client.call("token_revoke", json!({ "token_id": id })).await?;
            context.output.result(&gone, |gone| format!("{} is revoked", field(gone, "token_id")));
        }
    }
    Ok(())
}
