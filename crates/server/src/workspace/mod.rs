//! Workspaces on disk: creating, cloning, diffing, reading, writing, archiving and removing them.
//!
//! An agent can write anything into its workspace, so nothing in it is trusted: paths are resolved beneath its root
//! by the kernel ([`files`]), files are put together outside it ([`upload`]), git works on it in a sandbox ([`git`]),
//! and an archive holds symbolic links as links ([`archive`]); one that a client sends is checked whole before its
//! entries are moved into place ([`unpack`], [`writer`]).

pub(crate) mod archive;
pub(crate) mod files;
pub(crate) mod git;
pub(crate) mod quota;
pub(crate) mod unpack;
pub(crate) mod upload;
mod writer;

use std::path::PathBuf;

use oubliette_home::safe_fs;
use oubliette_protocol::{ProjectId, Result, WorkspaceId};

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
        app.git.clone_remote(project, remote, &dir).await?;
        let repository = repository(app, project, workspace);
        app.git.record_baseline(project, &repository, &dir).await?;
    }
    Ok(())
}

/// Path of what is kept of a cloned workspace's first content. It is outside the sandbox, so the agent cannot change
/// it.
pub(crate) fn repository(app: &App, project: &ProjectId, workspace: &WorkspaceId) -> PathBuf {
    app.home
        .project_dir(project)
        .join("git")
        .join(format!("{workspace}.git"))
}

/// Removes a workspace's files. A failure is only logged, since its row is already deleted.
pub(crate) async fn remove(app: &App, project: &ProjectId, workspace: &WorkspaceId) {
    app.home
        .discard(&app.home.workspace_dir(project, workspace))
        .await;
    app.home.discard(&repository(app, project, workspace)).await;
}

/// Removes all of a project's files.
pub(crate) async fn remove_project(app: &App, project: &ProjectId) {
    app.home.discard(&app.home.project_dir(project)).await;
}
