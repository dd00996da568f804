//! Git on workspaces, in sandboxes: clones, diffs and their limits.

#![allow(missing_docs, clippy::unwrap_used, clippy::expect_used)]

mod common;

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use common::siblings::build_sibling_programs;
use oubliette_egress::{EgressProxy, ProxyLimits};
use oubliette_home::HomeDir;
use oubliette_protocol::{ErrorCode, ProjectId};
use oubliette_sandbox::{IsolationLevel, LocalDriver, LocalDriverConfig};
use oubliette_server::testing::{
    ServerConfig, TrustConfig,
    git::{GitDiff, GitRemote, GitSandboxes, MAX_DIFF_BYTES},
};

/// A workspace, its baseline and the means to run git on it.
struct GitFixture {
    dir: tempfile::TempDir,
    git: GitSandboxes,
    project: ProjectId,
}

impl GitFixture {
    async fn new(config: &str) -> Self {
        build_sibling_programs();
        let client = Path::new(env!("CARGO_BIN_EXE_oubliette")).with_file_name("oubliette-client");
        Self::with_driver(config, client, IsolationLevel::Namespaces, None).await
    }

    async fn without_bubblewrap(minimum: IsolationLevel) -> Self {
        build_sibling_programs();
        let client = Path::new(env!("CARGO_BIN_EXE_oubliette")).with_file_name("oubliette-client");
        Self::with_driver("", client, minimum, Some("/nonexistent/bwrap".into())).await
    }

    async fn with_driver(
        config: &str,
        client: PathBuf,
        minimum: IsolationLevel,
        bwrap: Option<PathBuf>,
    ) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeDir::at(dir.path().join("home")).unwrap();
        std::fs::create_dir_all(home.run_dir()).unwrap();
        std::fs::create_dir(dir.path().join("workspace")).unwrap();
        let driver = LocalDriver::new(LocalDriverConfig {
            client,
            minimum,
            bwrap,
            run_dir: home.run_dir(),
        });
        let config = ServerConfig::parse(config, "oubliette.toml", &|_| None).unwrap();
        let proxy = EgressProxy::new(Vec::new(), ProxyLimits::default()).unwrap();
        Self {
            git: GitSandboxes::new(Arc::new(driver.await.unwrap()), proxy, &home, &config),
            dir,
            project: ProjectId::generate(),
        }
    }

    fn workspace(&self) -> PathBuf {
        self.dir.path().join("workspace")
    }

    fn write(&self, path: &str, text: &str) {
        std::fs::write(self.workspace().join(path), text).unwrap();
    }

    async fn clone_remote(&self, source: &Path, reference: Option<&str>) -> oubliette_protocol::Result<()> {
        let trust = TrustConfig {
            read_only: vec![source.to_owned()],
            ..TrustConfig::default()
        };
        let remote = GitRemote::check(&format!("file://{}", source.display()), reference, &trust).unwrap();
        let workspace = self.workspace();
        self.git.clone_remote(&self.project, &remote, &workspace).await?;
        let repository = self.dir.path().join("w.git");
        self.git
            .record_baseline(&self.project, &repository, &workspace)
            .await
    }

    async fn diff(&self) -> oubliette_protocol::Result<GitDiff> {
        let repository = self.dir.path().join("w.git");
        self.git.diff(&self.project, &repository, &self.workspace()).await
    }
}

fn git(dir: &Path, args: &[&str]) {
    let mut git = std::process::Command::new("git");
    git.current_dir(dir)
        .args([
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t",
            "-c",
            "init.defaultBranch=main",
        ])
        .args(args);
    assert!(git.status().unwrap().success(), "{args:?}");
}

/// A repository with the tag `v1`, and a branch `side` that has one more file.
fn source() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("a.txt"), "one\n").unwrap();
    git(dir.path(), &["init", "-q"]);
    git(dir.path(), &["add", "."]);
    git(dir.path(), &["commit", "-qm", "first"]);
    git(dir.path(), &["tag", "v1"]);
    git(dir.path(), &["checkout", "-qb", "side"]);
    std::fs::write(dir.path().join("b.txt"), "side\n").unwrap();
    git(dir.path(), &["add", "."]);
    git(dir.path(), &["commit", "-qm", "second"]);
    git(dir.path(), &["checkout", "-q", "main"]);
    dir
}

#[tokio::test]
async fn a_clone_is_diffed_against_its_first_content() {
    let (source, fixture) = (source(), GitFixture::new("").await);
    fixture.clone_remote(source.path(), Some("v1")).await.unwrap();
    assert_eq!(fixture.diff().await.unwrap().text, "");
    fixture.write("a.txt", "two\n");
    fixture.write("new.txt", "new\n");
    let diff = fixture.diff().await.unwrap().text;
    assert!(
        diff.contains("-one") && diff.contains("+two") && diff.contains("+++ b/new.txt"),
        "{diff}"
    );
    assert_eq!(
        fixture.diff().await.unwrap().text,
        diff,
        "looking changes nothing"
    );
    std::fs::remove_file(fixture.workspace().join("a.txt")).unwrap();
    let diff = fixture.diff().await.unwrap().text;
    assert!(diff.contains("+++ /dev/null") && diff.contains("-one"), "{diff}");
}

