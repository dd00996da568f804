//! Keys typed while a turn runs in `oubliette chat`: the terminal is in raw mode, and what is typed is kept in a buffer that
//! the footer shows. Enter hands the line over; what has no Enter yet is in the line editor when the turn has ended.

use std::{
    io::Write as _,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    thread::JoinHandle,
    time::Duration,
};

use crossterm::{
    QueueableCommand as _,
    event::{
        self, DisableBracketedPaste, EnableBracketedPaste, Event, KeyCode, KeyEvent, KeyEventKind,
        KeyModifiers,
    },
    terminal,
};
use oubliette_protocol::{Error, Result};
use tokio::sync::mpsc;

use super::style::is_hidden_char;

/// How often the reading thread looks whether it should stop.
const POLL_INTERVAL: Duration = Duration::from_millis(20);
/// The most that is kept of what is typed, in bytes; more is ignored.
const MAX_TYPED_BYTES: usize = 256 * 1024;

/// Puts the terminal into raw mode, with pastes marked as such, until it is dropped.
pub(crate) struct RawMode(());

impl RawMode {
    /// Enters raw mode.
    pub(crate) fn enter() -> Result<Self> {
        terminal::enable_raw_mode().map_err(Error::internal)?;
        let mut out = std::io::stdout();
        let _ = out.queue(EnableBracketedPaste).and_then(|out| out.flush());
        Ok(Self(()))
    }
}

impl Drop for RawMode {
    fn drop(&mut self) {
        let mut out = std::io::stdout();
        let _ = out.queue(DisableBracketedPaste).and_then(|out| out.flush());
        let _ = terminal::disable_raw_mode();
    }
}

/// Reads events of the terminal on a thread of its own, because the read blocks.
pub(crate) struct TerminalEvents {
    events: mpsc::UnboundedReceiver<Event>,
    stop: Arc<AtomicBool>,
    thread: Option<JoinHandle<()>>,
}

impl TerminalEvents {
    /// Starts the thread.
    pub(crate) fn start() -> Self {
        let (sender, events) = mpsc::unbounded_channel();
        let stop = Arc::new(AtomicBool::new(false));
        let asked_to_stop = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            while !asked_to_stop.load(Ordering::Relaxed) {
                match event::poll(POLL_INTERVAL) {
                    Ok(false) => {}
                    Ok(true) => {
                        let Ok(event) = event::read() else { return };
                        if sender.send(event).is_err() {
                            return;
                        }
                    }
                    Err(_) => return,
                }
            }
        });
        Self {
            events,
            stop,
            thread: Some(thread),
        }
    }

    /// The next event; none if the terminal is gone. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<Event> {
        self.events.recv().await
    }

    /// Waits for the thread's end, so that nobody else's keys are read, and returns what it had read.
    fn stop(&mut self) -> Vec<Event> {
        self.stop.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
        std::iter::from_fn(|| self.events.try_recv().ok()).collect()
    }
}

impl Drop for TerminalEvents {
    fn drop(&mut self) {
        self.stop();
    }
}

/// What the person at the terminal did.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum TypedInput {
    /// Ended a line.
    Line(String),
    /// Pressed Ctrl-C.
    Interrupt,
    /// Changed what is being typed, or the terminal's size.
    Changed,
    /// There is no more input.
    End,
}

/// Reads what is typed during one turn.
pub(crate) struct TurnKeys {
    events: TerminalEvents,
    buffer: TypedBuffer,
    // After `events`: the thread must have ended before the mode changes.
    _raw: RawMode,
}

impl TurnKeys {
    /// Starts reading; this was typed already.
    pub(crate) fn start(typed: String) -> Result<Self> {
        let raw = RawMode::enter()?;
        Ok(Self {
            events: TerminalEvents::start(),
            buffer: TypedBuffer { text: typed },
            _raw: raw,
        })
    }

    /// What is being typed.
    pub(crate) fn typed(&self) -> &str {
        &self.buffer.text
    }

