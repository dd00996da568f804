//! Git, used so that neither a URL nor a workspace's contents can make it run anything.
//!
//! What changed in a workspace is asked of a repository of our own beside it, whose configuration the
//! agent cannot write: hooks, filters, external diffs and file monitors of the workspace never run.

use std::{
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use oubliette_protocol::{Error, ProjectId, Result, WorkspaceId, id::quoted};
use oubliette_sandbox::disk_usage;
use tokio::{io::AsyncReadExt as _, process::Command};

use super::repository;
use crate::{app::App, config::TrustConfig};

/// How long a clone may take.
const CLONE: Duration = Duration::from_secs(300);
/// How often the size of a clone under way is looked at.
const LOOK_AT_SIZE: Duration = Duration::from_secs(1);
/// How long looking at a workspace may take.
const LOOK: Duration = Duration::from_secs(60);
/// The most of a diff that is shown.
const MOST_DIFF: usize = 2 * 1024 * 1024;
/// The most of git's complaints that is read.
const MOST_STDERR: u64 = 16 * 1024;
/// Files larger than this are compared as a whole, not line by line.
const BIG_FILE: &str = "core.bigFileThreshold=5m";
/// The empty tree, which every repository knows: what a workspace without origin began with.
const EMPTY_TREE: &str = "4b825dc642cb6eb9a060e54bf8d69288fbee4904";
const BASELINE: &str = "refs/oubliette/baseline";

/// Where a workspace's first files come from, checked.
#[derive(Debug, Clone)]
pub struct Origin {
    url: String,
    reference: Option<String>,
    local: bool,
}

impl Origin {
    /// Checks URL and ref. A path of this machine is taken only from under `[trust] read_only`.
    pub fn check(url: &str, reference: Option<&str>, trust: &TrustConfig) -> Result<Self> {
        let bad = |why: &str| Error::invalid(format!("source.git: {} {why}", quoted(&without_password(url))));
        if url.len() > 2000
            || url.chars().any(|c| c.is_control() || c.is_whitespace())
            || url.starts_with('-')
        {
            return Err(bad("is not a URL"));
        }
        if let Some(reference) = reference {
            check_ref(reference)?;
        }
        let reference = reference.map(str::to_owned);
        let path = url
            .strip_prefix("file://")
            .or_else(|| url.starts_with('/').then_some(url));
        if let Some(path) = path {
            let real = std::fs::canonicalize(path).ok();
            let listed = |real: &PathBuf| {
                trust
                    .read_only
                    .iter()
                    .filter_map(|p| std::fs::canonicalize(p).ok())
                    .any(|p| real.starts_with(p))
            };
            return match real.filter(listed) {
                Some(real) => Ok(Self {
                    url: real.to_string_lossy().into_owned(),
                    reference,
                    local: true,
                }),
                None => Err(bad(
                    "is on this machine, and [trust] read_only in oubliette.toml does not list it",
                )),
            };
        }
        let rest = ["https://", "http://", "ssh://", "git://"]
            .iter()
            .find_map(|s| url.strip_prefix(s));
        match rest {
            // A host that begins with a dash would be an option of ssh.
            Some(rest) if !rest.is_empty() && !rest.starts_with(['-', '/']) && !rest.contains("@-") => {
                Ok(Self {
                    url: url.to_owned(),
                    reference,
                    local: false,
                })
            }
            _ => Err(bad("must be an https://, http://, ssh:// or git:// URL")),
        }
    }
}

fn check_ref(reference: &str) -> Result<()> {
    let plain = !reference.is_empty()
        && reference.len() <= 250
        && !reference.starts_with(['-', '/', '.'])
        && !reference.contains("..")
        && !reference.contains("@{")
        && reference
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || b"/._-+@".contains(&b));
    match plain {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "source.ref: {} is not a branch, tag or commit",
            quoted(reference)
        ))),
    }
}

/// A URL as it may be kept and shown.
pub fn without_password(url: &str) -> String {
    let Some((scheme, rest)) = url.split_once("://") else {
        return url.to_owned();
    };
    let (authority, path) = rest.split_once('/').map_or((rest, ""), |(a, p)| (a, p));
    match authority.rsplit_once('@') {
        Some((user, host)) => {
            let user = user.split(':').next().unwrap_or_default();
            format!("{scheme}://{user}@{host}/{path}")
        }
        None => url.to_owned(),
    }
}

