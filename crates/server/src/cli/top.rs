//! `oubliette top`: sessions, calls in progress, approvals, tool servers and servers, live.

use std::{
    io::{IsTerminal as _, Write as _},
    sync::Arc,
    time::Duration,
};

use crossterm::event::{Event, KeyCode, KeyEvent, KeyEventKind, KeyModifiers};
use oubliette_protocol::{Error, Result};
use serde_json::json;
use tokio::sync::{mpsc, watch};

use super::{
    CommandContext, ServerTarget,
    client::ActionClient,
    output::{OutputFormat, print_line},
    server_url,
    style::{AnsiStyle, terminal_width},
    top_data::{ServerSnapshot, ServerWatch, SnapshotRequest},
    top_view::{FrameSize, TopView},
    turn_keys::{RawMode, TerminalEvents},
};

/// Arguments of `oubliette top`.
#[derive(Debug, clap::Args)]
#[command(
    after_help = "Keys: arrows or j and k select a session, Enter shows its last events, s changes the order, / filters, a shows \
    ended sessions too, r looks at once, q leaves.\nAGE is how long the turn has been running, CALLS how many calls the session has \
    made; a session is `waiting` while a call of it waits for approval.\n\nExamples:\n  oubliette top\n  oubliette top --once\n  \
    oubliette --context work top --interval 5\n  oubliette top --json | jq '.servers[].approvals'"
)]
pub(crate) struct TopArgs {
    /// Print one frame and leave; so it is done when stdin or stdout is not a terminal, and with --json.
    #[arg(long)]
    once: bool,
    /// Look again after this many seconds, 1 to 60.
    #[arg(long, value_name = "SECONDS", default_value_t = 2, value_parser = clap::value_parser!(u64).range(1..=60))]
    interval: u64,
    /// Ended and failed sessions too.
    #[arg(long, short)]
    all: bool,
}

/// Runs `oubliette top`.
pub(crate) async fn run(args: TopArgs, context: CommandContext) -> Result<()> {
    let client = Arc::new(ActionClient::connect_running(&context).await?);
    let url = match &context.target {
        ServerTarget::Remote(remote) => remote.url().to_owned(),
        ServerTarget::Home => server_url::lookup(&context.home).await?,
    };
    let mut server = ServerWatch::new(client, url);
    let mut view = TopView {
        all_sessions: args.all,
        ..TopView::default()
    };
    let wanted = SnapshotRequest {
        all_sessions: args.all,
        opened: None,
    };
    // An error now is the command's; later ones are shown in the frame.
    let first = server.look(&wanted).await?;
    let is_smart = std::env::var_os("TERM").is_none_or(|term| term != "dumb");
    let on_terminal = std::io::stdin().is_terminal() && std::io::stdout().is_terminal() && is_smart;
    if args.once || !on_terminal || context.output == OutputFormat::Json {
        match context.output {
            OutputFormat::Json => print_line(&json!({ "servers": [first] }).to_string()),
            OutputFormat::Text => {
                let size = FrameSize {
                    width: terminal_width(),
                    height: None,
                };
                print_line(&view.format(&[first], size, AnsiStyle::stdout()).join("\n"));
            }
        }
        return Ok(());
    }
    let (asked, wanted) = watch::channel(wanted);
    let (sender, looks) = mpsc::channel(1);
    let looking = tokio::spawn(watch_server(
        server,
        wanted,
        sender,
        Duration::from_secs(args.interval),
    ));
    let shown = show(&mut view, first, looks, &asked).await;
    looking.abort();
    shown
}

/// Looks at the server at this interval, and at once when something else is wanted.
async fn watch_server(
    mut server: ServerWatch,
    mut wanted: watch::Receiver<SnapshotRequest>,
    looks: mpsc::Sender<Result<ServerSnapshot>>,
    interval: Duration,
) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(interval) => {}
            changed = wanted.changed() => if changed.is_err() { return },
        }
        let request = wanted.borrow_and_update().clone();
        if looks.send(server.look(&request).await).await.is_err() {
            return;
        }
    }
}

/// The terminal's second screen, without a cursor; what was there before is back when this is dropped.
struct AlternateScreen(());

impl AlternateScreen {
    fn enter() -> Self {
        write_stdout("\x1b[?1049h\x1b[?25l");
        Self(())
    }
}

