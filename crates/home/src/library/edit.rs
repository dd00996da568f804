//! Writing and removing definitions through Oubliette: checked completely first, then written atomically.

use std::{collections::BTreeMap, fs, io::ErrorKind, path::Path, sync::Arc};

use oubliette_protocol::{
    CatalogId, Error, Result, Slug,
    agent::{AgentDefinition, MAX_DEFINITION_BYTES, check_file_name},
    catalog::ToolDefinition,
};
use serde_json::Value;

use super::{
    AgentEntry, DefinitionLibrary, ToolEntry, check_catalog_references,
    definition_set::{DefinitionFile, DefinitionSet, display_path},
    home_files::check_home_path,
};
use crate::safe_fs;

/// Maximum files written beside one `agent.json`.
const MAX_FILES: usize = 64;
/// Mode of written files: definitions may contain secrets in environment values, so only the owner reads them.
pub(super) const MODE: u32 = 0o600;

impl DefinitionLibrary {
    /// Writes an agent: its definition and the files beside it. Nothing is written if any of it is invalid;
    /// existing files that are not given stay.
    pub async fn agent_put(
        self: &Arc<Self>,
        slug: Slug,
        definition: Value,
        files: BTreeMap<String, String>,
    ) -> Result<Arc<AgentEntry>> {
        self.run_blocking(move |library| library.write_agent(&slug, &definition, &files))
            .await
    }

    /// Removes an agent with all its files.
    pub async fn agent_delete(self: &Arc<Self>, slug: Slug) -> Result<()> {
        self.run_blocking(move |library| {
            let mut state = library.state.lock();
            if !state.agents.has(&slug) {
                drop(state);
                return library.agent(&slug).map(|_| ());
            }
            remove_folder(&state.agents.folder(&slug))?;
            state.agents.scan_one(&library.root, &slug);
            library.publish_changes(&mut state);
            Ok(())
        })
        .await
    }

    /// Writes a catalog entry.
    pub async fn tool_put(self: &Arc<Self>, id: CatalogId, definition: Value) -> Result<Arc<ToolEntry>> {
        self.run_blocking(move |library| {
            let (text, _) = check_and_format::<ToolDefinition>(&id, &definition)?;
            let mut state = library.state.lock();
            let folder = folder_for(&state.tools, &id)?;
            safe_fs::write_atomic(&folder.join(ToolDefinition::FILE), text.as_bytes(), MODE)?;
            state.tools.scan_one(&library.root, &id);
            library.publish_changes(&mut state);
            drop(state);
            library.tool(&id)
        })
        .await
    }

    /// Removes a catalog entry; `conflict` while an agent uses it.
    pub async fn tool_delete(self: &Arc<Self>, id: CatalogId) -> Result<()> {
        self.run_blocking(move |library| {
            let mut state = library.state.lock();
            if !state.tools.has(&id) {
                drop(state);
                return library.tool(&id).map(|_| ());
            }
            // Includes agents edited on disk a moment ago, before the watcher saw it.
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
            library.publish_changes(&mut state);
            Ok(())
        })
        .await
    }

    fn write_agent(
        &self,
        slug: &Slug,
        definition: &Value,
        files: &BTreeMap<String, String>,
    ) -> Result<Arc<AgentEntry>> {
        let (text, agent) = check_and_format::<AgentDefinition>(slug, definition)?;
        check_files(files)?;
        let mut state = self.state.lock();
        // Includes tools added on disk a moment ago, before the watcher saw it.
        state.tools.scan(&self.root);
        self.publish_changes(&mut state);
        check_catalog_references(&agent, |id| state.tools.has_usable(id))
            .map_err(|refusal| refusal.in_file(&display_path::<AgentDefinition>(slug)))?;
        let folder = folder_for(&state.agents, slug)?;
        // The definition last: it must not refer to a script that is not written yet.
        for (name, text) in files {
            write_beside(&folder, name, text)?;
        }
        safe_fs::write_atomic(&folder.join(AgentDefinition::FILE), text.as_bytes(), MODE)?;
        state.agents.scan_one(&self.root, slug);
        self.publish_changes(&mut state);
        drop(state);
        self.agent(slug)
    }