/// Git with nothing of this machine's or its user's configuration, and nobody to ask.
fn git(dir: &Path) -> Command {
    let mut git = Command::new("git");
    git.current_dir(dir)
        .env_clear()
        .kill_on_drop(true)
        .process_group(0);
    for name in [
        "PATH",
        "LANG",
        "SSL_CERT_FILE",
        "SSL_CERT_DIR",
        "http_proxy",
        "https_proxy",
        "no_proxy",
        "HTTPS_PROXY",
        "NO_PROXY",
    ] {
        if let Some(value) = std::env::var_os(name) {
            git.env(name, value);
        }
    }
    git.envs([
        ("HOME", "/nonexistent"),
        ("GIT_CONFIG_NOSYSTEM", "1"),
        ("GIT_CONFIG_GLOBAL", "/dev/null"),
        ("GIT_ATTR_NOSYSTEM", "1"),
        ("GIT_TERMINAL_PROMPT", "0"),
        ("GIT_ASKPASS", "/bin/false"),
        ("SSH_ASKPASS", "/bin/false"),
        ("GIT_SSH_COMMAND", "ssh -oBatchMode=yes -oConnectTimeout=15"),
        ("GIT_OPTIONAL_LOCKS", "0"),
        ("GIT_NO_LAZY_FETCH", "1"),
    ]);
    for setting in [
        "core.hooksPath=/dev/null",
        "core.fsmonitor=false",
        "core.attributesFile=/dev/null",
        "core.excludesFile=/dev/null",
        "core.pager=cat",
        "core.quotePath=false",
        "core.autocrlf=false",
        "core.untrackedCache=false",
        "submodule.recurse=false",
        "gc.auto=0",
        "maintenance.auto=false",
        "protocol.ext.allow=never",
        "commit.gpgSign=false",
        "user.name=Oubliette",
        "user.email=oubliette@localhost",
        "safe.directory=*",
        BIG_FILE,
    ] {
        git.arg("-c").arg(setting);
    }
    git.stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    git
}

/// What a run of git gave.
struct Ran {
    ok: bool,
    stdout: Vec<u8>,
    truncated: bool,
    stderr: String,
}

/// Git and what it started, ended when it is given up.
struct Group(Option<u32>);

impl Drop for Group {
    fn drop(&mut self) {
        let leader = self
            .0
            .and_then(|id| rustix::process::Pid::from_raw(id.cast_signed()));
        if let Some(leader) = leader {
            // Not reaped yet, so the number is still its own.
            let _ = rustix::process::kill_process_group(leader, rustix::process::Signal::KILL);
        }
    }
}

/// Runs git, bounded in time and output.
async fn run(mut git: Command, most: usize, within: Duration) -> Result<Ran> {
    let mut child = git
        .spawn()
        .map_err(|e| Error::unavailable("git could not be started on the server; install git").with_log(e))?;
    let mut group = Group(child.id());
    let (Some(mut out), Some(err)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(Error::internal("git without pipes"));
    };
    let work = async {
        let stderr = async {
            let mut text = Vec::new();
            let mut err = err;
            let _ = (&mut err).take(MOST_STDERR).read_to_end(&mut text).await;
            // Read on, so that a talkative git is not stopped by a full pipe.
            let _ = tokio::io::copy(&mut err, &mut tokio::io::sink()).await;
            String::from_utf8_lossy(&text).into_owned()
        };
        let stdout = async {
            let mut bytes = Vec::new();
            let _ = (&mut out).take(most as u64 + 1).read_to_end(&mut bytes).await;
            let truncated = bytes.len() > most;
            bytes.truncate(most);
            // Past the bound git is told by a closed pipe.
            drop(out);
            (bytes, truncated)
        };
        let ((stdout, truncated), stderr) = tokio::join!(stdout, stderr);
        let status = child.wait().await.map_err(Error::internal)?;
        group.0 = None;
        Ok(Ran {
            ok: status.success() || truncated,
            stdout,
            truncated,
            stderr,
        })
    };
    match tokio::time::timeout(within, work).await {
        Ok(ran) => ran,
        Err(_) => Err(Error::timeout(format!(
            "git took longer than {} s",
            within.as_secs()
        ))),
    }
}

async fn must(git: Command, what: &str) -> Result<Ran> {
    let ran = run(git, 64 * 1024, LOOK).await?;
    match ran.ok {
        true => Ok(ran),
        false => Err(Error::internal(format!("git {what}: {}", ran.stderr.trim()))),
    }
}

/// Ends when a folder holds more than it may.
async fn outgrown(dir: &Path, most: u64) {
    loop {
        tokio::time::sleep(LOOK_AT_SIZE).await;
        let dir = dir.to_owned();
        let usage = tokio::task::spawn_blocking(move || disk_usage(&dir, most)).await;
        if usage.is_ok_and(|usage| usage.over) {
            return;
        }
    }
}

