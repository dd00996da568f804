//! What the tests need on a fresh machine: installed when it can be, named exactly when it cannot.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::sh::{find, run};

/// Everything.
pub(crate) fn all(root: &Path) -> Result<()> {
    system(&[("bwrap", "bubblewrap"), ("chromium", "chromium"), ("git", "git")])?;
    node(root)?;
    python(root).map(drop)?;
    deny(root).map(drop)
}

/// Programs that come from the system's packages: `(program, package)`.
pub(crate) fn system(needed: &[(&str, &str)]) -> Result<()> {
    let missing: Vec<&str> = needed
        .iter()
        .filter(|(program, _)| find(program).is_none())
        .map(|(_, package)| *package)
        .collect();
    if missing.is_empty() {
        return Ok(());
    }
    let by_hand = format!(
        "install them, for example: sudo apt-get install {}",
        missing.join(" ")
    );
    let Some(apt) = find("apt-get") else {
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

/// The npm packages of the end-to-end tests.
pub(crate) fn node(root: &Path) -> Result<()> {
    npm(&root.join("tests/node"))
}

/// Installs what a folder's lock file says, unless that was done already. Not `npm ci`: it refuses locks
/// that leave out other platforms' optional packages.
pub(crate) fn npm(dir: &Path) -> Result<()> {
    if find("npm").is_none() {
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

/// A virtual environment with the Python packages of the end-to-end tests; its interpreter.
pub(crate) fn python(root: &Path) -> Result<PathBuf> {
    let venv = root.join("target/venv");
    let python = venv.join("bin/python");
    let wanted = std::fs::read(root.join("tests/python/requirements.txt"))?;
    let stamp = venv.join(".installed-requirements");
    if python.exists() && std::fs::read(&stamp).is_ok_and(|installed| installed == wanted) {
        return Ok(python);
    }
    if find("python3").is_none() {
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

/// `cargo deny`, built once into target/tools when it is not installed.
pub(crate) fn deny(root: &Path) -> Result<PathBuf> {
    const VERSION: &str = "0.20.2";
    if let Some(installed) = find("cargo-deny") {
        return Ok(installed);
    }
    let tools = root.join("target/tools");
    let program = tools.join("bin/cargo-deny");
    if !program.exists() {
        let tools = tools.to_string_lossy().into_owned();
        // A debug build: it runs once for a second, and compiles in a third of the time.
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
