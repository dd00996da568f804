//! Workspaces on disk: creating, cloning, diffing, reading, writing, archiving and removing them.
//!
//! An agent can write anything into its workspace, so nothing in it is trusted: paths are resolved beneath its root
//! by the kernel ([`files`]), git works on it with a repository outside it ([`git`]), and an archive holds
//! symbolic links as links ([`archive`]).

pub(crate) mod archive;
pub(crate) mod files;
pub(crate) mod git;

use std::path::{Path, PathBuf};

use oubliette_home::safe_fs;
use oubliette_protocol::{Error, ProjectId, Result, WorkspaceId};

use crate::app::App;

/// Creates a workspace's folder and, with a remote, clones it and records the content as the baseline of later diffs.
pub(crate) async fn create(
    app: &App,
    project: &ProjectId,
    workspace: &WorkspaceId,
    remote: Option<&git::GitRemote>,
) -> Result<()> {
    let dir = app.home.workspace_dir(project, workspace);
    let made = dir.clone();
    crate::actions::run_blocking(move || safe_fs::create_private_dir(&made)).await?;
    if let Some(remote) = remote {
        git::clone_remote(remote, &dir, app.config.sandbox.workspace_mb * 1024 * 1024).await?;
        git::record_baseline(&repository(app, project, workspace), &dir).await?;
    }
    Ok(())
}

/// Path of the git repository used to diff a workspace. It is outside the sandbox, so the agent cannot change it.
pub(crate) fn repository(app: &App, project: &ProjectId, workspace: &WorkspaceId) -> PathBuf {
    app.home
        .project_dir(project)
        .join("git")
        .join(format!("{workspace}.git"))
}

/// Removes a workspace's files. A failure is only logged, since its row is already deleted.
pub(crate) async fn remove(app: &App, project: &ProjectId, workspace: &WorkspaceId) {
    remove_dir(app.home.workspace_dir(project, workspace)).await;
    remove_dir(repository(app, project, workspace)).await;
}

/// Removes all of a project's files.
pub(crate) async fn remove_project(app: &App, project: &ProjectId) {
    remove_dir(app.home.project_dir(project)).await;
}

async fn remove_dir(dir: PathBuf) {
    let removed = crate::actions::run_blocking(move || match std::fs::remove_dir_all(&dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            make_removable(&dir);
            std::fs::remove_dir_all(&dir)
                .map_err(|e| Error::internal_during(format!("removing {}", dir.display()), e))
        }
        _ => Ok(()),
    })
    .await;
    if let Err(error) = removed {
        tracing::warn!(error = %error.for_log(), "removing workspace files failed; they stay on disk");
    }
}

/// Makes folders removable whose permissions an agent took away. Symbolic links are not followed.
fn make_removable(dir: &Path) {
    use std::os::unix::fs::PermissionsExt as _;
    let Ok(meta) = std::fs::symlink_metadata(dir) else {
        return;
    };
    if !meta.is_dir() {
        return;
    }
    let _ = std::fs::set_permissions(dir, std::fs::Permissions::from_mode(0o700));
    let Ok(entries) = std::fs::read_dir(dir) else {
        return;
    };
    for entry in entries.flatten() {
        make_removable(&entry.path());
    }
}
