//! `oubliette library …`: exchanges agents and catalog entries with a directory, such as a repository of a team.

use std::{
    collections::BTreeMap,
    path::{Path, PathBuf},
};

use oubliette_home::{LibraryDir, StagedDefinition};
use oubliette_protocol::{
    Error, Result,
    library::{DefinitionFiles, DefinitionKey, DefinitionKind},
};
use serde_json::{Value, json};

use super::{
    CommandContext,
    client::ActionClient,
    output::{OutputFormat, field_text},
    style::strip_control_chars,
};
use crate::{
    actions::library_exchange::{MAX_PUSH_BYTES, PushedDefinition},
    definitions::digest::definition_digest,
};

/// How often a pull begins again because definitions change while they are read.
const PULL_ATTEMPTS: usize = 3;
/// Maximum names that an error lists.
const MAX_LISTED: usize = 10;

/// What `library` does.
#[derive(Debug, clap::Subcommand)]
pub(crate) enum LibraryCommand {
    /// Make the library what a directory holds: agents/<slug>/ and tools/<id>/ with all their files. Everything is checked
    /// before anything changes.
    Push(PushArgs),
    /// Write the library's agents and catalog entries, with all their files, into a directory.
    Pull(PullArgs),
}

/// Arguments of `library push`.
#[derive(Debug, clap::Args)]
pub(crate) struct PushArgs {
    /// The directory, with agents/ or tools/ in it.
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Delete agents and catalog entries that the directory does not have.
    #[arg(long)]
    pub(crate) prune: bool,
    /// Show what would change, and change nothing.
    #[arg(long)]
    pub(crate) dry_run: bool,
}

/// Arguments of `library pull`.
#[derive(Debug, clap::Args)]
pub(crate) struct PullArgs {
    /// The directory; made if it is missing.
    #[arg(value_name = "DIR")]
    pub(crate) dir: PathBuf,
    /// Replace definitions of the directory that differ from the library, and remove those that the library does not have.
    #[arg(long)]
    pub(crate) force: bool,
}

/// Runs `oubliette library`.
pub(crate) async fn run(command: LibraryCommand, context: CommandContext) -> Result<()> {
    // Looked at first: a wrong path is no reason to open anything.
    if let LibraryCommand::Push(args) = &command {
        check_pushed_dir(&args.dir)?;
    }
    let client = ActionClient::connect(&context).await?;
    let done = match command {
        LibraryCommand::Push(args) => push(&args, &client, context.output).await,
        LibraryCommand::Pull(args) => pull(&args, &client, context.output).await,
    };
    client.close().await;
    done
}

/// The hash of each definition of the library; none for one whose files cannot be read.
async fn list(client: &ActionClient) -> Result<BTreeMap<DefinitionKey, Option<String>>> {
    let listed = client
        .list("library_list", "definitions", json!({}), None)
        .await?;
    let rows = listed["definitions"].as_array().map_or(&[][..], Vec::as_slice);
    let entry = |row: &Value| {
        let kind: DefinitionKind = field_text(row, "kind").parse()?;
        let key = DefinitionKey::parse(kind, &field_text(row, "id"))?;
        Ok((key, row["sha256"].as_str().map(str::to_owned)))
    };
    rows.iter().map(entry).collect()
}

async fn push(args: &PushArgs, client: &ActionClient, output: OutputFormat) -> Result<()> {
    let dir = LibraryDir::at(&args.dir);
    let listed = list(client).await?;
    let keys = dir.keys()?;
    let (mut puts, mut unchanged, mut bytes) = (Vec::new(), Vec::new(), 0);
    for key in &keys {
        let definition = dir.read(key)?;
        let digest = definition_digest(&definition);
        if listed
            .get(key)
            .is_some_and(|known| known.as_ref() == Some(&digest))
        {
            unchanged.push(named(key));
            continue;
        }
        bytes += definition
            .files
            .iter()
            .map(|file| file.content.len())
            .sum::<usize>();
        if bytes > MAX_PUSH_BYTES {
            return Err(Error::limit_exceeded(format!(
                "what is new or changed in {} has more than {} MiB: push it in parts; nothing was changed",
                args.dir.display(),
                MAX_PUSH_BYTES >> 20
            )));
        }
        puts.push(PushedDefinition::from(definition));
    }
    let others: Vec<&DefinitionKey> = listed.keys().filter(|key| !keys.contains(key)).collect();
    let deletes: Vec<Value> = match args.prune {
        true => others.iter().map(|key| named(key)).collect(),
        false => Vec::new(),
    };
    let request = json!({ "puts": puts, "deletes": deletes, "dry_run": args.dry_run });
    let mut pushed = client.call("library_push", request).await?;
    if let Some(list) = pushed["unchanged"].as_array_mut() {
        list.extend(unchanged);
    }
    let kept: Vec<Value> = match args.prune {
        true => Vec::new(),
        false => others.iter().map(|key| named(key)).collect(),
    };
    pushed["kept"] = json!(kept);
    output.print_result(&pushed, format_pushed);
    if !kept.is_empty() {
        output.print_hint(&format!(
            "only in the library, and kept there: {}; --prune deletes them",
            list_names(others.iter().map(ToString::to_string))
        ));
    }
    Ok(())
}

fn check_pushed_dir(dir: &Path) -> Result<()> {
    let shown = dir.display();
    if !dir.is_dir() {
        return Err(Error::not_found(format!("{shown} is not a directory")));
    }
    match DefinitionKind::ALL
        .iter()
        .any(|kind| dir.join(kind.folder()).exists())
    {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{shown} has neither agents/ nor tools/: name the directory that has them"
        ))),
    }
}

