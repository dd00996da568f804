//! What works here and what does not, each with its remedy. The tool and the command say the same: of a
//! running server, or of a home whose server is stopped, where what cannot be opened is a finding.

use std::{net::SocketAddr, path::PathBuf};

use oubliette_home::{Home, Library};
use oubliette_sandbox::{Local, LocalConfig, Report, Sandbox as _};
use oubliette_store::Store;
use serde_json::{Value, json};

use crate::{
    app::{self, App},
    config::Config,
};

/// Agents people have, the program each is, and how to get it.
const AGENTS: [(&str, &str); 5] = [
    ("opencode", "npm install -g opencode-ai"),
    (
        "claude-agent-acp",
        "npm install -g @agentclientprotocol/claude-agent-acp",
    ),
    ("codex-acp", "npm install -g @agentclientprotocol/codex-acp"),
    ("gemini", "npm install -g @google/gemini-cli"),
    ("droid", "npm install -g @factory/cli"),
];

/// Whether Oubliette can do without.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Need {
    Essential,
    Optional,
}

/// One thing looked at.
fn check(name: &str, need: Need, ok: bool, detail: impl Into<String>, remedy: &str) -> Value {
    let mut check =
        json!({ "name": name, "ok": ok, "essential": need == Need::Essential, "detail": detail.into() });
    if !ok && !remedy.is_empty() {
        check["remedy"] = json!(remedy);
    }
    check
}

/// Looks at a running server.
pub async fn examine(app: &App) -> Value {
    let mut checks = vec![home(&app.home), configuration(&app.home, Ok(()))];
    let healthy = app
        .store
        .healthy()
        .await
        .map_err(|error| error.for_log().into_owned());
    checks.push(database(&app.home, healthy));
    checks.extend(sandbox(app.sandbox.look().await));
    checks.extend(programs());
    checks.extend(definitions(&app.library));
    checks.extend(providers(&app.config));
    checks.push(git());
    checks.extend(agents());
    report(checks)
}

/// Looks at a home no server runs for. Nothing is made that is not there.
pub async fn examine_stopped(at: &Home) -> Value {
    let loaded = Config::load(&at.config_path(), &|name| std::env::var(name).ok());
    let told = loaded.as_ref().map(drop).map_err(|error| error.message.clone());
    let config = loaded.ok();
    let mut checks = vec![home(at), configuration(at, told)];
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
        checks.push(database(at, opened));
    }
    if let Some(config) = &config {
        checks.push(port(config.listen));
        checks.extend(probe(config).await);
    }
    checks.extend(programs());
    if there && let Ok(library) = Library::open(at) {
        checks.extend(definitions(&library));
    }
    checks.extend(config.iter().flat_map(providers));
    checks.push(git());
    checks.extend(agents());
    report(checks)
}

/// Where a running server listens.
pub fn listening(url: &str) -> Value {
    check("server", Need::Optional, true, format!("running at {url}"), "")
}

fn report(checks: Vec<Value>) -> Value {
    let ok = checks.iter().all(|c| c["ok"] == true || c["essential"] == false);
    json!({ "ok": ok, "version": env!("CARGO_PKG_VERSION"), "checks": checks })
}

fn home(home: &Home) -> Value {
    use std::os::unix::fs::PermissionsExt as _;
    let root = home.root();
    match std::fs::metadata(root) {
        Ok(found) if found.is_dir() => {
            let mode = found.permissions().mode() & 0o777;
            let remedy = format!("others can read it: chmod 700 {}", root.display());
            check(
                "home",
                Need::Essential,
                mode & 0o077 == 0,
                format!("{} (mode {mode:o})", root.display()),
                &remedy,
            )
        }
        Ok(_) => {
            let remedy = "move the file away, or name another place with --home";
            check(
                "home",
                Need::Essential,
                false,
                format!("{} is not a folder", root.display()),
                remedy,
            )
        }
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => check(
            "home",
            Need::Optional,
            false,
            format!("{} is not there yet", root.display()),
            "oubliette up makes it",
        ),
        Err(e) => check(
            "home",
            Need::Essential,
            false,
            format!("{}: {e}", root.display()),
            "name another place with --home",
        ),
    }
}

fn configuration(home: &Home, read: Result<(), String>) -> Value {
    let path = home.config_path();
    match read {
        Ok(()) => {
            let said = if path.is_file() {
                path.display().to_string()
            } else {
                "none, so every default holds".into()
            };
            check("config", Need::Essential, true, said, "")
        }
        Err(why) => check(
            "config",
            Need::Essential,
            false,
            why,
            "correct the file; nothing starts until then",
        ),
    }
}

fn database(home: &Home, healthy: Result<(), String>) -> Value {
    match healthy {
        Ok(()) => check(
            "database",
            Need::Essential,
            true,
            home.database_path().display().to_string(),
            "",
        ),
        Err(why) => check(
            "database",
            Need::Essential,
            false,
            why,
            "see what it says; the server's log may tell more",
        ),
    }
}

