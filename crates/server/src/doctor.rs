//! Checks of the installation, each with a remedy if it fails. [`examine`] is the action `doctor` of a running server;
//! [`examine_stopped`] is for the command when no server runs, and reports what cannot be opened as failed checks.

use std::{net::SocketAddr, path::PathBuf};

use oubliette_home::{DefinitionLibrary, HomeDir};
use oubliette_sandbox::{LocalDriver, LocalDriverConfig, SandboxDriver as _, SandboxReport};
use oubliette_store::Store;
use serde_json::{Value, json};

use crate::{
    app::{self, App},
    config::ServerConfig,
};

/// Programs of well-known agents, and the command that installs each.
const AGENT_PROGRAMS: [(&str, &str); 5] = [
    ("opencode", "npm install -g opencode-ai"),
    (
        "claude-agent-acp",
        "npm install -g @agentclientprotocol/claude-agent-acp",
    ),
    ("codex-acp", "npm install -g @agentclientprotocol/codex-acp"),
    ("gemini", "npm install -g @google/gemini-cli"),
    ("droid", "npm install -g @factory/cli"),
];

/// Whether Oubliette works without what a check looks for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CheckImportance {
    Essential,
    Optional,
}

/// The result of one check, as JSON; the remedy is included if the check failed.
fn check_result(
    name: &str,
    importance: CheckImportance,
    ok: bool,
    detail: impl Into<String>,
    remedy: &str,
) -> Value {
    let mut check = json!({ "name": name, "ok": ok, "essential": importance == CheckImportance::Essential, "detail": detail.into() });
    if !ok && !remedy.is_empty() {
        check["remedy"] = json!(remedy);
    }
    check
}

/// Checks a running server.
pub(crate) async fn examine(app: &App) -> Value {
    let mut checks = vec![check_home(&app.home), check_config(&app.home, Ok(()))];
    let healthy = app
        .store
        .healthy()
        .await
        .map_err(|error| error.for_log().into_owned());
    checks.push(check_database(&app.home, healthy));
    checks.extend(sandbox_checks(app.sandbox.probe().await));
    checks.extend(check_programs());
    checks.extend(check_definitions(&app.library));
    checks.extend(check_providers(&app.config));
    checks.push(check_git());
    checks.extend(check_agent_programs());
    report(checks)
}

/// Checks a home whose server is stopped. Creates nothing in it.
pub(crate) async fn examine_stopped(at: &HomeDir) -> Value {
    let loaded = ServerConfig::load(&at.config_path(), &|name| std::env::var(name).ok());
    let told = loaded.as_ref().map(drop).map_err(|error| error.message.clone());
    let config = loaded.ok();
    let mut checks = vec![check_home(at), check_config(at, told)];
    let there = at.root().is_dir();
    if there && at.database_path().is_file() {
        let opened = match Store::open(&at.database_path()).await {
            Ok(store) => {
                let healthy = store
                    .healthy()
                    .await
                    .map_err(|error| error.for_log().into_owned());
                store.close().await;
                healthy
            }
            Err(error) => Err(error.to_string()),
        };
        checks.push(check_database(at, opened));
    }
    if let Some(config) = &config {
        checks.push(check_port(config.listen));
        checks.extend(probe_sandbox(config).await);
    }
    checks.extend(check_programs());
    if there && let Ok(library) = DefinitionLibrary::open(at) {
        checks.extend(check_definitions(&library));
    }
    checks.extend(config.iter().flat_map(check_providers));
    checks.push(check_git());
    checks.extend(check_agent_programs());
    report(checks)
}

/// The check that shows a running server's URL.
pub(crate) fn listening_check(url: &str) -> Value {
    check_result(
        "server",
        CheckImportance::Optional,
        true,
        format!("running at {url}"),
        "",
    )
}

fn report(checks: Vec<Value>) -> Value {
    let ok = checks.iter().all(|c| c["ok"] == true || c["essential"] == false);
    json!({ "ok": ok, "version": env!("CARGO_PKG_VERSION"), "checks": checks })
}

fn check_home(home: &HomeDir) -> Value {
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

fn check_config(home: &HomeDir, read: Result<(), String>) -> Value {
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
            "correct the file; nothing starts until then",
        ),
    }
}