async fn pull(args: &PullArgs, client: &ActionClient, output: OutputFormat) -> Result<()> {
    let dir = LibraryDir::at(&args.dir);
    for _ in 0..PULL_ATTEMPTS {
        let listed = list(client).await?;
        let local = read_local(&dir)?;
        let has_local = |key: &DefinitionKey, digest: &Option<String>| {
            digest.is_some() && local.get(key).is_some_and(|found| found == digest)
        };
        if !args.force {
            let differing = local
                .keys()
                .filter(|key| !listed.get(key).is_some_and(|digest| has_local(key, digest)));
            let differing: Vec<String> = differing.map(ToString::to_string).collect();
            if !differing.is_empty() {
                return Err(Error::conflict(format!(
                    "{} has other definitions than the library: {}; nothing was changed. Keep a copy of what you need, and \
                     --force replaces them",
                    args.dir.display(),
                    list_names(differing)
                )));
            }
        }
        let mut staged: Vec<(DefinitionKey, StagedDefinition)> = Vec::new();
        let mut is_stale = false;
        for (key, digest) in listed.iter().filter(|(key, digest)| !has_local(key, digest)) {
            let definition = read_remote(client, key).await?;
            if digest
                .as_ref()
                .is_some_and(|digest| *digest != definition_digest(&definition))
            {
                is_stale = true;
                break;
            }
            staged.push((key.clone(), dir.stage(&definition)?));
        }
        if is_stale {
            continue;
        }
        let removed: Vec<DefinitionKey> = local
            .into_keys()
            .filter(|key| !listed.contains_key(key))
            .collect();
        let written: Vec<Value> = staged.iter().map(|(key, _)| named(key)).collect();
        for (_, definition) in staged {
            definition.publish()?;
        }
        for key in &removed {
            dir.remove(key)?;
        }
        let pulled = json!({
            "written": written,
            "removed": removed.iter().map(named).collect::<Vec<_>>(),
            "unchanged": listed.len() - written.len(),
        });
        output.print_result(&pulled, |pulled| format_pulled(pulled, &args.dir));
        return Ok(());
    }
    Err(Error::unavailable(
        "definitions change while they are read: try again; nothing was changed",
    ))
}

/// The hash of each definition of a directory; none for one whose files are not those of a definition.
fn read_local(dir: &LibraryDir) -> Result<BTreeMap<DefinitionKey, Option<String>>> {
    let keys = dir.keys()?.into_iter();
    Ok(keys
        .map(|key| {
            let digest = dir.read(&key).ok().map(|found| definition_digest(&found));
            (key, digest)
        })
        .collect())
}

async fn read_remote(client: &ActionClient, key: &DefinitionKey) -> Result<DefinitionFiles> {
    let arguments = json!({ "kind": key.kind, "id": key.id() });
    let read = client.call("library_read", arguments).await?;
    let read: PushedDefinition = serde_json::from_value(read)
        .map_err(|error| Error::internal_during(format!("reading {key}"), error))?;
    let definition = DefinitionFiles::try_from(read)?;
    match definition.key == *key {
        true => Ok(definition),
        false => Err(Error::internal("the server answered with another definition")),
    }
}

fn named(key: &DefinitionKey) -> Value {
    json!({ "kind": key.kind, "id": key.id() })
}

fn list_names(names: impl IntoIterator<Item = String>) -> String {
    let names: Vec<String> = names.into_iter().collect();
    let shown = names
        .iter()
        .take(MAX_LISTED)
        .cloned()
        .collect::<Vec<_>>()
        .join(", ");
    match names.len() > MAX_LISTED {
        true => format!("{shown} and {} more", names.len() - MAX_LISTED),
        false => shown,
    }
}

fn lines(result: &Value, field: &str, mark: &str) -> Vec<String> {
    let rows = result[field].as_array().map_or(&[][..], Vec::as_slice);
    let line = |row: &Value| {
        let folder = if row["kind"] == "agent" { "agents" } else { "tools" };
        format!("{mark} {folder}/{}", strip_control_chars(&field_text(row, "id")))
    };
    rows.iter().map(line).collect()
}

fn format_pushed(pushed: &Value) -> String {
    let mut text = lines(pushed, "added", "+");
    text.extend(lines(pushed, "changed", "~"));
    text.extend(lines(pushed, "deleted", "-"));
    let count = text.len();
    let unchanged = pushed["unchanged"].as_array().map_or(0, Vec::len);
    text.push(match (count, pushed["dry_run"] == true) {
        (0, _) => format!("Nothing to change: {unchanged} definitions are the same."),
        (_, true) => {
            format!("{count} definitions would change, {unchanged} are the same. Nothing was changed.")
        }
        (_, false) => format!("{count} definitions are changed, {unchanged} were the same."),
    });
    text.join("\n")
}

fn format_pulled(pulled: &Value, dir: &Path) -> String {
    let mut text = lines(pulled, "written", "+");
    text.extend(lines(pulled, "removed", "-"));
    let unchanged = field_text(pulled, "unchanged");
    text.push(match text.len() {
        0 => format!("{} is as the library: {unchanged} definitions.", dir.display()),
        count => format!(
            "{count} definitions of {} are changed, {unchanged} were the same.",
            dir.display()
        ),
    });
    text.join("\n")
}