impl Drop for AlternateScreen {
    fn drop(&mut self) {
        write_stdout("\x1b[?25h\x1b[?1049l");
    }
}

async fn show(
    view: &mut TopView,
    first: ServerSnapshot,
    mut looks: mpsc::Receiver<Result<ServerSnapshot>>,
    asked: &watch::Sender<SnapshotRequest>,
) -> Result<()> {
    // Declared so that they end in the right order: the reading thread, the mode, the screen.
    let _screen = AlternateScreen::enter();
    let _raw = RawMode::enter()?;
    let mut events = TerminalEvents::start();
    let mut servers = vec![first];
    loop {
        draw(view, &servers);
        tokio::select! {
            look = looks.recv() => match look {
                Some(Ok(snapshot)) => {
                    servers = vec![snapshot];
                    view.error = None;
                }
                Some(Err(error)) => view.error = Some(error.message),
                None => return Err(Error::internal("nobody looks at the server any more")),
            },
            event = events.next() => match event {
                None => return Ok(()),
                Some(Event::Key(key)) if key.kind != KeyEventKind::Release => {
                    if take_key(view, &servers, key, asked) == KeyOutcome::Quit {
                        return Ok(());
                    }
                }
                Some(_) => {}
            },
        }
    }
}

fn draw(view: &TopView, servers: &[ServerSnapshot]) {
    let (columns, rows) = crossterm::terminal::size().unwrap_or((80, 24));
    let size = FrameSize {
        width: usize::from(columns.max(20)),
        height: Some(usize::from(rows.max(4))),
    };
    let lines = view.format(servers, size, AnsiStyle::stdout());
    // Every line is cleared to its end, so that nothing of the frame before stays.
    let frame = lines
        .iter()
        .map(|line| format!("{line}\x1b[K"))
        .collect::<Vec<_>>();
    write_stdout(&format!("\x1b[H{}\x1b[J", frame.join("\r\n")));
}

/// Whether to go on after a key.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum KeyOutcome {
    Continue,
    Quit,
}

fn take_key(
    view: &mut TopView,
    servers: &[ServerSnapshot],
    key: KeyEvent,
    asked: &watch::Sender<SnapshotRequest>,
) -> KeyOutcome {
    let control = key.modifiers.contains(KeyModifiers::CONTROL);
    match key.code {
        KeyCode::Char('c' | 'd') if control => return KeyOutcome::Quit,
        _ if view.is_filtering => take_filter_key(view, key.code),
        KeyCode::Char('q') => return KeyOutcome::Quit,
        KeyCode::Esc | KeyCode::Backspace | KeyCode::Left if view.opened.is_some() => {
            view.opened = None;
            request_look(view, asked);
        }
        KeyCode::Esc if view.filter.is_empty() => return KeyOutcome::Quit,
        KeyCode::Esc => view.filter.clear(),
        KeyCode::Down | KeyCode::Char('j') => view.move_cursor(servers, 1),
        KeyCode::Up | KeyCode::Char('k') => view.move_cursor(servers, -1),
        KeyCode::Enter | KeyCode::Right => {
            view.opened = view.selected.clone();
            request_look(view, asked);
        }
        KeyCode::Char('s') => view.sort = view.sort.next(),
        KeyCode::Char('/') => view.is_filtering = true,
        KeyCode::Char('a') => {
            view.all_sessions = !view.all_sessions;
            request_look(view, asked);
        }
        KeyCode::Char('r') => request_look(view, asked),
        _ => {}
    }
    KeyOutcome::Continue
}

fn take_filter_key(view: &mut TopView, key: KeyCode) {
    match key {
        KeyCode::Enter => view.is_filtering = false,
        KeyCode::Esc => {
            view.filter.clear();
            view.is_filtering = false;
        }
        KeyCode::Backspace => {
            view.filter.pop();
        }
        KeyCode::Char(c) if view.filter.len() < 64 => view.filter.push(c),
        _ => {}
    }
}

/// Asks for a look at what is wanted now.
fn request_look(view: &TopView, asked: &watch::Sender<SnapshotRequest>) {
    let _ = asked.send(SnapshotRequest {
        all_sessions: view.all_sessions,
        opened: view.opened.clone(),
    });
}

fn write_stdout(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}
