//! What a turn looks like on a terminal: rendered text above a footer with the running calls, the session's status and what
//! is being typed.

use std::time::{Duration, Instant};

use super::{
    markdown::MarkdownRenderer,
    screen::Screen,
    status_line::SessionStatusLine,
    style::{AnsiStyle, char_width, display_width, fold_to_line, short_duration, terminal_width},
};

/// Frames of the spinner.
const SPINNER_FRAMES: [&str; 10] = ["⠋", "⠙", "⠹", "⠸", "⠼", "⠴", "⠦", "⠧", "⠇", "⠏"];
/// The most running calls that the footer has lines for.
const MAX_CALL_LINES: usize = 4;

/// Shows turns on a terminal.
pub(crate) struct LiveView {
    /// The session's status, which the footer shows.
    pub(crate) status: SessionStatusLine,
    style: AnsiStyle,
    screen: Screen,
    text: MarkdownRenderer,
    thought: MarkdownRenderer,
    /// Whether there is a footer at all; not when only the agent's text is shown.
    wants_footer: bool,
    /// Whether the footer is hidden because a question waits for a line, which the terminal itself shows.
    is_hidden: bool,
    activity: String,
    turn_began: Instant,
    in_turn: bool,
    frame: usize,
    calls: Vec<RunningCall>,
    /// What is being typed, when this program and not the terminal shows it.
    input: Option<String>,
}

struct RunningCall {
    id: String,
    name: String,
    arguments: String,
    began: Instant,
}

/// A call that has ended, as a line shows it.
pub(crate) struct FinishedCall<'a> {
    /// Whether it succeeded.
    pub ok: bool,
    /// The tool.
    pub name: &'a str,
    /// Its arguments on one line.
    pub arguments: &'a str,
    /// How long it took, if that is known.
    pub took: Option<Duration>,
    /// Its result as text.
    pub result: &'a str,
}

impl LiveView {
    /// A view without a turn.
    pub(crate) fn new(style: AnsiStyle, wants_footer: bool) -> Self {
        Self {
            status: SessionStatusLine::default(),
            style,
            screen: Screen::default(),
            text: MarkdownRenderer::new(style),
            thought: MarkdownRenderer::new(style),
            wants_footer,
            is_hidden: false,
            activity: String::new(),
            turn_began: Instant::now(),
            in_turn: false,
            frame: 0,
            calls: Vec::new(),
            input: None,
        }
    }

    /// Whether the footer is drawn during a turn.
    pub(crate) fn has_footer(&self) -> bool {
        self.wants_footer
    }

    /// Shows the footer of a new turn.
    pub(crate) fn begin_turn(&mut self) {
        self.turn_began = Instant::now();
        self.activity = "starting".into();
        (self.in_turn, self.is_hidden) = (true, false);
        self.calls.clear();
        self.redraw();
    }

    /// Ends what was begun and removes the footer.
    pub(crate) fn close(&mut self) {
        self.break_line();
        self.end_text();
        self.in_turn = false;
        self.calls.clear();
        self.input = None;
        self.screen.close();
    }

    /// Draws the next frame of the spinner.
    pub(crate) fn advance(&mut self) {
        self.frame = (self.frame + 1) % SPINNER_FRAMES.len();
        self.is_hidden = false;
        self.update_footer();
    }

    /// Draws what may change again.
    pub(crate) fn redraw(&mut self) {
        self.update_footer();
        self.screen.redraw();
    }

    /// Says what the agent does now.
    pub(crate) fn set_activity(&mut self, activity: &str) {
        self.activity = fold_to_line(activity, 60);
        self.update_footer();
    }

    /// Shows what is being typed.
    pub(crate) fn set_input(&mut self, typed: Option<&str>) {
        self.input = typed.map(str::to_owned);
        self.update_footer();
    }

    /// Prints a piece of the agent's text.
    pub(crate) fn print_text(&mut self, text: &str) {
        let shown = self.text.push(text, terminal_width());
        self.screen.print(&shown);
    }

    /// Prints a piece of the agent's reasoning.
    pub(crate) fn print_thought(&mut self, text: &str) {
        let shown = self.thought.push(text, terminal_width());
        let shown = self.dim_lines(&shown);
        self.screen.print(&shown);
    }

    /// Ends a message: an open code block ends with it.
    pub(crate) fn end_text(&mut self) {
        let shown = self.text.finish(terminal_width());
        self.screen.print(&shown);
        self.thought.finish(terminal_width());
    }

    /// Ends the line that was begun, with what was held back of it.
    pub(crate) fn break_line(&mut self) {
        let width = terminal_width();
        let (thought, text) = (self.thought.break_line(width), self.text.break_line(width));
        if !thought.is_empty() || !text.is_empty() {
            let thought = self.dim_lines(&thought);
            self.screen.print(&format!("{thought}{text}"));
        }
        self.screen.end_line();
    }

    /// Prints a line, or several.
    pub(crate) fn print_line(&mut self, line: &str) {
        self.screen.print(&format!("{line}\n"));
    }

