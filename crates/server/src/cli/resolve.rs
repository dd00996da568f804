//! Turns what people write on the command line (a project's name, `last`, `NAME=VALUE`) into arguments of actions.

use oubliette_protocol::{Error, ProjectId, Result, SessionId};
use serde_json::{Value, json};

use super::{client::ActionClient, output::field_text};

/// The id of the project with this id or name. An id is not looked up.
pub(crate) async fn project_id(client: &ActionClient, given: &str) -> Result<String> {
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
        [one] => Ok(field_text(one, "project_id")),
        [] => Err(Error::not_found(format!(
            "there is no project with the id or name {}; `oubliette project list` shows what there is",
            oubliette_protocol::id::quoted(given)
        ))),
        several => {
            let ids: Vec<String> = several.iter().map(|p| field_text(p, "project_id")).collect();
            let name = oubliette_protocol::id::quoted(given);
            Err(Error::invalid(format!(
                "{} projects are named {name}; use an id: {}",
                ids.len(),
                ids.join(", ")
            )))
        }
    }
}

/// [`project_id`] of an option that may be left out.
pub(crate) async fn optional_project_id(
    client: &ActionClient,
    given: Option<&str>,
) -> Result<Option<String>> {
    match given {
        Some(given) => project_id(client, given).await.map(Some),
        None => Ok(None),
    }
}

/// [`project_id`], or the id of the only project when none was given.
pub(crate) async fn project_id_or_only(client: &ActionClient, given: Option<&str>) -> Result<String> {
    if let Some(given) = given {
        return project_id(client, given).await;
    }
    let found = client.call("project_list", json!({ "limit": 2 })).await?;
    match found["projects"].as_array().map_or(&[][..], Vec::as_slice) {
        [one] => Ok(field_text(one, "project_id")),
        [] => Err(Error::invalid(
            "there is no project yet; make one with `oubliette project create NAME`",
        )),
        _ => Err(Error::invalid(
            "there are several projects; say which with --project (`oubliette project list` shows them)",
        )),
    }
}

/// The session id given; `last` is the id of the newest session.
pub(crate) async fn session_id(client: &ActionClient, given: &str) -> Result<String> {
    if given != "last" {
        return given.parse::<SessionId>().map(|id| id.to_string());
    }
    let newest = client.call("session_list", json!({ "limit": 1 })).await?;
    match newest["sessions"].get(0) {
        Some(session) => Ok(field_text(session, "session_id")),
        None => Err(Error::not_found(
            "there is no session yet; start one with `oubliette run`",
        )),
    }
}

/// Parses `NAME=VALUE`.
pub(crate) fn parse_variable(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".into()),
    }
}

/// Sets `arguments[name]` if there is a value.
pub(crate) fn set_if_some(arguments: &mut Value, name: &str, value: Option<impl serde::Serialize>) {
    if let Some(value) = value {
        arguments[name] = json!(value);
    }
}
