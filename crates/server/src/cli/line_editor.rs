//! The line editor of `oubliette chat`: history, several lines, completion and paste, on reedline.
//!
//! It runs on a thread of its own, because reading keys blocks, and reads only while it is asked for a line.

use std::{borrow::Cow, sync::mpsc as std_mpsc};

use oubliette_protocol::{Error, Result};
use reedline::{
    Color, ColumnarMenu, Completer, EditCommand, Emacs, Highlighter, KeyCode, KeyModifiers, MenuBuilder as _,
    Prompt, PromptEditMode, PromptHistorySearch, Reedline, ReedlineEvent, ReedlineMenu, Signal, StyledText,
    ValidationResult, Validator, default_emacs_keybindings,
};
use tokio::sync::mpsc;

use super::{
    chat_history::{self, HistoryFile},
    style::{AnsiStyle, fold_to_line, terminal_width},
};

/// The name of the menu that shows completions.
const COMPLETION_MENU: &str = "completion_menu";

/// Reads lines from the terminal.
pub(crate) struct LineEditor {
    requests: std_mpsc::Sender<LineRequest>,
    answers: mpsc::UnboundedReceiver<EditedLine>,
}

/// Asks for a line.
struct LineRequest {
    status: String,
    /// What is in the line already.
    text: String,
}

/// What came of asking for a line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum EditedLine {
    /// A line, or several.
    Line(String),
    /// Ctrl-C, with nothing typed.
    Interrupt,
    /// Ctrl-D, with nothing typed.
    End,
    /// The terminal cannot be used for editing; why.
    Unusable(String),
}

impl LineEditor {
    /// Starts the editor.
    pub(crate) fn start(history: Option<HistoryFile>, completer: Box<dyn Completer + Send>) -> Self {
        let (requests, asked) = std_mpsc::channel::<LineRequest>();
        let (sender, answers) = mpsc::unbounded_channel();
        std::thread::spawn(move || {
            let mut editor = build_editor(history, completer);
            for request in asked {
                let answer = read_line(&mut editor, request);
                if sender.send(answer).is_err() {
                    return;
                }
            }
        });
        Self { requests, answers }
    }

    /// Reads a line, with the status above it and this text in it already.
    pub(crate) async fn read(&mut self, status: String, text: String) -> Result<EditedLine> {
        let gone = || Error::internal("the line editor has ended");
        self.requests
            .send(LineRequest { status, text })
            .map_err(|_| gone())?;
        self.answers.recv().await.ok_or_else(gone)
    }
}

fn build_editor(history: Option<HistoryFile>, completer: Box<dyn Completer + Send>) -> Reedline {
    let mut keys = default_emacs_keybindings();
    keys.add_binding(
        KeyModifiers::NONE,
        KeyCode::Tab,
        ReedlineEvent::UntilFound(vec![
            ReedlineEvent::Menu(COMPLETION_MENU.to_owned()),
            ReedlineEvent::MenuNext,
        ]),
    );
    keys.add_binding(KeyModifiers::SHIFT, KeyCode::BackTab, ReedlineEvent::MenuPrevious);
    let newline = ReedlineEvent::Edit(vec![EditCommand::InsertNewline]);
    keys.add_binding(KeyModifiers::ALT, KeyCode::Enter, newline);
    keys.add_binding(KeyModifiers::CONTROL, KeyCode::Char('c'), clear_or_interrupt());
    let menu = Box::new(ColumnarMenu::default().with_name(COMPLETION_MENU));
    let editor = Reedline::create()
        .with_edit_mode(Box::new(Emacs::new(keys)))
        .with_completer(completer)
        .with_menu(ReedlineMenu::EngineCompleter(menu))
        .with_quick_completions(true)
        .with_partial_completions(true)
        .with_validator(Box::new(BackslashContinues))
        .with_highlighter(Box::new(PlainText))
        .with_ansi_colors(AnsiStyle::stderr().is_enabled())
        .with_history_exclusion_prefix(Some(" ".to_owned()))
        .with_transient_prompt(Box::new(ChatPrompt::default()))
        .use_bracketed_paste(true);
    match history.and_then(chat_history::open) {
        Some(history) => editor.with_history(history),
        None => editor,
    }
}

