//! The fuzz target of the built-in tools' policies.

use oubliette_protocol::catalog::BuiltinPolicy;

use super::{
    command_policy::CommandPolicy,
    path::{AllowedPaths, PathInWorkspace},
};

/// Reads a policy and a call from text and decides about the call. Panics only when something is let through that the
/// policy does not allow.
///
/// The text, a line each: `p<path>` an allowed path, `c<command>` an allowed command, `s` with a shell, `w<word>` a word
/// of the command asked for, and `?<path>` (or any other letter) a path asked for.
#[doc(hidden)]
pub fn fuzz_policy(text: &str) {
    let (mut paths, mut commands, mut argv, mut asked, mut shell) = (vec![], vec![], vec![], vec![], false);
    for line in text.lines() {
        let Some(kind) = line.chars().next() else { continue };
        let rest = line[kind.len_utf8()..].to_owned();
        match kind {
            'p' => paths.push(rest),
            'c' => commands.push(rest),
            's' => shell = true,
            'w' => argv.push(rest),
            _ => asked.push(rest),
        }
    }
    let policy = CommandPolicy::new(&BuiltinPolicy::ShellExec {
        allowed_commands: commands.clone(),
        allowed_env: Vec::new(),
        timeout_ms: 1,
        shell,
    });
    if let Ok(runs) = policy.admit(&argv) {
        let line = match shell {
            true => runs.last().cloned().unwrap_or_default(),
            false => runs.join(" "),
        };
        let mut words = line.split_whitespace();
        let allowed = commands.iter().any(|command| {
            command
                .split_whitespace()
                .all(|word| words.clone().any(|w| w == word))
        });
        assert!(allowed, "{line:?} runs");
        assert!(
            !words.next().unwrap_or_default().contains('/'),
            "a path runs: {line:?}"
        );
    }
    let allowed = AllowedPaths::new(&paths);
    for path in asked {
        let Ok(path) = PathInWorkspace::parse(&path) else {
            continue;
        };
        let inside = path.sandbox_path();
        assert!(inside.starts_with("/workspace") && !inside.split('/').any(|part| part == ".."));
        if let Ok(covering) = allowed.covering(&path) {
            assert!(covering.iter().all(|above| path.as_slice().starts_with(above)));
        }
    }
}
