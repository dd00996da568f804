//! `catalog_*`: the catalog of tool servers and built-in tools, the files under `tools/` in the home or the
//! database.

use std::borrow::Cow;

use oubliette_protocol::{CatalogId, Error, Result, Scope, library::DefinitionKey};
use oubliette_session::RunningToolServer;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use tokio::sync::Semaphore;

use super::{
    ActionCall, ActionHandler, Effect, StateOwner,
    library::{self, CatalogEntryView, LibraryEntry as _},
    tool_add::{self, EntryTest},
};

/// Maximum number of servers that `catalog_status` lists.
const MAX_SERVERS: usize = 1_000;
/// Tests that may run at once: each starts processes.
static TESTS: Semaphore = Semaphore::const_new(2);

/// `catalog_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogList {
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `catalog_get`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogGet {
    /// Id of the catalog entry, for example "files".
    pub id: CatalogId,
}

/// `catalog_put`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogPut {
    /// Id of the entry to create or replace: 1 to 32 of a-z, 0-9 and -, not starting with -.
    pub id: CatalogId,
    /// The whole tool.json, at most 1 MiB; its `id` may be left out. Required: kind ("mcp" with transport, or
    /// "builtin" with builtinPolicy). The value `***` in env or headers keeps the stored value,
    /// and is refused where none is stored.
    #[schemars(with = "serde_json::Map<String, Value>")]
    pub definition: Value,
}

/// `catalog_delete`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogDelete {
    /// Id of the catalog entry to delete.
    pub id: CatalogId,
}

/// `catalog_status`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogStatus {}

/// `catalog_test`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct CatalogTest {
    /// Id of the catalog entry to start once, for example "files".
    pub id: CatalogId,
}

/// Result of `catalog_list`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CatalogPage {
    /// The entries, by id.
    entries: Vec<CatalogEntryView>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

/// Result of `catalog_delete`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct CatalogEntryDeleted {
    /// The entry.
    id: CatalogId,
    /// True.
    deleted: bool,
}

/// Result of `catalog_status`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct RunningServers {
    /// The tool servers of sessions in memory, at most 1000.
    servers: Vec<RunningToolServer>,
}

impl ActionHandler for CatalogList {
    type Output = CatalogPage;

    const NAME: &'static str = "catalog_list";
    const DESCRIPTION: &'static str = "List the catalog's tool servers and built-ins, by id. One whose file is broken has usable false and its error.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let (catalog, broken) = (call.app.library.catalog(), call.app.library.broken_tools());
        let cursor = self.cursor.as_deref();
        let (entries, next_cursor) = library::list_entries(&catalog, &broken, self.limit, cursor)?;
        Ok(CatalogPage { entries, next_cursor })
    }
}

impl ActionHandler for CatalogGet {
    type Output = CatalogEntryView;

    const NAME: &'static str = "catalog_get";
    const DESCRIPTION: &'static str = "Show one catalog entry.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.app.library.tool(&self.id)?.view()
    }
}

impl ActionHandler for CatalogPut {
    type Output = CatalogEntryView;

    const NAME: &'static str = "catalog_put";
    const DESCRIPTION: &'static str = "Create or replace a catalog entry. Running sessions that use it start its server anew with the new definition.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let catalog = &call.app.library;
        let mut definition = self.definition;
        if let Value::Object(object) = &mut definition {
            object.entry("id").or_insert_with(|| json!(self.id));
        }
        let key = DefinitionKey::tool(&self.id)?;
        library::restore_masked(&key, &mut definition, catalog.tool(&self.id))?;
        call.app.definitions.tool_put(self.id, definition).await?.view()
    }
}

impl ActionHandler for CatalogDelete {
    type Output = CatalogEntryDeleted;

    const NAME: &'static str = "catalog_delete";
    const DESCRIPTION: &'static str = "Delete a catalog entry. Refused while an agent uses it.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Delete;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.app.definitions.tool_delete(self.id.clone()).await?;
        Ok(CatalogEntryDeleted {
            id: self.id,
            deleted: true,
        })
    }
}

impl ActionHandler for CatalogStatus {
    type Output = RunningServers;

    const NAME: &'static str = "catalog_status";
    const DESCRIPTION: &'static str = "List the tool servers that run in sessions now, with their health (green, yellow or red) and \
        last error. Starts nothing.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let servers = call
            .app
            .sessions
            .running_servers(call.grant.principal(), MAX_SERVERS);
        Ok(RunningServers { servers })
    }
}

impl ActionHandler for CatalogTest {
    type Output = EntryTest;

    const NAME: &'static str = "catalog_test";
    const DESCRIPTION: &'static str = "Start a catalog entry once, as a session would and in a temporary workspace, list its tools and \
        stop it.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.id.as_str().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        call.app.library.tool(&self.id)?;
        let _turn = TESTS.acquire().await.map_err(Error::internal)?;
        tokio::select! {
            tested = tool_add::test_entry(call, &self.id) => tested,
            error = call.abandoned() => Err(error),
        }
    }
}
