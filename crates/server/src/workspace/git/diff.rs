//! What changed in a workspace.
//!
//! It is asked of a repository of our own beside it, whose configuration the agent cannot write: hooks,
//! filters, external diffs and file monitors of the workspace never run.

use std::path::Path;

use oubliette_protocol::{Error, ProjectId, Result, WorkspaceId};
use tokio::process::Command;

use super::run::{LOOK, WHOLE, git, must, run};
use crate::{app::App, workspace::repository};

/// The most of a diff that is shown.
pub(super) const MOST_DIFF: usize = 2 * 1024 * 1024;
/// The empty tree, which every repository knows: what a workspace without origin began with.
const EMPTY_TREE: &str = "4b825dc642cb6eb9a060e54bf8d69288fbee4904";
const BASELINE: &str = "refs/oubliette/baseline";

/// The workspace seen through a repository of our own.
fn look(repository: &Path, dir: &Path) -> Command {
    let mut command = git(dir);
    command.env("GIT_DIR", repository).env("GIT_WORK_TREE", dir);
    command
}

/// Remembers what a workspace holds now.
pub async fn baseline(repository: &Path, dir: &Path) -> Result<()> {
    prepare(repository, dir).await?;
    let mut add = look(repository, dir);
    add.args(["add", "--all", "--force", "--", "."]);
    let ran = run(add, 4096, WHOLE).await?;
    if !ran.ok {
        return Err(Error::internal(format!("git add: {}", ran.stderr.trim())));
    }
    let mut write = look(repository, dir);
    write.arg("write-tree");
    let tree = String::from_utf8_lossy(&must(write, "write-tree").await?.stdout)
        .trim()
        .to_owned();
    let mut commit = look(repository, dir);
    commit.args(["commit-tree", "-m", "as created", &tree]);
    let commit = String::from_utf8_lossy(&must(commit, "commit-tree").await?.stdout)
        .trim()
        .to_owned();
    let mut update = look(repository, dir);
    update.args(["update-ref", BASELINE, &commit]);
    must(update, "update-ref").await?;
    Ok(())
}

/// Makes the repository, if it is not there.
async fn prepare(repository: &Path, dir: &Path) -> Result<()> {
    if repository.join("info/attributes").exists() {
        return Ok(());
    }
    let made = repository.to_owned();
    crate::actions::blocking(move || oubliette_home::disk::private_dir(&made)).await?;
    let mut init = git(dir);
    init.env("GIT_DIR", repository)
        .args(["init", "--quiet", "--bare", "--template="]);
    must(init, "init").await?;
    let info = repository.join("info");
    // Stronger than any .gitattributes of the workspace: no filters, no conversions.
    let written = std::fs::create_dir_all(&info).and_then(|()| {
        std::fs::write(
            info.join("attributes"),
            "* -filter -text -ident -working-tree-encoding\n",
        )
    });
    written.map_err(Error::internal)
}

/// What changed.
#[derive(Debug)]
pub struct Diff {
    /// In git's format.
    pub text: String,
    /// Whether there is more.
    pub truncated: bool,
}

/// What changed in a workspace since it was created.
pub async fn diff(app: &App, project: &ProjectId, workspace: &WorkspaceId) -> Result<Diff> {
    let repository = repository(app, project, workspace);
    diff_of(&repository, &app.home.workspace_dir(project, workspace)).await
}

pub(super) async fn diff_of(repository: &Path, dir: &Path) -> Result<Diff> {
    prepare(repository, dir).await?;
    let mut probe = look(repository, dir);
    probe.args(["rev-parse", "--verify", "--quiet", BASELINE]);
    let has_baseline = run(probe, 4096, LOOK).await?.ok;
    let base = if has_baseline { BASELINE } else { EMPTY_TREE };
    // An index of its own for each look: two at once do not meet, and the kept one stays as it was.
    let index = tempfile::Builder::new()
        .prefix("index-")
        .tempdir_in(repository)
        .map_err(Error::internal)?;
    let index = index.path().join("index");
    let mut read = look(repository, dir);
    read.env("GIT_INDEX_FILE", &index).args(["read-tree", base]);
    must(read, "read-tree").await?;
    // New files are named without being copied into the repository.
    let mut add = look(repository, dir);
    add.env("GIT_INDEX_FILE", &index)
        .args(["add", "--intent-to-add", "--all", "--ignore-errors", "--", "."]);
    run(add, 4096, LOOK).await?;
    let mut command = look(repository, dir);
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
    let ran = run(command, MOST_DIFF, LOOK).await?;
    if !ran.ok {
        return Err(Error::internal(format!("git diff: {}", ran.stderr.trim())));
    }
    Ok(Diff {
        text: String::from_utf8_lossy(&ran.stdout).into_owned(),
        truncated: ran.truncated,
    })
}
