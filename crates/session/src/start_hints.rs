//! What to do about an agent that does not start: known reasons, told before or after the attempt.

use std::path::{Path, PathBuf};

use oubliette_protocol::{
    Error, Result,
    agent::{AgentDefinition, AgentRuntime, NetworkAccess},
};

use crate::agent_plan::AgentPlan;

/// Programs that fetch a package and run it.
const PACKAGE_RUNNERS: [&str; 5] = ["npx", "bunx", "pnpx", "uvx", "pipx"];
/// Arguments by which these use only what is installed.
const OFFLINE_ARGUMENTS: [&str; 4] = ["--offline", "--no-install", "--no", "--prefer-offline"];
/// Directories of the host that every sandbox sees.
const VISIBLE: [&str; 6] = ["/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc"];

/// Refuses a command that fetches a package in a sandbox without a network: it would try for minutes.
pub fn check_package_runner(definition: &AgentDefinition, network: NetworkAccess) -> Result<()> {
    let AgentRuntime::Acp { command, .. } = &definition.runtime else {
        return Ok(());
    };
    let name = command
        .first()
        .and_then(|program| Path::new(program).file_name()?.to_str());
    let Some(runner) = name.filter(|name| PACKAGE_RUNNERS.contains(name)) else {
        return Ok(());
    };
    let offline = command
        .iter()
        .any(|word| OFFLINE_ARGUMENTS.contains(&word.as_str()));
    match network == NetworkAccess::None && !offline {
        false => Ok(()),
        true => Err(Error::unavailable(format!(
            "{runner} needs the network to fetch its package, and this agent's sandbox has none. Let Oubliette install the \
             package: \"runtime\": {{\"kind\": \"acp\", \"program\": {{\"npm\": \"NAME@VERSION\"}}}} (\"pypi\": \
             \"NAME==VERSION\" for Python), or set \"sandbox\": {{\"network\": \"proxy\"}}"
        ))),
    }
}

/// Adds to the error of a failed start what can be done about it.
pub(crate) fn explain(mut error: Error, argv: &[String], plan: &AgentPlan) -> Error {
    let shown: Vec<&Path> = plan.read_only.iter().map(|mount| &*mount.inside).collect();
    if let Some(hint) = argv.first().and_then(|program| hidden_program(program, &shown)) {
        error.message.push_str(". ");
        error.message.push_str(&hint);
    }
    error
}

/// The hint for a program that exists on the host and that the sandbox does not see, beside the paths it is shown.
pub fn hidden_program(program: &str, shown: &[&Path]) -> Option<String> {
    let path = find_on_host(program)?;
    let seen = |path: &Path| {
        let mut dirs = VISIBLE.iter().map(Path::new).chain(shown.iter().copied());
        dirs.any(|dir| path.starts_with(dir))
    };
    let real = path.canonicalize().ok()?;
    if seen(&path) && seen(&real) {
        return None;
    }
    let dir = real.parent().unwrap_or(&real).display();
    Some(format!(
        "{} exists on the host, but the sandbox does not see it: add {dir} to \"read_only\" of the agent's runtime and to \
         [trust] read_only in oubliette.toml, or let Oubliette install the package as a \"program\"",
        path.display()
    ))
}

/// The path of a program on the host: as it is given, or from the server's own search path.
fn find_on_host(program: &str) -> Option<PathBuf> {
    if program.contains('/') {
        let path = PathBuf::from(program);
        return (path.is_absolute() && path.exists()).then_some(path);
    }
    let dirs = std::env::var_os("PATH")?;
    std::env::split_paths(&dirs)
        .map(|dir| dir.join(program))
        .find(|path| path.is_file())
}