    /// What happens next. Cancel-safe.
    pub(crate) async fn next(&mut self) -> TypedInput {
        loop {
            match self.events.next().await {
                None => return TypedInput::End,
                Some(event) => {
                    if let Some(input) = self.buffer.take_event(event) {
                        return input;
                    }
                }
            }
        }
    }

    /// Stops reading: the lines that were ended meanwhile, and what was typed after them.
    pub(crate) fn finish(mut self) -> (Vec<String>, String) {
        let mut lines = Vec::new();
        for event in self.events.stop() {
            if let Some(TypedInput::Line(line)) = self.buffer.take_event(event) {
                lines.push(line);
            }
        }
        (lines, std::mem::take(&mut self.buffer.text))
    }
}

/// The line that is being typed.
#[derive(Debug, Default)]
struct TypedBuffer {
    text: String,
}

impl TypedBuffer {
    fn take_event(&mut self, event: Event) -> Option<TypedInput> {
        match event {
            Event::Key(key) if key.kind != KeyEventKind::Release => self.take_key(key),
            Event::Paste(text) => {
                self.insert(&text.replace("\r\n", "\n").replace('\r', "\n"));
                Some(TypedInput::Changed)
            }
            Event::Resize(..) => Some(TypedInput::Changed),
            _ => None,
        }
    }

    fn take_key(&mut self, key: KeyEvent) -> Option<TypedInput> {
        let control = key.modifiers.contains(KeyModifiers::CONTROL);
        let is_newline = key.modifiers.intersects(KeyModifiers::ALT | KeyModifiers::SHIFT);
        match key.code {
            KeyCode::Char('c') if control => return Some(TypedInput::Interrupt),
            KeyCode::Char('u') if control => self.text.clear(),
            KeyCode::Char('w') if control => {
                let kept = self.text.trim_end();
                let kept = kept.rfind(char::is_whitespace).map_or(0, |at| at + 1);
                self.text.truncate(kept);
            }
            KeyCode::Enter if is_newline => self.insert("\n"),
            KeyCode::Enter if self.text.ends_with('\\') => {
                self.text.pop();
                self.insert("\n");
            }
            KeyCode::Enter => return Some(TypedInput::Line(std::mem::take(&mut self.text))),
            KeyCode::Char('j') if control => return Some(TypedInput::Line(std::mem::take(&mut self.text))),
            KeyCode::Backspace => {
                self.text.pop();
            }
            KeyCode::Char(c) if !control && !key.modifiers.contains(KeyModifiers::ALT) => {
                self.insert(c.encode_utf8(&mut [0; 4]));
            }
            KeyCode::Tab => self.insert(" "),
            _ => return None,
        }
        Some(TypedInput::Changed)
    }

    fn insert(&mut self, text: &str) {
        if self.text.len() + text.len() <= MAX_TYPED_BYTES {
            self.text.extend(text.chars().filter(|c| !is_hidden_char(*c)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn key(code: KeyCode, modifiers: KeyModifiers) -> Event {
        Event::Key(KeyEvent::new(code, modifiers))
    }

    #[test]
    fn keys_edit_the_line_and_enter_hands_it_over() {
        let mut buffer = TypedBuffer::default();
        for c in "go onx".chars() {
            buffer.take_event(key(KeyCode::Char(c), KeyModifiers::NONE));
        }
        buffer.take_event(key(KeyCode::Backspace, KeyModifiers::NONE));
        assert_eq!(buffer.text, "go on");
        buffer.take_event(key(KeyCode::Char('w'), KeyModifiers::CONTROL));
        assert_eq!(buffer.text, "go ");
        buffer.take_event(Event::Paste("a\r\nb\u{1b}[2J".into()));
        buffer.take_event(key(KeyCode::Enter, KeyModifiers::ALT));
        let line = buffer.take_event(key(KeyCode::Enter, KeyModifiers::NONE));
        assert_eq!(line, Some(TypedInput::Line("go a\nb[2J\n".into())));
        let stop = buffer.take_event(key(KeyCode::Char('c'), KeyModifiers::CONTROL));
        assert_eq!(stop, Some(TypedInput::Interrupt));
        assert_eq!(buffer.take_event(Event::Resize(1, 1)), Some(TypedInput::Changed));
    }
}
