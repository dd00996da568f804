//! `oubliette completions`.

use clap::CommandFactory as _;
use clap_complete::Shell;
use oubliette_protocol::Result;
use serde_json::json;

use super::{
    Cli, Context, Verdict,
    output::{Output, say},
};

/// For which shell.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Examples:\n  oubliette completions bash > ~/.local/share/bash-completion/completions/oubliette\n  \
    oubliette completions zsh > ~/.zfunc/_oubliette\n  \
    oubliette completions fish > ~/.config/fish/completions/oubliette.fish"
)]
pub struct Args {
    /// The shell.
    shell: Shell,
}

/// Prints the script.
pub fn run(args: &Args, context: &Context) -> Result<Verdict> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "oubliette", &mut script);
    let script = String::from_utf8_lossy(&script);
    match context.output {
        Output::Json => say(&json!({ "shell": args.shell.to_string(), "script": script }).to_string()),
        Output::Text => say(script.trim_end()),
    }
    Ok(Verdict::Done)
}
