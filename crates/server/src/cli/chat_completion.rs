//! Completion in `oubliette chat`: commands after `/`, agents after `/agent`, workspace paths after `@` and `/files`.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use reedline::{Completer, CompletionResult, Span, Suggestion};
use serde_json::{Value, json};

use super::{chat_commands::COMMANDS, client::ActionClient, style::is_hidden_char, workspace_files};

/// How long the server may take to answer; the person waits for it.
const ANSWER_TIMEOUT: Duration = Duration::from_secs(2);
/// How long a list is used before it is asked for again: one press of Tab asks several times.
const LIST_LIFETIME: Duration = Duration::from_secs(2);
/// The most suggestions that are shown.
const MAX_SUGGESTIONS: usize = 200;

/// What the chat works on now; the chat changes it, completion reads it.
#[derive(Debug, Default, Clone, PartialEq, Eq)]
pub(crate) struct CompletionScope {
    /// The session, once there is one.
    pub session: Option<String>,
    /// The project of the first message.
    pub project: Option<String>,
}

/// Completes what is being typed.
pub(crate) struct ChatCompleter {
    client: Arc<ActionClient>,
    scope: Arc<Mutex<CompletionScope>>,
    runtime: tokio::runtime::Handle,
    /// The list asked for last: what it is of, when it came.
    last: Option<(CompletionSource, Instant, Vec<String>)>,
}

/// What can be listed.
#[derive(Debug, Clone, PartialEq, Eq)]
enum CompletionSource {
    Agents,
    Folder(CompletionScope, String),
}

/// What is being completed: the words that fit, and where the part of the line begins that they replace.
#[derive(Debug, PartialEq, Eq)]
enum CompletionKind<'a> {
    Command(&'a str),
    Agent(&'a str),
    /// A path, relative to the workspace's root.
    Path(&'a str),
    Nothing,
}

impl ChatCompleter {
    /// Completes with what the server has.
    pub(crate) fn new(
        client: Arc<ActionClient>,
        scope: Arc<Mutex<CompletionScope>>,
        runtime: tokio::runtime::Handle,
    ) -> Self {
        Self {
            client,
            scope,
            runtime,
            last: None,
        }
    }

    fn list(&mut self, wanted: CompletionSource) -> Vec<String> {
        if let Some((of, since, names)) = &self.last
            && *of == wanted
            && since.elapsed() < LIST_LIFETIME
        {
            return names.clone();
        }
        let client = Arc::clone(&self.client);
        let asked = wanted.clone();
        // This thread is not one of the runtime's: it may wait.
        let answer = self
            .runtime
            .block_on(async { tokio::time::timeout(ANSWER_TIMEOUT, fetch_names(&client, &asked)).await });
        let names = answer.ok().flatten().unwrap_or_default();
        self.last = Some((wanted, Instant::now(), names.clone()));
        names
    }
}

async fn fetch_names(client: &ActionClient, wanted: &CompletionSource) -> Option<Vec<String>> {
    match wanted {
        CompletionSource::Agents => {
            let list = client.call("agent_list", json!({ "limit": 1000 })).await.ok()?;
            let agents = list["agents"].as_array()?;
            Some(
                agents
                    .iter()
                    .filter_map(|agent| agent["slug"].as_str().map(str::to_owned))
                    .collect(),
            )
        }
        CompletionSource::Folder(scope, folder) => {
            let (session, project) = (scope.session.as_deref(), scope.project.as_deref());
            let workspace = workspace_files::workspace_of(client, session, project)
                .await
                .ok()?;
            let listing = workspace_files::list_folder(client, &workspace, folder)
                .await
                .ok()?;
            Some(listing.iter().filter_map(entry_name).collect())
        }
    }
}

/// A folder's entry as it is completed: folders end with a slash. Names with characters that cannot be seen are left out.
fn entry_name(entry: &Value) -> Option<String> {
    let name = entry["name"].as_str()?;
    if name.contains(|c: char| is_hidden_char(c) || c == '\n') {
        return None;
    }
    Some(match entry["type"] == "directory" {
        true => format!("{name}/"),
        false => name.to_owned(),
    })
}

/// What is being completed at the end of this text.
fn completion_kind(before: &str) -> CompletionKind<'_> {
    let word = before.rsplit(char::is_whitespace).next().unwrap_or_default();
    if let Some(path) = word.strip_prefix('@') {
        return CompletionKind::Path(path);
    }
    match before.split_once(' ') {
        None if before.starts_with('/') => CompletionKind::Command(before),
        Some(("/agent" | "/switch", agent)) if !agent.contains(' ') => CompletionKind::Agent(agent),
        Some(("/files", path)) => CompletionKind::Path(path),
        _ => CompletionKind::Nothing,
    }
}

impl Completer for ChatCompleter {
    fn complete(&mut self, line: &str, pos: usize) -> CompletionResult {
        CompletionResult::fresh(self.suggestions(line, pos))
    }
}

impl ChatCompleter {
    fn suggestions(&mut self, line: &str, pos: usize) -> Vec<Suggestion> {
        let before = line.get(..pos).unwrap_or(line);
        let (typed, names, describe): (&str, Vec<String>, bool) = match completion_kind(before) {
            CompletionKind::Nothing => return Vec::new(),
            CompletionKind::Command(typed) => {
                let names = COMMANDS.iter().map(|command| format!("/{}", command.name));
                (typed, names.collect(), true)
            }
            CompletionKind::Agent(typed) => (typed, self.list(CompletionSource::Agents), false),
            CompletionKind::Path(path) => {
                let (folder, typed) = match path.rfind('/') {
                    Some(at) => path.split_at(at + 1),
                    None => ("", path),
                };
                let scope = self.scope.lock().clone();
                (
                    typed,
                    self.list(CompletionSource::Folder(scope, folder.to_owned())),
                    false,
                )
            }
        };
        let start = before.len() - typed.len();
        let fitting = names.into_iter().filter(|name| name.starts_with(typed));
        fitting
            .take(MAX_SUGGESTIONS)
            .map(|name| Suggestion {
                description: describe.then(|| describe_command(&name)),
                append_whitespace: !name.ends_with('/'),
                span: Span::new(start, before.len()),
                value: name,
                ..Suggestion::default()
            })
            .collect()
    }
}

fn describe_command(name: &str) -> String {
    let found = COMMANDS
        .iter()
        .find(|command| name.strip_prefix('/') == Some(command.name));
    found.map_or("", |command| command.help).to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_completed_depends_on_the_line() {
        for (line, kind) in [
            ("/ag", CompletionKind::Command("/ag")),
            ("/agent de", CompletionKind::Agent("de")),
            ("/switch ", CompletionKind::Agent("")),
            ("/files src/m", CompletionKind::Path("src/m")),
            ("look at @src/", CompletionKind::Path("src/")),
            ("/diff @a", CompletionKind::Path("a")),
            ("hello", CompletionKind::Nothing),
            ("mail@", CompletionKind::Nothing),
            ("", CompletionKind::Nothing),
        ] {
            assert_eq!(completion_kind(line), kind, "{line:?}");
        }
    }

    #[test]
    fn names_that_would_hide_something_are_not_completed() {
        let entry = |name: &str, kind: &str| entry_name(&json!({ "name": name, "type": kind }));
        assert_eq!(entry("src", "directory").as_deref(), Some("src/"));
        assert_eq!(entry("a b.rs", "file").as_deref(), Some("a b.rs"));
        assert_eq!(entry("a\u{1b}[2J", "file"), None);
        assert_eq!(entry("a\u{202e}b", "file"), None);
    }
}
