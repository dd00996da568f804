//! The console and the release programs.

use std::{ffi::OsStr, os::unix::process::CommandExt, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{
    setup,
    sh::{find, run, run_with},
};

/// The console, from `ui/` into `ui/dist`, where the server's build embeds it.
pub(crate) fn console(root: &Path) -> Result<()> {
    let ui = root.join("ui");
    setup::npm(&ui)?;
    run(&ui, "npm", &["run", "--silent", "build"])
}

/// All programs, optimised, into `target/release`.
pub(crate) fn release(root: &Path) -> Result<()> {
    if find("npm").is_some() {
        console(root)?;
    } else {
        eprintln!("npm is missing: building without the console (install Node.js and run this again)");
    }
    run(
        root,
        "cargo",
        &[
            "build",
            "--release",
            "-p",
            "oubliette",
            "-p",
            "oubliette-bridge",
            "-p",
            "oubliette-agent",
        ],
    )?;
    static_client(root)
}

/// `oubliette-client` again, linked statically, over the dynamic one: it then starts in any container.
fn static_client(root: &Path) -> Result<()> {
    const TARGET: &str = "x86_64-unknown-linux-gnu";
    if !cfg!(all(
        target_arch = "x86_64",
        target_os = "linux",
        target_env = "gnu"
    )) {
        return Ok(());
    }
    run_with(
        root,
        "cargo",
        &["build", "--release", "-p", "oubliette-bridge", "--target", TARGET],
        &[("RUSTFLAGS", OsStr::new("-C target-feature=+crt-static"))],
    )?;
    let built = root.join("target").join(TARGET).join("release/oubliette-client");
    let place = root.join("target/release/oubliette-client");
    // Renamed over, not written over: a running client keeps the file it started from.
    let fresh = place.with_extension("new");
    std::fs::copy(&built, &fresh).with_context(|| format!("cannot copy {}", built.display()))?;
    std::fs::rename(&fresh, &place).context("cannot put the static client in its place")
}

/// Builds and becomes `oubliette up`.
pub(crate) fn up(root: &Path, args: &[String]) -> Result<()> {
    if let Err(error) = setup::system(&[("bwrap", "bubblewrap"), ("git", "git")]) {
        eprintln!("warning: {error:#}");
    }
    release(root)?;
    let program = root.join("target/release/oubliette");
    let failed = Command::new(&program).arg("up").args(args).exec();
    Err(failed).with_context(|| format!("cannot run {}", program.display()))
}

/// Builds and runs the bench program.
pub(crate) fn bench(root: &Path, args: &[String]) -> Result<()> {
    setup::system(&[("bwrap", "bubblewrap")])?;
    setup::node(root)?;
    release(root)?;
    let base = ["run", "--release", "--quiet", "-p", "oubliette-bench", "--"];
    let all: Vec<&str> = base.into_iter().chain(args.iter().map(String::as_str)).collect();
    run(root, "cargo", &all)
}