/// Clones an origin into an empty folder, which may not hold more than so many bytes.
pub async fn clone(origin: &Origin, dir: &Path, most: u64) -> Result<()> {
    let too_large = || {
        Error::limit_exceeded(format!(
            "source.git: {} holds more than the {} MiB a workspace may",
            without_password(&origin.url),
            most / 1024 / 1024
        ))
    };
    tokio::select! {
        cloned = clone_whole(origin, dir) => cloned?,
        () = outgrown(dir, most) => return Err(too_large()),
    }
    let dir = dir.to_owned();
    let usage = tokio::task::spawn_blocking(move || disk_usage(&dir, most))
        .await
        .map_err(Error::internal)?;
    if usage.over { Err(too_large()) } else { Ok(()) }
}

async fn clone_whole(origin: &Origin, dir: &Path) -> Result<()> {
    let allow_local = if origin.local { "always" } else { "never" };
    let mut command = git(dir);
    command
        .arg("-c")
        .arg(format!("protocol.file.allow={allow_local}"));
    // A server that redirects may not lead to another protocol or a local path.
    command.args([
        "-c",
        "http.followRedirects=initial",
        "clone",
        "--quiet",
        "--no-hardlinks",
        "--no-recurse-submodules",
        "--template=",
    ]);
    command.arg("--").arg(&origin.url).arg(".");
    let ran = run(command, 4096, CLONE).await?;
    if !ran.ok {
        return Err(refused("could not be cloned", &origin.url, &ran.stderr));
    }
    if let Some(reference) = &origin.reference {
        // A branch of the origin first, else a tag or commit; never a path of that name.
        let branch = format!("refs/remotes/origin/{reference}");
        let mut probe = git(dir);
        probe.args(["rev-parse", "--verify", "--quiet", "--end-of-options", &branch]);
        let is_branch = run(probe, 4096, LOOK).await?.ok;
        let mut command = git(dir);
        match is_branch {
            true => command.args([
                "checkout",
                "--quiet",
                "-B",
                reference,
                "--track",
                &format!("origin/{reference}"),
                "--",
            ]),
            false => command.args(["checkout", "--quiet", "--detach", reference, "--"]),
        };
        let ran = run(command, 4096, LOOK).await?;
        if !ran.ok {
            return Err(Error::invalid(format!(
                "source.ref: {} is not in {}",
                quoted(reference),
                without_password(&origin.url)
            ))
            .with_log(ran.stderr.trim()));
        }
    }
    Ok(())
}

fn refused(what: &str, url: &str, stderr: &str) -> Error {
    let shown = without_password(url);
    let last = stderr
        .lines()
        .rfind(|l| l.starts_with("fatal:"))
        .unwrap_or_default();
    let last = last.trim_start_matches("fatal: ").replace(url, &shown);
    Error::invalid(format!(
        "source.git: {shown} {what}: {}",
        if last.is_empty() { "git failed" } else { &last }
    ))
    .with_log(stderr.trim())
}

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
    let ran = run(add, 4096, CLONE).await?;
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

