//! Git with nothing of this machine's or its user's, bounded in time and output.

use std::{path::Path, process::Stdio, time::Duration};

use oubliette_protocol::{Error, Result};
use tokio::{io::AsyncReadExt as _, process::Command};

/// How long fetching or remembering a whole workspace may take.
pub(super) const WHOLE: Duration = Duration::from_secs(300);
/// How long looking at a workspace may take.
pub(super) const LOOK: Duration = Duration::from_secs(60);
/// The most of git's complaints that is read.
const MOST_STDERR: u64 = 16 * 1024;
/// Files larger than this are compared as a whole, not line by line.
const BIG_FILE: &str = "core.bigFileThreshold=5m";

/// Git with nothing of this machine's or its user's configuration, and nobody to ask.
pub(super) fn git(dir: &Path) -> Command {
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
pub(super) struct Ran {
    pub(super) ok: bool,
    pub(super) stdout: Vec<u8>,
    pub(super) truncated: bool,
    pub(super) stderr: String,
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
pub(super) async fn run(mut git: Command, most: usize, within: Duration) -> Result<Ran> {
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

/// Runs git where it has no reason to fail.
pub(super) async fn must(git: Command, what: &str) -> Result<Ran> {
    let ran = run(git, 64 * 1024, LOOK).await?;
    match ran.ok {
        true => Ok(ran),
        false => Err(Error::internal(format!("git {what}: {}", ran.stderr.trim()))),
    }
}
