//! Builds the console and the release programs, and runs the commands that need them.

use std::{
    ffi::{OsStr, OsString},
    os::unix::process::CommandExt,
    path::{Path, PathBuf},
    process::Command,
};

use anyhow::{Context, Result};

use crate::{
    book,
    process::{find_on_path, run, run_with},
    setup,
};

/// Between flags of `CARGO_ENCODED_RUSTFLAGS`.
const FLAG_SEPARATOR: &str = "\u{1f}";

/// Builds the console from `ui/` into `ui/dist`, from where the server's build embeds it.
pub(crate) fn build_console(root: &Path) -> Result<()> {
    let ui = root.join("ui");
    setup::npm_install(&ui, &[])?;
    run(&ui, "npm", &["run", "--silent", "build"])
}

/// Builds the TypeScript client into `clients/typescript/dist`.
pub(crate) fn build_typescript_client(root: &Path) -> Result<()> {
    let client = root.join("clients/typescript");
    setup::npm_install(&client, &[])?;
    run(&client, "npm", &["run", "--silent", "build"])
}

/// Builds all programs, optimised, into `target/release`.
pub(crate) fn build_release(root: &Path) -> Result<()> {
    if find_on_path("npm").is_some() {
        build_console(root)?;
    } else {
        eprintln!("npm is missing: building without the console (install Node.js and run this again)");
    }
    match setup::install_mdbook(root) {
        Ok(_) => book::build_book(root)?,
        Err(error) => eprintln!("mdBook cannot be installed: building without the book ({error:#})"),
    }
    let flags = path_independent_flags(root);
    run_with(
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
        &[("CARGO_ENCODED_RUSTFLAGS", flags.as_os_str())],
    )?;
    build_static_programs(root, &flags)
}

/// Compiler flags, in cargo's encoded form, with which programs contain no path of this machine: the same source gives the
/// same bytes wherever it is built, and no program tells who built it. What `RUSTFLAGS` says is kept.
fn path_independent_flags(root: &Path) -> OsString {
    let home = std::env::home_dir().unwrap_or_default();
    let folder = |variable: &str, default: &str| {
        std::env::var_os(variable).map_or_else(|| home.join(default), PathBuf::from)
    };
    // Of several that match, the last is taken.
    let prefixes = [
        (folder("RUSTUP_HOME", ".rustup"), "/rustup"),
        (folder("CARGO_HOME", ".cargo"), "/cargo"),
        (root.to_path_buf(), "/oubliette"),
    ];
    let mut flags = std::env::var_os("CARGO_ENCODED_RUSTFLAGS").unwrap_or_else(|| {
        let given = std::env::var("RUSTFLAGS").unwrap_or_default();
        given
            .split_whitespace()
            .collect::<Vec<_>>()
            .join(FLAG_SEPARATOR)
            .into()
    });
    for (path, name) in prefixes {
        if !flags.is_empty() {
            flags.push(FLAG_SEPARATOR);
        }
        flags.push("--remap-path-prefix=");
        flags.push(path);
        flags.push("=");
        flags.push(name);
    }
    flags
}

/// Links the programs that run inside sandboxes again, statically, so that they start in any container. Options after `--`
/// reach only their own crates, so nothing else is rebuilt.
fn build_static_programs(root: &Path, flags: &OsStr) -> Result<()> {
    if !cfg!(all(target_os = "linux", target_env = "gnu")) {
        return Ok(());
    }
    for program in ["oubliette-client", "oubliette-agent"] {
        let build = ["rustc", "--release", "-p", program, "--bin", program];
        let linked = ["--", "-C", "target-feature=+crt-static"];
        run_with(
            root,
            "cargo",
            &[&build[..], &linked[..]].concat(),
            &[("CARGO_ENCODED_RUSTFLAGS", flags)],
        )?;
    }
    Ok(())
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
    if let Err(error) = setup::install_postgres() {
        // The suite that needs it says that it was not measured.
        eprintln!("warning: {error:#}");
    }
    setup::install_node_packages(root)?;
    build_release(root)?;
    let base = ["run", "--release", "--quiet", "-p", "oubliette-bench", "--"];
    let all: Vec<&str> = base.into_iter().chain(args.iter().map(String::as_str)).collect();
    // The flags of the programs: other flags would compile every library a second time.
    let flags = path_independent_flags(root);
    run_with(
        root,
        "cargo",
        &all,
        &[("CARGO_ENCODED_RUSTFLAGS", flags.as_os_str())],
    )
}

/// Builds the release programs and runs the fault rounds against them.
pub(crate) fn run_soak(root: &Path, args: &[String]) -> Result<()> {
    setup::install_system_packages(&[("bwrap", "bubblewrap")])?;
    if args.iter().any(|arg| arg.starts_with("--servers")) {
        setup::install_postgres()?;
    }
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

/// Builds the release programs and runs the checks of real agents: of all presets, or of those named. Their rows of the
/// page of the docs are written.
pub(crate) fn run_agents(root: &Path, names: &[String]) -> Result<()> {
    setup::install_system_packages(&[("bwrap", "bubblewrap")])?;
    let python = setup::install_python_packages(root)?;
    build_release(root)?;
    let programs = root.join("target/release");
    let page = root.join("docs/agents.md").to_string_lossy().into_owned();
    let mut args = vec!["agent_matrix.py".to_owned()];
    args.extend(names.iter().cloned());
    args.extend(["--page".to_owned(), page]);
    run_with(
        &root.join("tests/python"),
        &python.to_string_lossy(),
        &args,
        &[("OUBLIETTE_BIN_DIR", programs.as_os_str())],
    )
}
