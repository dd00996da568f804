//! Changing many definitions at once: checked against what the library will be, then put in place together.

use std::collections::{BTreeMap, BTreeSet};

use oubliette_protocol::{
    CatalogId, Error, Result, Slug,
    agent::AgentDefinition,
    catalog::ToolDefinition,
    library::{DefinitionFiles, DefinitionKey, DefinitionKind, LibraryChange, LibraryFile},
};
use serde_json::Value;

use super::{
    DefinitionLibrary, LibraryDir, StagedDefinition, check_catalog_references,
    definition_set::{DefinitionFile, display_path},
    edit::{self, MODE},
};

impl DefinitionLibrary {
    /// The directory of its definitions.
    pub fn dir(&self) -> &LibraryDir {
        &self.dir
    }

    /// Every definition, usable or not.
    pub fn keys(&self) -> Vec<DefinitionKey> {
        let state = self.state.lock();
        let agents = state.agents.ids().map(DefinitionKey::agent);
        let tools = state.tools.ids().filter_map(|id| DefinitionKey::tool(id).ok());
        agents.chain(tools).collect()
    }

    /// Whether there is such a definition, usable or not.
    pub fn has(&self, key: &DefinitionKey) -> bool {
        let state = self.state.lock();
        match key.kind {
            DefinitionKind::Agent => key.id().parse().is_ok_and(|slug| state.agents.has(&slug)),
            DefinitionKind::Tool => key.id().parse().is_ok_and(|id| state.tools.has(&id)),
        }
    }

    /// The whole files of an agent that is put: its definition, these files, and what it has besides.
    pub fn agent_files(
        &self,
        slug: &Slug,
        definition: &Value,
        files: &BTreeMap<String, String>,
    ) -> Result<DefinitionFiles> {
        let (text, _) = edit::check_and_format::<AgentDefinition>(slug, definition)?;
        edit::check_files(files)?;
        let mut given: Vec<LibraryFile> = files.iter().map(|(name, text)| written(name, text)).collect();
        given.push(written(AgentDefinition::FILE, &text));
        self.with_present(DefinitionKey::agent(slug), given)
    }

    /// The whole files of a catalog entry that is put.
    pub fn tool_files(&self, id: &CatalogId, definition: &Value) -> Result<DefinitionFiles> {
        let (text, _) = edit::check_and_format::<ToolDefinition>(id, definition)?;
        self.with_present(
            DefinitionKey::tool(id)?,
            vec![written(ToolDefinition::FILE, &text)],
        )
    }

    fn with_present(&self, key: DefinitionKey, mut files: Vec<LibraryFile>) -> Result<DefinitionFiles> {
        if self.has(&key) {
            let names: BTreeSet<String> = files.iter().map(|file| file.path.clone()).collect();
            let present = self.dir.read(&key)?.files;
            files.extend(present.into_iter().filter(|file| !names.contains(&file.path)));
        }
        files.sort_by(|one, other| one.path.cmp(&other.path));
        let whole = DefinitionFiles { key, files };
        whole.check()?;
        Ok(whole)
    }

