//! Cloning a git remote into a workspace.

use std::{path::Path, time::Duration};

use oubliette_os::disk_usage;
use oubliette_protocol::{Error, Result, id::quoted};

use super::{
    remote::{GitRemote, without_password},
    run::{COMMAND_TIMEOUT, WHOLE_TREE_TIMEOUT, git_command, run},
};

/// How often the size of a running clone is checked.
const SIZE_CHECK_INTERVAL: Duration = Duration::from_secs(1);

/// Returns when a folder holds more than `max_bytes`.
async fn wait_until_larger_than(dir: &Path, max_bytes: u64) {
    loop {
        tokio::time::sleep(SIZE_CHECK_INTERVAL).await;
        let dir = dir.to_owned();
        let usage = tokio::task::spawn_blocking(move || disk_usage(&dir, max_bytes)).await;
        if usage.is_ok_and(|usage| usage.over) {
            return;
        }
    }
}

/// Clones a remote into an empty folder; an error if the result is larger than `max_bytes`.
pub(crate) async fn clone_remote(remote: &GitRemote, dir: &Path, max_bytes: u64) -> Result<()> {
    let too_large = || {
        Error::limit_exceeded(format!(
            "source.git: {} holds more than the {} MiB a workspace may",
            without_password(&remote.url),
            max_bytes / 1024 / 1024
        ))
    };
    tokio::select! {
        cloned = run_clone(remote, dir) => cloned?,
        () = wait_until_larger_than(dir, max_bytes) => return Err(too_large()),
    }
    let dir = dir.to_owned();
    let usage = tokio::task::spawn_blocking(move || disk_usage(&dir, max_bytes))
        .await
        .map_err(Error::internal)?;
    if usage.over { Err(too_large()) } else { Ok(()) }
}

async fn run_clone(remote: &GitRemote, dir: &Path) -> Result<()> {
    let allow_local = if remote.local { "always" } else { "never" };
    let mut command = git_command(dir);
    command
        .arg("-c")
        .arg(format!("protocol.file.allow={allow_local}"));
    // Redirects only on the first request, and none to another protocol or a local path.
    command.args([
        "-c",
        "http.followRedirects=initial",
        "clone",
        "--quiet",
        "--no-hardlinks",
        "--no-recurse-submodules",
        "--template=",
    ]);
    command.arg("--").arg(&remote.url).arg(".");
    let ran = run(command, 4096, WHOLE_TREE_TIMEOUT).await?;
    if !ran.ok {
        return Err(clone_error("could not be cloned", &remote.url, &ran.stderr));
    }
    if let Some(reference) = &remote.reference {
        // A branch of the remote if there is one, else a tag or commit; never a path of that name.
        let branch = format!("refs/remotes/origin/{reference}");
        let mut probe = git_command(dir);
        probe.args(["rev-parse", "--verify", "--quiet", "--end-of-options", &branch]);
        let is_branch = run(probe, 4096, COMMAND_TIMEOUT).await?.ok;
        let mut command = git_command(dir);
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
        let ran = run(command, 4096, COMMAND_TIMEOUT).await?;
        if !ran.ok {
            return Err(Error::invalid(format!(
                "source.ref: {} is not in {}",
                quoted(reference),
                without_password(&remote.url)
            ))
            .with_cause(ran.stderr.trim()));
        }
    }
    Ok(())
}

fn clone_error(what: &str, url: &str, stderr: &str) -> Error {
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
    .with_cause(stderr.trim())
}