    /// Runs work that waits for the disk on tokio's blocking threads.
    async fn run_blocking<T: Send + 'static>(
        self: &Arc<Self>,
        work: impl FnOnce(&DefinitionLibrary) -> Result<T> + Send + 'static,
    ) -> Result<T> {
        let library = Arc::clone(self);
        tokio::task::spawn_blocking(move || work(&library))
            .await
            .map_err(Error::internal)?
    }
}

/// Checks a definition by itself and formats it; returns the text to write and the parsed definition.
pub(super) fn check_and_format<D: DefinitionFile>(id: &D::Id, definition: &Value) -> Result<(String, D)> {
    let file = display_path::<D>(id);
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

/// Writes a file beside `agent.json`, creating the folders in its name. A folder that is a symbolic link is refused: it
/// could lead outside the home.
fn write_beside(folder: &Path, name: &str, text: &str) -> Result<()> {
    let path = folder.join(name);
    let mut dir = folder.to_path_buf();
    let parents = name.rsplit_once('/').map_or("", |(parents, _)| parents);
    for part in parents.split('/').filter(|part| !part.is_empty()) {
        dir.push(part);
        safe_fs::create_private_dir(&dir)?;
        match fs::symlink_metadata(&dir) {
            Ok(seen) if seen.is_dir() => {}
            Ok(_) => {
                return Err(Error::conflict(format!(
                    "{} is a symbolic link, which is not written through: replace it by a folder",
                    dir.display()
                )));
            }
            Err(e) => return Err(safe_fs::io_error("look at", &dir, e)),
        }
    }
    safe_fs::write_atomic(&path, text.as_bytes(), MODE)
}

pub(super) fn check_files(files: &BTreeMap<String, String>) -> Result<()> {
    if files.len() > MAX_FILES {
        return Err(Error::invalid(format!(
            "files: {} are too many; at most {MAX_FILES}",
            files.len()
        )));
    }
    for (name, text) in files {
        let refuse = |why: String| Err(Error::invalid(format!("files.{}: {why}", name.escape_debug())));
        let checked = match name.contains('/') {
            true => check_home_path(name),
            false => check_file_name(name),
        };
        if let Err(why) = checked {
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

/// The directory to write a definition into, created if missing. A symbolic link is refused: it could lead
/// outside the home.
fn folder_for<D: DefinitionFile>(set: &DefinitionSet<D>, id: &D::Id) -> Result<std::path::PathBuf> {
    let folder = set.folder(id);
    safe_fs::create_private_dir(&folder)?;
    match fs::symlink_metadata(&folder) {
        Ok(seen) if seen.is_dir() => Ok(folder),
        Ok(_) => Err(Error::conflict(format!(
            "{}/{id} is a symbolic link, which is not written through: replace it by a folder",
            D::FOLDER
        ))),
        Err(e) => Err(safe_fs::io_error("look at", &folder, e)),
    }
}

/// Removes a directory: renames it away in one step, then deletes its content.
pub(super) fn remove_folder(folder: &Path) -> Result<()> {
    let fail = |e: std::io::Error| safe_fs::io_error("remove", folder, e);
    let seen = fs::symlink_metadata(folder).map_err(fail)?;
    if seen.is_symlink() {
        return fs::remove_file(folder).map_err(fail);
    }
    let parent = folder.parent().unwrap_or(folder);
    // Renamed to a name that is no valid id, so that a half-deleted directory is never read as a definition.
    let trash = tempfile::Builder::new()
        .prefix(".removing-")
        .tempdir_in(parent)
        .map_err(fail)?;
    fs::rename(folder, trash.path().join("it")).map_err(fail)?;
    safe_fs::sync_dir(parent).map_err(fail)?;
    match trash.close() {
        Err(e) if e.kind() != ErrorKind::NotFound => Err(fail(e)),
        _ => Ok(()),
    }
}
