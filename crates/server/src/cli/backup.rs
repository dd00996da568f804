//! `oubliette backup` and `oubliette restore`.

use std::{path::PathBuf, sync::Arc};

use oubliette_home::HomeDir;
use oubliette_protocol::{Error, Result};
use oubliette_store::StoreLocation;
use serde_json::{Value, json};
use tokio::signal::unix::{SignalKind, signal};

use super::{
    CommandContext, client,
    output::{OutputFormat, format_table},
    workspace_sync::TerminalProgress,
};
use crate::{
    backup::{
        ReportProgress,
        create::{self, FinishedBackup},
        restore::{self, ExistingData, FinishedRestore},
    },
    config::ServerConfig,
};

/// Arguments of `backup`.
#[derive(Debug, clap::Args)]
pub(crate) struct BackupArgs {
    /// The file to write, a tar.gz with mode 0600. One that is there is replaced when the new one is whole.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
}

/// Arguments of `restore`.
#[derive(Debug, clap::Args)]
pub(crate) struct RestoreArgs {
    /// The backup.
    #[arg(value_name = "FILE")]
    pub(crate) file: PathBuf,
    /// Move what the home holds into a folder `replaced-TIME` of it, and what a `[workspaces] dir` elsewhere holds into a folder
    /// `.replaced-TIME` of that, instead of refusing. A PostgreSQL database has to be
    /// empty all the same.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Runs `oubliette backup`.
pub(crate) async fn backup(args: BackupArgs, context: CommandContext) -> Result<()> {
    context.require_home("backup")?;
    let (home, location) = home_and_store(&context)?;
    let progress = report_progress(context.output);
    let working = create::create(&home, &location, &args.file, progress.clone());
    let finished = until_signal(Box::pin(working)).await;
    drop(progress);
    let FinishedBackup {
        manifest,
        bytes,
        left_out,
        has_config,
    } = finished?;
    let (rows, files) = (manifest.rows(), manifest.entries());
    let shape = json!({
        "file": args.file,
        "bytes": bytes,
        "created_at": manifest.backup.created_at,
        "version": manifest.backup.version,
        "schema": manifest.backup.schema,
        "rows": rows,
        "files": files,
        "left_out": left_out.count,
        "tables": table_rows(&manifest.tables),
    });
    context.output.print_result(&shape, |_| {
        format!(
            "{} holds {rows} rows and {files} files ({:.1} MiB)",
            args.file.display(),
            bytes as f64 / f64::from(1 << 20)
        )
    });
    if left_out.count > 0 {
        let hint = format!(
            "left out: {} entries, such as {}",
            left_out.count,
            left_out.examples.join("; ")
        );
        context.output.print_hint(&hint);
    }
    if !has_config {
        context.output.print_hint(
            "oubliette.toml is not in it, because the address of the store could not be taken out of it: keep a copy of it",
        );
    }
    Ok(())
}

/// Runs `oubliette restore`.
pub(crate) async fn restore(args: RestoreArgs, context: CommandContext) -> Result<()> {
    context.require_home("restore")?;
    ensure_stopped(&context, "restore").await?;
    let (home, location) = home_and_store(&context)?;
    let existing = match args.force {
        true => ExistingData::MoveAway,
        false => ExistingData::Refuse,
    };
    let progress = report_progress(context.output);
    let working = restore::restore(&home, &location, &args.file, existing, progress.clone());
    let finished = until_signal(Box::pin(working)).await;
    drop(progress);
    let FinishedRestore {
        manifest,
        moved_to,
        projects_dir,
        projects_moved_to,
        has_config,
        definition_error,
    } = finished?;
    let (rows, files) = (manifest.rows(), manifest.entries());
    let shape = json!({
        "file": args.file,
        "home": context.home.root(),
        "store": location.to_string(),
        "created_at": manifest.backup.created_at,
        "version": manifest.backup.version,
        "rows": rows,
        "files": files,
        "moved_to": moved_to,
        "workspaces": projects_dir,
        "workspaces_moved_to": projects_moved_to,
        "tables": table_rows(&manifest.tables),
    });
    context.output.print_result(&shape, |_| {
        format!(
            "{rows} rows are in {location} and {files} files in {}, as they were at {}",
            match &projects_dir {
                Some(dir) => format!("{} and {}", context.home.root().display(), dir.display()),
                None => context.home.root().display().to_string(),
            },
            manifest.backup.created_at
        )
    });
    for moved_to in [moved_to, projects_moved_to].into_iter().flatten() {
        let hint = format!(
            "what was there is in {}: remove it when you no longer need it",
            moved_to.display()
        );
        context.output.print_hint(&hint);
    }
    if let Some(error) = definition_error {
        context.output.print_hint(&format!(
            "agents and catalog entries are files of the home and not in the database yet: {}; correct them and run `oubliette \
             library push {}`",
            error.message,
            context.home.root().display()
        ));
    }
    if !has_config {
        context
            .output
            .print_hint("oubliette.toml was there and is unchanged; the backup's was not used");
    }
    Ok(())
}

/// Refuses to work beside a running server.
pub(crate) async fn ensure_stopped(context: &CommandContext, command: &str) -> Result<()> {
    match client::is_running(&context.home).await {
        true => Err(Error::conflict(format!(
            "a server is running for {}: stop it before `oubliette {command}`; nothing was changed",
            context.home.root().display()
        ))),
        false => Ok(()),
    }
}

/// The home with its projects where the configuration has them, and where its database is.
fn home_and_store(context: &CommandContext) -> Result<(HomeDir, StoreLocation)> {
    let config = ServerConfig::load(&context.home.config_path(), &|name| std::env::var(name).ok())?;
    let location = config.store_location(&context.home);
    Ok((
        context.home.clone().with_projects_dir(config.workspaces_dir),
        location,
    ))
}

/// Where the database of this home is.
pub(crate) fn store_location(context: &CommandContext) -> Result<StoreLocation> {
    let config = ServerConfig::load(&context.home.config_path(), &|name| std::env::var(name).ok())?;
    Ok(config.store_location(&context.home))
}

/// Shows progress on a terminal, until all clones are dropped.
pub(crate) fn report_progress(output: OutputFormat) -> ReportProgress {
    let line = TerminalProgress::new(output);
    Arc::new(move |text: &str| line.show(text))
}

/// The counts and hashes of tables, for `--json`.
pub(crate) fn table_rows(tables: &[oubliette_store::TableDigest]) -> Vec<Value> {
    let row = |table: &oubliette_store::TableDigest| json!({ "table": table.table.name, "rows": table.rows, "sha256": table.sha256 });
    tables.iter().map(row).collect()
}

/// The counts and hashes of tables, for people.
pub(crate) fn format_tables(tables: &[oubliette_store::TableDigest]) -> String {
    let row = |table: &oubliette_store::TableDigest| {
        let hash = table.sha256.get(..16).unwrap_or_default().to_owned();
        vec![table.table.name.clone(), table.rows.to_string(), hash]
    };
    let rows: Vec<_> = tables.iter().map(row).collect();
    format_table(&["TABLE", "ROWS", "SHA-256"], &rows)
}

/// Works until it is done, or until SIGINT or SIGTERM: then the work is dropped, which leaves everything as it was.
pub(crate) async fn until_signal<T>(work: impl Future<Output = Result<T>>) -> Result<T> {
    let hear = |kind| signal(kind).map_err(Error::internal);
    let (mut interrupt, mut terminate) = (hear(SignalKind::interrupt())?, hear(SignalKind::terminate())?);
    tokio::select! {
        done = work => done,
        _ = interrupt.recv() => Err(cancelled()),
        _ = terminate.recv() => Err(cancelled()),
    }
}

fn cancelled() -> Error {
    Error::unavailable("cancelled: nothing was changed, and nothing is left of it")
}
