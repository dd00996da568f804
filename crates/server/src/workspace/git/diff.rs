//! The diff of a workspace against what it held when it was created.
//!
//! It is made with a repository outside the workspace, whose configuration the agent cannot write, so that hooks,
//! filters, external diffs and file monitors of the workspace never run.

use std::path::Path;

use oubliette_protocol::{Error, ProjectId, Result, WorkspaceId};
use tokio::process::Command;

use super::run::{COMMAND_TIMEOUT, WHOLE_TREE_TIMEOUT, git_command, run, run_checked};
use crate::{app::App, workspace::repository};

/// Maximum length of a diff in bytes; longer ones are cut.
pub(super) const MAX_DIFF_BYTES: usize = 2 * 1024 * 1024;
/// Git's empty tree, which exists in every repository: the baseline of a workspace that was not cloned.
const EMPTY_TREE: &str = "4b825dc642cb6eb9a060e54bf8d69288fbee4904";
/// Ref of the commit with the workspace's first content.
const BASELINE: &str = "refs/oubliette/baseline";

/// A git command on a workspace that uses the repository outside it.
fn git_on_workspace(repository: &Path, dir: &Path) -> Command {
    let mut command = git_command(dir);
    command.env("GIT_DIR", repository).env("GIT_WORK_TREE", dir);
    command
}

/// Commits what a workspace holds now as the baseline of later diffs.
pub(crate) async fn record_baseline(repository: &Path, dir: &Path) -> Result<()> {
    ensure_repository(repository, dir).await?;
    let mut add = git_on_workspace(repository, dir);
    add.args(["add", "--all", "--force", "--", "."]);
    let output = run(add, 4096, WHOLE_TREE_TIMEOUT).await?;
    if !output.ok {
        return Err(Error::internal(format!("git add: {}", output.stderr.trim())));
    }
    let mut write = git_on_workspace(repository, dir);
    write.arg("write-tree");
    let tree = String::from_utf8_lossy(&run_checked(write, "write-tree").await?.stdout)
        .trim()
        .to_owned();
    let mut commit = git_on_workspace(repository, dir);
    commit.args(["commit-tree", "-m", "as created", &tree]);
    let commit = String::from_utf8_lossy(&run_checked(commit, "commit-tree").await?.stdout)
        .trim()
        .to_owned();
    let mut update = git_on_workspace(repository, dir);
    update.args(["update-ref", BASELINE, &commit]);
    run_checked(update, "update-ref").await?;
    Ok(())
}

/// Creates the repository if it does not exist.
async fn ensure_repository(repository: &Path, dir: &Path) -> Result<()> {
    if repository.join("info/attributes").exists() {
        return Ok(());
    }
    let made = repository.to_owned();
    crate::actions::run_blocking(move || oubliette_home::safe_fs::create_private_dir(&made)).await?;
    let mut init = git_command(dir);
    init.env("GIT_DIR", repository)
        .args(["init", "--quiet", "--bare", "--template="]);
    run_checked(init, "init").await?;
    let info = repository.join("info");
    // Takes precedence over any .gitattributes of the workspace: no filters, no conversions.
    let written = std::fs::create_dir_all(&info).and_then(|()| {
        std::fs::write(
            info.join("attributes"),
            "* -filter -text -ident -working-tree-encoding\n",
        )
    });
    written.map_err(Error::internal)
}

/// A diff as git prints it.
#[derive(Debug)]
pub(crate) struct GitDiff {
    /// The diff text.
    pub text: String,
    /// Whether it was cut at the maximum length.
    pub truncated: bool,
}

/// The diff of a workspace against its baseline.
pub(crate) async fn diff(app: &App, project: &ProjectId, workspace: &WorkspaceId) -> Result<GitDiff> {
    let repository = repository(app, project, workspace);
    diff_against_baseline(&repository, &app.home.workspace_dir(project, workspace)).await
}

pub(super) async fn diff_against_baseline(repository: &Path, dir: &Path) -> Result<GitDiff> {
    ensure_repository(repository, dir).await?;
    let mut probe = git_on_workspace(repository, dir);
    probe.args(["rev-parse", "--verify", "--quiet", BASELINE]);
    let has_baseline = run(probe, 4096, COMMAND_TIMEOUT).await?.ok;
    let base = if has_baseline { BASELINE } else { EMPTY_TREE };
    // A temporary index for each diff, so that concurrent diffs do not conflict and the repository's own index stays
    // unchanged.
    let index = tempfile::Builder::new()
        .prefix("index-")
        .tempdir_in(repository)
        .map_err(Error::internal)?;
    let index = index.path().join("index");
    let mut read = git_on_workspace(repository, dir);
    read.env("GIT_INDEX_FILE", &index).args(["read-tree", base]);
    run_checked(read, "read-tree").await?;
    // Adds new files to the index without copying their content into the repository.
    let mut add = git_on_workspace(repository, dir);
    add.env("GIT_INDEX_FILE", &index)
        .args(["add", "--intent-to-add", "--all", "--ignore-errors", "--", "."]);
    run(add, 4096, COMMAND_TIMEOUT).await?;
    let mut command = git_on_workspace(repository, dir);
    command.env("GIT_INDEX_FILE", &index);
    command.args([
        "diff",
        "--no-color",
        "--no-ext-diff",
        "--no-textconv",
        "--ignore-submodules=all",
        "--no-renames",
        base,
        "--",
        ".",
    ]);
    let output = run(command, MAX_DIFF_BYTES, COMMAND_TIMEOUT).await?;
    if !output.ok {
        return Err(Error::internal(format!("git diff: {}", output.stderr.trim())));
    }
    Ok(GitDiff {
        text: String::from_utf8_lossy(&output.stdout).into_owned(),
        truncated: output.truncated,
    })
}