#[tokio::test]
async fn a_change_that_keeps_size_and_modification_time_is_shown() {
    let (source, fixture) = (source(), GitFixture::new("").await);
    fixture.clone_remote(source.path(), None).await.unwrap();
    let path = fixture.workspace().join("a.txt");
    let modified = path.metadata().unwrap().modified().unwrap();
    fixture.write("a.txt", "two\n");
    let file = std::fs::File::options().write(true).open(&path).unwrap();
    file.set_modified(modified).unwrap();
    assert!(fixture.diff().await.unwrap().text.contains("+two"));
}

#[tokio::test]
async fn a_branch_is_checked_out_and_a_missing_ref_is_refused() {
    let source = source();
    for (reference, side) in [(Some("side"), true), (Some("main"), false), (None, false)] {
        let fixture = GitFixture::new("").await;
        fixture.clone_remote(source.path(), reference).await.unwrap();
        assert!(fixture.workspace().join("a.txt").exists(), "{reference:?}");
        assert_eq!(fixture.workspace().join("b.txt").exists(), side, "{reference:?}");
        assert_eq!(fixture.diff().await.unwrap().text, "", "{reference:?}");
    }
    let fixture = GitFixture::new("").await;
    let refused = fixture
        .clone_remote(source.path(), Some("nowhere"))
        .await
        .unwrap_err();
    assert_eq!(refused.code, ErrorCode::InvalidArgument);
    assert!(refused.message.contains("nowhere"), "{}", refused.message);
}

#[tokio::test]
async fn an_empty_repository_is_cloned() {
    let (source, fixture) = (tempfile::tempdir().unwrap(), GitFixture::new("").await);
    git(source.path(), &["init", "-q"]);
    fixture.clone_remote(source.path(), None).await.unwrap();
    fixture.write("f", "new\n");
    assert!(fixture.diff().await.unwrap().text.contains("+new"));
}

#[tokio::test]
async fn a_clone_that_is_too_large_is_refused() {
    let (source, fixture) = (source(), GitFixture::new("[sandbox]\nworkspace_mb = 1").await);
    // Random, so that packing does not make it smaller.
    let bytes: Vec<u8> = (0..900 * 1024).map(|_| rand::random()).collect();
    std::fs::write(source.path().join("large"), bytes).unwrap();
    git(source.path(), &["add", "."]);
    git(source.path(), &["commit", "-qm", "large"]);
    let refused = fixture.clone_remote(source.path(), None).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::LimitExceeded, "{}", refused.message);
}

