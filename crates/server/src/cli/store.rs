//! `oubliette store copy`: everything from the database of a home into another one.

use std::path::{Path, PathBuf};

use oubliette_home::HomeDir;
use oubliette_protocol::{Error, Result};
use oubliette_store::{DatabaseLock, DatabaseUrl, Store, StoreLocation, StoreOptions, transfer};
use serde_json::json;

use super::{CommandContext, backup};
use crate::definitions::DefinitionEditor;

/// What `store` does.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum StoreCommand {
    /// Copy the whole database into an empty one and compare every table; no server may run on either. The source is not
    /// changed.
    Copy(CopyArgs),
}

/// Arguments of `store copy`.
#[derive(Debug, clap::Args)]
pub(crate) struct CopyArgs {
    /// The database to fill, which must be empty: postgres://USER:PASSWORD@HOST:PORT/DATABASE, or sqlite:FILE.
    #[arg(long, value_name = "URL")]
    pub(crate) to: String,
}

/// Runs `oubliette store`.
pub(crate) async fn run(command: StoreCommand, context: CommandContext) -> Result<()> {
    let StoreCommand::Copy(CopyArgs { to }) = command;
    context.require_home("store copy")?;
    backup::ensure_stopped(&context, "store copy").await?;
    let from = backup::store_location(&context)?;
    let to = parse_target(&to)?;
    if let StoreLocation::File(database) = &from
        && !database.exists()
    {
        return Err(Error::not_found(format!(
            "there is nothing to copy: {} does not exist; name the home with --home",
            database.display()
        )));
    }
    let own_database = context.home.database_path();
    // The home's own lock is held while the source is open, wherever the source is.
    let _lock = match &to {
        StoreLocation::File(path) if is_same(path, &own_database) => {
            if matches!(from, StoreLocation::File(_)) {
                return Err(Error::invalid(format!(
                    "{} is the database that is to be copied",
                    path.display()
                )));
            }
            None
        }
        StoreLocation::File(path) => Some(DatabaseLock::take(path).await?),
        StoreLocation::Postgres(_) => None,
    };
    let progress = backup::report_progress(context.output);
    let options = StoreOptions {
        lock_file: Some(own_database),
        ..StoreOptions::default()
    };
    let copying = transfer::copy_store(&from, &options, &to, |table, rows| {
        progress(&format!("{table}: {rows} rows"));
    });
    let copied = backup::until_signal(Box::pin(copying)).await;
    drop(progress);
    let tables = copied?;
    let definition_error = match (&from, &to) {
        (StoreLocation::File(_), StoreLocation::Postgres(_)) => {
            bring_definitions(&context.home, &to).await.err()
        }
        _ => None,
    };
    let rows: u64 = tables.iter().map(|table| table.rows).sum();
    let shape = json!({
        "from": from.to_string(),
        "to": to.to_string(),
        "rows": rows,
        "tables": backup::table_rows(&tables),
    });
    context.output.print_result(&shape, |_| {
        format!(
            "{}\n{rows} rows of {from} are in {to}; counts and hashes of all tables agree",
            backup::format_tables(&tables)
        )
    });
    context.output.print_hint(match &to {
        StoreLocation::Postgres(_) => {
            "to use it, set `url` under [store] in oubliette.toml, or OUBLIETTE_STORE_URL, and start the server; workspaces stay in the home, and agents and catalog entries are in the database from then on"
        }
        StoreLocation::File(_) => {
            "to use it, it has to be HOME/oubliette.db, and `url` under [store] and OUBLIETTE_STORE_URL have to be gone; agents and catalog entries become files of the home at the first start"
        }
    });
    if let Some(error) = definition_error {
        let home = context.home.root().display();
        context.output.print_hint(&format!(
            "agents and catalog entries are not in the database yet: {}; correct them and run `oubliette library push {home}` \
             when the server uses it",
            error.message
        ));
    }
    Ok(())
}

/// Brings the home's definition files into a database that was just filled.
async fn bring_definitions(home: &HomeDir, to: &StoreLocation) -> Result<()> {
    let store = Store::open_at(to, &StoreOptions::default()).await?;
    let opened = DefinitionEditor::open(home, &store, to).await;
    store.close().await;
    match opened?.import_error() {
        Some(error) => Err(Error::invalid(error)),
        None => Ok(()),
    }
}

fn parse_target(url: &str) -> Result<StoreLocation> {
    if let Some(path) = url.strip_prefix("sqlite:") {
        let path = path.strip_prefix("//").unwrap_or(path);
        if path.is_empty() {
            return Err(Error::invalid("sqlite: names no file: write sqlite:FILE"));
        }
        let path = std::path::absolute(path).map_err(Error::internal)?;
        return Ok(StoreLocation::File(path));
    }
    let url: DatabaseUrl = url
        .parse()
        .map_err(|error| Error::invalid(format!("--to: {error}; for a SQLite database write sqlite:FILE")))?;
    Ok(StoreLocation::Postgres(url))
}

/// Whether two paths are of one file, which need not exist.
fn is_same(one: &Path, other: &Path) -> bool {
    let resolved = |path: &Path| -> Option<PathBuf> {
        let folder = std::fs::canonicalize(path.parent()?).ok()?;
        Some(folder.join(path.file_name()?))
    };
    one == other || resolved(one).is_some_and(|one| Some(one) == resolved(other))
}
