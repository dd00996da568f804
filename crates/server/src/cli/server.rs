//! `oubliette server …`: the servers that make up an Oubliette.

use jiff::Timestamp;
use oubliette_protocol::Result;
use serde_json::{Value, json};

use super::{
    CommandContext,
    client::ActionClient,
    output::{field_text, format_listing},
    style::age_text,
};

/// List servers.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum ServerCommand {
    /// List the servers: address, version, active sessions, how long each runs and when it was last seen.
    List,
}

/// Runs `oubliette server`.
pub(crate) async fn run(command: ServerCommand, context: CommandContext) -> Result<()> {
    let client = ActionClient::connect_running(&context).await?;
    match command {
        ServerCommand::List => {
            let list = client.call("server_list", json!({})).await?;
            context
                .output
                .print_result(&list, |list| format_servers(list, Timestamp::now()));
        }
    }
    client.close().await;
    Ok(())
}

fn format_servers(list: &Value, now: Timestamp) -> String {
    let columns = [
        ("SERVER", "server_id"),
        ("ADDRESS", "address"),
        ("VERSION", "version"),
        ("SESSIONS", "sessions"),
        ("RUNS", "runs"),
        ("LAST SEEN", "seen"),
    ];
    let row = |server: &Value| {
        let mut row = server.clone();
        row["runs"] = age_of(server, "since", now).into();
        row["seen"] = format!("{} ago", age_of(server, "last_seen", now)).into();
        row
    };
    let rows: Vec<Value> = list["servers"]
        .as_array()
        .into_iter()
        .flatten()
        .map(row)
        .collect();
    format_listing(&rows, &columns, "No server is known.")
}

/// How long ago a field's time is; 0 if it is not in the past, because this machine's clock may differ.
fn age_of(server: &Value, field: &str, now: Timestamp) -> String {
    match field_text(server, field).parse::<Timestamp>() {
        Ok(at) => age_text(u64::try_from(now.duration_since(at).as_secs()).unwrap_or(0)),
        Err(_) => "?".to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn servers_are_listed_with_their_ages() {
        let now: Timestamp = "2026-11-17T10:00:00Z".parse().unwrap();
        let list = json!({ "servers": [
            { "server_id": "srv_a", "address": "http://a:1", "version": "1.2", "sessions": 3,
              "since": "2026-11-17T09:00:00Z", "last_seen": "2026-11-17T09:59:55Z" },
            // A clock that is ahead, and text that would act on a terminal.
            { "server_id": "srv_b", "address": "http://b\u{1b}[2J:1", "version": "1.2", "sessions": 0,
              "since": "2026-11-17T11:00:00Z", "last_seen": "soon" },
        ] });
        let text = format_servers(&list, now);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 3, "{text}");
        for wanted in ["srv_a", "http://a:1", "3", "1h00m", "5s ago"] {
            assert!(lines[1].contains(wanted), "{wanted}: {text}");
        }
        assert!(lines[2].contains("0s") && lines[2].contains("? ago") && !text.contains("\u{1b}[2J"));
        assert_eq!(
            format_servers(&json!({ "servers": [] }), now),
            "No server is known."
        );
    }
}
