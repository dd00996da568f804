//! `oubliette run --here`: a session that works on a copy of the folder the command is started in. In the folder of a git
//! repository `run` offers it. The agent never sees the folder itself, and nothing is copied back without being asked for.

use std::{
    io::{IsTerminal as _, Write as _},
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    client::ActionClient,
    output::{OutputFormat, field_text},
    style::strip_control_chars,
    workspace_sync,
};

/// The folder to copy: the present one if `--here` is given, or if it is offered and somebody at the terminal wants it.
pub(crate) fn choose_folder(here: bool, may_ask: bool) -> Result<Option<PathBuf>> {
    let present = || {
        std::env::current_dir()
            .map_err(|error| Error::invalid(format!("the present folder cannot be used: {error}")))
    };
    if here {
        return present().map(Some);
    }
    if !may_ask || !std::io::stdin().is_terminal() || !std::io::stderr().is_terminal() {
        return Ok(None);
    }
    let Ok(folder) = present() else { return Ok(None) };
    let own_home = std::env::var_os("HOME").map(PathBuf::from);
    if !is_offered(&folder, own_home.as_deref()) {
        return Ok(None);
    }
    let mut terminal = std::io::stderr();
    let shown = folder.display().to_string();
    let _ = write!(
        terminal,
        "Let the agent work on a copy of {}? [y/N] ",
        strip_control_chars(&shown)
    );
    let _ = terminal.flush();
    let mut answer = String::new();
    std::io::stdin().read_line(&mut answer).map_err(Error::internal)?;
    let agreed = matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes");
    Ok(agreed.then_some(folder))
}

/// Whether a folder is offered: it is a git repository's, so it is likely what the message is about, and neither everything
/// nor the user's whole home.
fn is_offered(folder: &Path, own_home: Option<&Path>) -> bool {
    let all = folder.parent().is_none() || own_home.is_some_and(|home| home == folder);
    !all && folder.join(".git").exists()
}

/// Makes a new workspace of a project with the files of a folder, and returns its id.
pub(crate) async fn copy_into_workspace(
    client: &ActionClient,
    project: &Value,
    folder: &Path,
    output: OutputFormat,
) -> Result<String> {
    let name = folder.file_name().map(|name| name.to_string_lossy().into_owned());
    let name: String = name
        .unwrap_or_default()
        .chars()
        .filter(|c| !c.is_control())
        .take(100)
        .collect();
    let name = match name.trim() {
        "" => "folder",
        name => name,
    };
    let made = client
        .call("workspace_create", json!({ "project_id": project, "name": name }))
        .await?;
    let workspace = field_text(&made, "workspace_id");
    let pushed = workspace_sync::push(client, folder, &workspace, output).await;
    if let Err(error) = pushed {
        // A workspace with a part of the folder is of no use; that it stays is no reason to hide the first error.
        let _ = client
            .call("workspace_delete", json!({ "workspace_id": workspace }))
            .await;
        return Err(error);
    }
    Ok(workspace)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_folder_of_a_repository_is_offered_and_never_a_whole_home() {
        let root = tempfile::tempdir().unwrap();
        let (plain, repository) = (root.path().join("plain"), root.path().join("repository"));
        std::fs::create_dir_all(&plain).unwrap();
        std::fs::create_dir_all(repository.join(".git")).unwrap();
        assert!(is_offered(&repository, Some(root.path())));
        assert!(!is_offered(&plain, None));
        assert!(!is_offered(&repository, Some(&repository)));
        assert!(!is_offered(Path::new("/"), None));
    }
}
