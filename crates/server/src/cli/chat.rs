//! `oubliette chat`: a session's turns one after the other, with slash commands in between.

use std::{
    collections::VecDeque,
    io::{IsTerminal as _, Write as _},
    sync::Arc,
};

use oubliette_protocol::{Error, Result};
use parking_lot::Mutex;
use serde_json::json;

use super::{
    CommandContext, CommandOutcome,
    approval_prompt::StdinLines,
    chat_completion::{ChatCompleter, CompletionScope},
    chat_history::HistoryFile,
    client::ActionClient,
    line_editor::{EditedLine, LineEditor},
    output::{OutputFormat, field_text, print_line},
    resolve::{self, set_if_some},
    style::{AnsiStyle, fold_to_line, strip_control_chars, terminal_width},
    turn::{InterruptSignal, LineSource, SentMessage, TurnOutcome, TypedLines},
    turn_display::{TurnDisplay, TurnVerbosity},
    turn_keys::TurnKeys,
};

/// Arguments of `oubliette chat`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Commands while you chat, told by /help: /agent AGENT, /tools, /files, /diff, /usage, /approvals, /queue, /cancel, \
    /new, /end, /quit.\n\n\
    Keys:\n\
    \x20 Tab         complete a command, an agent, or a path of the workspace after @\n\
    \x20 Alt-Enter   begin a new line, and so does a backslash before Enter; a pasted text keeps its lines\n\
    \x20 Up, Ctrl-R  find what you typed before: kept in HOME/history for you alone, unless it begins with a space\n\
    \x20 Ctrl-C      cancel the turn; clear the line; twice at an empty prompt, or Ctrl-D, leaves\n\
    Lines you type while a turn runs are sent when it has ended.\n\n\
    Lines may also come from a pipe: printf 'Hello\\n/tools\\n/end\\n' | oubliette chat --agent demo"
)]
pub(crate) struct ChatArgs {
    /// The agent (default: the project's).
    #[arg(long, short)]
    agent: Option<String>,
    /// The project, by id or name (default: the only one).
    #[arg(long, short)]
    project: Option<String>,
    /// Go on with this session, or with the `last` one.
    #[arg(long, value_name = "ID", conflicts_with_all = ["agent", "project"])]
    session: Option<String>,
}

/// A running chat.
pub(super) struct ChatLoop {
    pub(super) client: Arc<ActionClient>,
    pub(super) output: OutputFormat,
    pub(super) display: TurnDisplay,
    interrupts: InterruptSignal,
    lines: StdinLines,
    /// Present if stdin, stdout and stderr are a terminal that can be edited on; else lines are read as they come.
    editor: Option<LineEditor>,
    /// What completion works on.
    scope: Arc<Mutex<CompletionScope>>,
    /// Lines typed while a turn ran.
    queued: VecDeque<String>,
    /// What was typed while a turn ran, without Enter: it is in the next line already.
    draft: String,
    /// Whether stdin and stdout are a terminal.
    pub(super) interactive: bool,
    pub(super) session: Option<String>,
    pub(super) since: i64,
    pub(super) agent: Option<String>,
    pub(super) project: Option<String>,
    /// How often Ctrl-C was pressed since the last line; the second time leaves, or ends the session without an editor.
    interrupt_count: usize,
    /// Whether a turn or command failed; the exit code when lines come from a pipe.
    failed: bool,
}

/// What came of waiting for a line.
enum NextLine {
    Line(String),
    Interrupt,
    End,
}

/// What to do after a line of input.
pub(super) enum ChatStep {
    Continue,
    Leave,
}

/// Runs `oubliette chat`.
pub(crate) async fn run(args: ChatArgs, context: CommandContext) -> Result<CommandOutcome> {
    let client = Arc::new(ActionClient::connect_running(&context).await?);
    let interrupts = InterruptSignal::listen()?;
    let interactive = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let show = if context.output == OutputFormat::Json {
        TurnVerbosity::Nothing
    } else {
        TurnVerbosity::All
    };
    let project = match args.session {
        Some(_) => None,
        None => Some(resolve::project_id_or_only(&client, args.project.as_deref()).await?),
    };
    let is_smart = std::env::var_os("TERM").is_none_or(|term| term != "dumb");
    let edits = interactive && is_smart && std::io::stderr().is_terminal() && show == TurnVerbosity::All;
    let scope = Arc::new(Mutex::new(CompletionScope::default()));
    let editor = edits.then(|| {
        let runtime = tokio::runtime::Handle::current();
        let completer = ChatCompleter::new(Arc::clone(&client), Arc::clone(&scope), runtime);
        let history = HistoryFile::of(&context.home, &context.target);
        LineEditor::start(Some(history), Box::new(completer))
    });
    let mut chat = ChatLoop {
        editor,
        scope,
        draft: String::new(),
        project,
        agent: args.agent,
        session: None,
        since: -1,
        output: context.output,
        display: TurnDisplay::new(show),
        lines: StdinLines::default(),
        queued: VecDeque::new(),
        interrupt_count: 0,
        failed: false,
        client,
        interrupts,
        interactive,
    };
    if let Some(agent) = &chat.agent {
        chat.client.call("agent_get", json!({ "slug": agent })).await?;
    }
    if let Some(given) = &args.session {
        chat.resume(given).await?;
    }
    chat.print_greeting();
    chat.run_loop().await
}

