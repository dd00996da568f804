//! What works here and what does not, each with its remedy.

use serde_json::{Value, json};

use crate::app::App;

/// One thing looked at.
fn check(name: &str, ok: bool, detail: impl Into<String>, remedy: Option<&str>) -> Value {
    let mut check = json!({ "name": name, "ok": ok, "detail": detail.into() });
    if let Some(remedy) = remedy.filter(|_| !ok) {
        check["remedy"] = json!(remedy);
    }
    check
}

/// Looks at home, store, sandbox, definitions, providers and programs.
pub async fn examine(app: &App) -> Value {
    let mut checks = vec![home(app), store(app).await];
    let report = app.sandbox.look().await;
    checks.push(check(
        "sandbox",
        report.ok,
        format!("driver {}, isolation {}", report.driver, report.level),
        Some("see the checks below, or lower [sandbox] minimum in oubliette.toml"),
    ));
    checks.extend(report.checks.iter().map(|c| json!(c)));
    checks.extend(definitions(app));
    checks.extend(app.config.providers.iter().map(|p| {
        let keyed = p.api_key.is_some() || p.api_key_env.is_none();
        let name = p.api_key_env.as_deref().unwrap_or_default();
        check(
            &format!("provider {}", p.name),
            keyed,
            match keyed {
                true => p.base_url.clone(),
                false => format!("{} is not set in the server's environment", name),
            },
            Some("set the variable and start the server again"),
        )
    }));
    checks.push(git());
    let ok = checks.iter().all(|c| c["ok"] == true);
    json!({ "ok": ok, "version": env!("CARGO_PKG_VERSION"), "checks": checks })
}

fn home(app: &App) -> Value {
    use std::os::unix::fs::PermissionsExt as _;
    let root = app.home.root();
    let mode = std::fs::metadata(root).map(|m| m.permissions().mode() & 0o777).unwrap_or(0);
    check(
        "home",
        mode & 0o077 == 0,
        format!("{} (mode {mode:o})", root.display()),
        Some("chmod 700 the home directory: others can read it"),
    )
}

async fn store(app: &App) -> Value {
    match app.store.healthy().await {
        Ok(()) => check("database", true, app.home.database_path().display().to_string(), None),
        Err(error) => check("database", false, error.for_log(), Some("see the server's log")),
    }
}

fn definitions(app: &App) -> Vec<Value> {
    let (agents, catalog) = (app.library.agents(), app.library.catalog());
    let mut checks = vec![
        check("agents", !agents.is_empty(), format!("{} found", agents.len()), Some("`oubliette up` makes some to start with")),
        check("catalog", true, format!("{} entries", catalog.len()), None),
    ];
    let remedy = Some("fix the file; the last good definition is in use until then");
    let edited = agents.values().filter_map(|a| a.error.as_ref().map(|e| (format!("agent {}", a.slug), e.clone())));
    let tools = catalog.values().filter_map(|t| t.error.as_ref().map(|e| (format!("tool {}", t.id), e.clone())));
    for (name, error) in edited.chain(tools) {
        checks.push(check(&name, false, error, remedy));
    }
    for (slug, error) in app.library.broken_agents().iter() {
        checks.push(check(&format!("agent {slug}"), false, error.clone(), Some("fix the file; it is not in use")));
    }
    for (id, error) in app.library.broken_tools().iter() {
        checks.push(check(&format!("tool {id}"), false, error.clone(), Some("fix the file; it is not in use")));
    }
    checks
}

fn git() -> Value {
    let found = std::env::var_os("PATH").and_then(|path| {
        std::env::split_paths(&path).map(|dir| dir.join("git")).find(|candidate| candidate.is_file())
    });
    let detail = found.as_ref().map_or_else(|| "not found".to_owned(), |p| p.display().to_string());
    check("git", found.is_some(), detail, Some("install git: workspaces cannot be cloned or compared without it"))
}
