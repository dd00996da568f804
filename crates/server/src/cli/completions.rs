//! `oubliette completions`: prints a shell's completion script. The script asks this program for what can be completed: commands
//! and options, and ids and slugs of the server; see [`super::value_candidates`].

use clap_complete::{Shell, env::Shells};
use oubliette_protocol::{Error, Result};
use serde_json::json;

use super::{
    CommandContext, CommandOutcome,
    output::{OutputFormat, print_line},
    value_candidates::COMPLETE_VARIABLE,
};

/// Makes the first completion work, too: zsh loads a script from its function path by calling it as the completer.
const ZSH_FIRST_CALL: &str = "
if [ \"$funcstack[1]\" = \"_oubliette\" ]; then
    _clap_dynamic_completer_oubliette \"$@\"
fi
";

/// Arguments of `oubliette completions`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "It completes commands and options, and ids and slugs of the server that the line is about.\n\n\
    Examples:\n  oubliette completions bash > ~/.local/share/bash-completion/completions/oubliette\n  \
    oubliette completions zsh > ~/.zfunc/_oubliette\n  \
    oubliette completions fish > ~/.config/fish/completions/oubliette.fish"
)]
pub(crate) struct CompletionsArgs {
    /// The shell that will load the script.
    shell: Shell,
}

/// Prints the script.
pub(crate) fn run(args: &CompletionsArgs, context: &CommandContext) -> Result<CommandOutcome> {
    let name = args.shell.to_string();
    let mut script = Vec::new();
    Shells::builtins()
        .completer(&name)
        .ok_or_else(|| Error::invalid(format!("there is no script for {name}")))?
        .write_registration(
            COMPLETE_VARIABLE,
            "oubliette",
            "oubliette",
            "oubliette",
            &mut script,
        )
        .map_err(Error::internal)?;
    let mut script = String::from_utf8_lossy(&script).into_owned();
    if args.shell == Shell::Zsh {
        script.push_str(ZSH_FIRST_CALL);
    }
    match context.output {
        OutputFormat::Json => print_line(&json!({ "shell": name, "script": script }).to_string()),
        OutputFormat::Text => print_line(script.trim()),
    }
    Ok(CommandOutcome::Done)
}