    /// Checks a change as a whole: every definition by itself, agents against the catalog as it will be, and that no agent
    /// uses a catalog entry that is deleted.
    pub fn check_change(&self, change: &LibraryChange) -> Result<()> {
        let mut agents: BTreeMap<&str, AgentDefinition> = BTreeMap::new();
        let mut tools: BTreeSet<&str> = BTreeSet::new();
        let mut named = BTreeSet::new();
        for key in change.puts.iter().map(|put| &put.key).chain(&change.deletes) {
            if !named.insert(key) {
                return Err(Error::invalid(format!("{key} is named twice")));
            }
        }
        for put in &change.puts {
            put.check()?;
            match put.key.kind {
                DefinitionKind::Agent => {
                    agents.insert(put.key.id(), parse::<AgentDefinition>(put)?);
                }
                DefinitionKind::Tool => {
                    parse::<ToolDefinition>(put)?;
                    tools.insert(put.key.id());
                }
            }
        }
        for key in &change.deletes {
            if !self.has(key) {
                return Err(Error::not_found(format!("there is no {key}")));
            }
        }
        let is_deleted = |kind, id: &str| {
            change
                .deletes
                .iter()
                .any(|key| key.kind == kind && key.id() == id)
        };
        let mut state = self.state.lock();
        self.scan_if_watched(&mut state);
        let known = |id: &str| {
            tools.contains(id) || state.tools.has_usable(id) && !is_deleted(DefinitionKind::Tool, id)
        };
        for (slug, agent) in &agents {
            let file = format!("{}/{slug}/{}", AgentDefinition::FOLDER, AgentDefinition::FILE);
            check_catalog_references(agent, known).map_err(|refusal| refusal.in_file(&file))?;
        }
        for key in change
            .deletes
            .iter()
            .filter(|key| key.kind == DefinitionKind::Tool)
        {
            let stays = |slug: &str| !agents.contains_key(slug) && !is_deleted(DefinitionKind::Agent, slug);
            let uses = |agent: &AgentDefinition| agent.tools.uses.iter().any(|id| id.as_str() == key.id());
            let mut users: BTreeSet<&str> = state
                .agents
                .all()
                .filter(|(slug, agent)| stays(slug.as_str()) && uses(agent))
                .map(|(slug, _)| slug.as_str())
                .collect();
            users.extend(
                agents
                    .iter()
                    .filter(|(_, agent)| uses(agent))
                    .map(|(slug, _)| *slug),
            );
            if !users.is_empty() {
                let users = users.into_iter().collect::<Vec<_>>().join(", ");
                return Err(Error::conflict(format!(
                    "catalog entry {} is used by {users}: take it out of their tools.use first",
                    key.id()
                )));
            }
        }
        Ok(())
    }

    /// Puts staged definitions in their places and removes others. Readers see all of it at once.
    pub fn replace(&self, staged: Vec<StagedDefinition>, removed: &[DefinitionKey]) -> Result<()> {
        let mut state = self.state.lock();
        let touched = staged.iter().map(StagedDefinition::key).chain(removed);
        let touched: Vec<DefinitionKey> = touched.cloned().collect();
        let replaced = (|| {
            for definition in staged {
                definition.publish()?;
            }
            removed.iter().try_for_each(|key| self.dir.remove(key))
        })();
        // Also after an error: a part may be in place. Nothing else is looked at: files that somebody put into the copy of a
        // database have no effect.
        for key in &touched {
            match key.kind {
                DefinitionKind::Agent => state.agents.scan_one(&self.root, key.slug()),
                DefinitionKind::Tool => {
                    if let Ok(id) = key.id().parse() {
                        state.tools.scan_one(&self.root, &id);
                    }
                }
            }
        }
        self.publish_changes(&mut state);
        replaced
    }

    /// Checks a change and writes it to the files, which survive a power cut when this returns.
    pub fn write_change(&self, change: &LibraryChange) -> Result<()> {
        self.check_change(change)?;
        let staged: Result<Vec<_>> = change.puts.iter().map(|put| self.dir.stage(put)).collect();
        let staged = staged?;
        self.dir.sync()?;
        self.replace(staged, &change.deletes)?;
        self.dir.sync()
    }
}

fn written(name: &str, text: &str) -> LibraryFile {
    LibraryFile {
        path: name.to_owned(),
        mode: MODE,
        content: text.as_bytes().to_vec(),
    }
}

fn parse<D: DefinitionFile>(put: &DefinitionFiles) -> Result<D> {
    let id: D::Id = put
        .key
        .id()
        .parse()
        .map_err(|_| Error::invalid(format!("{} is not a valid name", put.key)))?;
    D::parse(&id, put.main_text()?).map_err(|refusal| refusal.in_file(&display_path::<D>(&id)))
}
