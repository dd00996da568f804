//! `oubliette chat`: turns one after the other, with commands in between.

use std::{
    collections::VecDeque,
    io::{BufRead as _, IsTerminal as _, Write as _},
};

use oubliette_protocol::{Error, Result};
use serde_json::{Value, json};
use tokio::sync::mpsc;

use super::{
    Context, Verdict, agent,
    client::Client,
    debug,
    live::{Live, Show},
    names::{self, set},
    output::{Output, field, say},
    session::said_switched,
    style::{Paint, clean, fold},
    tool,
    turn::{Ended, Interrupts, Sent, Typed},
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

/// Where to begin.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Commands while you chat: /switch AGENT, /agents, /tools, /cancel, /end, /help.\n\
    Lines may also come from a pipe: printf 'Hello\\n/tools\\n/end\\n' | oubliette chat --agent demo"
)]
pub struct Args {
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

/// A chat under way.
struct Chat {
    client: Client,
    output: Output,
    live: Live,
    interrupts: Interrupts,
    lines: mpsc::Receiver<String>,
    /// Typed while a turn ran.
    waiting: VecDeque<String>,
    /// Whether a person types.
    typed: bool,
    session: Option<String>,
    since: i64,
    agent: Option<String>,
    project: Option<String>,
    /// How often Ctrl-C was pressed since the last line.
    presses: usize,
    /// Whether a turn failed that nobody was there to see.
    failed: bool,
}

enum Next {
    Go,
    Leave,
}

/// Runs it.
pub async fn run(args: Args, context: Context) -> Result<Verdict> {
    let client = Client::running(&context.home).await?;
    let interrupts = Interrupts::listen()?;
    let typed = std::io::stdin().is_terminal() && std::io::stdout().is_terminal();
    let show = if context.output == Output::Json {
        Show::Nothing
    } else {
        Show::All
    };
    let project = match args.session {
        Some(_) => None,
        None => Some(names::project_or_only(&client, args.project.as_deref()).await?),
    };
    let mut chat = Chat {
        project,
        agent: args.agent,
        session: None,
        since: -1,
        output: context.output,
        live: Live::new(show),
        lines: read_lines(),
        waiting: VecDeque::new(),
        presses: 0,
        failed: false,
        client,
        interrupts,
        typed,
    };
    if let Some(agent) = &chat.agent {
        chat.client.call("agent_get", json!({ "slug": agent })).await?;
    }
    if let Some(given) = &args.session {
        chat.resume(given).await?;
    }
    chat.greet();
    chat.talk().await
}

/// Lines of stdin, read where waiting holds nobody up.
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

impl Chat {
    async fn resume(&mut self, given: &str) -> Result<()> {
        let id = names::session(&self.client, given).await?;
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
        self.since = super::run::last_index(&self.client, &id).await?;
        self.session = Some(id);
        Ok(())
    }

    fn greet(&mut self) {
        let agent = self.agent.as_deref().unwrap_or("the project's agent");
        let session = match &self.session {
            Some(id) => format!(" · session {id}"),
            None => String::new(),
        };
        self.live.note(&format!("{agent}{session} · /help for commands"));
    }

    async fn talk(mut self) -> Result<Verdict> {
        loop {
            if self.typed && self.waiting.is_empty() {
                let mut out = std::io::stdout().lock();
                let _ = write!(out, "{} ", Paint::stdout().bold("›"));
                let _ = out.flush();
            }
            let line = match self.waiting.pop_front() {
                Some(line) => Some(line),
                None => tokio::select! {
                    line = self.lines.recv() => line,
                    () = self.interrupts.next() => {
                        self.presses += 1;
                        if self.presses > 1 {
                            return self.end().await;
                        }
                        say("");
                        self.live.note("Ctrl-C again ends the session; /quit leaves it");
                        continue;
                    }
                },
            };
            self.presses = 0;
            let Some(line) = line else {
                if self.typed {
                    say("");
                }
                return self.leave();
            };
            let line = line.trim();
            let next = match line.strip_prefix('/') {
                _ if line.is_empty() => Ok(Next::Go),
                Some("end") => return self.end().await,
                Some(command) => self.command(command).await,
                None => self.turn(line).await,
            };
            match next {
                Ok(Next::Go) => {}
                Ok(Next::Leave) => return self.leave(),
                // A server that is gone does not come back while we chat.
                Err(error) if !super::client::is_running(self.home()?).await => return Err(error),
                Err(error) => {
                    self.failed = true;
                    self.output.error(&error);
                }
            }
        }
    }

