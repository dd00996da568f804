//! The steps of `cargo xtask test`.

use std::{ffi::OsStr, path::Path};

use anyhow::{Context, Result};

use crate::{
    build,
    process::{StepRunner, run, run_with},
    setup,
};

/// Runs every step, or those whose name contains `only`, and prints how each ended.
pub(crate) fn run_steps(root: &Path, only: Option<&str>) -> Result<()> {
    let mut steps = StepRunner::new(only);
    steps.step("format", || run(root, "cargo", &["fmt", "--all", "--check"]));
    steps.step("setup: system packages", || {
        setup::install_system_packages(&[("bwrap", "bubblewrap"), ("chromium", "chromium"), ("git", "git")])
    });
    steps.step("setup: node packages", || setup::install_node_packages(root));
    steps.step("setup: python packages", || {
        setup::install_python_packages(root).map(drop)
    });
    steps.step("console: build", || build::build_console(root));
    steps.step("console: unit tests", || {
        run(&root.join("ui"), "npm", &["run", "--silent", "check"])
    });
    steps.step("lint", || {
        run(
            root,
            "cargo",
            &[
                "clippy",
                "--workspace",
                "--all-targets",
                "--quiet",
                "--",
                "-D",
                "warnings",
            ],
        )
    });
    steps.step("licences and advisories", || check_dependencies(root));
    steps.step("docs", || {
        let args = [
            "doc",
            "--workspace",
            "--no-deps",
            "--document-private-items",
            "--quiet",
        ];
        run_with(
            root,
            "cargo",
            &args,
            &[("RUSTDOCFLAGS", OsStr::new("-D warnings"))],
        )
    });
    steps.step("build", || {
        run(
            root,
            "cargo",
            &["build", "--workspace", "--bins", "--examples", "--quiet"],
        )
    });
    steps.step("rust tests", || {
        run(root, "cargo", &["test", "--workspace", "--no-fail-fast"])
    });
    steps.step("python tests", || run_python_tests(root));
    steps.step("node tests", || run_node_tests(root));
    steps.finish()
}

fn program_dir(root: &Path) -> std::path::PathBuf {
    root.join("target/debug")
}

fn run_python_tests(root: &Path) -> Result<()> {
    let python = setup::install_python_packages(root)?
        .to_string_lossy()
        .into_owned();
    let env = [("OUBLIETTE_BIN_DIR", program_dir(root))];
    let env: Vec<_> = env.iter().map(|(k, v)| (*k, v.as_os_str())).collect();
    run_with(
        &root.join("tests/python"),
        &python,
        &["-m", "pytest", "-q", "--no-header"],
        &env,
    )
}

fn run_node_tests(root: &Path) -> Result<()> {
    let dir = root.join("tests/node");
    let env = [("OUBLIETTE_BIN_DIR", program_dir(root))];
    let env: Vec<_> = env.iter().map(|(k, v)| (*k, v.as_os_str())).collect();
    // Node 22 from npm: the conformance suite needs it, and the system's may be older.
    let node = dir
        .join("node_modules/node/bin/node")
        .to_string_lossy()
        .into_owned();
    let tests = std::fs::read_dir(&dir).context("tests/node is missing")?;
    let mut files: Vec<String> = tests
        .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
        .filter(|name| name.ends_with(".test.mjs"))
        .collect();
    files.sort();
    let args: Vec<String> = ["--test".to_owned(), "--test-concurrency=1".to_owned()]
        .into_iter()
        .chain(files)
        .collect();
    run_with(&dir, &node, &args, &env)
}

/// Checks licences, bans and sources; advisories too if their database can be fetched.
fn check_dependencies(root: &Path) -> Result<()> {
    let deny = setup::install_cargo_deny(root)?.to_string_lossy().into_owned();
    run(
        root,
        &deny,
        &[
            "--workspace",
            "check",
            "--hide-inclusion-graph",
            "licenses",
            "bans",
            "sources",
        ],
    )?;
    if let Err(error) = run(
        root,
        &deny,
        &["--workspace", "check", "--hide-inclusion-graph", "advisories"],
    ) {
        let database = std::env::var_os("CARGO_HOME")
            .map(std::path::PathBuf::from)
            .or_else(|| std::env::home_dir().map(|home| home.join(".cargo")))
            .map(|home| home.join("advisory-dbs"));
        let fetched = database
            .and_then(|dir| std::fs::read_dir(dir).ok())
            .is_some_and(|mut entries| entries.any(|e| e.is_ok_and(|e| e.path().join("crates").is_dir())));
        if fetched {
            return Err(error);
        }
        eprintln!("advisories not checked: their database cannot be fetched from here");
    }
    Ok(())
}
