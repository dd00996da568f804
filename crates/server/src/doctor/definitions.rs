//! Checks of agents and catalog entries: whether their files can be used, and whether agents have what they name.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use oubliette_home::{AgentEntry, DefinitionLibrary, HomeDir};
use oubliette_programs::{ProgramId, ProgramStore};
use oubliette_protocol::{
    Slug,
    agent::{AgentDefinition, AgentRuntime},
};
use oubliette_session::{check_package_runner, hidden_program, needed_providers};
use serde_json::Value;

use super::{CheckImportance, check_result, host::find_on_path};
use crate::{config::ServerConfig, definitions::UnusedFiles};

pub(super) fn check_definitions(library: &DefinitionLibrary) -> Vec<Value> {
    let (agents, catalog) = (library.agents(), library.catalog());
    let some = "make one with `oubliette agent new`; `oubliette up` on a new home makes some to start with";
    let mut checks = vec![
        check_result(
            "agents",
            CheckImportance::Optional,
            !agents.is_empty(),
            format!("{} defined", agents.len()),
            some,
        ),
        check_result(
            "catalog",
            CheckImportance::Optional,
            true,
            format!("{} entries", catalog.len()),
            "",
        ),
    ];
    let kept = "correct the file; the last good definition is in use until then";
    let edited = agents
        .values()
        .filter_map(|a| a.error.as_ref().map(|e| (format!("agent {}", a.slug), e.clone())));
    let tools = catalog
        .values()
        .filter_map(|t| t.error.as_ref().map(|e| (format!("tool {}", t.id), e.clone())));
    checks.extend(
        edited
            .chain(tools)
            .map(|(name, error)| check_result(&name, CheckImportance::Optional, false, error, kept)),
    );
    let unused = "correct the file; it is not in use";
    let (agents, tools) = (library.broken_agents(), library.broken_tools());
    let agents = agents
        .iter()
        .map(|(slug, error)| (format!("agent {slug}"), error));
    let tools = tools.iter().map(|(id, error)| (format!("tool {id}"), error));
    checks.extend(
        agents.chain(tools).map(|(name, error)| {
            check_result(&name, CheckImportance::Optional, false, error.clone(), unused)
        }),
    );
    checks
}

/// Whether files of the home look like definitions but have no effect, because definitions are in the database.
pub(super) fn check_unused_files(
    home: &HomeDir,
    unused: Option<UnusedFiles>,
    import_error: Option<&str>,
) -> Option<Value> {
    let unused = unused?;
    let detail = match (&unused.differing, import_error) {
        (_, Some(error)) => format!("they were not brought into the database: {error}"),
        (Some(one), None) => format!(
            "{} under agents/ and tools/ of the home have no effect, because definitions are in the database; not as there: {one}",
            unused.count
        ),
        (None, None) => format!(
            "{}, the same as in the database, which is what counts",
            unused.count
        ),
    };
    let root = home.root().display();
    let remedy =
        format!("bring them in with `oubliette library push {root}`, or move agents/ and tools/ away");
    let ok = unused.differing.is_none() && import_error.is_none();
    Some(check_result(
        "definition files",
        CheckImportance::Optional,
        ok,
        detail,
        &remedy,
    ))
}

/// Whether each agent can be started: what refuses a start, or lets it fail, is said here with its remedy.
pub(super) fn check_agents(library: &DefinitionLibrary, config: &ServerConfig, home: &HomeDir) -> Vec<Value> {
    let one = |(slug, entry): (&Slug, &Arc<AgentEntry>)| {
        let name = format!("agent {slug}");
        match find_obstacle(&entry.definition, library, config, home) {
            Some(StartObstacle { what, remedy }) => {
                check_result(&name, CheckImportance::Optional, false, what, &remedy)
            }
            None => {
                let runs = describe_runtime(&entry.definition.runtime, home);
                let detail = format!("runs {runs}; `oubliette agent test {slug}` tries it");
                check_result(&name, CheckImportance::Optional, true, detail, "")
            }
        }
    };
    library.agents().iter().map(one).collect()
}