impl ChatLoop {
    async fn resume(&mut self, given: &str) -> Result<()> {
        let id = resolve::session_id(&self.client, given).await?;
        let session = self
            .client
            .call("session_get", json!({ "session_id": id }))
            .await?;
        if session["status"] == "ended" {
            return Err(Error::conflict(format!(
                "session {id} has ended; start another with `oubliette chat`"
            )));
        }
        self.agent = session["agent"].as_str().map(str::to_owned);
        self.since = super::run::last_event_index(&self.client, &id).await?;
        self.session = Some(id);
        Ok(())
    }

    fn print_greeting(&mut self) {
        let agent = self.agent.as_deref().unwrap_or("the project's agent");
        let session = match &self.session {
            Some(id) => format!(" · session {id}"),
            None => String::new(),
        };
        self.display
            .print_note(&format!("{agent}{session} · /help for commands"));
    }

    async fn run_loop(mut self) -> Result<CommandOutcome> {
        loop {
            let line = match self.next_line().await? {
                NextLine::Line(line) => line,
                NextLine::End => return self.leave(),
                NextLine::Interrupt => {
                    self.interrupt_count += 1;
                    match (self.interrupt_count, &self.editor) {
                        (1, Some(_)) => self.display.print_note("Ctrl-C again, or Ctrl-D, leaves"),
                        (1, None) => {
                            print_line("");
                            self.display
                                .print_note("Ctrl-C again ends the session; /quit leaves it");
                        }
                        (_, Some(_)) => return self.leave(),
                        (_, None) => return self.end_session().await,
                    }
                    continue;
                }
            };
            self.interrupt_count = 0;
            let line = line.trim();
            let next = match line.strip_prefix('/') {
                _ if line.is_empty() => Ok(ChatStep::Continue),
                Some("end") => return self.end_session().await,
                Some(command) => self.run_command(command).await,
                None => Box::pin(self.run_turn(line)).await,
            };
            match next {
                Ok(ChatStep::Continue) => {}
                Ok(ChatStep::Leave) => return self.leave(),
                // The server has stopped: no later turn can succeed.
                Err(error) if !self.client.is_reachable().await => return Err(error),
                Err(error) => {
                    self.failed = true;
                    self.output.print_error(&error);
                }
            }
        }
    }

    /// The next line: one typed ahead, else from the editor or stdin.
    async fn next_line(&mut self) -> Result<NextLine> {
        if let Some(line) = self.queued.pop_front() {
            if self.editor.is_some() {
                let shown = fold_to_line(&line, terminal_width().saturating_sub(3));
                print_line(&format!("{} {shown}", AnsiStyle::stdout().bold("›")));
            }
            return Ok(NextLine::Line(line));
        }
        if self.editor.is_some() {
            let status = self.status_text().await;
            *self.scope.lock() = CompletionScope {
                session: self.session.clone(),
                project: self.project.clone(),
            };
            let draft = std::mem::take(&mut self.draft);
            // One pressed while a command ran was for that command.
            self.interrupts.clear().await;
            if let Some(editor) = &mut self.editor {
                let edited = tokio::select! {
                    edited = editor.read(status, draft) => edited?,
                    // Not the key, which the editor reads, but the signal.
                    () = self.interrupts.next() => {
                        let _ = crossterm::terminal::disable_raw_mode();
                        print_line("");
                        EditedLine::End
                    }
                };
                match edited {
                    EditedLine::Line(line) => return Ok(NextLine::Line(line)),
                    EditedLine::Interrupt => return Ok(NextLine::Interrupt),
                    EditedLine::End => return Ok(NextLine::End),
                    EditedLine::Unusable(why) => {
                        self.editor = None;
                        let why = fold_to_line(&why, 200);
                        self.display
                            .print_note(&format!("lines are read without editing: {why}"));
                    }
                }
            }
        }
        if self.interactive {
            let mut out = std::io::stdout().lock();
            let _ = write!(out, "{} ", AnsiStyle::stdout().bold("›"));
            let _ = out.flush();
        }
        let line = tokio::select! {
            line = self.lines.next() => line,
            () = self.interrupts.next() => return Ok(NextLine::Interrupt),
        };
        if line.is_none() && self.interactive {
            print_line("");
        }
        Ok(line.map_or(NextLine::End, NextLine::Line))
    }