fn check_database(home: &HomeDir, healthy: Result<(), String>) -> Value {
    match healthy {
        Ok(()) => check_result(
            "database",
            CheckImportance::Essential,
            true,
            home.database_path().display().to_string(),
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
fn check_port(listen: SocketAddr) -> Value {
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

/// Probes the sandbox driver as the server would, in a scratch folder.
async fn probe_sandbox(config: &ServerConfig) -> Vec<Value> {
    let failed = |why: String| {
        vec![check_result(
            "sandbox",
            CheckImportance::Essential,
            false,
            why,
            "see the checks below",
        )]
    };
    let scratch = match tempfile::Builder::new().prefix("oubliette-doctor-").tempdir() {
        Ok(scratch) => scratch,
        Err(e) => return failed(format!("creating a scratch folder failed: {e}")),
    };
    let local = LocalDriverConfig {
        client: app::find_programs().client,
        minimum: config.sandbox.minimum,
        bwrap: None,
        run_dir: scratch.path().to_owned(),
    };
    match LocalDriver::new(local).await {
        Ok(local) => sandbox_checks(&local.probe().await),
        Err(e) => failed(e.to_string()),
    }
}

fn sandbox_checks(report: &SandboxReport) -> Vec<Value> {
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
fn check_programs() -> Vec<Value> {
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

fn check_definitions(library: &DefinitionLibrary) -> Vec<Value> {
    let (agents, catalog) = (library.agents(), library.catalog());
    let some = "make one with `oubliette agent new`; `oubliette up` on a new home makes some to start with";
    let mut checks = vec![
        check_result(
            "agents",
            CheckImportance::Optional,
            !agents.is_empty(),
            format!("{} defined", agents.len()),
            some,
        ),
        check_result(
            "catalog",
            CheckImportance::Optional,
            true,
            format!("{} entries", catalog.len()),
            "",
        ),
    ];
    let kept = "correct the file; the last good definition is in use until then";
    let edited = agents
        .values()
        .filter_map(|a| a.error.as_ref().map(|e| (format!("agent {}", a.slug), e.clone())));
    let tools = catalog
        .values()
        .filter_map(|t| t.error.as_ref().map(|e| (format!("tool {}", t.id), e.clone())));
    checks.extend(
        edited
            .chain(tools)
            .map(|(name, error)| check_result(&name, CheckImportance::Optional, false, error, kept)),
    );
    let unused = "correct the file; it is not in use";
    let (agents, tools) = (library.broken_agents(), library.broken_tools());
    let agents = agents
        .iter()
        .map(|(slug, error)| (format!("agent {slug}"), error));
    let tools = tools.iter().map(|(id, error)| (format!("tool {id}"), error));
    checks.extend(
        agents.chain(tools).map(|(name, error)| {
            check_result(&name, CheckImportance::Optional, false, error.clone(), unused)
        }),
    );
    checks
}

fn check_providers(config: &ServerConfig) -> Vec<Value> {
    let one = |p: &oubliette_egress::ModelProvider| {
        let keyed = p.api_key.is_some() || p.api_key_env.is_none();
        let variable = p.api_key_env.as_deref().unwrap_or_default();
        let detail = match keyed {
            true => p.base_url.clone(),
            false => format!("{variable} is not set in the server's environment"),
        };
        check_result(
            &format!("provider {}", p.name),
            CheckImportance::Optional,
            keyed,
            detail,
            "set the variable and start the server again",
        )
    };
    config.providers.iter().map(one).collect()
}

fn check_git() -> Value {
    let found = find_on_path("git");
    let detail = found
        .as_ref()
        .map_or_else(|| "not found".to_owned(), |p| p.display().to_string());
    let remedy = "install git: workspaces cannot be cloned or compared without it";
    check_result("git", CheckImportance::Optional, found.is_some(), detail, remedy)
}

/// Which programs of well-known agents are installed. All are optional: the built-in agent needs none.
fn check_agent_programs() -> Vec<Value> {
    let one = |(program, install): (&str, &str)| {
        let found = find_on_path(program);
        let detail = found
            .as_ref()
            .map_or_else(|| "not installed".to_owned(), |p| p.display().to_string());
        let remedy = format!("only if you want that agent: {install}");
        check_result(
            &format!("agent program {program}"),
            CheckImportance::Optional,
            found.is_some(),
            detail,
            &remedy,
        )
    };
    AGENT_PROGRAMS.into_iter().map(one).collect()
}

fn find_on_path(program: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = std::env::var_os("PATH")?;
    let runs = |file: &PathBuf| {
        std::fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(runs)
}
