//! The diff of a workspace against what it held when it was created.
//!
//! What is kept of its first content, outside the workspace, are git's objects, an index and the id of the tree. The
//! repository that git works with is an empty one that no run can change; what a diff adds to index and objects is in
//! its sandbox's private memory. So no configuration an agent wrote is read, and nothing stays.

use std::{path::Path, time::Duration};

use oubliette_home::safe_fs;
use oubliette_protocol::{Error, ProjectId, Result, WorkspaceId};
use oubliette_sandbox::BindMount;

use super::sandboxed::{BASELINE, GitSandboxes, GitScript, REPOSITORY, WORK_TREE};
use crate::{app::App, workspace::repository};

/// Maximum length of a diff in bytes; longer ones are cut.
pub const MAX_DIFF_BYTES: usize = 2 * 1024 * 1024;

/// Records the content of a workspace. The id is written last: it is there only if everything else is.
const RECORD_BASELINE: &str = r#"
    umask 077
    mkdir -p "$BASELINE/objects" "$BASELINE/refs/oubliette" || exit 125
    export GIT_OBJECT_DIRECTORY="$BASELINE/objects" GIT_INDEX_FILE="$BASELINE/index"
    git add --all --force -- . || exit
    tree=$(git write-tree) || exit
    echo "$tree" >"$BASELINE/refs/oubliette/baseline"
"#;

/// Prints the diff. `$1` is the tree to compare with where there is no baseline: git's empty one.
///
/// The index of the baseline tells by size and times which files are unchanged, so that those are not read; it is
/// copied with its own times, from which git knows where this cannot be told. New files are entered into the copy
/// without their content. Exit code 1 of `git add` means that some file could not be read, which is no reason to
/// show nothing of the others.
const DIFF: &str = r#"
    export GIT_OBJECT_DIRECTORY="$TMPDIR" GIT_INDEX_FILE="$TMPDIR/index"
    base=$1
    if [ -n "${BASELINE:-}" ] && [ -f "$BASELINE/refs/oubliette/baseline" ]; then
        export GIT_ALTERNATE_OBJECT_DIRECTORIES="$BASELINE/objects"
        read -r base <"$BASELINE/refs/oubliette/baseline" || exit 125
        if [ -f "$BASELINE/index" ]; then
            cp -p "$BASELINE/index" "$GIT_INDEX_FILE" || exit 125
        else
            git read-tree "$base" || exit
        fi
    fi
    git add --intent-to-add --all --ignore-errors -- . >/dev/null
    added=$?
    [ "$added" -le 1 ] || exit "$added"
    exec git diff --no-color --no-ext-diff --no-textconv --ignore-submodules=all --no-renames "$base" -- .
"#;

/// Git's empty tree, which exists in every repository.
const EMPTY_TREE: &str = "4b825dc642cb6eb9a060e54bf8d69288fbee4904";

/// A diff as git prints it.
#[derive(Debug)]
pub struct GitDiff {
    /// The diff text.
    pub text: String,
    /// Whether it was cut at the maximum length.
    pub truncated: bool,
}

/// The diff of a workspace against its baseline.
pub(crate) async fn diff(app: &App, project: &ProjectId, workspace: &WorkspaceId) -> Result<GitDiff> {
    let repository = repository(app, project, workspace);
    let dir = app.home.workspace_dir(project, workspace);
    app.git.diff(project, &repository, &dir).await
}

impl GitSandboxes {
    /// Records what a workspace holds now as the baseline of later diffs.
    pub async fn record_baseline(&self, project: &ProjectId, repository: &Path, dir: &Path) -> Result<()> {
        let made = repository.to_owned();
        crate::actions::run_blocking(move || safe_fs::create_private_dir(&made)).await?;
        let mut script = self
            .work_tree_script(RECORD_BASELINE, dir, self.config.clone_timeout)
            .await?;
        script.mounts.push(BindMount::read_write(repository, BASELINE));
        script.env.push(("BASELINE".into(), BASELINE.into()));
        script.written = Some(repository.to_owned());
        let output = self.run(project, script).await?;
        match output.success() {
            true => Ok(()),
            false => Err(output.failure("record the content of the workspace")),
        }
    }

    /// The diff of a workspace against its baseline, or against nothing where none was recorded.
    pub async fn diff(&self, project: &ProjectId, repository: &Path, dir: &Path) -> Result<GitDiff> {
        let mut script = self.work_tree_script(DIFF, dir, self.config.diff_timeout).await?;
        script.arguments.push(EMPTY_TREE.into());
        script.max_stdout = MAX_DIFF_BYTES;
        if tokio::fs::try_exists(repository).await.map_err(Error::internal)? {
            script.mounts.push(BindMount::read_only(repository, BASELINE));
            script.env.push(("BASELINE".into(), BASELINE.into()));
        }
        let output = self.run(project, script).await?;
        if !output.success() {
            return Err(output.failure("compare the workspace"));
        }
        Ok(GitDiff {
            text: String::from_utf8_lossy(&output.stdout).into_owned(),
            truncated: output.truncated,
        })
    }
}

impl GitSandboxes {
    /// A script on a workspace that is mounted read-only, with the empty repository.
    async fn work_tree_script(&self, text: &'static str, dir: &Path, timeout: Duration) -> Result<GitScript> {
        let make = || {
            let dir = self.empty_repository.clone();
            crate::actions::run_blocking(move || make_empty_repository(&dir))
        };
        self.empty_repository_made.get_or_try_init(make).await?;
        let mut script = GitScript::new(text, timeout);
        script.mounts.push(BindMount::read_only(dir, WORK_TREE));
        script
            .mounts
            .push(BindMount::read_only(&self.empty_repository, REPOSITORY));
        script.env.extend([
            ("GIT_WORK_TREE".into(), WORK_TREE.into()),
            ("GIT_DIR".into(), REPOSITORY.into()),
        ]);
        Ok(script)
    }
}

/// Makes the empty repository in a folder of the server's. Its attributes take precedence over any `.gitattributes` of
/// a workspace: no filters, no conversions.
fn make_empty_repository(dir: &Path) -> Result<()> {
    for folder in ["objects", "refs", "info"] {
        safe_fs::create_private_dir(&dir.join(folder))?;
    }
    for (file, text) in [
        ("HEAD", "ref: refs/heads/none\n"),
        (
            "info/attributes",
            "* -filter -text -ident -working-tree-encoding\n",
        ),
    ] {
        std::fs::write(dir.join(file), text).map_err(Error::internal)?;
    }
    Ok(())
}
