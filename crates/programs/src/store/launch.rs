//! How an installed program is run in a sandbox.

use std::{path::Path, sync::Arc};

use oubliette_protocol::{Error, Result, program::ProgramSpec};
use oubliette_sandbox::BindMount;

use super::{ProgramStore, checked_program::CheckedProgram};
use crate::manifest::{BinCommand, Interpreter, ProgramId};

/// How a program is run in a sandbox.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ProgramLaunch {
    /// The command; the arguments of the definition follow.
    pub argv: Vec<String>,
    /// The programs it needs, read-only.
    pub mounts: Vec<BindMount>,
    /// Variables that it needs, unless the definition sets them.
    pub env: Vec<(String, String)>,
}

impl ProgramStore {
    /// Makes a program ready to run: installs it if it is not, checks it, and says how it is started.
    pub async fn launch(self: &Arc<Self>, spec: &ProgramSpec) -> Result<ProgramLaunch> {
        let (store, spec) = (self.clone(), spec.clone());
        let launching = self.runtime.spawn(async move { store.launch_now(&spec).await });
        launching.await.map_err(Error::internal)?
    }

    async fn launch_now(self: &Arc<Self>, spec: &ProgramSpec) -> Result<ProgramLaunch> {
        let id = ProgramId::of_spec(spec)?;
        if !self.is_installed(&id) {
            self.install(&spec.package()?, spec.scripts).await?;
        }
        let checked = self.check_locked(&id).await?;
        let command = checked.manifest.command(spec.bin.as_deref())?;
        let node = match &checked.manifest.node {
            Some(node) => Some(self.check_locked(node).await?),
            None => None,
        };
        self.describe_launch(&id, command, node.as_deref())
    }

    fn describe_launch(
        &self,
        id: &ProgramId,
        command: &BinCommand,
        node: Option<&CheckedProgram>,
    ) -> Result<ProgramLaunch> {
        let inside = id.inside();
        let mut launch = ProgramLaunch {
            argv: Vec::new(),
            mounts: vec![BindMount::read_only(self.tree(id), &inside)],
            env: Vec::new(),
        };
        match (command.interpreter, node) {
            (Interpreter::None, _) => {}
            (Interpreter::Node, None) => launch.argv.push("node".into()),
            (Interpreter::Node, Some(_)) => {}
            (Interpreter::Python, _) => launch.argv.push(format!("{inside}/venv/bin/python")),
        }
        if let Some(node) = node {
            let binary = node.manifest.command(Some("node"))?;
            let node_id = &node.manifest.program_id;
            let binary = format!("{}/{}", node_id.inside(), binary.file);
            let dir = Path::new(&binary).parent().unwrap_or(Path::new("/")).display();
            launch
                .mounts
                .push(BindMount::read_only(self.tree(node_id), node_id.inside()));
            // For whatever the program itself starts.
            launch
                .env
                .push(("PATH".into(), format!("{dir}:{}", oubliette_sandbox::spec::PATH)));
            if command.interpreter == Interpreter::Node {
                launch.argv.push(binary);
            }
        }
        launch.argv.extend(command.options.iter().cloned());
        launch.argv.push(format!("{inside}/{}", command.file));
        Ok(launch)
    }
}
