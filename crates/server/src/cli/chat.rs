//! `oubliette chat`: a session's turns one after the other, with slash commands in between.

use std::{
    collections::VecDeque,
    io::{BufRead as _, IsTerminal as _, Write as _},
};

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{
    CommandContext, CommandOutcome, agent,
    client::ActionClient,
    debug,
    output::{OutputFormat, field_text, print_line},
    resolve::{self, set_if_some},
    session::format_switch,
    style::{AnsiStyle, fold_to_line, strip_control_chars},
    tool,
    turn::{InterruptSignal, SentMessage, TurnOutcome, TypedLines},
    turn_display::{TurnDisplay, TurnVerbosity},
};

const HELP: &str = "\
/switch AGENT   give the session another agent
/agents         the agents there are
/tools          the tools the agent has, and every server's light
/cancel         cancel the running turn (so does Ctrl-C)
/session        the session's id
/end            end the session and leave
/quit           leave; the session stays (so does Ctrl-D)
/help           this";

/// Arguments of `oubliette chat`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Commands while you chat: /switch AGENT, /agents, /tools, /cancel, /end, /help.\n\
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
struct ChatLoop {
    client: ActionClient,
    output: OutputFormat,
    display: TurnDisplay,
    interrupts: InterruptSignal,
    lines: mpsc::Receiver<String>,
    /// Lines typed while a turn ran.
    queued: VecDeque<String>,
    /// Whether stdin and stdout are a terminal.
    interactive: bool,
    session: Option<String>,
    since: i64,
    agent: Option<String>,
    project: Option<String>,
    /// How often Ctrl-C was pressed since the last line; the second time ends the session.
    interrupt_count: usize,
    /// Whether a turn or command failed; the exit code when lines come from a pipe.
    failed: bool,
}

/// What to do after a line of input.
enum ChatStep {
    Continue,
    Leave,
}

/// Runs `oubliette chat`.
pub(crate) async fn run(args: ChatArgs, context: CommandContext) -> Result<CommandOutcome> {
    let client = ActionClient::connect_running(&context.home).await?;
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
    let mut chat = ChatLoop {
        project,
        agent: args.agent,
        session: None,
        since: -1,
        output: context.output,
        display: TurnDisplay::new(show),
        lines: read_lines(),
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

/// Lines of stdin, read on a thread of its own because the read blocks.
fn read_lines() -> mpsc::Receiver<String> {
    let (sender, lines) = mpsc::channel(1);
    std::thread::spawn(move || {
        for line in std::io::stdin().lock().lines() {
            let Ok(line) = line else { return };
            if sender.blocking_send(line).is_err() {
                return;
            }
        }
    });
    lines
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
            if self.interactive && self.queued.is_empty() {
                let mut out = std::io::stdout().lock();
                let _ = write!(out, "{} ", AnsiStyle::stdout().bold("›"));
                let _ = out.flush();
            }
            let line = match self.queued.pop_front() {
                Some(line) => Some(line),
                None => tokio::select! {
                    line = self.lines.recv() => line,
                    () = self.interrupts.next() => {
                        self.interrupt_count += 1;
                        if self.interrupt_count > 1 {
                            return self.end_session().await;
                        }
                        print_line("");
                        self.display.print_note("Ctrl-C again ends the session; /quit leaves it");
                        continue;
                    }
                },
            };
            self.interrupt_count = 0;
            let Some(line) = line else {
                if self.interactive {
                    print_line("");
                }
                return self.leave();
            };
            let line = line.trim();
            let next = match line.strip_prefix('/') {
                _ if line.is_empty() => Ok(ChatStep::Continue),
                Some("end") => return self.end_session().await,
                Some(command) => self.run_command(command).await,
                None => self.run_turn(line).await,
            };
            match next {
                Ok(ChatStep::Continue) => {}
                Ok(ChatStep::Leave) => return self.leave(),
                // The server has stopped: no later turn can succeed.
                Err(error) if !super::client::is_running(self.home()?).await => return Err(error),
                Err(error) => {
                    self.failed = true;
                    self.output.print_error(&error);
                }
            }
        }
    }

    fn home(&self) -> Result<&oubliette_home::HomeDir> {
        match &self.client {
            ActionClient::Server(home) => Ok(home),
            ActionClient::Local(_) => Err(Error::internal("a chat needs a server")),
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
        let sent = SentMessage::send(&self.client, arguments).await?;
        if self.session.is_none() {
            self.session = Some(sent.session().to_owned());
            self.display.print_note(&format!("session {}", sent.session()));
        }
        let mut typed = TypedLines {
            lines: &mut self.lines,
            queued: &mut self.queued,
        };
        let typed = self.interactive.then_some(&mut typed);
        let ended = sent
            .follow(
                &self.client,
                &mut self.since,
                &mut self.display,
                &mut self.interrupts,
                typed,
            )
            .await?;
        match ended {
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
                self.interrupt_count = usize::from(by_interrupt);
                Ok(ChatStep::Continue)
            }
            TurnOutcome::Failed(error) => Err(error),
            TurnOutcome::SessionEnded => {
                self.session = None;
                Ok(ChatStep::Leave)
            }
        }
    }

    async fn run_command(&mut self, command: &str) -> Result<ChatStep> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match name {
            "quit" | "exit" | "q" => return Ok(ChatStep::Leave),
            "help" | "h" | "?" => print_line(HELP),
            "switch" => self.switch(rest.trim()).await?,
            "agents" => {
                let list = self.client.list("agent_list", "agents", json!({}), None).await?;
                self.output.print_result(&list, agent::format_agents);
            }
            "tools" => self.list_tools().await?,
            "cancel" => self.cancel_turn().await?,
            "session" => match &self.session {
                Some(id) => print_line(id),
                None => self
                    .display
                    .print_note("no session yet: it starts with your first message"),
            },
            other => {
                let name = fold_to_line(other, 40);
                return Err(Error::invalid(format!(
                    "there is no command /{name}; /help shows what there is"
                )));
            }
        }
        Ok(ChatStep::Continue)
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