/// What Ctrl-C does: empties the line and goes on as after an empty one, or interrupts if nothing is typed. In a search of the
/// history it ends the search.
fn clear_or_interrupt() -> ReedlineEvent {
    // Of these two moves neither is possible in an empty line, and at least one in any other.
    let to_end = ReedlineEvent::Edit(vec![EditCommand::MoveToEnd { select: false }]);
    let to_start = ReedlineEvent::Edit(vec![EditCommand::MoveToStart { select: false }]);
    ReedlineEvent::UntilFound(vec![
        // Nothing after an event that ends the reading is done. A search takes no `Multiple`.
        ReedlineEvent::Multiple(vec![
            ReedlineEvent::UntilFound(vec![to_end, to_start, ReedlineEvent::CtrlC]),
            ReedlineEvent::Esc,
            ReedlineEvent::Edit(vec![EditCommand::Clear]),
            ReedlineEvent::ExecuteHostCommand(String::new()),
        ]),
        ReedlineEvent::Esc,
    ])
}

fn read_line(editor: &mut Reedline, request: LineRequest) -> EditedLine {
    if !request.text.is_empty() {
        editor.run_edit_commands(&[EditCommand::InsertString(request.text)]);
    }
    let prompt = ChatPrompt {
        status: Some(request.status),
    };
    let signal = editor.read_line(&prompt);
    let _ = editor.sync_history();
    match signal {
        Ok(Signal::Success(text)) => EditedLine::Line(text.replace("\\\n", "\n")),
        Ok(Signal::CtrlC) => EditedLine::Interrupt,
        Ok(Signal::CtrlD) => EditedLine::End,
        // Of the rest only `HostCommand` comes: the line was cleared.
        Ok(_) => EditedLine::Line(String::new()),
        Err(error) => {
            let _ = crossterm::terminal::disable_raw_mode();
            EditedLine::Unusable(error.to_string())
        }
    }
}

/// The prompt: the session's status on a line of its own, then `›`.
#[derive(Default)]
struct ChatPrompt {
    status: Option<String>,
}

impl Prompt for ChatPrompt {
    fn render_prompt_left(&self) -> Cow<'_, str> {
        // Cut when it is drawn: the terminal's width may have changed since.
        match &self.status {
            Some(status) => {
                let line = fold_to_line(status, terminal_width().saturating_sub(1));
                Cow::Owned(format!("{}\n", AnsiStyle::stderr().dim(&line)))
            }
            None => Cow::Borrowed(""),
        }
    }

    fn render_prompt_right(&self) -> Cow<'_, str> {
        Cow::Borrowed("")
    }

    fn render_prompt_indicator(&self, _mode: PromptEditMode) -> Cow<'_, str> {
        Cow::Borrowed("› ")
    }

    fn render_prompt_multiline_indicator(&self) -> Cow<'_, str> {
        Cow::Borrowed("· ")
    }

    fn get_prompt_color(&self) -> Color {
        Color::Default
    }

    fn get_indicator_color(&self) -> Color {
        Color::Default
    }

    fn get_prompt_multiline_color(&self) -> Color {
        Color::Default
    }

    fn render_prompt_history_search_indicator(&self, search: PromptHistorySearch) -> Cow<'_, str> {
        Cow::Owned(format!("history: {} › ", fold_to_line(&search.term, 40)))
    }
}

/// A line that ends with a backslash goes on in the next.
struct BackslashContinues;

impl Validator for BackslashContinues {
    fn validate(&self, line: &str) -> ValidationResult {
        match line.ends_with('\\') {
            true => ValidationResult::Incomplete,
            false => ValidationResult::Complete,
        }
    }
}

/// Shows what is typed in the terminal's own colours; reedline's default is white, which nobody sees on a white ground.
struct PlainText;

impl Highlighter for PlainText {
    fn highlight(&self, line: &str, _cursor: usize) -> StyledText {
        let mut text = StyledText::new();
        text.push((Default::default(), line.to_owned()));
        text
    }
}
