//! Checks of the machine: home, configuration file, database, port, sandbox, and the programs Oubliette uses.

use std::{net::SocketAddr, path::PathBuf};

use oubliette_home::HomeDir;
use oubliette_sandbox::SandboxReport;
use oubliette_store::StoreLocation;
use serde_json::Value;

use super::{CheckImportance, check_result};
use crate::{app, config::ServerConfig, sandbox_drivers::SandboxDrivers, scratch_dir::ScratchDir};

pub(super) fn check_home(home: &HomeDir) -> Value {
    use std::os::unix::fs::PermissionsExt as _;
    let root = home.root();
    match std::fs::metadata(root) {
        Ok(found) if found.is_dir() => {
            let mode = found.permissions().mode() & 0o777;
            let remedy = format!("others can read it: chmod 700 {}", root.display());
            check_result(
                "home",
                CheckImportance::Essential,
                mode & 0o077 == 0,
                format!("{} (mode {mode:o})", root.display()),
                &remedy,
            )
        }
        Ok(_) => {
            let remedy = "move the file away, or name another place with --home";
            check_result(
                "home",
                CheckImportance::Essential,
                false,
                format!("{} is not a folder", root.display()),
                remedy,
            )
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => check_result(
            "home",
            CheckImportance::Optional,
            false,
            format!("{} is not there yet", root.display()),
            "oubliette up makes it",
        ),
        Err(e) => check_result(
            "home",
            CheckImportance::Essential,
            false,
            format!("{}: {e}", root.display()),
            "name another place with --home",
        ),
    }
}

pub(super) fn check_config(home: &HomeDir, read: Result<(), String>) -> Value {
    let path = home.config_path();
    match read {
        Ok(()) => {
            let said = if path.is_file() {
                path.display().to_string()
            } else {
                "none, so every default holds".into()
            };
            check_result("config", CheckImportance::Essential, true, said, "")
        }
        Err(why) => check_result(
            "config",
            CheckImportance::Essential,
            false,
            why,
            "correct the file; a running server keeps its old configuration, and none starts until then",
        ),
    }
}

pub(super) fn check_database(location: &StoreLocation, healthy: Result<(), String>) -> Value {
    match healthy {
        Ok(()) => check_result(
            "database",
            CheckImportance::Essential,
            true,
            location.to_string(),
            "",
        ),
        Err(why) => check_result(
            "database",
            CheckImportance::Essential,
            false,
            why,
            "see what it says; the server's log may tell more",
        ),
    }
}

/// Whether the configured port is free.
pub(super) fn check_port(listen: SocketAddr) -> Value {
    match std::net::TcpListener::bind(listen) {
        Ok(_) => check_result(
            "port",
            CheckImportance::Optional,
            true,
            format!("{listen} is free"),
            "",
        ),
        Err(e) => {
            let remedy = "stop what uses it, or choose another with --listen or [server] listen";
            check_result(
                "port",
                CheckImportance::Optional,
                false,
                format!("{listen}: {e}"),
                remedy,
            )
        }
    }
}

/// Probes the sandbox driver as the server would, in a scratch folder where it makes files.
pub(super) async fn probe_sandbox(home: &HomeDir, config: &ServerConfig) -> Vec<Value> {
    let failed = |why: String| {
        vec![check_result(
            "sandbox",
            CheckImportance::Essential,
            false,
            why,
            "see the checks below",
        )]
    };
    let scratch = match ScratchDir::new("oubliette-doctor-") {
        Ok(scratch) => scratch,
        Err(e) => return failed(format!("creating a scratch folder failed: {e}")),
    };
    let client = app::find_programs().client;
    let run_dir = match config.sandbox.kubernetes {
        // Whether the home is on the volume of pods is one of the checks.
        Some(_) if home.root().is_dir() => home.run_dir(),
        _ => scratch.path().to_owned(),
    };
    let drivers = SandboxDrivers::open(home, &config.sandbox, client, run_dir).await;
    let drivers = match drivers {
        Ok(drivers) => drivers,
        Err(e) => return failed(e.message),
    };
    let local = drivers.local.probe().await;
    if !config.sandbox.has_containers() {
        return sandbox_checks(&local);
    }
    let mut checks = sandbox_checks(&drivers.sandbox.probe().await);
    checks.push(check_local_sandbox(&local));
    checks
}

/// The sandboxes of what the server runs on this machine itself, where those of sessions are containers.
pub(super) fn check_local_sandbox(report: &SandboxReport) -> Value {
    check_result(
        "local sandbox",
        CheckImportance::Optional,
        report.ok,
        format!(
            "isolation {}; for git in workspaces and for installing packages",
            report.level
        ),
        "install bubblewrap: without it, cloning, diffs and installing packages do not work",
    )
}

pub(super) fn sandbox_checks(report: &SandboxReport) -> Vec<Value> {
    let remedy = "see the checks below, or lower [sandbox] minimum in oubliette.toml";
    let detail = format!("driver {}, isolation {}", report.driver, report.level);
    let mut checks = vec![check_result(
        "sandbox",
        CheckImportance::Essential,
        report.ok,
        detail,
        remedy,
    )];
    checks.extend(report.checks.iter().map(|c| {
        // Optional: whether the driver works without this is in `report.ok`, which is the check above.
        check_result(
            c.name,
            CheckImportance::Optional,
            c.ok,
            c.detail.clone(),
            c.remedy.as_deref().unwrap_or_default(),
        )
    }));
    checks
}

/// Whether Oubliette's other programs are installed.
pub(super) fn check_programs() -> Vec<Value> {
    let programs = app::find_programs();
    let one = |name: &str, path: PathBuf| {
        let remedy = format!("put {name} beside oubliette, where the build left it (cargo build --release)");
        check_result(
            name,
            CheckImportance::Essential,
            path.is_file(),
            path.display().to_string(),
            &remedy,
        )
    };
    vec![
        one("oubliette-client", programs.client),
        one("oubliette-agent", programs.agent),
    ]
}

pub(super) fn check_git() -> Value {
    // Git runs in sandboxes, which have a PATH of their own.
    let found = find_in(oubliette_sandbox::spec::PATH.as_ref(), "git");
    let detail = found
        .as_ref()
        .map_or_else(|| "not found".to_owned(), |p| p.display().to_string());
    let remedy = "install git: workspaces cannot be cloned or compared without it";
    check_result("git", CheckImportance::Optional, found.is_some(), detail, remedy)
}

/// Looks for what installs programs, where sandboxes look.
pub(super) fn check_package_managers() -> Vec<Value> {
    let check = |(name, remedy): (&str, &str)| {
        let found = find_in(oubliette_sandbox::spec::PATH.as_ref(), name);
        let detail = found
            .as_ref()
            .map_or_else(|| "not found".to_owned(), |p| p.display().to_string());
        check_result(name, CheckImportance::Optional, found.is_some(), detail, remedy)
    };
    let remedies = [
        (
            "npm",
            "install Node.js with npm: npm packages cannot be programs without it",
        ),
        (
            "pip3",
            "install pip and venv of Python 3 (Debian: python3-pip, python3-venv): PyPI packages cannot be programs \
             without them",
        ),
    ];
    remedies.map(check).to_vec()
}

pub(super) fn find_on_path(program: &str) -> Option<PathBuf> {
    find_in(&std::env::var_os("PATH")?, program)
}

/// Finds a program in a list of directories such as `PATH`.
fn find_in(path: &std::ffi::OsStr, program: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let runs = |file: &PathBuf| {
        std::fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(path)
        .map(|dir| dir.join(program))
        .find(runs)
}