/// Why an agent cannot be started.
struct StartObstacle {
    what: String,
    remedy: String,
}

impl StartObstacle {
    fn new(what: impl Into<String>, remedy: impl Into<String>) -> Self {
        Self {
            what: what.into(),
            remedy: remedy.into(),
        }
    }
}

/// The first obstacle to an agent's start, in the order in which a start would meet them.
fn find_obstacle(
    definition: &AgentDefinition,
    library: &DefinitionLibrary,
    config: &ServerConfig,
    home: &HomeDir,
) -> Option<StartObstacle> {
    if let Err(error) = library.check_agent(definition) {
        return Some(StartObstacle::new(error.message, "correct its agent.json"));
    }
    if let Err(error) = config.trust.resolve(home).check_agent(definition) {
        let remedy = "list it under [trust] in oubliette.toml, or take it out of agent.json";
        return Some(StartObstacle::new(error.message, remedy));
    }
    let unknown = |name: &&String| config.upstreams.iter().all(|known| known.name != **name);
    if let Some(name) = definition.sandbox.upstreams.iter().find(unknown) {
        return Some(StartObstacle::new(
            format!("its sandbox.upstreams names the service {name}, which is not configured"),
            format!("add [upstreams.{name}] to oubliette.toml"),
        ));
    }
    let network = definition.sandbox.network;
    let providers = needed_providers(definition, network);
    if let Some(obstacle) = providers
        .into_iter()
        .find_map(|name| unusable_provider(name, config))
    {
        return Some(obstacle);
    }
    if let Err(error) = check_package_runner(definition, network) {
        return Some(StartObstacle::new(
            error.message,
            "change `runtime` in its agent.json",
        ));
    }
    let AgentRuntime::Acp {
        command, read_only, ..
    } = &definition.runtime
    else {
        return None;
    };
    let program = command.first()?;
    let found = match program.contains('/') {
        true => PathBuf::from(program).exists(),
        false => find_on_path(program).is_some(),
    };
    if !found {
        let remedy = "install it, or use a preset: `oubliette agent presets`";
        return Some(StartObstacle::new(
            format!("its program {program} is not on this machine"),
            remedy,
        ));
    }
    let shown: Vec<&Path> = read_only.iter().map(Path::new).collect();
    let hidden = hidden_program(program, &shown)?;
    Some(StartObstacle::new(hidden, "change `runtime` in its agent.json"))
}

/// Why a model provider cannot be used, if it cannot.
fn unusable_provider(name: &str, config: &ServerConfig) -> Option<StartObstacle> {
    let Some(known) = config.providers.iter().find(|known| known.name == name) else {
        return Some(StartObstacle::new(
            format!("its model provider {name} is not configured"),
            format!("add [providers.{name}] to oubliette.toml"),
        ));
    };
    match (&known.api_key, &known.api_key_env) {
        (None, Some(variable)) => Some(StartObstacle::new(
            format!("its model provider {name} has no key"),
            format!("set {variable} in the server's environment"),
        )),
        _ => None,
    }
}

/// What an agent is run from, and whether that is there.
fn describe_runtime(runtime: &AgentRuntime, home: &HomeDir) -> String {
    match runtime {
        AgentRuntime::Builtin {} => "built in".to_owned(),
        AgentRuntime::Acp {
            program: Some(program),
            ..
        } => {
            let installed =
                ProgramId::of_spec(program).is_ok_and(|id| ProgramStore::is_installed_in(home, &id));
            match installed {
                true => format!("{program}, which is installed"),
                false => format!("{program}, which its first start installs"),
            }
        }
        AgentRuntime::Acp { command, .. } => command.first().cloned().unwrap_or_default(),
    }
}
