//! Fuzz targets: arbitrary bytes against everything that reads what others wrote.
//!
//! A target is an ordinary function. It panics when an invariant is broken; a panic on any thread, a stack overflow, memory
//! that grows without end and an input that takes more than a few seconds are findings too. Two engines run the targets,
//! both with the stable compiler: `fuzz-libfuzzer` is guided by coverage, `fuzz-random` needs nothing but Rust and is what
//! `cargo xtask test` uses. `seeds/<target>/` holds the inputs both start from, found ones among them.
//!
//! - this file: the targets. [`definitions`], [`tool_names`], [`workspace_archive`]: those with more than a line.
//! - [`mutator`]: makes new inputs of old ones, for `fuzz-random`.

pub mod definitions;
pub mod mutator;
pub mod tool_names;
pub mod workspace_archive;

use std::sync::OnceLock;

use oubliette_server::testing::fuzzing::{self as server, McpFuzzer};

/// A function that reads arbitrary bytes.
#[derive(Debug, Clone, Copy)]
pub struct FuzzTarget {
    /// Its name, which is also that of its directory of seeds.
    pub name: &'static str,
    /// What it reads.
    pub reads: &'static str,
    /// Runs it on one input.
    pub run: fn(&[u8]),
}

const fn target(name: &'static str, reads: &'static str, run: fn(&[u8])) -> FuzzTarget {
    FuzzTarget { name, reads, run }
}

/// Every target.
pub const TARGETS: &[FuzzTarget] = &[
    target(
        "relay_line",
        "lines of the relay socket",
        oubliette_relay::fuzz_line,
    ),
    target("handoff_line", "an MCP line of an agent", handoff_line),
    target(
        "acp_line",
        "lines of an agent (ACP)",
        oubliette_session::fuzz_agent_output,
    ),
    target(
        "tool_server_message",
        "messages of a tool server, its tool list and results",
        oubliette_tools::upstream::fuzz_messages,
    ),
    target("mcp_body", "bodies at /mcp, of both lifecycles", mcp_body),
    target("action", "names and arguments of actions", action),
    target("declaration", "a caller's declaration", definitions::declaration),
    target(
        "schema",
        "a JSON schema and arguments checked against it",
        definitions::schema,
    ),
    target("agent_json", "agent.json", definitions::agent_json),
    target("tool_json", "tool.json", definitions::tool_json),
    target("oubliette_toml", "oubliette.toml", oubliette_toml),
    target(
        "tool_names",
        "tool names, aliases and patterns of rules",
        tool_names::run,
    ),
    target(
        "builtin_policy",
        "policies of built-in tools, and calls under them",
        builtin_policy,
    ),
    target(
        "proxy_request",
        "requests of a sandbox to proxy and model gateway",
        proxy_request,
    ),
    target("host_header", "Host and Origin headers", host_header),
    target("workspace_path", "paths of file routes", workspace_path),
    target(
        "archive_entry",
        "names in a workspace that is packed",
        workspace_archive::run,
    ),
];

/// The target of this name.
pub fn find(name: &str) -> Option<&'static FuzzTarget> {
    TARGETS.iter().find(|target| target.name == name)
}

/// Runs a target that reads text; bytes that are none are not its concern.
pub(crate) fn with_text(bytes: &[u8], run: impl FnOnce(&str)) {
    if let Ok(text) = std::str::from_utf8(bytes) {
        run(text);
    }
}

fn handoff_line(bytes: &[u8]) {
    bytes
        .split(|byte| *byte == b'\n')
        .for_each(oubliette_handoff::fast_path::fuzz_line);
}

fn mcp_body(bytes: &[u8]) {
    // One server for all inputs. Its home is removed by the system at the next start: nothing here ends in an orderly way.
    static SERVER: OnceLock<(McpFuzzer, tempfile::TempDir)> = OnceLock::new();
    let (server, _) = SERVER.get_or_init(|| {
        let home = tempfile::tempdir().expect("a directory");
        (McpFuzzer::new(home.path()).expect("a server"), home)
    });
    server.run(bytes);
}

fn action(bytes: &[u8]) {
    with_text(bytes, server::fuzz_action);
}

fn oubliette_toml(bytes: &[u8]) {
    with_text(bytes, server::fuzz_config);
}

fn host_header(bytes: &[u8]) {
    with_text(bytes, server::fuzz_host_headers);
}

fn workspace_path(bytes: &[u8]) {
    with_text(bytes, server::fuzz_workspace_path);
}

fn builtin_policy(bytes: &[u8]) {
    with_text(bytes, oubliette_tools::builtin::fuzz_policy);
}

fn proxy_request(bytes: &[u8]) {
    with_text(bytes, oubliette_egress::fuzz_request);
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, path::Path};

    use super::*;

    #[test]
    fn every_target_has_seeds_and_they_all_pass() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("seeds");
        let names = std::fs::read_dir(&folder).unwrap();
        let found: BTreeSet<String> = names
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        let wanted: BTreeSet<String> = TARGETS.iter().map(|target| target.name.to_owned()).collect();
        assert_eq!(found, wanted);
        for target in TARGETS {
            let inputs = std::fs::read_dir(folder.join(target.name)).unwrap();
            let inputs: Vec<_> = inputs.map(|entry| entry.unwrap().path()).collect();
            assert!(!inputs.is_empty(), "{} has no seeds", target.name);
            for input in inputs {
                (target.run)(&std::fs::read(&input).unwrap());
            }
        }
    }
}
