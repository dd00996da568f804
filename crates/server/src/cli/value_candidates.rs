//! What a shell completes in the place of an argument: ids and slugs, asked of the server while the user types. Shells call
//! `oubliette` for it as the script says that `oubliette completions` prints.
//!
//! Whoever presses Tab waits for the answer, so it is short and comes at once or not at all: without a server, without
//! permission or past a deadline there is nothing to choose from, and no error is printed into the line.

use std::{path::PathBuf, time::Duration};

use clap::{Arg, Command, CommandFactory as _};
use clap_complete::{ArgValueCandidates, CompleteEnv, CompletionCandidate};
use oubliette_home::HomeDir;
use oubliette_protocol::Result;
use serde_json::{Value, json};

use super::{
    CommandContext, CommandLine, ServerTarget, choose_target,
    client::ActionClient,
    contexts::{self, ContextFile},
    output::{OutputFormat, field_text},
    style::{fold_to_line, strip_control_chars},
};
use crate::presets::AgentPreset;

/// The variable with which a shell's script asks for candidates.
pub(crate) const COMPLETE_VARIABLE: &str = "OUBLIETTE_COMPLETE";
/// How long the server of this machine may take; it takes a few milliseconds unless the machine is overloaded.
const LOCAL_TIMEOUT: Duration = Duration::from_millis(250);
/// How long a server elsewhere may take.
const REMOTE_TIMEOUT: Duration = Duration::from_millis(500);
/// Maximum number of candidates, the newest where there are more.
const MAX_CANDIDATES: u32 = 100;
/// Maximum length of the text beside a candidate, in characters.
const MAX_HELP_CHARS: usize = 60;

/// Answers the shell if it asks for candidates, and ends the process; returns if it does not.
pub(crate) fn answer_shell() {
    CompleteEnv::with_factory(|| with_candidates(CommandLine::command(), &mut Vec::new()))
        .var(COMPLETE_VARIABLE)
        .complete();
}

/// What an argument names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum NamedResource {
    Session,
    Project,
    Workspace,
    Agent,
    Preset,
    CatalogEntry,
    Program,
    Approval,
    Token,
    Context,
}

impl NamedResource {
    /// What the argument of a command names; none if it is something else.
    fn of_argument(command: &[String], argument: &str) -> Option<Self> {
        let path: Vec<&str> = command.iter().map(String::as_str).collect();
        match (path.as_slice(), argument) {
            (["session", ..], "id" | "ids") | (_, "session") => Some(Self::Session),
            (_, "project") => Some(Self::Project),
            (["workspace", ..], "id") | (_, "workspace") => Some(Self::Workspace),
            (["agent", "get" | "test" | "delete"], "slug") | (_, "agent") => Some(Self::Agent),
            (["agent", "add"], "preset") => Some(Self::Preset),
            (["tool", "get" | "test" | "delete"], "id")
            | (["tool", ..], "server")
            | (["agent", ..], "uses") => Some(Self::CatalogEntry),
            (["program", "remove"], _) => Some(Self::Program),
            (["approve" | "deny"], "id") => Some(Self::Approval),
            (["token", "revoke"], "id") => Some(Self::Token),
            (["context", ..], "name") | (_, "context") => Some(Self::Context),
            _ => None,
        }
    }

    /// The action that lists such things, the field of its answer, and the field that is completed.
    fn listing(self) -> Option<(&'static str, &'static str, &'static str)> {
        match self {
            Self::Session => Some(("session_list", "sessions", "session_id")),
            Self::Project => Some(("project_list", "projects", "project_id")),
            Self::Workspace => Some(("workspace_list", "workspaces", "workspace_id")),
            Self::Agent => Some(("agent_list", "agents", "slug")),
            Self::CatalogEntry => Some(("catalog_list", "entries", "id")),
            Self::Program => Some(("program_list", "programs", "program_id")),
            Self::Approval => Some(("approval_list", "approvals", "approval_id")),
            Self::Token => Some(("token_list", "tokens", "token_id")),
            Self::Preset | Self::Context => None,
        }
    }

    /// The arguments of the listing action.
    fn query(self) -> Value {
        match self {
            Self::Program => json!({}),
            Self::Approval => json!({ "status": "pending", "limit": MAX_CANDIDATES }),
            _ => json!({ "limit": MAX_CANDIDATES }),
        }
    }

    /// The fields of an item that are shown beside it.
    fn help_fields(self) -> &'static [&'static str] {
        match self {
            Self::Session => &["agent", "status", "title"],
            Self::Approval => &["agent", "tool"],
            Self::CatalogEntry => &["transport"],
            Self::Program => &["package"],
            Self::Token => &["name", "scope"],
            Self::Project | Self::Workspace | Self::Agent | Self::Preset | Self::Context => &["name"],
        }
    }
}

/// A command and those below it, with candidates for the arguments that name something.
fn with_candidates(command: Command, path: &mut Vec<String>) -> Command {
    let mut command =
        command.mut_args(
            |arg: Arg| match NamedResource::of_argument(path, arg.get_id().as_str()) {
                Some(thing) if arg.get_action().takes_values() => {
                    arg.add(ArgValueCandidates::new(move || candidates(thing)))
                }
                _ => arg,
            },
        );
    let names: Vec<String> = command
        .get_subcommands()
        .map(|sub| sub.get_name().to_owned())
        .collect();
    for name in names {
        path.push(name.clone());
        command = command.mut_subcommand(name, |sub| with_candidates(sub, path));
        path.pop();
    }
    command
}