    fn home(&self) -> Result<&oubliette_home::Home> {
        match &self.client {
            Client::Server(home) => Ok(home),
            Client::Local(_) => Err(Error::internal("a chat needs a server")),
        }
    }

    async fn turn(&mut self, text: &str) -> Result<Next> {
        let mut arguments = json!({ "message": text });
        match &self.session {
            Some(id) => arguments["session_id"] = json!(id),
            None => {
                set(&mut arguments, "agent", self.agent.as_ref());
                set(&mut arguments, "project_id", self.project.as_ref());
            }
        }
        let sent = Sent::send(&self.client, arguments).await?;
        if self.session.is_none() {
            self.session = Some(sent.session().to_owned());
            self.live.note(&format!("session {}", sent.session()));
        }
        let mut typed = Typed {
            lines: &mut self.lines,
            waiting: &mut self.waiting,
        };
        let typed = self.typed.then_some(&mut typed);
        let ended = sent
            .follow(
                &self.client,
                &mut self.since,
                &mut self.live,
                &mut self.interrupts,
                typed,
            )
            .await?;
        match ended {
            Ended::Completed { reply } => {
                if self.output == Output::Json {
                    say(&reply.to_string());
                }
                Ok(Next::Go)
            }
            Ended::Cancelled { reply, by_key } => {
                if self.output == Output::Json {
                    say(&reply.to_string());
                }
                self.live.note("cancelled");
                self.presses = usize::from(by_key);
                Ok(Next::Go)
            }
            Ended::Failed(error) => Err(error),
            Ended::SessionEnded => {
                self.session = None;
                Ok(Next::Leave)
            }
        }
    }

    async fn command(&mut self, command: &str) -> Result<Next> {
        let (name, rest) = command.split_once(char::is_whitespace).unwrap_or((command, ""));
        match name {
            "quit" | "exit" | "q" => return Ok(Next::Leave),
            "help" | "h" | "?" => say(HELP),
            "switch" => self.switch(rest.trim()).await?,
            "agents" => {
                let list = self.client.list("agent_list", "agents", json!({}), None).await?;
                self.output.result(&list, agent::shown_list);
            }
            "tools" => self.tools().await?,
            "cancel" => self.cancel().await?,
            "session" => match &self.session {
                Some(id) => say(id),
                None => self
                    .live
                    .note("no session yet: it starts with your first message"),
            },
            other => {
                let name = fold(other, 40);
                return Err(Error::invalid(format!(
                    "there is no command /{name}; /help shows what there is"
                )));
            }
        }
        Ok(Next::Go)
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
            self.live.note(&format!("{agent} it is"));
            return Ok(());
        };
        let output = self.output;
        let show = |line: &str| {
            if output == Output::Text {
                say(line);
            }
        };
        let switched = debug::switch(&self.client, session, agent, show).await?;
        self.agent = Some(field(&switched, "agent"));
        self.output.result(&switched, said_switched);
        Ok(())
    }

    async fn tools(&mut self) -> Result<()> {
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
        self.output.result(&list, tool::shown_tools);
        Ok(())
    }

    async fn cancel(&mut self) -> Result<()> {
        let done = match &self.session {
            Some(session) => {
                self.client
                    .call("session_cancel", json!({ "session_id": session }))
                    .await?
            }
            None => Value::Null,
        };
        if done["cancelled"] != true {
            self.live.note("no turn is running");
        }
        Ok(())
    }

    async fn end(mut self) -> Result<Verdict> {
        if let Some(id) = self.session.take() {
            let ended = self
                .client
                .call("session_end", json!({ "session_id": id }))
                .await?;
            if self.output == Output::Json {
                say(&ended.to_string());
            }
            self.live.note(&format!("{id} is ended"));
        }
        Ok(self.verdict())
    }

    fn leave(mut self) -> Result<Verdict> {
        if let Some(id) = &self.session {
            let hint = format!(
                "the session stays; come back with: oubliette chat --session {}",
                clean(id)
            );
            self.live.note(&hint);
        }
        Ok(self.verdict())
    }

    /// Nobody watches a pipe: there, what failed is in the exit code.
    fn verdict(&self) -> Verdict {
        match self.failed && !self.typed {
            true => Verdict::Failed,
            false => Verdict::Done,
        }
    }
}
