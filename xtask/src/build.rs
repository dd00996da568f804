//! Builds the console and the release programs, and runs the commands that need them.

use std::{os::unix::process::CommandExt, path::Path, process::Command};

use anyhow::{Context, Result};

use crate::{
    process::{find_on_path, run, run_with},
    setup,
};

/// Builds the console from `ui/` into `ui/dist`, from where the server's build embeds it.
pub(crate) fn build_console(root: &Path) -> Result<()> {
    let ui = root.join("ui");
    setup::npm_install(&ui)?;
    run(&ui, "npm", &["run", "--silent", "build"])
}

/// Builds all programs, optimised, into `target/release`.
pub(crate) fn build_release(root: &Path) -> Result<()> {
    if find_on_path("npm").is_some() {
        build_console(root)?;
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
            "oubliette-client",
            "-p",
            "oubliette-agent",
        ],
    )?;
    build_static_client(root)
}

/// Links `oubliette-client` again, statically, so that it starts in any container. Options after `--` reach only
/// this crate, so nothing else is rebuilt.
fn build_static_client(root: &Path) -> Result<()> {
    if !cfg!(all(target_os = "linux", target_env = "gnu")) {
        return Ok(());
    }
    let build = [
        "rustc",
        "--release",
        "-p",
        "oubliette-client",
        "--bin",
        "oubliette-client",
    ];
    let linked = ["--", "-C", "target-feature=+crt-static"];
    run(root, "cargo", &[&build[..], &linked[..]].concat())
}

/// Builds, then replaces this process with `oubliette up`.
pub(crate) fn run_up(root: &Path, args: &[String]) -> Result<()> {
    if let Err(error) = setup::install_system_packages(&[("bwrap", "bubblewrap"), ("git", "git")]) {
        eprintln!("warning: {error:#}");
    }
    build_release(root)?;
    let program = root.join("target/release/oubliette");
    let failed = Command::new(&program).arg("up").args(args).exec();
    Err(failed).with_context(|| format!("cannot run {}", program.display()))
}

/// Builds and runs the bench program.
pub(crate) fn run_bench(root: &Path, args: &[String]) -> Result<()> {
    setup::install_system_packages(&[("bwrap", "bubblewrap")])?;
    setup::install_node_packages(root)?;
    build_release(root)?;
    let base = ["run", "--release", "--quiet", "-p", "oubliette-bench", "--"];
    let all: Vec<&str> = base.into_iter().chain(args.iter().map(String::as_str)).collect();
    run(root, "cargo", &all)
}

/// Builds the release programs and runs the fault rounds against them.
pub(crate) fn run_soak(root: &Path, args: &[String]) -> Result<()> {
    setup::install_system_packages(&[("bwrap", "bubblewrap")])?;
    let python = setup::install_python_packages(root)?;
    build_release(root)?;
    let programs = root.join("target/release");
    let script = ["soak.py".to_owned()];
    let all: Vec<&String> = script.iter().chain(args).collect();
    run_with(
        &root.join("tests/python"),
        &python.to_string_lossy(),
        &all,
        &[("OUBLIETTE_BIN_DIR", programs.as_os_str())],
    )
}
