//! The files of a session's workspace, as commands list them.

use std::fmt::Write as _;

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{client::ActionClient, output::field_text};

/// The workspace of a session; before there is one, the default workspace of the project.
pub(crate) async fn workspace_of(
    client: &ActionClient,
    session: Option<&str>,
    project: Option<&str>,
) -> Result<String> {
    if let Some(session) = session {
        let session = client
            .call("session_get", json!({ "session_id": session }))
            .await?;
        return Ok(field_text(&session, "workspace_id"));
    }
    let Some(project) = project else {
        return Err(Error::invalid("no session yet: say something first"));
    };
    let arguments = json!({ "project_id": project });
    let list = client
        .list("workspace_list", "workspaces", arguments, None)
        .await?;
    let workspaces = list["workspaces"].as_array().map_or(&[][..], Vec::as_slice);
    let default = workspaces.iter().find(|workspace| workspace["default"] == true);
    match default {
        Some(workspace) => Ok(field_text(workspace, "workspace_id")),
        None => Err(Error::not_found("the project has no default workspace")),
    }
}

/// The entries of a folder of a workspace, `{name, type, size, modified}`, folders first.
pub(crate) async fn list_folder(client: &ActionClient, workspace: &str, folder: &str) -> Result<Vec<Value>> {
    let folder = folder.trim_matches('/');
    let path = match folder.is_empty() {
        true => format!("/api/workspaces/{workspace}/files"),
        false => format!("/api/workspaces/{workspace}/files/{}", encode_path(folder)),
    };
    let listing = client.get_json(&path).await?;
    let Some(entries) = listing["entries"].as_array() else {
        return Err(Error::invalid(format!(
            "{} is a file; `oubliette workspace pull DIR` copies the workspace here",
            oubliette_protocol::id::quoted(folder)
        )));
    };
    let mut entries = entries.clone();
    entries.sort_by_key(|entry| (entry["type"] != "directory", field_text(entry, "name")));
    Ok(entries)
}

/// A path as part of a URL.
fn encode_path(path: &str) -> String {
    let mut encoded = String::new();
    for byte in path.bytes() {
        match byte.is_ascii_alphanumeric() || b"-_.~/".contains(&byte) {
            true => encoded.push(char::from(byte)),
            false => {
                let _ = write!(encoded, "%{byte:02X}");
            }
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_path_in_a_url_stays_one_path() {
        assert_eq!(encode_path("a b/ü?#%"), "a%20b/%C3%BC%3F%23%25");
    }
}
