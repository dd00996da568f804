//! `program_*`: packages that are installed for agents and tool servers.

use std::borrow::Cow;

use oubliette_programs::{InstallProgress, ProgramId, ProgramManifest};
use oubliette_protocol::{
    Error, Result, Scope,
    catalog::{ToolDefinition, Transport},
    program::{PackageRef, ProgramSpec, check_bin_name},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActionCall, ActionHandler, Effect, StateOwner};
use crate::app::App;

/// `program_install`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProgramInstall {
    /// The package with its exact version: "npm:NAME@1.2.3" or "pypi:NAME==1.2.3".
    pub package: String,
    /// A command that the package must have, 1 to 100 bytes. Absent: any.
    #[serde(default)]
    pub bin: Option<String>,
    /// Whether the package's install scripts are run, in the sandbox of the installation. Default: false.
    #[serde(default)]
    pub scripts: bool,
}

/// `program_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProgramList {}

/// `program_remove`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct ProgramRemove {
    /// Id of the program, as `program_list` shows it.
    pub program_id: String,
}

/// An installed program.
#[derive(Debug, Serialize, JsonSchema)]
#[schemars(rename = "Program")]
pub(crate) struct ProgramView {
    #[serde(flatten)]
    program: ProgramManifest,
    /// What uses it: the definitions `agent SLUG` and `tool ID`, and `program PROGRAM_ID` of those that run with it as
    /// their Node.js.
    used_by: Vec<String>,
    /// Remarks for the user, one sentence each; only from `program_install`.
    #[serde(skip_serializing_if = "Option::is_none")]
    notes: Option<Vec<String>>,
}

impl ProgramView {
    fn new(app: &App, program: ProgramManifest) -> Self {
        Self {
            used_by: users_of(app, &program.program_id),
            program,
            notes: None,
        }
    }
}

/// Result of `program_list`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProgramPage {
    /// The installed programs.
    programs: Vec<ProgramView>,
    /// The installations under way.
    installing: Vec<InstallProgress>,
}

/// Result of `program_remove`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct ProgramRemoved {
    /// The program.
    program_id: ProgramId,
    /// True.
    deleted: bool,
}

impl ActionHandler for ProgramInstall {
    type Output = ProgramView;

    const NAME: &'static str = "program_install";
    const DESCRIPTION: &'static str = "Install a pinned npm or PyPI package, in a sandbox that reaches the package \
        registries only, so that agents and tool servers can run it. One that is installed is checked instead.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.package.chars().take(300).collect::<String>().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let package: PackageRef = self
            .package
            .parse()
            .map_err(|error: Error| Error::invalid(format!("package: {}", error.message)))?;
        if let Some(bin) = &self.bin {
            check_bin_name(bin).map_err(|why| Error::invalid(format!("bin: {why}")))?;
        }
        let program = call.app.programs.install(&package, self.scripts).await?;
        if let Some(bin) = &self.bin
            && !program.bins.contains_key(bin)
        {
            let has: Vec<&str> = program.bins.keys().map(String::as_str).collect();
            return Err(Error::invalid(format!(
                "bin: {package} has no command {bin:?}; it has {}",
                has.join(", ")
            )));
        }
        let notes = install_notes(&program);
        Ok(ProgramView {
            notes: Some(notes),
            ..ProgramView::new(call.app, program)
        })
    }
}

impl ActionHandler for ProgramList {
    type Output = ProgramPage;

    const NAME: &'static str = "program_list";
    const DESCRIPTION: &'static str =
        "List the installed programs with the definitions that use them, and the installations under way.";
    const SCOPE: Scope = Scope::Read;
    const EFFECT: Effect = Effect::Read;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let programs = call.app.programs.list();
        let runs_with: Vec<(ProgramId, ProgramId)> = programs
            .iter()
            .filter_map(|program| Some((program.node.clone()?, program.program_id.clone())))
            .collect();
        let view = |program: ProgramManifest| {
            let mut view = ProgramView::new(call.app, program);
            let with_it = runs_with
                .iter()
                .filter(|(node, _)| *node == view.program.program_id);
            view.used_by
                .extend(with_it.map(|(_, id)| format!("program {id}")));
            view
        };
        let programs = programs.into_iter().map(view).collect();
        Ok(ProgramPage {
            programs,
            installing: call.app.programs.installing(),
        })
    }
}

impl ActionHandler for ProgramRemove {
    type Output = ProgramRemoved;

    const NAME: &'static str = "program_remove";
    const DESCRIPTION: &'static str = "Remove an installed program. Refused while a definition uses it.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Delete;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(self.program_id.chars().take(300).collect::<String>().into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let id: ProgramId = self.program_id.parse()?;
        let users = users_of(call.app, &id);
        if !users.is_empty() {
            return Err(Error::conflict(format!(
                "{id} is used by {}; change or delete these first",
                users.join(", ")
            )));
        }
        call.app.programs.remove(&id).await?;
        Ok(ProgramRemoved {
            program_id: id,
            deleted: true,
        })
    }
}

/// Remarks on an installed program for the user, one sentence each.
pub(crate) fn install_notes(program: &ProgramManifest) -> Vec<String> {
    let mut notes = Vec::new();
    if !program.skipped_scripts.is_empty() {
        notes.push(format!(
            "{}: install scripts were skipped: {}; if it does not work without them, install it with \"scripts\": true \
             (--scripts)",
            program.package,
            program.skipped_scripts.join(", ")
        ));
    }
    if let Some(node) = &program.node {
        notes.push(format!("{}: runs with the Node.js of {node}", program.package));
    }
    notes
}

/// The definitions that use a program: `agent SLUG` and `tool ID`.
fn users_of(app: &App, id: &ProgramId) -> Vec<String> {
    let is_it = |spec: &ProgramSpec| ProgramId::of_spec(spec).is_ok_and(|of| of == *id);
    let mut users = Vec::new();
    for (slug, entry) in app.library.agents().iter() {
        if entry.definition.runtime.program().is_some_and(is_it) {
            users.push(format!("agent {slug}"));
        }
    }
    for (id, entry) in app.library.catalog().iter() {
        if let ToolDefinition::Mcp(server) = &*entry.definition
            && let Transport::Stdio(stdio) = &server.transport
            && stdio.program.as_ref().is_some_and(is_it)
        {
            users.push(format!("tool {id}"));
        }
    }
    users
}
