//! `tool_add`: tool servers as other clients start them, added to the catalog. A command that fetches a package becomes a
//! program: pinned to the version found, installed, and started once to see that it works.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use oubliette_programs::{ProgramId, ProgramManifest};
use oubliette_protocol::{
    CatalogId, Error, Result, Scope,
    agent::{AgentDefinition, NetworkAccess},
    catalog::{ServerIsolation, ToolDefinition},
    program::{PackageRef, ProgramSpec},
    tool::HealthStatus,
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    ActionCall, ActionHandler, Effect, StateOwner,
    library::{CatalogEntryView, LibraryEntry as _},
    program,
};
use crate::{
    import::{self, ImportOptions, ImportedServer},
    trial::ToolTrial,
};

/// Maximum number of servers of one call.
const MAX_SERVERS: usize = 50;

/// `tool_add`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ToolAdd {
    /// The command line of one server, for example `["npx", "-y", "@modelcontextprotocol/server-everything"]`. Either this or
    /// `servers`.
    #[serde(default)]
    pub command: Option<Vec<String>>,
    /// Another client's configuration: {"mcpServers": {NAME: {"command": …} or {"url": …}}}, at most 50 servers. Either
    /// this or `command`.
    #[serde(default)]
    #[schemars(with = "Option<serde_json::Map<String, Value>>")]
    pub servers: Option<Value>,
    /// Id of the entry that `command` makes. Default: the last part of the package's name.
    #[serde(default)]
    pub id: Option<CatalogId>,
    /// Network access of servers that are started: "none", "proxy" (HTTP and HTTPS through the server) or "host" (only if
    /// `[trust] host_network` allows it). Default: "none".
    #[serde(default)]
    pub network: Option<NetworkAccess>,
    /// Where servers that are started run: "sandbox", or "host" (only those that `[trust] host_tools` lists). Default:
    /// "sandbox".
    #[serde(default)]
    pub isolation: Option<ServerIsolation>,
    /// Whether entries with the same id are replaced. Default: false.
    #[serde(default)]
    pub replace: bool,
    /// Whether each new program is started once, to list its tools. Default: true.
    #[serde(default = "default_test")]
    pub test: bool,
    /// Whether the install scripts of new programs are run, in the sandbox of the installation. Default: false.
    #[serde(default)]
    pub scripts: bool,
    /// Whether only `planned` is answered, and nothing is installed or written. Default: false.
    #[serde(default)]
    pub dry_run: bool,
}

fn default_test() -> bool {
    true
}

/// Result of `tool_add`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ToolsAdded {
    /// The new entries.
    entries: Vec<CatalogEntryView>,
    /// The programs that were installed for them.
    programs: Vec<ProgramId>,
    /// How the first start of each new program went.
    tests: Vec<EntryTest>,
    /// Remarks for the user, one sentence each: fields left out, ids that differ from names, variables to allow.
    notes: Vec<String>,
    /// With `dry_run`, the entries that would be written; else absent.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    planned: Vec<PlannedEntry>,
}

/// A catalog entry that would be written.
#[derive(Debug, Serialize, JsonSchema)]
struct PlannedEntry {
    /// Its id.
    id: CatalogId,
    /// Its tool.json as it would be written; nothing in it is masked, since the client sent it.
    definition: ToolDefinition,
    /// Whether an entry with this id is replaced.
    replaces: bool,
}

/// How starting a catalog entry once went.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct EntryTest {
    /// The entry.
    id: CatalogId,
    /// Whether it became ready.
    ok: bool,
    /// How long it took, in milliseconds.
    took_ms: u64,
    /// Canonical names of its tools.
    tools: Vec<String>,
    /// Why it did not become ready; absent if it did.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

impl ActionHandler for ToolAdd {
    type Output = ToolsAdded;

    const NAME: &'static str = "tool_add";
    const DESCRIPTION: &'static str = "Add tool servers to the catalog as other clients start them: a command line, or an \
        mcpServers block. npx, uvx, bunx and pipx commands become programs, pinned, installed and tested.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Write;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let mut servers = self.imported()?;
        let ids: Vec<&str> = servers.iter().map(|server| server.id.as_str()).collect();
        call.note_target(&ids.join(", "));
        if !self.replace {
            self.check_free(call, &servers)?;
        }
        let mut pinned = Vec::new();
        for server in &mut servers {
            pinned.push(pin_package(call, server, self.scripts).await?);
        }
        if self.dry_run {
            call.note_detail(json!({ "dry_run": true }));
            return plan(call, &servers);
        }
        // All are installed before any is written, so that what cannot be installed leaves nothing behind.
        let mut installed = Vec::new();
        for (server, package) in servers.iter_mut().zip(&pinned) {
            installed.push(install(call, server, package.as_ref(), self.scripts).await?);
        }
        let mut entries = Vec::new();
        for server in &servers {
            let put = call
                .app
                .definitions
                .tool_put(server.id.clone(), server.definition.clone());
            entries.push(put.await?.view()?);
        }
        let mut tests = Vec::new();
        if self.test {
            for (server, _) in servers
                .iter()
                .zip(&installed)
                .filter(|(_, program)| program.is_some())
            {
                tests.push(test_entry(call, &server.id).await?);
            }
        }
        let programs = installed
            .into_iter()
            .flatten()
            .map(|program| program.program_id)
            .collect();
        Ok(ToolsAdded {
            entries,
            programs,
            tests,
            notes: named_notes(&servers),
            planned: Vec::new(),
        })
    }
}

