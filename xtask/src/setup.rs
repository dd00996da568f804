//! Installs what the tests need on a fresh machine; where it cannot, the error names the packages.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use crate::process::{find_on_path, run};

/// Programs with which the tests inject faults, and Prometheus, with their packages. Tests that need a missing one are skipped.
const FAULT_PACKAGES: [(&str, &str); 3] = [
    ("strace", "strace"),
    ("faketime", "faketime"),
    ("promtool", "prometheus"),
];

/// Programs the tests need, and their packages.
pub(crate) const SYSTEM_PACKAGES: [(&str, &str); 6] = [
    ("bwrap", "bubblewrap"),
    ("chromium", "chromium"),
    ("git", "git"),
    ("curl", "curl"),
    ("jq", "jq"),
    ("tmux", "tmux"),
];

/// Installs everything.
pub(crate) fn install_all(root: &Path) -> Result<()> {
    if let Some(missing) = install_fault_packages() {
        eprintln!("{missing}");
    }
    for missing in [make_minimal_root(root), install_container_engine()]
        .into_iter()
        .flatten()
    {
        eprintln!("{missing}");
    }
    install_system_packages(&SYSTEM_PACKAGES)?;
    install_node_packages(root)?;
    install_python_packages(root).map(drop)?;
    install_cargo_deny(root).map(drop)?;
    install_mdbook(root).map(drop)
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

/// Installs the programs with which the tests inject faults. Returns what is missing if that fails.
pub(crate) fn install_fault_packages() -> Option<String> {
    let why = install_system_packages(&FAULT_PACKAGES).err()?;
    let missing: Vec<&str> = FAULT_PACKAGES
        .iter()
        .filter(|(program, _)| find_on_path(program).is_none())
        .map(|(program, _)| *program)
        .collect();
    let missing = missing.join(" and ");
    Some(format!("fault tests that need {missing} are skipped: {why:#}"))
}

/// Installs PostgreSQL. An error that names the package if that is not possible.
pub(crate) fn install_postgres() -> Result<()> {
    // Its programs are not on the path: only the one that manages clusters is.
    install_system_packages(&[("pg_ctlcluster", "postgresql")])
}

/// Installs a container engine for the tests of the docker driver, which start it themselves. Returns what is missing if
/// that fails.
pub(crate) fn install_container_engine() -> Option<String> {
    let why = install_system_packages(&[("dockerd", "docker.io"), ("docker", "docker.io")]).err()?;
    Some(format!("tests of the docker driver are skipped: {why:#}"))
}

/// Makes target/minimal-root.tar, a root file system of Debian with its essential packages, passwd and bubblewrap, in which the
/// tests install the artifacts. Returns what is missing if that fails.
pub(crate) fn make_minimal_root(root: &Path) -> Option<String> {
    let archive = root.join("target/minimal-root.tar");
    if archive.exists() {
        return None;
    }
    let unfinished = root.join("target/minimal-root.tmp.tar");
    let made = install_system_packages(&[("mmdebstrap", "mmdebstrap")]).and_then(|()| {
        let archive_text = unfinished.to_string_lossy().into_owned();
        let options = ["--quiet", "--variant=essential", "--include=bubblewrap,passwd"];
        run(
            root,
            "mmdebstrap",
            &[&options[..], &["bookworm", &archive_text]].concat(),
        )?;
        std::fs::rename(&unfinished, &archive).context("cannot keep the root file system")
    });
    let why = made.err()?;
    Some(format!(
        "artifacts are not installed into a fresh root file system: {why:#}"
    ))
}

/// Packages of the end-to-end tests that are nothing without their install script: it fetches their program.
const PACKAGES_WITH_SCRIPTS: [&str; 2] = ["node", "opencode-ai"];

/// Installs the npm packages of the end-to-end tests.
pub(crate) fn install_node_packages(root: &Path) -> Result<()> {
    npm_install(&root.join("tests/node"), &PACKAGES_WITH_SCRIPTS)
}

/// Installs the packages of a folder's lock file, unless that version of it is installed. No package runs a script
/// while it is installed but those named: a package that was taken over would run its own as this user. Not `npm ci`,
/// which refuses lock files without the optional packages of other platforms.
pub(crate) fn npm_install(dir: &Path, with_scripts: &[&str]) -> Result<()> {
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
            "--ignore-scripts",
            "--no-save",
            "--no-audit",
            "--no-fund",
            "--loglevel=error",
        ],
    )?;
    if !with_scripts.is_empty() {
        // Also where the user's own configuration ignores scripts.
        let rebuild = ["rebuild", "--ignore-scripts=false", "--loglevel=error"];
        run(dir, "npm", &[&rebuild, with_scripts].concat())?;
    }
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
    install_cargo_tool(root, "cargo-deny", "0.20.2", &[])
}