/// A script that leaves a mark wherever git runs it: a word on its output, and a file in the working directory.
fn write_script(path: &Path) {
    let text = "#!/bin/sh\necho \"ran-\"\"by-git\"\ntouch \"ran-\"\"by-git\"\ncat\n";
    std::fs::write(path, text).unwrap();
    std::fs::set_permissions(path, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
}

/// Writes files that name programs for git to run, and such a program, `x.sh`.
fn write_hostile_files(repository: &Path, script: &str) {
    write_script(&repository.join("x.sh"));
    std::fs::write(
        repository.join(".gitattributes"),
        "* filter=x diff=x merge=x ident\n",
    )
    .unwrap();
    std::fs::write(
        repository.join(".gitmodules"),
        format!("[submodule \"sub\"]\n\tpath = sub\n\turl = ext::{script}\n\tupdate = !{script}\n"),
    )
    .unwrap();
}

/// Makes a repository run `script` wherever its own configuration and hooks can make git run something.
fn configure_hostile(repository: &Path, script: &str) {
    let included = repository.join(".git/included");
    let included = included.to_str().unwrap();
    for key in [
        "core.fsmonitor",
        "core.sshCommand",
        "core.askPass",
        "core.pager",
        "core.alternateRefsCommand",
        "credential.helper",
        "filter.x.clean",
        "filter.x.smudge",
        "filter.x.process",
        "diff.x.textconv",
        "diff.x.command",
        "diff.external",
        "merge.x.driver",
        "uploadpack.packObjectsHook",
        "gpg.program",
    ] {
        git(repository, &["config", "--file", included, key, script]);
    }
    for hook in [
        "post-checkout",
        "post-index-change",
        "pre-commit",
        "reference-transaction",
        "fsmonitor-watchman",
    ] {
        write_script(&repository.join(".git/hooks").join(hook));
    }
    git(repository, &["config", "include.path", included]);
}

#[tokio::test]
async fn a_workspace_cannot_make_git_run_anything() {
    let fixture = GitFixture::new("").await;
    let work = fixture.workspace();
    git(&work, &["init", "-q"]);
    write_hostile_files(&work, "/git/workspace/x.sh");
    configure_hostile(&work, "/git/workspace/x.sh");
    fixture.write("f", "text\n");
    let nested = work.join("nested");
    std::fs::create_dir(&nested).unwrap();
    git(&nested, &["init", "-q"]);
    git(&nested, &["commit", "-q", "--allow-empty", "-m", "x"]);
    configure_hostile(&nested, "/git/workspace/x.sh");
    // Objects, configuration and repository of somebody else, by a path or a link.
    std::fs::write(
        work.join(".git/objects/info/alternates"),
        "/git/baseline/objects\n",
    )
    .unwrap();
    std::fs::rename(work.join(".git"), work.join("moved")).unwrap();
    std::os::unix::fs::symlink("moved", work.join(".git")).unwrap();
    let diff = fixture.diff().await.unwrap().text;
    assert!(diff.contains("+text") && !diff.contains("ran-by-git"), "{diff}");
    assert!(!work.join("ran-by-git").exists());
}

#[tokio::test]
async fn a_cloned_repository_cannot_make_git_run_anything() {
    let (source, fixture) = (source(), GitFixture::new("").await);
    let script = source.path().join("x.sh");
    let script = script.to_str().unwrap();
    write_hostile_files(source.path(), script);
    git(source.path(), &["add", "."]);
    git(source.path(), &["commit", "-qm", "hostile"]);
    configure_hostile(source.path(), script);
    assert!(!source.path().join("ran-by-git").exists());
    fixture.clone_remote(source.path(), None).await.unwrap();
    let names = |dir: &Path| -> Vec<String> {
        let entries = std::fs::read_dir(dir).unwrap();
        entries
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect()
    };
    let mut cloned = names(&fixture.workspace());
    cloned.sort();
    assert_eq!(cloned, [".git", ".gitattributes", ".gitmodules", "a.txt", "x.sh"]);
    assert!(!fixture.workspace().join(".git/hooks").exists());
    assert!(!source.path().join("ran-by-git").exists());
    assert_eq!(fixture.diff().await.unwrap().text, "");
}

#[tokio::test]
async fn objects_that_a_repository_borrows_elsewhere_are_not_cloned() {
    let (lender, source) = (source(), tempfile::tempdir().unwrap());
    git(
        source.path(),
        &["clone", "-q", "--shared", lender.path().to_str().unwrap(), "."],
    );
    let fixture = GitFixture::new("").await;
    let refused = fixture.clone_remote(source.path(), None).await.unwrap_err();
    assert_eq!(refused.code, ErrorCode::InvalidArgument, "{}", refused.message);
    assert!(!fixture.workspace().join("a.txt").exists());
}

#[tokio::test]
async fn without_namespaces_git_runs_under_landlock_where_that_is_accepted() {
    let (source, fixture) = (
        source(),
        GitFixture::without_bubblewrap(IsolationLevel::Landlock).await,
    );
    fixture.clone_remote(source.path(), Some("side")).await.unwrap();
    fixture.write("a.txt", "two\n");
    let secret = fixture.dir.path().join("secret");
    std::fs::write(&secret, "of the host\n").unwrap();
    std::os::unix::fs::symlink(&secret, fixture.workspace().join(".gitattributes")).unwrap();
    let diff = fixture.diff().await.unwrap().text;
    assert!(diff.contains("+two") && !diff.contains("of the host"), "{diff}");
    // There is no proxy for it to go through.
    let remote = GitRemote::check("https://example.com/x", None, &TrustConfig::default()).unwrap();
    let cloned = fixture
        .git
        .clone_remote(&fixture.project, &remote, &fixture.workspace())
        .await;
    let refused = cloned.unwrap_err();
    assert_eq!(refused.code, ErrorCode::Unavailable);
    assert!(refused.message.contains("bubblewrap"), "{}", refused.message);
}

#[tokio::test]
async fn a_diff_is_cut_at_its_maximum_length() {
    let fixture = GitFixture::new("").await;
    fixture.write("f", &"x\n".repeat(MAX_DIFF_BYTES));
    let diff = fixture.diff().await.unwrap();
    assert!(diff.truncated && diff.text.len() <= MAX_DIFF_BYTES);
}

#[tokio::test]
async fn without_a_sandbox_git_does_not_run() {
    let fixture = GitFixture::without_bubblewrap(IsolationLevel::Namespaces).await;
    let source = source();
    fixture.write("f", "text\n");
    let compared = fixture.diff().await.unwrap_err();
    let cloned = fixture.clone_remote(source.path(), None).await.unwrap_err();
    for refused in [compared, cloned] {
        assert_eq!(refused.code, ErrorCode::Unavailable);
        assert!(
            refused.message.contains("only in a sandbox") && refused.message.contains("bubblewrap"),
            "{}",
            refused.message
        );
    }
    assert!(!fixture.workspace().join(".git").exists());
}
