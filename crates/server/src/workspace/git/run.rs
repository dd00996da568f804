//! Running git without any configuration of the machine or user, limited in time and output.

use std::{path::Path, process::Stdio, time::Duration};

use oubliette_protocol::{Error, Result};
use tokio::{io::AsyncReadExt as _, process::Command};

/// Timeout of commands that read or write a whole workspace: clone and add.
pub(super) const WHOLE_TREE_TIMEOUT: Duration = Duration::from_secs(300);
/// Timeout of all other git commands.
pub(super) const COMMAND_TIMEOUT: Duration = Duration::from_secs(60);
/// Maximum length of the stderr that is kept, in bytes.
const MAX_STDERR_BYTES: u64 = 16 * 1024;
/// Git setting: files above 5 MiB are treated as binary and not diffed line by line.
const BIG_FILE_SETTING: &str = "core.bigFileThreshold=5m";

/// A git command without configuration, hooks or prompts, in a process group of its own.
pub(super) fn git_command(dir: &Path) -> Command {
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
        BIG_FILE_SETTING,
    ] {
        git.arg("-c").arg(setting);
    }
    git.stdin(Stdio::null())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped());
    git
}

/// Result of a git command. `ok` is also true when git was stopped because its output reached the limit.
pub(super) struct GitOutput {
    pub(super) ok: bool,
    pub(super) stdout: Vec<u8>,
    pub(super) truncated: bool,
    pub(super) stderr: String,
}

/// Kills git and the processes it started when it is dropped before git ended.
struct ProcessGroupGuard(Option<u32>);

impl Drop for ProcessGroupGuard {
    fn drop(&mut self) {
        let leader = self
            .0
            .and_then(|id| rustix::process::Pid::from_raw(id.cast_signed()));
        if let Some(leader) = leader {
            // git is not reaped yet, so its process id cannot have been reused.
            let _ = rustix::process::kill_process_group(leader, rustix::process::Signal::KILL);
        }
    }
}

/// Runs a git command, limited in time and in stdout bytes.
pub(super) async fn run(mut git: Command, max_stdout: usize, timeout: Duration) -> Result<GitOutput> {
    let mut child = git.spawn().map_err(|e| {
        Error::unavailable("git could not be started on the server; install git").with_cause(e)
    })?;
    let mut group = ProcessGroupGuard(child.id());
    let (Some(mut out), Some(err)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(Error::internal("git was started without stdout or stderr pipe"));
    };
    let work = async {
        let stderr = async {
            let mut text = Vec::new();
            let mut err = err;
            let _ = (&mut err).take(MAX_STDERR_BYTES).read_to_end(&mut text).await;
            // The rest is read and dropped, so that git does not block on a full pipe.
            let _ = tokio::io::copy(&mut err, &mut tokio::io::sink()).await;
            String::from_utf8_lossy(&text).into_owned()
        };
        let stdout = async {
            let mut bytes = Vec::new();
            let _ = (&mut out)
                .take(max_stdout as u64 + 1)
                .read_to_end(&mut bytes)
                .await;
            let truncated = bytes.len() > max_stdout;
            bytes.truncate(max_stdout);
            // Closing the pipe stops a git that has more output than allowed.
            drop(out);
            (bytes, truncated)
        };
        let ((stdout, truncated), stderr) = tokio::join!(stdout, stderr);
        let status = child.wait().await.map_err(Error::internal)?;
        group.0 = None;
        Ok(GitOutput {
            ok: status.success() || truncated,
            stdout,
            truncated,
            stderr,
        })
    };
    match tokio::time::timeout(timeout, work).await {
        Ok(output) => output,
        Err(_) => Err(Error::timeout(format!(
            "git took longer than {} s",
            timeout.as_secs()
        ))),
    }
}

/// Runs a git command that is not expected to fail; a failure is an internal error.
pub(super) async fn run_checked(git: Command, what: &str) -> Result<GitOutput> {
    let output = run(git, 64 * 1024, COMMAND_TIMEOUT).await?;
    match output.ok {
        true => Ok(output),
        false => Err(Error::internal(format!("git {what}: {}", output.stderr.trim()))),
    }
}
