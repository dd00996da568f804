//! Installs what the tests need on a fresh machine; where it cannot, the error names the packages.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::process::{find_on_path, run};

/// Installs everything.
pub(crate) fn install_all(root: &Path) -> Result<()> {
    install_system_packages(&[("bwrap", "bubblewrap"), ("chromium", "chromium"), ("git", "git")])?;
    install_node_packages(root)?;
    install_python_packages(root).map(drop)?;
    install_cargo_deny(root).map(drop)
}

/// Installs missing programs from the system's packages; `needed` has pairs of program and package.
pub(crate) fn install_system_packages(needed: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> = needed
        .iter()
        .filter(|(program, _)| find_on_path(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let by_hand = format!(
        "install them, for example: sudo apt-get install {}",
        missing.join(" ")
    );
    let Some(apt) = find_on_path("apt-get") else {
        bail!("these packages are missing: {}; {by_hand}", missing.join(", "));
    };
    let apt = apt.to_string_lossy().into_owned();
    let root = std::fs::metadata("/proc/self").is_ok_and(|m| std::os::unix::fs::MetadataExt::uid(&m) == 0);
    let sudo = if root { None } else { Some("sudo") };
    let apt_get = |args: &[&str]| match sudo {
        None => run(Path::new("/"), &apt, args),
        Some(sudo) => run(Path::new("/"), sudo, &[&["-n", apt.as_str()], args].concat()),
    };
    println!("installing {}", missing.join(", "));
    apt_get(&["update", "-q"]).with_context(|| by_hand.clone())?;
    let install: Vec<&str> = ["install", "-y", "-q", "--no-install-recommends"]
        .into_iter()
        .chain(missing)
        .collect();
    apt_get(&install).context(by_hand)
}

/// Installs the npm packages of the end-to-end tests.
pub(crate) fn install_node_packages(root: &Path) -> Result<()> {
    npm_install(&root.join("tests/node"))
}

/// Installs the packages of a folder's lock file, unless that version of it is installed. Not `npm ci`, which
/// refuses lock files without the optional packages of other platforms.
pub(crate) fn npm_install(dir: &Path) -> Result<()> {
    if find_on_path("npm").is_none() {
        bail!("npm is missing: install Node.js 20 or later, for example: sudo apt-get install nodejs npm");
    }
    let lock = std::fs::read(dir.join("package-lock.json"))
        .with_context(|| format!("{} has no package-lock.json", dir.display()))?;
    let stamp = dir.join("node_modules/.installed-lock");
    if std::fs::read(&stamp).is_ok_and(|installed| installed == lock) {
        return Ok(());
    }
    run(
        dir,
        "npm",
        &[
            "install",
            "--no-save",
            "--no-audit",
            "--no-fund",
            "--loglevel=error",
        ],
    )?;
    std::fs::write(stamp, lock).context("cannot note what was installed")
}

/// Creates a virtual environment with the Python packages of the end-to-end tests; returns its interpreter.
pub(crate) fn install_python_packages(root: &Path) -> Result<PathBuf> {
    let venv = root.join("target/venv");
    let python = venv.join("bin/python");
    let wanted = std::fs::read(root.join("tests/python/requirements.txt"))?;
    let stamp = venv.join(".installed-requirements");
    if python.exists() && std::fs::read(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    if find_on_path("python3").is_none() {
        bail!("python3 is missing: sudo apt-get install python3 python3-venv");
    }
    let venv_text = venv.to_string_lossy().into_owned();
    run(root, "python3", &["-m", "venv", &venv_text])
        .context("cannot make a virtual environment; try: sudo apt-get install python3-venv")?;
    let pip = venv.join("bin/pip").to_string_lossy().into_owned();
    run(
        root,
        &pip,
        &["install", "--quiet", "-r", "tests/python/requirements.txt"],
    )?;
    std::fs::write(stamp, wanted).context("cannot note what was installed")?;
    Ok(python)
}

/// The path of `cargo-deny`, which is built into target/tools if it is not installed.
pub(crate) fn install_cargo_deny(root: &Path) -> Result<PathBuf> {
    const VERSION: &str = "0.20.2";
    if let Some(installed) = find_on_path("cargo-deny") {
        return Ok(installed);
    }
    let tools = root.join("target/tools");
    let program = tools.join("bin/cargo-deny");
    if !program.exists() {
        let tools = tools.to_string_lossy().into_owned();
        // A debug build: it compiles in a third of the time, and runs only for a second.
        run(
            root,
            "cargo",
            &[
                "install",
                "--debug",
                "--locked",
                "--quiet",
                "--version",
                VERSION,
                "--root",
                &tools,
                "cargo-deny",
            ],
        )?;
    }
    Ok(program)
}
