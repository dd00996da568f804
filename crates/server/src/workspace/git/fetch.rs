//! An origin, cloned into a workspace.

use std::{path::Path, time::Duration};

use oubliette_protocol::{Error, Result, id::quoted};
use oubliette_sandbox::disk_usage;

use super::{
    origin::{Origin, without_password},
    run::{LOOK, WHOLE, git, run},
};

/// How often the size of a clone under way is looked at.
const LOOK_AT_SIZE: Duration = Duration::from_secs(1);

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
    let ran = run(command, 4096, WHOLE).await?;
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
