//! Where definitions of agents and catalog entries are kept, and changing them there.
//!
//! Without `[store] url` they are files of the home, which people edit. With it they are rows of the database, which several
//! servers share, and the home has a copy of them (`HOME/library`) that the server reads and nobody else writes. Either way a
//! [`DefinitionLibrary`] reads directories.
//!
//! - [`library_copy`]: the copy of what the database holds, brought up to date, and changes of the database.
//! - [`relocate`]: definitions that are in the other place when a server starts: files for a new database, rows of a database
//!   that was copied or restored.
//! - [`digest`]: one hash of all files of a definition.

pub(crate) mod digest;
mod library_copy;
mod relocate;

use std::{collections::BTreeMap, sync::Arc};

use oubliette_home::{AgentEntry, DefinitionLibrary, HomeDir, LibraryDir, ToolEntry};
use oubliette_protocol::{
    CatalogId, Result, Slug,
    library::{DefinitionKey, LibraryChange},
};
use oubliette_store::{Store, StoreLocation};
use serde_json::Value;

pub(crate) use library_copy::follow_database;
pub(crate) use relocate::UnusedFiles;

use crate::actions::run_blocking;
use library_copy::LibraryCopy;

/// Changes definitions where they are kept.
#[derive(Debug)]
pub(crate) struct DefinitionEditor {
    library: Arc<DefinitionLibrary>,
    /// None: the files of the home are what counts.
    copy: Option<LibraryCopy>,
    /// Why the files of the home were not brought into a new database.
    import_error: Option<String>,
}

impl DefinitionEditor {
    /// Loads the definitions of this home and its database. Moves them first if they are in the other place.
    pub(crate) async fn open(home: &HomeDir, store: &Store, location: &StoreLocation) -> Result<Self> {
        match location {
            StoreLocation::File(_) => {
                relocate::write_out(home, store).await?;
                Ok(Self {
                    library: DefinitionLibrary::open(home)?,
                    copy: None,
                    import_error: None,
                })
            }
            StoreLocation::Postgres(_) => {
                let library = DefinitionLibrary::open_copy(home)?;
                let copy = LibraryCopy::open(store.clone(), library.clone()).await?;
                let import_error = relocate::import(home, &copy)
                    .await
                    .err()
                    .map(|error| error.message);
                if let Some(error) = &import_error {
                    tracing::error!(
                        %error,
                        "agents and catalog entries of the home were not brought into the database; correct them and run \
                         `oubliette library push {}`",
                        home.root().display()
                    );
                } else {
                    relocate::warn_of_unused(home, &library);
                }
                Ok(Self {
                    library,
                    copy: Some(copy),
                    import_error,
                })
            }
        }
    }

    /// The definitions.
    pub(crate) fn library(&self) -> &Arc<DefinitionLibrary> {
        &self.library
    }

    /// Why the files of the home were not brought into a new database; none if they were, or there are none.
    pub(crate) fn import_error(&self) -> Option<&str> {
        self.import_error.as_deref()
    }

    /// The files of the home that have no effect, because definitions are in the database; none if they are not.
    pub(crate) fn unused_files(&self, home: &HomeDir) -> Option<UnusedFiles> {
        self.copy.as_ref()?;
        relocate::find_unused(home, self.library.dir(), |key| self.library.has(key))
    }

    /// Puts an agent: its definition and files beside it. Files that are not given stay.
    pub(crate) async fn agent_put(
        &self,
        slug: Slug,
        definition: Value,
        files: BTreeMap<String, String>,
    ) -> Result<Arc<AgentEntry>> {
        let Some(copy) = &self.copy else {
            return self.library.agent_put(slug, definition, files).await;
        };
        let put = slug.clone();
        let plan = move |library: &DefinitionLibrary| {
            Ok(LibraryChange {
                puts: vec![library.agent_files(&put, &definition, &files)?],
                deletes: Vec::new(),
            })
        };
        copy.change(plan).await?;
        self.library.agent(&slug)
    }

    /// Deletes an agent with all its files.
    pub(crate) async fn agent_delete(&self, slug: Slug) -> Result<()> {
        let Some(copy) = &self.copy else {
            return self.library.agent_delete(slug).await;
        };
        copy.change(move |library| {
            let key = DefinitionKey::agent(&slug);
            if !library.has(&key) {
                library.agent(&slug)?;
            }
            Ok(deletion(key))
        })
        .await
    }

    /// Puts a catalog entry.
    pub(crate) async fn tool_put(&self, id: CatalogId, definition: Value) -> Result<Arc<ToolEntry>> {
        let Some(copy) = &self.copy else {
            return self.library.tool_put(id, definition).await;
        };
        let put = id.clone();
        let plan = move |library: &DefinitionLibrary| {
            Ok(LibraryChange {
                puts: vec![library.tool_files(&put, &definition)?],
                deletes: Vec::new(),
            })
        };
        copy.change(plan).await?;
        self.library.tool(&id)
    }

    /// Deletes a catalog entry; `conflict` while an agent uses it.
    pub(crate) async fn tool_delete(&self, id: CatalogId) -> Result<()> {
        let Some(copy) = &self.copy else {
            return self.library.tool_delete(id).await;
        };
        copy.change(move |library| {
            let key = DefinitionKey::tool(&id)?;
            if !library.has(&key) {
                library.tool(&id)?;
            }
            Ok(deletion(key))
        })
        .await
    }

    /// Makes the change that `plan` returns, all of it or nothing. It may be asked again, if others change definitions at the
    /// same time.
    pub(crate) async fn change(
        &self,
        plan: impl Fn(&DefinitionLibrary) -> Result<LibraryChange> + Send + Sync + 'static,
    ) -> Result<()> {
        match &self.copy {
            Some(copy) => copy.change(plan).await,
            None => {
                let library = self.library.clone();
                run_blocking(move || library.write_change(&plan(&library)?)).await
            }
        }
    }
}

fn deletion(key: DefinitionKey) -> LibraryChange {
    LibraryChange {
        puts: Vec::new(),
        deletes: vec![key],
    }
}

/// The directory in which the definitions of a home are that no server has open: its files, or the copy of its database.
pub(crate) fn open_stopped(home: &HomeDir, location: &StoreLocation) -> Result<Arc<DefinitionLibrary>> {
    match location {
        StoreLocation::File(_) => DefinitionLibrary::open(home),
        StoreLocation::Postgres(_) => DefinitionLibrary::open_copy(home),
    }
}

/// The files of a stopped home that have no effect, because definitions are in the database.
pub(crate) fn unused_files_of_stopped(home: &HomeDir, location: &StoreLocation) -> Option<UnusedFiles> {
    match location {
        StoreLocation::File(_) => None,
        StoreLocation::Postgres(_) => relocate::find_unused(home, &home.library_copy(), |_| true),
    }
}

/// The directory of a home's own definition files.
pub(crate) fn home_files(home: &HomeDir) -> LibraryDir {
    LibraryDir::at(home.root())
}
