//! What people call things, as the ids that actions take.

use oubliette_protocol::{Error, ProjectId, Result, SessionId};
use serde_json::{Value, json};

use super::{client::Client, output::field};

/// A project by its id or its name.
pub async fn project(client: &Client, given: &str) -> Result<String> {
    if given.parse::<ProjectId>().is_ok() {
        return Ok(given.to_owned());
    }
    let found = client
        .list(
            "project_list",
            "projects",
            json!({ "name_contains": given }),
            None,
        )
        .await?;
    let found: Vec<&Value> = found["projects"].as_array().into_iter().flatten().collect();
    let named: Vec<&&Value> = found.iter().filter(|p| p["name"] == given).collect();
    match named.as_slice() {
        [one] => Ok(field(one, "project_id")),
        [] => Err(Error::not_found(format!(
            "there is no project with the id or name {}; `oubliette project list` shows what there is",
            oubliette_protocol::id::quoted(given)
        ))),
        several => {
            let ids: Vec<String> = several.iter().map(|p| field(p, "project_id")).collect();
            let name = oubliette_protocol::id::quoted(given);
            Err(Error::invalid(format!(
                "{} projects are named {name}; use an id: {}",
                ids.len(),
                ids.join(", ")
            )))
        }
    }
}

/// The same, when one was given.
pub async fn maybe_project(client: &Client, given: Option<&str>) -> Result<Option<String>> {
    match given {
        Some(given) => project(client, given).await.map(Some),
        None => Ok(None),
    }
}

/// The same, or the only project there is when none was given.
pub async fn project_or_only(client: &Client, given: Option<&str>) -> Result<String> {
    if let Some(given) = given {
        return project(client, given).await;
    }
    let found = client.call("project_list", json!({ "limit": 2 })).await?;
    match found["projects"].as_array().map_or(&[][..], Vec::as_slice) {
        [one] => Ok(field(one, "project_id")),
        [] => Err(Error::invalid(
            "there is no project yet; make one with `oubliette project create NAME`",
        )),
        _ => Err(Error::invalid(
            "there are several projects; say which with --project (`oubliette project list` shows them)",
        )),
    }
}

/// A session by its id, or `last`: the newest one.
pub async fn session(client: &Client, given: &str) -> Result<String> {
    if given != "last" {
        return given.parse::<SessionId>().map(|id| id.to_string());
    }
    let newest = client.call("session_list", json!({ "limit": 1 })).await?;
    match newest["sessions"].get(0) {
        Some(session) => Ok(field(session, "session_id")),
        None => Err(Error::not_found(
            "there is no session yet; start one with `oubliette run`",
        )),
    }
}

/// `NAME=VALUE` of a command line.
pub fn variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".into()),
    }
}

/// Sets a field when there is something to set.
pub fn set(arguments: &mut Value, name: &str, value: Option<impl serde::Serialize>) {
    if let Some(value) = value {
        arguments[name] = json!(value);
    }
}