/// The servers' notes, each with its server's id.
fn named_notes(servers: &[ImportedServer]) -> Vec<String> {
    servers
        .iter()
        .flat_map(|server| server.notes.iter().map(|note| format!("{}: {note}", server.id)))
        .collect()
}

/// What adding these servers would write.
fn plan(call: &ActionCall<'_>, servers: &[ImportedServer]) -> Result<ToolsAdded> {
    let catalog = call.app.library.catalog();
    let planned = servers.iter().map(|server| {
        Ok(PlannedEntry {
            id: server.id.clone(),
            definition: ToolDefinition::from_value(server.definition.clone())
                .map_err(|error| Error::invalid(error.to_string()))?,
            replaces: catalog.contains_key(&server.id),
        })
    });
    Ok(ToolsAdded {
        entries: Vec::new(),
        programs: Vec::new(),
        tests: Vec::new(),
        notes: named_notes(servers),
        planned: planned.collect::<Result<_>>()?,
    })
}

impl ToolAdd {
    fn options(&self) -> ImportOptions {
        ImportOptions {
            network: self.network,
            isolation: self.isolation,
        }
    }

    /// The servers that are asked for, as catalog entries.
    fn imported(&self) -> Result<Vec<ImportedServer>> {
        let servers = match (&self.command, &self.servers) {
            (Some(command), None) => vec![import::import_command(command, self.id.clone(), self.options())?],
            (None, Some(_)) if self.id.is_some() => {
                return Err(Error::invalid("id: the servers of a block have their own names"));
            }
            (None, Some(block)) => import::import_servers(block, self.options())?,
            _ => {
                return Err(Error::invalid(
                    "give a command, or servers as an mcpServers block",
                ));
            }
        };
        match servers.len() <= MAX_SERVERS {
            true => Ok(servers),
            false => Err(Error::invalid(format!("servers: at most {MAX_SERVERS} at once"))),
        }
    }

    fn check_free(&self, call: &ActionCall<'_>, servers: &[ImportedServer]) -> Result<()> {
        let catalog = call.app.library.catalog();
        let taken: Vec<&str> = servers
            .iter()
            .filter(|server| catalog.contains_key(&server.id))
            .map(|server| server.id.as_str())
            .collect();
        match taken.is_empty() {
            true => Ok(()),
            false => Err(Error::conflict(format!(
                "the catalog has {} already; nothing was added. Give --replace (`replace`) to replace, or another id",
                taken.join(", ")
            ))),
        }
    }
}

/// Makes the entry of a command that would fetch a package a program, pinned to the version found; returns the package.
async fn pin_package(
    call: &ActionCall<'_>,
    server: &mut ImportedServer,
    scripts: bool,
) -> Result<Option<PackageRef>> {
    let Some(package) = server.package.take() else {
        return Ok(None);
    };
    let pinned = call.app.programs.find_version(&package.request).await?;
    let spec = ProgramSpec {
        bin: package.bin,
        scripts,
        ..ProgramSpec::of(&pinned)
    };
    server.notes.extend(package.notes);
    server.notes.push(format!("pinned to {pinned}"));
    if server.definition["network"] == json!(NetworkAccess::None) {
        server.notes.push(
            "it runs without network; if it has to reach the web, set \"network\": \"proxy\" in its tool.json, or add it \
             with --network proxy"
                .into(),
        );
    }
    if let Value::Object(definition) = &mut server.definition {
        definition.remove("command");
        definition.insert("program".into(), json!(spec));
        definition.insert("args".into(), json!(package.args));
    }
    ToolDefinition::from_value(server.definition.clone())
        .map_err(|error| Error::invalid(error.to_string()))?;
    Ok(Some(pinned))
}

/// Installs a server's package, if it has one.
async fn install(
    call: &ActionCall<'_>,
    server: &mut ImportedServer,
    package: Option<&PackageRef>,
    scripts: bool,
) -> Result<Option<ProgramManifest>> {
    let Some(package) = package else {
        return Ok(None);
    };
    let installed = call.app.programs.install(package, scripts).await?;
    server.notes.extend(program::install_notes(&installed));
    Ok(Some(installed))
}

/// Starts an entry once and lists its tools.
pub(super) async fn test_entry(call: &ActionCall<'_>, id: &CatalogId) -> Result<EntryTest> {
    let definition = json!({ "name": "Trial", "prompt": "None.", "tools": { "use": [id] } });
    let definition: AgentDefinition = serde_json::from_value(definition).map_err(Error::internal)?;
    let began = Instant::now();
    let tried = ToolTrial::in_server(call.app)
        .run("trial".parse()?, Arc::new(definition))
        .await;
    let tried = match tried {
        Ok(tried) => tried,
        // The entry is written, and so are the others: this is how the start of this one went.
        Err(error) => {
            return Ok(EntryTest {
                id: id.clone(),
                ok: false,
                took_ms: whole_ms(began.elapsed()),
                tools: Vec::new(),
                error: Some(error.message),
            });
        }
    };
    let row = tried
        .list
        .servers
        .first()
        .ok_or_else(|| Error::internal("the entry was not started"))?;
    let ok = row.status != HealthStatus::Red;
    let error = (!ok).then(|| {
        row.error
            .clone()
            .unwrap_or_else(|| "it did not become ready".to_owned())
    });
    Ok(EntryTest {
        id: id.clone(),
        ok,
        took_ms: whole_ms(tried.took),
        error,
        tools: tried.list.tools.into_iter().map(|tool| tool.canonical).collect(),
    })
}

fn whole_ms(took: Duration) -> u64 {
    u64::try_from(took.as_millis()).unwrap_or(u64::MAX)
}
