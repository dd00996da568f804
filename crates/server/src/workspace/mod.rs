//! Workspaces on disk: made, cloned, compared, read, written, packed and removed.
//!
//! A workspace belongs to its agent, so nothing in it is trusted: paths are opened beneath its root by
//! the kernel ([`files`]), git looks at it with a repository kept elsewhere ([`git`]), and a packed one
//! holds links as links ([`archive`]).

pub mod archive;
pub mod files;
pub mod git;

use std::path::{Path, PathBuf};

use oubliette_home::disk;
use oubliette_protocol::{Error, ProjectId, Result, WorkspaceId};

use crate::app::App;

/// Makes a workspace's folder, fills it from its origin, and remembers what it held.
pub async fn create(
    app: &App,
    project: &ProjectId,
    workspace: &WorkspaceId,
    origin: Option<&git::Origin>,
) -> Result<()> {
    let dir = app.home.workspace_dir(project, workspace);
    let made = dir.clone();
    crate::actions::blocking(move || disk::private_dir(&made)).await?;
    if let Some(origin) = origin {
        git::clone(origin, &dir, app.config.sandbox.workspace_mb * 1024 * 1024).await?;
        git::baseline(&repository(app, project, workspace), &dir).await?;
    }
    Ok(())
}

/// Where a workspace's own repository is: out of its agent's reach.
pub fn repository(app: &App, project: &ProjectId, workspace: &WorkspaceId) -> PathBuf {
    app.home
        .project_dir(project)
        .join("git")
        .join(format!("{workspace}.git"))
}

/// Removes a workspace's files. What cannot be removed is left and logged: its row is gone already.
pub async fn remove(app: &App, project: &ProjectId, workspace: &WorkspaceId) {
    remove_dir(app.home.workspace_dir(project, workspace)).await;
    remove_dir(repository(app, project, workspace)).await;
}

/// Removes all of a project's files.
pub async fn remove_project(app: &App, project: &ProjectId) {
    remove_dir(app.home.project_dir(project)).await;
}

async fn remove_dir(dir: PathBuf) {
    let removed = crate::actions::blocking(move || match std::fs::remove_dir_all(&dir) {
        Err(e) if e.kind() != std::io::ErrorKind::NotFound => {
            open_up(&dir);
            std::fs::remove_dir_all(&dir).map_err(|e| Error::internal(format!("{}: {e}", dir.display())))
        }
        _ => Ok(()),
    })
    .await;
    if let Err(error) = removed {
        tracing::warn!(error = %error.for_log(), "files left behind");
    }
}

/// Makes folders that an agent closed to everyone removable again. Links are not followed.
fn open_up(dir: &Path) {
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
        open_up(&entry.path());
    }
}
