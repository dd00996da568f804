//! `oubliette completions`: prints a shell's completion script.

use clap::CommandFactory as _;
use clap_complete::Shell;
use oubliette_protocol::Result;
use serde_json::json;

use super::{
    CommandContext, CommandLine, CommandOutcome,
    output::{OutputFormat, print_line},
};

/// Arguments of `oubliette completions`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  oubliette completions bash > ~/.local/share/bash-completion/completions/oubliette\n  \
    oubliette completions zsh > ~/.zfunc/_oubliette\n  \
    oubliette completions fish > ~/.config/fish/completions/oubliette.fish"
)]
pub(crate) struct CompletionsArgs {
    /// The shell that will load the script.
    shell: Shell,
}

/// Prints the script.
pub(crate) fn run(args: &CompletionsArgs, context: &CommandContext) -> Result<CommandOutcome> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut CommandLine::command(), "oubliette", &mut script);
    let script = String::from_utf8_lossy(&script);
    match context.output {
        OutputFormat::Json => {
            print_line(&json!({ "shell": args.shell.to_string(), "script": script }).to_string())
        }
        OutputFormat::Text => print_line(script.trim_end()),
    }
    Ok(CommandOutcome::Done)
}
