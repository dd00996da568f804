//! Definitions written and removed through Oubliette: checked whole first, then written atomically.

use std::{collections::BTreeMap, fs, io::ErrorKind, path::Path, sync::Arc};

use oubliette_protocol::{
    CatalogId, Error, Result, Slug,
    agent::{AgentDefinition, MAX_DEFINITION_BYTES, plain_file_name},
    catalog::ToolDefinition,
};
use serde_json::Value;

use super::{
    AgentEntry, Library, ToolEntry, check_against,
    shelf::{Definition, Shelf, file_of},
};
use crate::disk;

/// Most files written beside one `agent.json`.
const MAX_FILES: usize = 64;
/// Definitions may hold environment values, so they are for the owner alone.
const MODE: u32 = 0o600;

impl Library {
    /// Writes an agent: its definition and the files beside it. Nothing is written when any of it is
    /// wrong; files that are there and not named stay.
    pub async fn agent_put(
        self: &Arc<Self>,
        slug: Slug,
        definition: Value,
        files: BTreeMap<String, String>,
    ) -> Result<Arc<AgentEntry>> {
        self.off_thread(move |library| library.agent_put_now(&slug, &definition, &files))
            .await
    }

    /// Removes an agent with all its files.
    pub async fn agent_delete(self: &Arc<Self>, slug: Slug) -> Result<()> {
        self.off_thread(move |library| {
            let mut state = library.state.lock();
            if !state.agents.has(&slug) {
                drop(state);
                return library.agent(&slug).map(|_| ());
            }
            remove_folder(&state.agents.folder(&slug))?;
            state.agents.scan_one(&library.root, &slug);
            library.settle(&mut state);
            Ok(())
        })
        .await
    }

    /// Writes a catalog entry.
    pub async fn tool_put(self: &Arc<Self>, id: CatalogId, definition: Value) -> Result<Arc<ToolEntry>> {
        self.off_thread(move |library| {
            let (text, _) = checked::<ToolDefinition>(&id, &definition)?;
            let mut state = library.state.lock();
            let folder = folder_for(&state.tools, &id)?;
            disk::write_atomic(&folder.join(ToolDefinition::FILE), text.as_bytes(), MODE)?;
            state.tools.scan_one(&library.root, &id);
            library.settle(&mut state);
            drop(state);
            library.tool(&id)
        })
        .await
    }

    /// Removes a catalog entry; `conflict` while an agent uses it.
    pub async fn tool_delete(self: &Arc<Self>, id: CatalogId) -> Result<()> {
        self.off_thread(move |library| {
            let mut state = library.state.lock();
            if !state.tools.has(&id) {
                drop(state);
                return library.tool(&id).map(|_| ());
            }
            // An agent edited by hand a moment ago counts too.
            state.agents.scan(&library.root);
            let mut users: Vec<_> = state
                .agents
                .all()
                .filter(|(_, a)| a.tools.uses.contains(&id))
                .map(|(slug, _)| slug.as_str())
                .collect();
            users.dedup();
            if !users.is_empty() {
                let users = users.join(", ");
                return Err(Error::conflict(format!(
                    "catalog entry {id} is used by {users}: take it out of their tools.use first"
                )));
            }
            remove_folder(&state.tools.folder(&id))?;
            state.tools.scan_one(&library.root, &id);
            library.settle(&mut state);
            Ok(())
        })
        .await
    }

    fn agent_put_now(
        &self,
        slug: &Slug,
        definition: &Value,
        files: &BTreeMap<String, String>,
    ) -> Result<Arc<AgentEntry>> {
        let (text, agent) = checked::<AgentDefinition>(slug, definition)?;
        check_files(files)?;
        let mut state = self.state.lock();
        // A tool added by hand a moment ago counts.
        state.tools.scan(&self.root);
        self.settle(&mut state);
        check_against(&agent, |id| state.tools.has_good(id))
            .map_err(|refusal| refusal.in_file(&file_of::<AgentDefinition>(slug)))?;
        let folder = folder_for(&state.agents, slug)?;
        // The definition last: it must not name a script that is not there yet.
        for (name, text) in files {
            disk::write_atomic(&folder.join(name), text.as_bytes(), MODE)?;
        }
        disk::write_atomic(&folder.join(AgentDefinition::FILE), text.as_bytes(), MODE)?;
        state.agents.scan_one(&self.root, slug);
        self.settle(&mut state);
        drop(state);
        self.agent(slug)
    }

    /// Writing waits for the disk, so it is done where waiting hurts nobody.
    async fn off_thread<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&Library) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let library = Arc::clone(self);
        tokio::task::spawn_blocking(move || work(&library))
            .await
            .map_err(Error::internal)?
    }
}

/// The text to write for a definition that passes every check of its own.
fn checked<D: Definition>(id: &D::Id, definition: &Value) -> Result<(String, D)> {
    let file = file_of::<D>(id);
    let mut text = serde_json::to_string_pretty(definition).map_err(Error::internal)?;
    text.push('\n');
    if text.len() > MAX_DEFINITION_BYTES {
        return Err(Error::invalid(format!(
            "{file}: is larger than {} KiB",
            MAX_DEFINITION_BYTES / 1024
        )));
    }
    let parsed = D::parse(id, &text).map_err(|refusal| refusal.in_file(&file))?;
    Ok((text, parsed))
}

fn check_files(files: &BTreeMap<String, String>) -> Result<()> {
    if files.len() > MAX_FILES {
        return Err(Error::invalid(format!(
            "files: {} are too many; at most {MAX_FILES}",
            files.len()
        )));
    }
    for (name, text) in files {
        let refuse = |why: String| Err(Error::invalid(format!("files.{}: {why}", name.escape_debug())));
        if let Err(why) = plain_file_name(name) {
            return refuse(why.into());
        }
        if name == AgentDefinition::FILE {
            return refuse("give it as definition, not as a file".into());
        }
        if text.len() > MAX_DEFINITION_BYTES {
            return refuse(format!("is larger than {} KiB", MAX_DEFINITION_BYTES / 1024));
        }
    }
    Ok(())
}

/// The folder to write a definition into, made if need be; never one that a link puts elsewhere.
fn folder_for<D: Definition>(shelf: &Shelf<D>, id: &D::Id) -> Result<std::path::PathBuf> {
    let folder = shelf.folder(id);
    disk::private_dir(&folder)?;
    match fs::symlink_metadata(&folder) {
        Ok(seen) if seen.is_dir() => Ok(folder),
        Ok(_) => Err(Error::conflict(format!(
            "{}/{id} is a symbolic link, which is not written through: replace it by a folder",
            D::SHELF
        ))),
        Err(e) => Err(disk::io_error("look at", &folder, &e)),
    }
}

/// Takes a folder away at once, then its content.
fn remove_folder(folder: &Path) -> Result<()> {
    let fail = |e: &std::io::Error| disk::io_error("remove", folder, e);
    let seen = fs::symlink_metadata(folder).map_err(|e| fail(&e))?;
    if seen.is_symlink() {
        return fs::remove_file(folder).map_err(|e| fail(&e));
    }
    let shelf = folder.parent().unwrap_or(folder);
    // Renamed into a name no definition can have: half of a folder must never be read as one.
    let grave = tempfile::Builder::new()
        .prefix(".removing-")
        .tempdir_in(shelf)
        .map_err(|e| fail(&e))?;
    fs::rename(folder, grave.path().join("it")).map_err(|e| fail(&e))?;
    disk::sync_dir(shelf).map_err(|e| fail(&e))?;
    match grave.close() {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(fail(&e)),
        _ => Ok(()),
    }
}