    /// Prints a question. Where the terminal shows what is typed, the footer makes way for the answer.
    pub(crate) fn print_question(&mut self, question: &str) {
        self.is_hidden = self.input.is_none();
        self.update_footer();
        self.print_line(question);
    }

    /// Shows a call in the footer until it ends.
    pub(crate) fn begin_call(&mut self, id: &str, name: &str, arguments: &str) {
        self.calls.retain(|call| call.id != id);
        self.calls.push(RunningCall {
            id: id.to_owned(),
            name: name.to_owned(),
            arguments: fold_to_line(arguments, 400),
            began: Instant::now(),
        });
        "working".clone_into(&mut self.activity);
        self.update_footer();
    }

    /// Removes a call from the footer.
    pub(crate) fn end_call(&mut self, id: &str) {
        self.calls.retain(|call| call.id != id);
        self.update_footer();
    }

    /// Prints a call that has ended: status, name, arguments, duration; below it the beginning of its result.
    pub(crate) fn print_call(&mut self, call: &FinishedCall<'_>) {
        let mark = match call.ok {
            true => self.style.green("✓"),
            false => self.style.red("✗"),
        };
        let took = call
            .took
            .map(|took| format!(" · {}", short_duration(took)))
            .unwrap_or_default();
        let width = terminal_width();
        let name = fold_to_line(call.name, width / 2);
        let room = width.saturating_sub(display_width(&name) + took.len() + 4);
        let arguments = fold_to_line(call.arguments, room);
        let line = format!("{} {arguments}", self.style.bold(&name));
        self.print_line(&format!("{mark} {}{}", line.trim_end(), self.style.dim(&took)));
        let result = fold_to_line(call.result, width.saturating_sub(5));
        if !result.is_empty() {
            let result = match call.ok {
                true => self.style.dim(&result),
                false => self.style.red(&result),
            };
            self.print_line(&format!("  {} {result}", self.style.dim("└")));
        }
    }

    fn dim_lines(&self, text: &str) -> String {
        let lines = text.split('\n').map(|line| self.style.dim(line));
        lines.collect::<Vec<_>>().join("\n")
    }

    fn update_footer(&mut self) {
        let footer = match self.wants_footer && self.in_turn && !self.is_hidden {
            true => self.format_footer(terminal_width().saturating_sub(1)),
            false => Vec::new(),
        };
        self.screen.set_footer(footer);
    }

    fn format_footer(&self, width: usize) -> Vec<String> {
        let frame = SPINNER_FRAMES[self.frame];
        let mut lines: Vec<String> = Vec::new();
        for call in self.calls.iter().take(MAX_CALL_LINES) {
            let took = format!(" {}s", call.began.elapsed().as_secs());
            let said = format!("{} {}", call.name, call.arguments);
            let said = fold_to_line(&said, width.saturating_sub(took.len() + 2));
            lines.push(format!(
                "{} {said}{}",
                self.style.cyan(frame),
                self.style.dim(&took)
            ));
        }
        if self.calls.len() > MAX_CALL_LINES {
            let more = format!("  … and {} more calls", self.calls.len() - MAX_CALL_LINES);
            lines.push(self.style.dim(&more));
        }
        // Whatever else the agent does meanwhile: this is what a person has to know.
        let activity = match self.status.waits_for_approval() {
            true => "waiting for approval",
            false => &self.activity,
        };
        let state = format!("{activity} {}s", self.turn_began.elapsed().as_secs());
        let status = format!("{frame} {} · Ctrl-C cancels", self.status.format(&state));
        lines.push(self.style.dim(&fold_to_line(&status, width)));
        if let Some(input) = &self.input {
            let shown = tail_of_line(input, width.saturating_sub(3));
            lines.push(format!("{} {shown}", self.style.bold("›")));
        }
        lines
    }
}

/// The end of what is being typed, as much as fits; line breaks are shown as marks.
fn tail_of_line(typed: &str, width: usize) -> String {
    let mut tail = Vec::new();
    let mut left = width;
    for c in typed.chars().rev() {
        let c = if c == '\n' { '⏎' } else { c };
        let Some(rest) = left.checked_sub(char_width(c)) else {
            break;
        };
        left = rest;
        tail.push(c);
    }
    tail.iter().rev().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_what_is_typed_stays_visible() {
        assert_eq!(tail_of_line("one\ntwo", 20), "one⏎two");
        assert_eq!(tail_of_line("abcdef", 3), "def");
        assert_eq!(tail_of_line("日本", 3), "本");
    }

    #[test]
    fn every_line_of_the_footer_fits() {
        let mut view = LiveView::new(AnsiStyle::plain(), true);
        view.status.agent = "a".repeat(10_000);
        view.input = Some("x".repeat(10_000));
        for id in ["1", "2", "3", "4", "5", "6"] {
            view.calls.push(RunningCall {
                id: id.into(),
                name: "n".repeat(64),
                arguments: "y".repeat(400),
                began: Instant::now(),
            });
        }
        let lines = view.format_footer(59);
        assert_eq!(lines.len(), MAX_CALL_LINES + 3);
        assert!(lines.iter().all(|line| display_width(line) <= 59), "{lines:?}");
    }
}