/// Whether the port the server would take is free.
fn port(listen: SocketAddr) -> Value {
    match std::net::TcpListener::bind(listen) {
        Ok(_) => check("port", Need::Optional, true, format!("{listen} is free"), ""),
        Err(e) => {
            let remedy = "stop what uses it, or choose another with --listen or [server] listen";
            check("port", Need::Optional, false, format!("{listen}: {e}"), remedy)
        }
    }
}

/// Looks at the sandbox as the server would, in a folder of its own.
async fn probe(config: &Config) -> Vec<Value> {
    let failed = |why: String| {
        vec![check(
            "sandbox",
            Need::Essential,
            false,
            why,
            "see the checks below",
        )]
    };
    let scratch = match tempfile::Builder::new().prefix("oubliette-doctor-").tempdir() {
        Ok(scratch) => scratch,
        Err(e) => return failed(format!("no scratch folder could be made: {e}")),
    };
    let local = LocalConfig {
        client: app::programs().client,
        minimum: config.sandbox.minimum,
        bwrap: None,
        run_dir: scratch.path().to_owned(),
    };
    match Local::new(local).await {
        Ok(local) => sandbox(&local.probe().await),
        Err(e) => failed(e.to_string()),
    }
}

fn sandbox(report: &Report) -> Vec<Value> {
    let remedy = "see the checks below, or lower [sandbox] minimum in oubliette.toml";
    let detail = format!("driver {}, isolation {}", report.driver, report.level);
    let mut checks = vec![check("sandbox", Need::Essential, report.ok, detail, remedy)];
    checks.extend(report.checks.iter().map(|c| {
        // What the driver can do without is told, and is no failure: its own verdict is above.
        check(
            c.name,
            Need::Optional,
            c.ok,
            c.detail.clone(),
            c.remedy.as_deref().unwrap_or_default(),
        )
    }));
    checks
}

/// Our own other programs.
fn programs() -> Vec<Value> {
    let programs = app::programs();
    let one = |name: &str, path: PathBuf| {
        let remedy = format!("put {name} beside oubliette, where the build left it (cargo build --release)");
        check(
            name,
            Need::Essential,
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

fn definitions(library: &Library) -> Vec<Value> {
    let (agents, catalog) = (library.agents(), library.catalog());
    let some = "make one with `oubliette agent new`; `oubliette up` on a new home makes some to start with";
    let mut checks = vec![
        check(
            "agents",
            Need::Optional,
            !agents.is_empty(),
            format!("{} defined", agents.len()),
            some,
        ),
        check(
            "catalog",
            Need::Optional,
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
            .map(|(name, error)| check(&name, Need::Optional, false, error, kept)),
    );
    let unused = "correct the file; it is not in use";
    let (agents, tools) = (library.broken_agents(), library.broken_tools());
    let agents = agents
        .iter()
        .map(|(slug, error)| (format!("agent {slug}"), error));
    let tools = tools.iter().map(|(id, error)| (format!("tool {id}"), error));
    checks.extend(
        agents
            .chain(tools)
            .map(|(name, error)| check(&name, Need::Optional, false, error.clone(), unused)),
    );
    checks
}

fn providers(config: &Config) -> Vec<Value> {
    let one = |p: &oubliette_egress::Provider| {
        let keyed = p.api_key.is_some() || p.api_key_env.is_none();
        let variable = p.api_key_env.as_deref().unwrap_or_default();
        let detail = match keyed {
            true => p.base_url.clone(),
            false => format!("{variable} is not set in the server's environment"),
        };
        check(
            &format!("provider {}", p.name),
            Need::Optional,
            keyed,
            detail,
            "set the variable and start the server again",
        )
    };
    config.providers.iter().map(one).collect()
}

fn git() -> Value {
    let found = on_path("git");
    let detail = found
        .as_ref()
        .map_or_else(|| "not found".to_owned(), |p| p.display().to_string());
    let remedy = "install git: workspaces cannot be cloned or compared without it";
    check("git", Need::Optional, found.is_some(), detail, remedy)
}

/// Agents that are installed; the built-in one needs nothing.
fn agents() -> Vec<Value> {
    let one = |(program, install): (&str, &str)| {
        let found = on_path(program);
        let detail = found
            .as_ref()
            .map_or_else(|| "not installed".to_owned(), |p| p.display().to_string());
        let remedy = format!("only if you want that agent: {install}");
        check(
            &format!("agent program {program}"),
            Need::Optional,
            found.is_some(),
            detail,
            &remedy,
        )
    };
    AGENTS.into_iter().map(one).collect()
}

fn on_path(program: &str) -> Option<PathBuf> {
    use std::os::unix::fs::PermissionsExt as _;
    let path = std::env::var_os("PATH")?;
    let runs = |file: &PathBuf| {
        std::fs::metadata(file).is_ok_and(|m| m.is_file() && m.permissions().mode() & 0o111 != 0)
    };
    std::env::split_paths(&path)
        .map(|dir| dir.join(program))
        .find(runs)
}
