//! Which commands a policy allows: an allowed command matches as a prefix of whole words.

use std::time::Duration;

use oubliette_protocol::{Error, Result, catalog::BuiltinPolicy, id::quoted};

pub(super) const MAX_WORDS: usize = 1_000;
pub(super) const MAX_BYTES: usize = 128 * 1024;

/// A `shell_exec` policy, compiled.
#[derive(Debug)]
pub(super) struct CommandPolicy {
    allowed: Vec<Vec<String>>,
    pub(super) env: Vec<String>,
    pub(super) timeout: Duration,
    shell: bool,
}

impl CommandPolicy {
    /// Compiles a policy. One of another built-in allows no command.
    pub(super) fn new(policy: &BuiltinPolicy) -> Self {
        let none = Self {
            allowed: Vec::new(),
            env: Vec::new(),
            timeout: Duration::ZERO,
            shell: false,
        };
        match policy {
            BuiltinPolicy::FsRead { .. } | BuiltinPolicy::FsWrite { .. } => none,
            BuiltinPolicy::ShellExec {
                allowed_commands,
                allowed_env,
                timeout_ms,
                shell,
            } => Self {
                allowed: allowed_commands.iter().map(|line| words(line)).collect(),
                env: allowed_env.clone(),
                timeout: Duration::from_millis(*timeout_ms),
                shell: *shell,
            },
        }
    }

    /// The command line to run for an `argv`, if the policy allows it.
    ///
    /// Without a shell each word reaches the program as it is: `;`, `$(…)` and quotes have no meaning. With a
    /// shell, the words are joined by spaces and matched as written; the shell then interprets the rest of the
    /// line, which can run anything, and only the sandbox limits it.
    pub(super) fn admit(&self, argv: &[String]) -> Result<Vec<String>> {
        if argv.len() > MAX_WORDS || argv.iter().map(String::len).sum::<usize>() > MAX_BYTES {
            return Err(Error::limit_exceeded(format!(
                "argv is too long: at most {MAX_WORDS} words of {MAX_BYTES} bytes in all"
            )));
        }
        if argv.iter().any(|word| word.contains('\0')) {
            return Err(Error::invalid("argv must hold no NUL"));
        }
        let line = argv.join(" ");
        let asked = if self.shell { words(&line) } else { argv.to_vec() };
        let Some(program) = asked.first().filter(|program| !program.is_empty()) else {
            return Err(Error::invalid("argv must name a command"));
        };
        if program.contains('/') {
            return Err(Error::not_allowed(format!(
                "{} is a path: name the command alone, it is found in a fixed PATH",
                quoted(program)
            )));
        }
        if !self.allowed.iter().any(|allowed| asked.starts_with(allowed)) {
            return Err(Error::not_allowed(format!(
                "{} is not a command the policy allows",
                quoted(&line)
            )));
        }
        Ok(match self.shell {
            true => vec!["sh".into(), "-c".into(), line],
            false => asked,
        })
    }
}

fn words(line: &str) -> Vec<String> {
    line.split_whitespace().map(str::to_owned).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn commands(allowed: &[&str], shell: bool) -> CommandPolicy {
        let allowed_commands = allowed.iter().map(|c| (*c).into()).collect();
        CommandPolicy::new(&BuiltinPolicy::ShellExec {
            allowed_commands,
            allowed_env: vec![],
            timeout_ms: 1,
            shell,
        })
    }

    fn argv(words: &[&str]) -> Vec<String> {
        words.iter().map(|w| (*w).into()).collect()
    }

    #[test]
    fn commands_match_by_whole_words_as_a_prefix() {
        let git = commands(&["git  status", "ls"], false);
        for good in [
            &["git", "status"][..],
            &["git", "status", "-s"],
            &["ls"],
            &["ls", "-l", "; rm -rf /"],
        ] {
            assert_eq!(git.admit(&argv(good)).unwrap(), argv(good));
        }
        for bad in [
            &["git"][..],
            &["git", "push"],
            &["git", "statusx"],
            &["gits", "status"],
            &["git status"],
            &["lsx"],
            &["/bin/ls"],
            &["./ls"],
            &["../bin/ls"],
            &[""],
            &[],
            &["LS"],
            &["ls\n"],
            &[" ls"],
            &["ls;rm"],
            &["sh", "-c", "ls"],
        ] {
            assert!(git.admit(&argv(bad)).is_err(), "{bad:?}");
        }
        assert!(git.admit(&argv(&["ls", "a\0b"])).is_err());
        assert!(git.admit(&vec!["ls".into(); 1_001]).is_err());
        assert!(commands(&[], false).admit(&argv(&["ls"])).is_err());
    }

    #[test]
    fn a_shell_policy_matches_the_line_and_hands_it_to_sh() {
        let shell = commands(&["echo hi"], true);
        assert_eq!(
            shell.admit(&argv(&["echo hi | wc -c"])).unwrap(),
            argv(&["sh", "-c", "echo hi | wc -c"])
        );
        assert_eq!(
            shell.admit(&argv(&["echo", "hi"])).unwrap(),
            argv(&["sh", "-c", "echo hi"])
        );
        for bad in [
            &["echo ho"][..],
            &["echo", "hi;"],
            &["/bin/echo hi"],
            &["wc; echo hi"],
        ] {
            assert!(shell.admit(&argv(bad)).is_err(), "{bad:?}");
        }
    }

    proptest! {
        /// Whatever is asked for, what runs starts with the words of an allowed command, and is what was asked for.
        #[test]
        fn only_allowed_commands_run(asked in prop::collection::vec("[gitls ;/$()'\"-]{0,6}", 0..5)) {
            let commands = commands(&["git st", "ls"], false);
            if let Ok(runs) = commands.admit(&asked) {
                prop_assert_eq!(&runs, &asked);
                prop_assert!(runs[0] == "ls" || (runs[0] == "git" && runs[1] == "st"));
            }
        }
    }
}