/// The path of `mdbook`, which is built into target/tools if it is not installed. Without its features: the book needs
/// neither its web server nor its search.
pub(crate) fn install_mdbook(root: &Path) -> Result<PathBuf> {
    install_cargo_tool(root, "mdbook", "0.5.4", &["--no-default-features"])
}

/// The path of a program that `cargo install` gives, built into target/tools if it is not on PATH.
fn install_cargo_tool(root: &Path, name: &str, version: &str, options: &[&str]) -> Result<PathBuf> {
    if let Some(installed) = find_on_path(name) {
        return Ok(installed);
    }
    let tools = root.join("target/tools");
    let program = tools.join("bin").join(name);
    if !program.exists() {
        let tools = tools.to_string_lossy().into_owned();
        println!("building {name}, which takes about a minute, once");
        // A debug build: it compiles in a third of the time, and runs only for a second.
        let install = ["install", "--debug", "--locked", "--quiet", "--version", version];
        let into = ["--root", &tools, name];
        run(root, "cargo", &[&install, options, &into].concat())?;
    }
    Ok(program)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::process::remove_built_folder;

    /// Packs a package whose scripts leave a file named `ran-` and its name.
    fn pack(dir: &Path, name: &str) {
        let script = format!("touch '{}'", dir.join(format!("ran-{name}")).display());
        let scripts = json!({"preinstall": script, "install": script, "postinstall": script});
        let manifest = json!({"name": name, "version": "1.0.0", "scripts": scripts});
        std::fs::create_dir_all(dir.join("packed/package")).unwrap();
        std::fs::write(dir.join("packed/package/package.json"), manifest.to_string()).unwrap();
        let archive = format!("{name}.tgz");
        run(dir, "tar", &["-czf", &archive, "-C", "packed", "package"]).unwrap();
    }

    #[test]
    fn no_package_runs_a_script_while_it_is_installed_but_those_named() {
        if find_on_path("npm").is_none() {
            eprintln!("skipped: npm is missing");
            return;
        }
        let dir = std::env::temp_dir().join(format!("oubliette-npm-install-{}", std::process::id()));
        std::fs::create_dir_all(&dir).unwrap();
        pack(&dir, "taken-over");
        pack(&dir, "wanted");
        // No registry is asked, and scripts run unless the command line says otherwise.
        let settings = format!(
            "offline=true\nupdate-notifier=false\nignore-scripts=false\ncache={}\n",
            dir.join("cache").display()
        );
        std::fs::write(dir.join(".npmrc"), settings).unwrap();
        let root = json!({"name": "root", "version": "1.0.0",
            "dependencies": {"taken-over": "file:taken-over.tgz", "wanted": "file:wanted.tgz"}});
        std::fs::write(dir.join("package.json"), root.to_string()).unwrap();
        let locked = |name: &str| json!({"version": "1.0.0", "resolved": format!("file:{name}.tgz"), "hasInstallScript": true});
        let lock = json!({"name": "root", "version": "1.0.0", "lockfileVersion": 3, "requires": true, "packages": {
            "": root, "node_modules/taken-over": locked("taken-over"), "node_modules/wanted": locked("wanted")}});
        std::fs::write(dir.join("package-lock.json"), lock.to_string()).unwrap();
        npm_install(&dir, &["wanted"]).unwrap();
        for name in ["taken-over", "wanted"] {
            assert!(
                dir.join("node_modules").join(name).join("package.json").exists(),
                "{name} is installed"
            );
        }
        let ran = ["taken-over", "wanted"].map(|name| dir.join(format!("ran-{name}")).exists());
        remove_built_folder(&dir).unwrap();
        assert_eq!(ran, [false, true]);
    }
}
