//! The page of commands, from clap's tree.

use std::fmt::Write as _;

use clap::{Arg, Command, CommandFactory as _};

use super::fields::cell;
use crate::cli::CommandLine;

/// The page of every command and option.
pub(super) fn page() -> String {
    let mut root = CommandLine::command();
    root.build();
    let mut out = "# Commands\n\n`oubliette --help` and `oubliette COMMAND --help` print the same. Every command prints JSON with \
        `--json`: the result object, or `{\"error\": {\"code\", \"message\"}}`. Exit codes: 0 done, 1 failed, 2 wrong usage.\n\n\
        Options of every command:\n\n"
        .to_owned();
    let global = root.get_arguments().filter(|arg| arg.is_global_set());
    write_arguments(global, &mut out);
    out.push_str(
        "\n`OUBLIETTE_HOME` names the home directory where `--home` does not.\n\n\
         Two more programs are installed beside it. `oubliette-client` is the MCP server that an agent finds inside its sandbox, and \
         `oubliette-agent` the built-in agent; the server starts both, and neither is of use by hand.\n",
    );
    write_commands(&mut root, &mut out);
    out
}

fn write_commands(parent: &mut Command, out: &mut String) {
    for command in parent.get_subcommands_mut() {
        if command.is_hide_set() || command.get_name() == "help" {
            continue;
        }
        let usage = command.render_usage().to_string();
        let usage = usage.trim_start_matches("Usage:").trim();
        let name = command.get_bin_name().unwrap_or_default().to_owned();
        let about = command.get_long_about().or_else(|| command.get_about());
        let about = about.map(ToString::to_string).unwrap_or_default();
        let _ = write!(out, "\n## `{name}`\n\n{}\n", cell(&about));
        if !command.has_subcommands() {
            let _ = write!(out, "\n```text\n{usage}\n```\n");
        }
        let own: Vec<&Arg> = command
            .get_arguments()
            .filter(|arg| !arg.is_global_set() && !arg.is_hide_set())
            .filter(|arg| !matches!(arg.get_id().as_str(), "help" | "version"))
            .collect();
        if !own.is_empty() {
            out.push('\n');
            write_arguments(own.into_iter(), out);
        }
        let examples = command.get_after_long_help().or_else(|| command.get_after_help());
        if let Some(examples) = examples {
            let _ = write!(out, "\n```text\n{}\n```\n", examples.to_string().trim_end());
        }
        write_commands(command, out);
    }
}

fn write_arguments<'a>(arguments: impl Iterator<Item = &'a Arg>, out: &mut String) {
    out.push_str("| argument | meaning |\n|---|---|\n");
    for arg in arguments {
        let help = arg.get_long_help().or_else(|| arg.get_help());
        let mut text = cell(&help.map(ToString::to_string).unwrap_or_default());
        let takes_value = arg.get_action().takes_values();
        let values = arg.get_possible_values();
        if takes_value && !values.is_empty() {
            let names: Vec<_> = values
                .iter()
                .map(|value| format!("`{}`", value.get_name()))
                .collect();
            let _ = write!(text, " One of {}.", names.join(", "));
        }
        if let ([default, ..], true) = (arg.get_default_values(), takes_value) {
            let _ = write!(text, " Default: `{}`.", default.to_string_lossy());
        }
        if let Some(variable) = arg.get_env() {
            let _ = write!(text, " Environment: `{}`.", variable.to_string_lossy());
        }
        let _ = writeln!(out, "| `{}` | {text} |", argument_name(arg));
    }
}

/// `-n, --name <VALUE>`, or `<VALUE>`.
fn argument_name(arg: &Arg) -> String {
    let shown = arg.to_string().replace('|', "\\|");
    match arg.get_short() {
        Some(short) if arg.get_long().is_some() => format!("-{short}, {shown}"),
        _ => shown,
    }
}
