//! Tarballs whose bytes depend on their files alone, and checksums.

use std::{
    fs,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use anyhow::{Context, Result, bail};

use super::{
    Dist,
    tree::{put, put_folder},
};

/// The tarball: the tree, the script that installs it, and checksums that the script verifies.
pub(super) fn make_tarball(dist: &Dist, tree: &Path) -> Result<()> {
    let folder = dist.stage.join("tarball").join(dist.name());
    put_folder(tree, &folder)?;
    put(
        &dist.root.join("deploy/install.sh"),
        &folder.join("install.sh"),
        0o755,
    )?;
    write_checksums(&folder, &["bin", "lib", "share", "install.sh"])?;
    pack(dist, &folder, &dist.out.join(format!("{}.tar.gz", dist.name())))
}

/// The container image's context: a Containerfile, and the files that it copies.
pub(super) fn make_image(dist: &Dist, tree: &Path) -> Result<()> {
    let folder = dist.stage.join("image").join(format!("{}-image", dist.name()));
    put_folder(tree, &folder.join("rootfs/usr"))?;
    put(
        &dist.root.join("deploy/container/Containerfile"),
        &folder.join("Containerfile"),
        0o644,
    )?;
    pack(
        dist,
        &folder,
        &dist.out.join(format!("{}-image.tar.gz", dist.name())),
    )
}

/// Packs a folder under its own name. GNU tar and gzip: sorted, owned by root, one time for all.
fn pack(dist: &Dist, folder: &Path, archive: &Path) -> Result<()> {
    let (Some(parent), Some(name)) = (folder.parent(), folder.file_name()) else {
        bail!("{} cannot be packed", folder.display());
    };
    let tarball = archive.with_extension("");
    let done = Command::new("tar")
        .args([
            "--create",
            "--sort=name",
            "--format=gnu",
            "--owner=0",
            "--group=0",
            "--numeric-owner",
        ])
        .arg(format!("--mtime=@{}", dist.epoch))
        .args(["--mode=go-w,u+rw,a+rX", "--file"])
        .arg(&tarball)
        .arg("--directory")
        .arg(parent)
        .arg(name)
        .stdin(Stdio::null())
        .status()
        .context("cannot run tar")?;
    let packed = done.success()
        && Command::new("gzip")
            .args(["--no-name", "--force", "-6"])
            .arg(&tarball)
            .status()
            .context("cannot run gzip")?
            .success();
    match packed {
        true => Ok(()),
        false => bail!("packing {} failed", archive.display()),
    }
}

/// Writes `SHA256SUMS` into a folder, of all files below some of its entries.
pub(super) fn write_checksums(folder: &Path, entries: &[&str]) -> Result<()> {
    let mut files = Vec::new();
    for entry in entries {
        gather(&folder.join(entry), &mut files)?;
    }
    let mut names: Vec<String> = files
        .iter()
        .filter_map(|file| file.strip_prefix(folder).ok())
        .map(|name| name.to_string_lossy().trim_start_matches("./").to_owned())
        .filter(|name| name != "SHA256SUMS")
        .collect();
    names.sort();
    let said = Command::new("sha256sum")
        .args(&names)
        .current_dir(folder)
        .output()
        .context("cannot run sha256sum")?;
    if !said.status.success() {
        bail!("sha256sum failed: {}", String::from_utf8_lossy(&said.stderr));
    }
    fs::write(folder.join("SHA256SUMS"), said.stdout).context("cannot write SHA256SUMS")
}

fn gather(path: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    if !path.is_dir() {
        files.push(path.to_owned());
        return Ok(());
    }
    for entry in fs::read_dir(path)? {
        gather(&entry?.path(), files)?;
    }
    Ok(())
}
