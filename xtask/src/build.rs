//! The console and the release programs.

use std::{os::unix::process::CommandExt, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{
    setup,
    sh::{find, run},
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

/// `oubliette-client` again, linked statically: it then starts in any container. Only its last step is done
/// anew; `-C` after `--` reaches no other crate.
fn static_client(root: &Path) -> Result<()> {
    if !cfg!(all(target_os = "linux", target_env = "gnu")) {
        return Ok(());
    }
    let build = [
        "rustc",
        "--release",
        "-p",
        "oubliette-bridge",
        "--bin",
        "oubliette-client",
    ];
    let linked = ["--", "-C", "target-feature=+crt-static"];
    run(root, "cargo", &[&build[..], &linked[..]].concat())
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