    /// The status line above the prompt.
    async fn status_text(&mut self) -> String {
        let mut state = "no session yet".to_owned();
        let mut session = json!({ "agent": self.agent });
        if let Some(id) = &self.session {
            match self.client.call("session_get", json!({ "session_id": id })).await {
                Ok(found) => {
                    state = field_text(&found, "status");
                    session = found;
                }
                Err(error) => state = fold_to_line(&error.message, 60),
            }
        }
        match self.display.status_mut() {
            Some(status) => {
                status.observe_session(&session);
                status.format(&state)
            }
            None => state,
        }
    }

    async fn run_turn(&mut self, text: &str) -> Result<ChatStep> {
        let mut arguments = json!({ "message": text });
        match &self.session {
            Some(id) => arguments["session_id"] = json!(id),
            None => {
                set_if_some(&mut arguments, "agent", self.agent.as_ref());
                set_if_some(&mut arguments, "project_id", self.project.as_ref());
            }
        }
        let mut keys = match &self.editor {
            Some(_) => Some(TurnKeys::start(std::mem::take(&mut self.draft))?),
            None => None,
        };
        let ended = self.send_and_follow(arguments, keys.as_mut()).await;
        if let Some(keys) = keys {
            let (lines, draft) = keys.finish();
            self.queued.extend(lines);
            self.draft = draft;
        }
        match ended? {
            TurnOutcome::Completed { reply } => {
                if self.output == OutputFormat::Json {
                    print_line(&reply.to_string());
                }
                Ok(ChatStep::Continue)
            }
            TurnOutcome::Cancelled { reply, by_interrupt } => {
                if self.output == OutputFormat::Json {
                    print_line(&reply.to_string());
                }
                self.display.print_note("cancelled");
                match &self.editor {
                    // Nothing runs unasked after a cancel, and nothing typed is lost.
                    Some(_) if by_interrupt => self.put_back_queued(),
                    Some(_) => {}
                    None => self.interrupt_count = usize::from(by_interrupt),
                }
                Ok(ChatStep::Continue)
            }
            TurnOutcome::Failed(error) => Err(error),
            TurnOutcome::SessionEnded => {
                self.session = None;
                Ok(ChatStep::Leave)
            }
            TurnOutcome::Left => Ok(ChatStep::Leave),
        }
    }

    /// Sends the message and shows its turn.
    async fn send_and_follow(
        &mut self,
        arguments: serde_json::Value,
        keys: Option<&mut TurnKeys>,
    ) -> Result<TurnOutcome> {
        let sent = SentMessage::send(&self.client, arguments).await?;
        if self.session.is_none() {
            self.session = Some(sent.session().to_owned());
            self.display.print_note(&format!("session {}", sent.session()));
        }
        let typed = TypedLines {
            source: match (keys, self.interactive) {
                (Some(keys), _) => LineSource::Keys(keys),
                (None, true) => LineSource::Always(&mut self.lines),
                (None, false) => LineSource::ForApprovals(&mut self.lines),
            },
            queued: &mut self.queued,
        };
        sent.follow(
            &self.client,
            &mut self.since,
            &mut self.display,
            &mut self.interrupts,
            typed,
        )
        .await
    }

    /// Puts lines typed ahead back into the line editor.
    fn put_back_queued(&mut self) {
        let mut lines: Vec<String> = self.queued.drain(..).collect();
        if !self.draft.is_empty() {
            lines.push(std::mem::take(&mut self.draft));
        }
        self.draft = lines.join("\n");
    }

    async fn end_session(mut self) -> Result<CommandOutcome> {
        if let Some(id) = self.session.take() {
            let ended = self
                .client
                .call("session_end", json!({ "session_id": id }))
                .await?;
            if self.output == OutputFormat::Json {
                print_line(&ended.to_string());
            }
            self.display.print_note(&format!("{id} is ended"));
        }
        Ok(self.outcome())
    }

    fn leave(mut self) -> Result<CommandOutcome> {
        if let Some(id) = &self.session {
            let hint = format!(
                "the session stays; come back with: oubliette chat --session {}",
                strip_control_chars(id)
            );
            self.display.print_note(&hint);
        }
        Ok(self.outcome())
    }

    /// Failed if a line failed and nobody sat at the terminal to see it.
    fn outcome(&self) -> CommandOutcome {
        match self.failed && !self.interactive {
            true => CommandOutcome::Failed,
            false => CommandOutcome::Done,
        }
    }
}