async fn diff_of(repository: &Path, dir: &Path) -> Result<Diff> {
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

#[cfg(test)]
mod tests {
    use super::*;

    const ROOM: u64 = 1 << 30;

    fn plain(dir: &Path) -> std::process::Command {
        let mut git = std::process::Command::new("git");
        git.current_dir(dir).args([
            "-c",
            "user.name=t",
            "-c",
            "user.email=t@t",
            "-c",
            "init.defaultBranch=main",
        ]);
        git
    }

    fn repo() -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("a.txt"), "one\n").unwrap();
        for args in [
            vec!["init", "-q"],
            vec!["add", "."],
            vec!["commit", "-qm", "first"],
            vec!["tag", "v1"],
            vec!["checkout", "-qb", "side"],
        ] {
            assert!(
                plain(dir.path()).args(&args).status().unwrap().success(),
                "{args:?}"
            );
        }
        std::fs::write(dir.path().join("b.txt"), "side\n").unwrap();
        for args in [
            vec!["add", "."],
            vec!["commit", "-qm", "second"],
            vec!["checkout", "-q", "main"],
        ] {
            assert!(
                plain(dir.path()).args(&args).status().unwrap().success(),
                "{args:?}"
            );
        }
        dir
    }

    fn trusting(path: &Path) -> TrustConfig {
        TrustConfig {
            read_only: vec![path.to_owned()],
            ..TrustConfig::default()
        }
    }

    #[test]
    fn urls_and_refs_are_checked() {
        let trust = TrustConfig::default();
        for good in ["https://h/x.git", "http://u:p@h/x", "ssh://git@h/x", "git://h/x"] {
            assert!(Origin::check(good, None, &trust).is_ok(), "{good}");
        }
        for bad in [
            "",
            "ext::sh -c id",
            "--upload-pack=x",
            "file:///etc",
            "/etc",
            "https://",
            "ssh://-oProxyCommand=x/y",
            "h:x",
            "https://a b/",
        ] {
            assert!(Origin::check(bad, None, &trust).is_err(), "{bad}");
        }
        for bad in ["", "-x", "--orphan", "a..b", "a b", "HEAD@{1}", "../x"] {
            assert!(Origin::check("https://h/x", Some(bad), &trust).is_err(), "{bad}");
        }
        assert_eq!(without_password("https://u:p@h/x"), "https://u@h/x");
    }

    #[tokio::test]
    async fn a_clone_is_compared_with_what_it_was() {
        let source = repo();
        let origin = Origin::check(
            &format!("file://{}", source.path().display()),
            Some("v1"),
            &trusting(source.path()),
        )
        .unwrap();
        let work = tempfile::tempdir().unwrap();
        let kept = tempfile::tempdir().unwrap();
        let repository = kept.path().join("w.git");
        clone(&origin, work.path(), ROOM).await.unwrap();
        baseline(&repository, work.path()).await.unwrap();
        assert_eq!(diff_of(&repository, work.path()).await.unwrap().text, "");
        std::fs::write(work.path().join("a.txt"), "two\n").unwrap();
        std::fs::write(work.path().join("new.txt"), "new\n").unwrap();
        let diff = diff_of(&repository, work.path()).await.unwrap().text;
        assert!(
            diff.contains("-one") && diff.contains("+two") && diff.contains("+++ b/new.txt"),
            "{diff}"
        );
        assert!(
            diff_of(&repository, work.path()).await.unwrap().text == diff,
            "looking changes nothing"
        );
    }

    #[tokio::test]
    async fn a_branch_is_checked_out_and_a_missing_ref_is_refused() {
        let source = repo();
        let origin = |reference: &str| {
            Origin::check(
                &source.path().display().to_string(),
                Some(reference),
                &trusting(source.path()),
            )
            .unwrap()
        };
        let (work, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        clone(&origin("side"), work.path(), ROOM).await.unwrap();
        assert!(work.path().join("b.txt").exists());
        let refused = clone(&origin("nowhere"), other.path(), ROOM).await;
        assert!(refused.unwrap_err().message.contains("nowhere"));
    }

    #[tokio::test]
    async fn a_clone_that_is_too_large_is_refused() {
        let source = repo();
        let url = source.path().display().to_string();
        let origin = Origin::check(&url, None, &trusting(source.path())).unwrap();
        let work = tempfile::tempdir().unwrap();
        let refused = clone(&origin, work.path(), 1).await.unwrap_err();
        assert_eq!(refused.code, oubliette_protocol::ErrorCode::LimitExceeded);
    }

    #[tokio::test]
    async fn a_workspace_cannot_make_git_run_anything() {
        let work = tempfile::tempdir().unwrap();
        let kept = tempfile::tempdir().unwrap();
        let mark = kept.path().join("ran");
        let repository = kept.path().join("w.git");
        // An agent's own repository with every hook into git that there is.
        assert!(
            plain(work.path())
                .args(["init", "-q"])
                .status()
                .unwrap()
                .success()
        );
        let script = work.path().join("x.sh");
        std::fs::write(&script, format!("#!/bin/sh\ntouch {}\ncat\n", mark.display())).unwrap();
        std::fs::set_permissions(&script, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        for (key, value) in [
            ("core.fsmonitor", &script),
            ("filter.x.clean", &script),
            ("diff.x.textconv", &script),
            ("diff.external", &script),
        ] {
            plain(work.path())
                .arg("config")
                .arg(key)
                .arg(value)
                .status()
                .unwrap();
        }
        std::fs::write(work.path().join(".gitattributes"), "* filter=x diff=x\n").unwrap();
        std::fs::write(work.path().join("f"), "text\n").unwrap();
        let nested = work.path().join("nested");
        std::fs::create_dir(&nested).unwrap();
        assert!(plain(&nested).args(["init", "-q"]).status().unwrap().success());
        plain(&nested)
            .args(["config", "core.fsmonitor"])
            .arg(&script)
            .status()
            .unwrap();
        plain(&nested)
            .args(["commit", "-q", "--allow-empty", "-m", "x"])
            .env("GIT_OPTIONAL_LOCKS", "0")
            .status()
            .unwrap();
        let _ = std::fs::remove_file(&mark);
        let diff = diff_of(&repository, work.path()).await.unwrap();
        assert!(diff.text.contains("+text"), "{}", diff.text);
        assert!(!mark.exists(), "something of the workspace was run");
    }

    #[tokio::test]
    async fn a_long_diff_is_cut() {
        let work = tempfile::tempdir().unwrap();
        let kept = tempfile::tempdir().unwrap();
        std::fs::write(work.path().join("f"), "x\n".repeat(MOST_DIFF)).unwrap();
        let diff = diff_of(&kept.path().join("w.git"), work.path()).await.unwrap();
        assert!(diff.truncated && diff.text.len() <= MOST_DIFF);
    }
}
