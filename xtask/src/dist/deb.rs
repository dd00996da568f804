//! The Debian package, put together for `dpkg-deb`.

use std::{fs, path::Path, process::Command};

use anyhow::{Context, Result, bail};

use super::{
    Dist,
    tree::{PROGRAMS, put, put_folder, put_text},
};
use crate::process::find_on_path;

/// Makes the package; says so and goes on where `dpkg-deb` is not installed.
pub(super) fn make(dist: &Dist, tree: &Path) -> Result<()> {
    if find_on_path("dpkg-deb").is_none() {
        eprintln!("dpkg-deb is missing: no Debian package is made");
        return Ok(());
    }
    let folder = dist.stage.join("deb");
    put_folder(tree, &folder.join("usr"))?;
    // Debian's zsh looks elsewhere.
    let zsh = folder.join("usr/share/zsh");
    fs::rename(zsh.join("site-functions"), zsh.join("vendor-completions"))?;
    let copyright = fs::read_to_string(dist.root.join("LICENSE"))?;
    put_text(&copyright, &folder.join("usr/share/doc/oubliette/copyright"))?;
    let control = folder.join("DEBIAN");
    put_text(&control_file(dist, &folder)?, &control.join("control"))?;
    for script in ["postinst", "prerm", "postrm"] {
        put(
            &dist.root.join("deploy/deb").join(script),
            &control.join(script),
            0o755,
        )?;
    }
    let package = format!("oubliette_{}_{}.deb", dist.version, architecture());
    let done = Command::new("dpkg-deb")
        .args(["--root-owner-group", "-Zgzip", "--build"])
        .arg(&folder)
        .arg(dist.out.join(package))
        .env("SOURCE_DATE_EPOCH", &dist.epoch)
        .status()
        .context("cannot run dpkg-deb")?;
    match done.success() {
        true => Ok(()),
        false => bail!("dpkg-deb failed ({done})"),
    }
}

fn control_file(dist: &Dist, folder: &Path) -> Result<String> {
    let mut size = 0;
    let mut glibc = (2, 0);
    for program in PROGRAMS {
        let bytes = fs::read(folder.join("usr/bin").join(program))?;
        size += bytes.len() / 1024;
        glibc = glibc.max(needed_glibc(&bytes));
    }
    Ok(format!(
        "Package: oubliette\nVersion: {}\nArchitecture: {}\nMaintainer: The Oubliette developers <oubliette@example.org>\n\
         Installed-Size: {size}\nDepends: libc6 (>= {}.{}), libgcc-s1, passwd, bubblewrap\nRecommends: git, ca-certificates\n\
         Section: devel\nPriority: optional\nDescription: coding agents in sandboxes behind one tool gate\n \
         A server that runs coding agents in sandboxes and gives each of them exactly\n \
         the tools it should have: lent by programs, from MCP servers, or built in.\n",
        dist.version,
        architecture(),
        glibc.0,
        glibc.1
    ))
}

/// Debian's name of this machine's architecture.
fn architecture() -> &'static str {
    match std::env::consts::ARCH {
        "x86_64" => "amd64",
        "aarch64" => "arm64",
        other => other,
    }
}

/// The newest version of glibc of which a program uses a symbol; 2.36 if its relocations are packed.
fn needed_glibc(program: &[u8]) -> (u32, u32) {
    const PREFIX: &[u8] = b"GLIBC_2.";
    let mut newest = 0;
    for (at, _) in program
        .windows(PREFIX.len())
        .enumerate()
        .filter(|(_, window)| *window == PREFIX)
    {
        let digits = program[at + PREFIX.len()..]
            .iter()
            .take_while(|byte| byte.is_ascii_digit());
        let minor = digits
            .take(3)
            .fold(0, |sum, digit| sum * 10 + u32::from(digit - b'0'));
        newest = newest.max(minor);
    }
    // The dynamic linker must know GLIBC_ABI_DT_RELR to start such a program.
    if program.windows(18).any(|window| window == b"GLIBC_ABI_DT_RELR\0") {
        newest = newest.max(36);
    }
    (2, newest)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_newest_symbol_decides() {
        assert_eq!(needed_glibc(b"x GLIBC_2.2.5\0GLIBC_2.34\0GLIBC_2.17\0"), (2, 34));
        assert_eq!(needed_glibc(b"GLIBC_2.17\0GLIBC_ABI_DT_RELR\0"), (2, 36));
        assert_eq!(needed_glibc(b"static"), (2, 0));
    }
}
