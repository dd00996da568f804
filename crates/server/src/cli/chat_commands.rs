//! The `/` commands of `oubliette chat`.

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};

use super::{
    agent, approval,
    chat::{ChatLoop, ChatStep},
    debug,
    output::{OutputFormat, field_text, format_listing, print_line},
    session::format_switch,
    style::{fold_to_line, terminal_width},
    tool, usage, workspace, workspace_files,
};

/// A command, as help and completion show it.
pub(crate) struct ChatCommand {
    /// Its name, without the slash.
    pub name: &'static str,
    /// What follows it.
    pub arguments: &'static str,
    /// What it does.
    pub help: &'static str,
}

const fn command(name: &'static str, arguments: &'static str, help: &'static str) -> ChatCommand {
    ChatCommand {
        name,
        arguments,
        help,
    }
}

/// The commands there are.
pub(crate) const COMMANDS: &[ChatCommand] = &[
    command(
        "agent",
        "[AGENT]",
        "the session's agent; with a name, another one for it",
    ),
    command("switch", "AGENT", "give the session another agent"),
    command("agents", "", "the agents there are"),
    command("tools", "", "the tools the agent has, and every server's light"),
    command("files", "[FOLDER]", "the files of the workspace"),
    command("diff", "", "what changed in the workspace"),
    command("usage", "", "what the session used, by model"),
    command("approvals", "", "calls of the session that wait for approval"),
    command("approve", "ID", "allow a call that waits"),
    command(
        "deny",
        "ID [WHY]",
        "deny a call that waits; the agent is told why",
    ),
    command("queue", "[remove TURN]", "messages that wait for their turn"),
    command("cancel", "", "cancel the running turn (so does Ctrl-C)"),
    command("session", "", "the session's id"),
    command(
        "new",
        "",
        "leave this session as it is; the next message starts another",
    ),
    command("clear", "", "clear the screen"),
    command("end", "", "end the session and leave"),
    command("quit", "", "leave; the session stays (so does Ctrl-D)"),
    command("help", "", "this"),
];

/// The keys, as `/help` shows them after the commands.
const KEYS: [(&str, &str); 5] = [
    (
        "Tab",
        "complete a command, an agent, or a path of the workspace after @",
    ),
    (
        "Alt-Enter",
        "a new line in the message; so does a backslash before Enter, and a pasted one stays",
    ),
    (
        "Up, Ctrl-R",
        "what you typed before; a line that begins with a space is not kept",
    ),
    (
        "Ctrl-C",
        "cancel the turn, or the line; twice at an empty prompt leaves",
    ),
    (
        "Enter",
        "while a turn runs, the line waits for its end; /queue shows such lines, /queue clear forgets them, /cancel acts at once",
    ),
];
/// Explanations narrower than this begin below what they explain.
const MIN_HELP_COLUMNS: usize = 24;

/// The text of `/help`, wrapped at words.
pub(crate) fn help_text(width: usize) -> String {
    let usage = |command: &ChatCommand| format!("/{} {}", command.name, command.arguments);
    let widest = COMMANDS
        .iter()
        .map(|command| usage(command).len())
        .max()
        .unwrap_or(0);
    let rows = COMMANDS.iter().map(|command| (usage(command), command.help));
    let keys = KEYS.iter().map(|(key, help)| ((*key).to_owned(), *help));
    let mut lines: Vec<String> = rows
        .flat_map(|row| help_lines(&row.0, row.1, widest, width))
        .collect();
    lines.push(String::new());
    lines.extend(keys.flat_map(|row| help_lines(&row.0, row.1, widest, width)));
    lines.join("\n")
}

/// One row of `/help`: what is explained, in a column of this width, and its explanation beside it, or below it where there
/// is little room.
fn help_lines(name: &str, help: &str, column: usize, width: usize) -> Vec<String> {
    let (indent, first) = match width.saturating_sub(column + 1) >= MIN_HELP_COLUMNS {
        true => (column + 1, format!("{name:column$} ")),
        false => (4, String::new()),
    };
    let wrapped = wrap_words(help, width.saturating_sub(indent));
    let beside = !first.is_empty();
    let mut lines = if beside {
        Vec::new()
    } else {
        vec![name.trim_end().to_owned()]
    };
    for (n, text) in wrapped.iter().enumerate() {
        let start = if n == 0 && beside {
            first.clone()
        } else {
            " ".repeat(indent)
        };
        lines.push(format!("{start}{text}"));
    }
    lines
}

