//! Checks of the installation, each with a remedy if it fails. [`examine`] is the action `doctor` of a running server;
//! [`examine_stopped`] is for the command when no server runs, and reports what cannot be opened as failed checks.
//!
//! - [`host`]: the machine, from the home to the programs it needs.
//! - [`cluster`]: the servers that share the database.
//! - [`services`]: model providers, services and webhooks.
//! - [`definitions`]: agents and catalog entries.

mod cluster;
mod definitions;
mod host;
mod services;

use oubliette_home::HomeDir;
use oubliette_store::{Store, StoreLocation, StoreOptions};
use serde_json::{Value, json};

use self::{
    cluster::{check_cluster, check_cluster_of_stopped},
    definitions::{check_agents, check_definitions, check_unused_files},
    host::{
        check_config, check_database, check_git, check_home, check_local_sandbox, check_package_managers,
        check_port, check_programs, probe_sandbox, sandbox_checks,
    },
    services::{check_models, check_providers, check_upstreams, check_webhooks},
};
use crate::{
    app::App,
    config::ServerConfig,
    definitions::{open_stopped, unused_files_of_stopped},
};

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
    let reloaded = app.live.reload_error().map_or(Ok(()), Err);
    let mut checks = vec![check_home(&app.home), check_config(&app.home, reloaded)];
    let healthy = app
        .store
        .healthy()
        .await
        .map_err(|error| error.for_log().into_owned());
    checks.push(check_database(&app.config.store_location(&app.home), healthy));
    checks.extend(check_cluster(app).await);
    let sandbox = app.sandbox.probe().await;
    checks.extend(sandbox_checks(&sandbox));
    if app.config.sandbox.has_containers() {
        checks.push(check_local_sandbox(&app.git.probe_sandbox().await));
    }
    checks.extend(check_programs());
    checks.extend(check_definitions(&app.library));
    let unused = app.definitions.unused_files(&app.home);
    checks.extend(check_unused_files(
        &app.home,
        unused,
        app.definitions.import_error(),
    ));
    let config = app.live.config();
    checks.push(check_models(&config));
    checks.extend(check_providers(&config));
    checks.extend(check_upstreams(&config));
    checks.extend(check_webhooks(app).await);
    checks.push(check_git());
    checks.extend(check_package_managers());
    checks.extend(check_agents(&app.library, &config, &app.home));
    report(checks)
}

/// Checks a home whose server is stopped. Creates nothing in it.
pub(crate) async fn examine_stopped(at: &HomeDir) -> Value {
    let loaded = ServerConfig::load(&at.config_path(), &|name| std::env::var(name).ok());
    let told = loaded.as_ref().map(drop).map_err(|error| error.message.clone());
    let config = loaded.ok();
    let mut checks = vec![check_home(at), check_config(at, told)];
    let there = at.root().is_dir();
    let location = match &config {
        Some(config) => config.store_location(at),
        None => StoreLocation::File(at.database_path()),
    };
    let is_made = match &location {
        StoreLocation::File(path) => path.is_file(),
        StoreLocation::Postgres(_) => true,
    };
    let mut of_cluster = Vec::new();
    if there && is_made {
        let opened = match (
            &location,
            config.as_ref().and_then(|config| config.cluster.as_ref()),
        ) {
            // Read only: opened for writing it would be one more server of the cluster for a moment.
            (StoreLocation::Postgres(url), Some(cluster)) => match Store::observe(url).await {
                Ok(store) => {
                    of_cluster = check_cluster_of_stopped(cluster, &store).await;
                    store.close().await;
                    Ok(())
                }
                Err(error) => Err(error.to_string()),
            },
            _ => match Store::open_at(&location, &StoreOptions::default()).await {
                Ok(store) => {
                    let healthy = store
                        .healthy()
                        .await
                        .map_err(|error| error.for_log().into_owned());
                    store.close().await;
                    healthy
                }
                Err(error) => Err(error.to_string()),
            },
        };
        checks.push(check_database(&location, opened));
    }
    checks.extend(of_cluster);
    if let Some(config) = &config {
        checks.push(check_port(config.listen));
        checks.extend(probe_sandbox(at, config).await);
    }
    checks.extend(check_programs());
    let library = if there {
        open_stopped(at, &location).ok()
    } else {
        None
    };
    checks.extend(library.iter().flat_map(|library| check_definitions(library)));
    checks.extend(check_unused_files(
        at,
        unused_files_of_stopped(at, &location),
        None,
    ));
    checks.extend(config.iter().map(check_models));
    checks.extend(config.iter().flat_map(check_providers));
    checks.extend(config.iter().flat_map(check_upstreams));
    checks.push(check_git());
    checks.extend(check_package_managers());
    if let (Some(library), Some(config)) = (&library, &config) {
        checks.extend(check_agents(library, config, at));
    }
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
    // What agents need to do real work, whatever else is optional.
    let for_work = |name: &str| {
        let kinds = ["models", "agents", "provider ", "agent ", "tool ", "upstream "];
        kinds
            .iter()
            .any(|kind| name == kind.trim_end() || kind.ends_with(' ') && name.starts_with(kind))
    };
    let missing: Vec<Value> = checks
        .iter()
        .filter(|check| check["ok"] == false && check["name"].as_str().is_some_and(for_work))
        .map(|check| {
            json!(format!(
                "{}: {}",
                check["name"].as_str().unwrap_or_default(),
                check["detail"].as_str().unwrap_or_default()
            ))
        })
        .collect();
    json!({ "ok": ok, "version": env!("CARGO_PKG_VERSION"), "missing": missing, "checks": checks })
}