/// The candidates for one kind of thing; none if they cannot be had at once.
fn candidates(thing: NamedResource) -> Vec<CompletionCandidate> {
    let words: Vec<String> = std::env::args().skip_while(|word| word != "--").skip(1).collect();
    let rows = match thing {
        NamedResource::Preset => AgentPreset::all().map(|all| {
            let row = |preset: &AgentPreset| (preset.name.clone(), preset.title.clone());
            all.iter().map(row).collect()
        }),
        NamedResource::Context => context_rows(&words),
        _ => server_rows(thing, &words),
    };
    let candidate = |(id, help): (String, String)| {
        let help = fold_to_line(&strip_control_chars(&help), MAX_HELP_CHARS);
        CompletionCandidate::new(id).help((!help.is_empty()).then(|| help.into()))
    };
    rows.unwrap_or_default().into_iter().map(candidate).collect()
}

/// The contexts of the home that the line names.
fn context_rows(words: &[String]) -> Result<Vec<(String, String)>> {
    let file = ContextFile::load(&home_of_line(words)?)?;
    let mut rows: Vec<(String, String)> = file
        .contexts
        .into_iter()
        .map(|context| (context.name, context.url))
        .collect();
    rows.push((
        contexts::LOCAL.to_owned(),
        "the home directory of this machine".to_owned(),
    ));
    Ok(rows)
}

/// What the server that the line is about lists.
fn server_rows(thing: NamedResource, words: &[String]) -> Result<Vec<(String, String)>> {
    let Some((action, items, id_field)) = thing.listing() else {
        return Ok(Vec::new());
    };
    let home = home_of_line(words)?;
    let choice = (option_of_line(words, "--url"), option_of_line(words, "--context"));
    let target = choose_target(&home, (choice.0.as_deref(), choice.1.as_deref()))?;
    let timeout = match target {
        ServerTarget::Home => LOCAL_TIMEOUT,
        ServerTarget::Remote(_) => REMOTE_TIMEOUT,
    };
    let context = CommandContext {
        home,
        target,
        url: choice.0,
        output: OutputFormat::Json,
    };
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(oubliette_protocol::Error::internal)?;
    let listed = runtime.block_on(async {
        let listing = async {
            ActionClient::connect_running(&context)
                .await?
                .call(action, thing.query())
                .await
        };
        tokio::time::timeout(timeout, listing).await
    });
    // A connection that is still being made must not delay the answer.
    runtime.shutdown_background();
    let listed = listed.map_err(oubliette_protocol::Error::internal)??;
    let rows = listed[items]
        .as_array()
        .into_iter()
        .flatten()
        .take(MAX_CANDIDATES as usize);
    let rows = rows.filter_map(|row| {
        let fields = thing.help_fields().iter().map(|field| field_text(row, field));
        let help: Vec<String> = fields.filter(|text| !text.is_empty()).collect();
        let id = row[id_field].as_str()?;
        // Ids of a server are of these characters; others could be read by the shell.
        let plain = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.' | b'@' | b'/');
        id.bytes().all(plain).then(|| (id.to_owned(), help.join(" · ")))
    });
    Ok(rows.collect())
}

/// The home directory that the line is about.
fn home_of_line(words: &[String]) -> Result<HomeDir> {
    let given = option_of_line(words, "--home").map(PathBuf::from);
    HomeDir::locate(given, |name| std::env::var_os(name))
}

/// The value of an option in the line that is being completed. It is not parsed, because it is not finished.
fn option_of_line(words: &[String], option: &str) -> Option<String> {
    let prefix = format!("{option}=");
    let mut found = None;
    for (at, word) in words.iter().enumerate() {
        if let Some(value) = word.strip_prefix(&prefix) {
            found = Some(value.to_owned());
        } else if word == option {
            found = words.get(at + 1).cloned();
        }
    }
    found.filter(|value| !value.is_empty())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_server_of_a_line_is_the_one_its_options_name() {
        let words: Vec<String> = ["oubliette", "--home", "/h", "session", "get", "--url=http://h:1"]
            .map(str::to_owned)
            .to_vec();
        assert_eq!(option_of_line(&words, "--home").as_deref(), Some("/h"));
        assert_eq!(option_of_line(&words, "--url").as_deref(), Some("http://h:1"));
        assert_eq!(option_of_line(&words, "--context"), None);
        assert_eq!(option_of_line(&["--home".to_owned()], "--home"), None);
    }

    #[test]
    fn arguments_that_name_something_have_candidates() {
        let command = with_candidates(CommandLine::command(), &mut Vec::new());
        let has = |path: &[&str], arg: &str| {
            let found = path.iter().fold(&command, |command, name| {
                command
                    .find_subcommand(name)
                    .unwrap_or_else(|| panic!("{path:?}"))
            });
            let mut args = found.get_arguments();
            let arg = args
                .find(|a| a.get_id() == arg)
                .unwrap_or_else(|| panic!("{path:?} {arg}"));
            arg.get::<ArgValueCandidates>().is_some()
        };
        for (path, arg) in [
            (&["session", "get"][..], "id"),
            (&["session", "end"], "ids"),
            (&["session", "switch"], "agent"),
            (&["run"], "agent"),
            (&["run"], "session"),
            (&["run"], "project"),
            (&["project", "delete"], "project"),
            (&["agent", "delete"], "slug"),
            (&["agent", "add"], "preset"),
            (&["tool", "delete"], "id"),
            (&["token", "revoke"], "id"),
            (&["approve"], "id"),
            (&["context", "use"], "name"),
        ] {
            assert!(has(path, arg), "{path:?} {arg}");
        }
        assert!(!has(&["agent", "new"], "slug"));
        assert!(!has(&["token", "create"], "name"));
    }
}