/// Lines of at most this many columns, broken at spaces.
fn wrap_words(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    for word in text.split_whitespace() {
        match lines.last_mut() {
            Some(line) if line.len() + 1 + word.len() <= width => {
                line.push(' ');
                line.push_str(word);
            }
            _ => lines.push(word.to_owned()),
        }
    }
    lines
}

impl ChatLoop {
    /// Runs a command, given without its slash.
    pub(super) async fn run_command(&mut self, command: &str) -> Result<ChatStep> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        let rest = rest.trim();
        match (name, rest) {
            ("quit" | "exit" | "q", _) => return Ok(ChatStep::Leave),
            ("help" | "h" | "?", _) => print_line(&help_text(terminal_width())),
            ("agent", "") => self.print_agent(),
            ("agent" | "switch", agent) => self.switch(agent).await?,
            ("agents", _) => {
                let list = self.client.list("agent_list", "agents", json!({}), None).await?;
                self.output.print_result(&list, agent::format_agents);
            }
            ("tools", _) => self.list_tools().await?,
            ("files", folder) => self.list_files(folder).await?,
            ("diff", _) => self.print_diff().await?,
            ("usage", _) => self.print_usage().await?,
            ("approvals", _) => self.list_approvals().await?,
            ("approve", id) => {
                self.decide(json!({ "approval_id": id, "decision": "allow" }))
                    .await?
            }
            ("deny", rest) => {
                let (id, why) = rest.split_once(' ').unwrap_or((rest, ""));
                let mut arguments = json!({ "approval_id": id, "decision": "deny" });
                if !why.trim().is_empty() {
                    arguments["reason"] = json!(why.trim());
                }
                self.decide(arguments).await?;
            }
            ("queue", rest) => self.queue(rest).await?,
            ("cancel", _) => self.cancel_turn().await?,
            ("session", _) => match &self.session {
                Some(id) => print_line(id),
                None => self.note_no_session(),
            },
            ("new", _) => self.start_anew(),
            ("clear", _) => {
                if self.interactive {
                    print_line("\x1b[2J\x1b[H");
                }
            }
            (other, _) => {
                let name = fold_to_line(other, 40);
                return Err(Error::invalid(format!(
                    "there is no command /{name}; /help shows what there is"
                )));
            }
        }
        Ok(ChatStep::Continue)
    }

    fn note_no_session(&mut self) {
        self.display
            .print_note("no session yet: it starts with your first message");
    }

    /// The session, for a command that needs one.
    fn require_session(&self) -> Result<&str> {
        let missing = || Error::invalid("no session yet: it starts with your first message");
        self.session.as_deref().ok_or_else(missing)
    }

    fn print_agent(&mut self) {
        match &self.agent {
            Some(agent) => print_line(&fold_to_line(agent, 200)),
            None => self
                .display
                .print_note("the project's agent; /agents shows the others"),
        }
    }

    async fn switch(&mut self, agent: &str) -> Result<()> {
        if agent.is_empty() {
            return Err(Error::invalid(
                "say to which agent: /switch AGENT; /agents shows them",
            ));
        }
        let Some(session) = &self.session else {
            self.client.call("agent_get", json!({ "slug": agent })).await?;
            self.agent = Some(agent.to_owned());
            self.display
                .print_note(&format!("{agent} will get the first message"));
            return Ok(());
        };
        let output = self.output;
        let show = |line: &str| {
            if output == OutputFormat::Text {
                print_line(line);
            }
        };
        let switched = debug::switch_agent(&self.client, session, agent, show).await?;
        self.agent = Some(field_text(&switched, "agent"));
        self.output.print_result(&switched, format_switch);
        Ok(())
    }

    async fn list_tools(&mut self) -> Result<()> {
        let asked = match (&self.session, &self.agent) {
            (Some(session), _) => json!({ "session_id": session }),
            (None, Some(agent)) => json!({ "agent": agent }),
            (None, None) => {
                return Err(Error::invalid(
                    "no session yet: say something first, or name an agent with /switch",
                ));
            }
        };
        let list = self.client.call("tool_list", asked).await?;
        self.output.print_result(&list, tool::format_tool_list);
        Ok(())
    }

    async fn workspace(&self) -> Result<String> {
        let (session, project) = (self.session.as_deref(), self.project.as_deref());
        workspace_files::workspace_of(&self.client, session, project).await
    }

    async fn list_files(&self, folder: &str) -> Result<()> {
        let workspace = self.workspace().await?;
        let folder = folder.strip_prefix('@').unwrap_or(folder);
        let entries = workspace_files::list_folder(&self.client, &workspace, folder).await?;
        let listing = json!({ "workspace_id": workspace, "entries": entries });
        self.output.print_result(&listing, |listing| {
            let mut entries = listing["entries"].as_array().cloned().unwrap_or_default();
            for entry in &mut entries {
                if entry["type"] == "directory" {
                    entry["name"] = json!(format!("{}/", field_text(entry, "name")));
                    entry["size"] = Value::Null;
                }
            }
            format_listing(
                &entries,
                &[("NAME", "name"), ("SIZE", "size")],
                "The folder is empty.",
            )
        });
        Ok(())
    }

    async fn print_diff(&self) -> Result<()> {
        let workspace = self.workspace().await?;
        let diff = self
            .client
            .call("workspace_diff", json!({ "workspace_id": workspace }))
            .await?;
        self.output
            .print_result(&diff, |diff| workspace::colour_diff(&field_text(diff, "diff")));
        if diff["truncated"] == true {
            self.output
                .print_hint("the diff is longer than this; the rest was left out");
        }
        Ok(())
    }

    async fn print_usage(&self) -> Result<()> {
        let arguments = json!({ "session_id": self.require_session()?, "group_by": "model" });
        let report = self.client.call("usage_report", arguments).await?;
        self.output
            .print_result(&report, |report| usage::format_report(report, "MODEL"));
        Ok(())
    }

    async fn list_approvals(&self) -> Result<()> {
        let arguments = json!({ "session_id": self.require_session()?, "status": "pending" });
        let page = self.client.call("approval_list", arguments).await?;
        self.output.print_result(&page, approval::format_approvals);
        Ok(())
    }

    async fn decide(&self, arguments: Value) -> Result<()> {
        if arguments["approval_id"] == "" {
            return Err(Error::invalid(
                "say which: /approve ID or /deny ID; /approvals shows them",
            ));
        }
        let decided = self.client.call("approval_decide", arguments).await?;
        self.output.print_result(&decided, approval::format_decision);
        Ok(())
    }

    async fn queue(&mut self, rest: &str) -> Result<()> {
        let session = self.require_session()?.to_owned();
        if let Some(turn) = rest.strip_prefix("remove") {
            let turn: u64 = turn
                .trim()
                .parse()
                .map_err(|_| Error::invalid("say which: /queue remove TURN; /queue shows them"))?;
            let arguments = json!({ "session_id": session, "turn": turn });
            let removed = self.client.call("session_queue_remove", arguments).await?;
            self.output
                .print_result(&removed, |_| format!("the message of turn {turn} is removed"));
            return Ok(());
        }
        if !rest.is_empty() {
            return Err(Error::invalid("it is /queue, or /queue remove TURN"));
        }
        let list = self
            .client
            .call("session_queue_list", json!({ "session_id": session }))
            .await?;
        self.output.print_result(&list, |list| {
            let messages = list["messages"].as_array().cloned().unwrap_or_default();
            format_listing(
                &messages,
                &[("TURN", "turn"), ("MESSAGE", "text")],
                "No message waits.",
            )
        });
        Ok(())
    }

    async fn cancel_turn(&mut self) -> Result<()> {
        let done = match &self.session {
            Some(session) => {
                self.client
                    .call("session_cancel", json!({ "session_id": session }))
                    .await?
            }
            None => Value::Null,
        };
        if done["cancelled"] != true {
            self.display.print_note("no turn is running");
        }
        Ok(())
    }

    fn start_anew(&mut self) {
        match self.session.take() {
            Some(id) => {
                self.since = -1;
                let hint =
                    format!("the next message starts a session; {id} stays: oubliette chat --session {id}");
                self.display.print_note(&hint);
            }
            None => self.note_no_session(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_names_every_command_once() {
        for width in [40, 60, 90, 200] {
            let help = help_text(width);
            for command in COMMANDS {
                let name = format!("/{}", command.name);
                let lines = help
                    .lines()
                    .filter(|line| line.starts_with('/') && line.split_whitespace().next() == Some(&name));
                assert_eq!(lines.count(), 1, "{}", command.name);
            }
            // Wrapped at words: a terminal would break anywhere.
            assert!(help.lines().all(|line| line.len() <= width), "{help}");
            assert!(help.contains("forgets") && help.contains("pasted"), "{help}");
        }
    }
}
