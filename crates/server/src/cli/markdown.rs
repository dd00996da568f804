//! Shows Markdown in a terminal while it streams in: words are wrapped at the terminal's width, marks become emphasis.
//!
//! What is written is only ever appended to: a mark that may still be closed is held back until it is, or until its line
//! ends, so that nothing has to be printed again. The result does not depend on how the text was cut into pieces.
//!
//! A table is the exception: it is shown when it has ended, because its columns are as wide as their widest cells
//! ([`super::markdown_table`]).
//!
//! Line breaks stay where the agent made them: many agents write plain text, whose lines mean something.

use super::{
    markdown_inline::{InlineParser, InlinePiece, TextMarks},
    markdown_table::{self, MarkdownTable},
    style::{AnsiStyle, char_width, display_width, strip_control_chars},
};

/// A line that begins with this many characters that could all be marks is prose.
const MAX_PREFIX_BYTES: usize = 64;
/// A line that must be whole before it is shown (code, fence) is shown in pieces of this size when it is longer. A longer
/// row of a table is prose.
const MAX_WHOLE_LINE_BYTES: usize = 4_096;
/// The deepest indentation that is kept, in columns.
const MAX_INDENT: usize = 24;

/// Renders Markdown, piece by piece.
pub(crate) struct MarkdownRenderer {
    style: AnsiStyle,
    /// Source text that has not been rendered yet, of the current line.
    unread: String,
    /// The fence that closes the code block the current line is in.
    fence: Option<CodeFence>,
    /// The line before, if it may be the header of a table.
    header: Option<String>,
    /// The table that the current line may continue.
    table: Option<MarkdownTable>,
    /// The current line, once it is known to be prose.
    prose: Option<ProseLine>,
    /// Whether the last line that was shown is blank, or there is none: a second blank line is left out.
    after_blank: bool,
}

/// The fence around a code block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CodeFence {
    mark: char,
    length: usize,
}

/// A line of prose that is being written.
struct ProseLine {
    inline: InlineParser,
    /// What lines after the first begin with, and its width.
    indent: String,
    indent_width: usize,
    /// Codes that the whole line has, such as bold for a heading.
    codes: &'static str,
    column: usize,
    /// Whether a space is due before the next word.
    space: bool,
    word: Vec<(TextMarks, String)>,
    word_width: usize,
}

/// What a line of source is, as far as its beginning shows.
enum LineKind {
    /// More of it is needed.
    Unknown,
    Blank,
    Fence(CodeFence),
    Rule,
    TableRow,
    Prose {
        /// What the first line begins with.
        first: String,
        /// What the lines it is wrapped into begin with.
        indent: String,
        codes: &'static str,
        /// The text after its marks.
        rest: String,
    },
}

impl MarkdownRenderer {
    /// Renders with these colours.
    pub(crate) fn new(style: AnsiStyle) -> Self {
        Self {
            style,
            unread: String::new(),
            fence: None,
            header: None,
            table: None,
            prose: None,
            after_blank: true,
        }
    }

    /// Takes the next piece of text; returns what to print after what was printed before.
    pub(crate) fn push(&mut self, text: &str, width: usize) -> String {
        let mut out = String::new();
        for line in strip_control_chars(text).split_inclusive('\n') {
            match line.strip_suffix('\n') {
                Some(line) => {
                    self.unread.push_str(&line.replace('\t', "    "));
                    self.render(LineEnd::Reached, width, &mut out);
                }
                None => {
                    self.unread.push_str(&line.replace('\t', "    "));
                    self.render(LineEnd::Open, width, &mut out);
                }
            }
        }
        out
    }

    /// Ends the line that was begun, if one was, so that something else can be printed in between.
    pub(crate) fn break_line(&mut self, width: usize) -> String {
        let mut out = String::new();
        if !self.unread.is_empty() || self.prose.is_some() {
            self.render(LineEnd::Reached, width, &mut out);
        }
        self.end_table(width, &mut out);
        self.after_blank = true;
        out
    }

    /// Ends the text: returns what was held back, with a newline if a line was begun.
    pub(crate) fn finish(&mut self, width: usize) -> String {
        let out = self.break_line(width);
        self.fence = None;
        out
    }

    fn render(&mut self, end: LineEnd, width: usize, out: &mut String) {
        if self.prose.is_none() && !self.begin_line(end, out, width) {
            return;
        }
        let Some(mut prose) = self.prose.take() else {
            return;
        };
        let text = std::mem::take(&mut self.unread);
        for piece in prose.inline.push(&text, end == LineEnd::Reached) {
            prose.add(piece, self.style, width, out);
        }
        match end {
            LineEnd::Open => self.prose = Some(prose),
            LineEnd::Reached => {
                prose.flush_word(self.style, width, out);
                out.push('\n');
                self.after_blank = false;
            }
        }
    }

    /// Finds out what the current line is; shows it if it is no prose. False if there is nothing more to do for now.
    fn begin_line(&mut self, end: LineEnd, out: &mut String, width: usize) -> bool {
        if let Some(fence) = self.fence {
            return self.render_code(fence, end, out);
        }
        let kind = classify(&self.unread, end);
        if !matches!(kind, LineKind::Unknown | LineKind::TableRow) {
            self.end_table(width, out);
        }
        match kind {
            LineKind::Unknown => false,
            LineKind::Blank => {
                if !std::mem::replace(&mut self.after_blank, true) {
                    out.push('\n');
                }
                self.unread.clear();
                false
            }
            LineKind::Fence(fence) => {
                self.fence = Some(fence);
                self.unread.clear();
                false
            }
            LineKind::Rule => {
                out.push_str(&self.style.dim(&"─".repeat(width.min(40))));
                out.push('\n');
                self.unread.clear();
                self.after_blank = false;
                false
            }
            LineKind::TableRow => {
                let row = std::mem::take(&mut self.unread);
                self.add_table_row(row, width, out);
                false
            }
            LineKind::Prose {
                first,
                indent,
                codes,
                rest,
            } => {
                self.prose = Some(ProseLine::begin(&first, &indent, codes, self.style, out));
                self.unread = rest;
                true
            }
        }
    }

    /// Takes a row: of the table under way, the line below a header, or what may be a header itself.
    fn add_table_row(&mut self, row: String, width: usize, out: &mut String) {
        if let Some(table) = &mut self.table {
            table.add_row(&row, width, self.style, out);
            self.after_blank = false;
            return;
        }
        self.table = self
            .header
            .as_deref()
            .and_then(|header| MarkdownTable::begin(header, &row));
        let header = self.header.take();
        if self.table.is_none() {
            if let Some(header) = header {
                self.write_prose_line(&header, width, out);
            }
            self.header = Some(row);
        }
    }

    /// Shows the table under way, or the line that might have been a header.
    fn end_table(&mut self, width: usize, out: &mut String) {
        if let Some(mut table) = self.table.take() {
            table.finish(width, self.style, out);
            self.after_blank = false;
        }
        if let Some(header) = self.header.take() {
            self.write_prose_line(&header, width, out);
        }
    }

    /// Shows a whole line as prose.
    fn write_prose_line(&mut self, line: &str, width: usize, out: &mut String) {
        let text = line.trim_start_matches(' ');
        let spaces = " ".repeat((line.len() - text.len()).min(MAX_INDENT));
        let mut prose = ProseLine::begin(&spaces, &spaces, "", self.style, out);
        for piece in prose.inline.push(text, true) {
            prose.add(piece, self.style, width, out);
        }
        prose.flush_word(self.style, width, out);
        out.push('\n');
        self.after_blank = false;
    }

    /// Shows a line of a code block as it is, or notes the block's end. Always false: no prose follows.
    fn render_code(&mut self, fence: CodeFence, end: LineEnd, out: &mut String) -> bool {
        if end == LineEnd::Open && self.unread.len() < MAX_WHOLE_LINE_BYTES {
            return false;
        }
        let line = std::mem::take(&mut self.unread);
        if end == LineEnd::Reached && fence.closes_at(&line) {
            self.fence = None;
            return false;
        }
        out.push_str("  ");
        out.push_str(&self.style.cyan(line.trim_end()));
        out.push('\n');
        self.after_blank = false;
        false
    }
}

/// Whether the end of the current source line has come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum LineEnd {
    Open,
    Reached,
}

impl CodeFence {
    /// The fence that opens with this line; the word after it names the language.
    fn opening(line: &str) -> Option<Self> {
        let mark = line.chars().next().filter(|c| matches!(c, '`' | '~'))?;
        let length = line.chars().take_while(|c| *c == mark).count();
        let info = &line[length..];
        (length >= 3 && !info.contains('`')).then_some(Self { mark, length })
    }

    fn closes_at(self, line: &str) -> bool {
        let line = line.trim();
        line.chars().count() >= self.length && line.chars().all(|c| c == self.mark)
    }
}

/// Finds out what a line is.
fn classify(line: &str, end: LineEnd) -> LineKind {
    let whole = end == LineEnd::Reached;
    let text = line.trim_start_matches(' ');
    let indent = (line.len() - text.len()).min(MAX_INDENT);
    if text.trim_end().is_empty() {
        return if whole { LineKind::Blank } else { LineKind::Unknown };
    }
    let is_mark = |c: char| "#-*+>`~_.) |[]".contains(c) || c.is_ascii_digit();
    let marks_only = text.chars().all(is_mark) || text.ends_with("[x") || text.ends_with("[x]");
    if !whole && marks_only && text.len() < MAX_PREFIX_BYTES {
        return LineKind::Unknown;
    }
    let needs_whole =
        text.starts_with("```") || text.starts_with("~~~") || markdown_table::is_row(text) || is_rule(text);
    if needs_whole && !whole && text.len() < MAX_WHOLE_LINE_BYTES {
        return LineKind::Unknown;
    }
    if let Some(fence) = CodeFence::opening(text.trim_end()) {
        return LineKind::Fence(fence);
    }
    if markdown_table::is_row(text) && text.len() < MAX_WHOLE_LINE_BYTES {
        return LineKind::TableRow;
    }
    if whole && is_rule(text) {
        return LineKind::Rule;
    }
    classify_prose(text, indent)
}

/// Whether a line is three or more `-`, `*` or `_`.
fn is_rule(text: &str) -> bool {
    let mark = text.chars().next().unwrap_or_default();
    let marks = text.chars().filter(|c| *c == mark).count();
    matches!(mark, '-' | '*' | '_') && marks >= 3 && text.chars().all(|c| c == mark || c == ' ')
}

fn classify_prose(text: &str, indent: usize) -> LineKind {
    let spaces = " ".repeat(indent);
    let hashes = text.chars().take_while(|c| *c == '#').count();
    if let (1..=6, Some(rest)) = (hashes, text[hashes..].strip_prefix(' ')) {
        return LineKind::Prose {
            first: String::new(),
            indent: String::new(),
            codes: if hashes == 1 { "1;4" } else { "1" },
            rest: rest.trim_start().to_owned(),
        };
    }
    if text.starts_with('>') {
        let rest = text.trim_start_matches(['>', ' ']);
        let depth = text[..text.len() - rest.len()].matches('>').count().min(8);
        let bar = format!("{spaces}{}", "│ ".repeat(depth));
        return LineKind::Prose {
            first: bar.clone(),
            indent: bar,
            codes: "",
            rest: rest.to_owned(),
        };
    }
    let (first, rest) = match list_marker(text) {
        Some((marker, rest)) => (format!("{spaces}{marker}"), rest),
        None => (spaces, text),
    };
    LineKind::Prose {
        indent: " ".repeat(display_width(&first)),
        first,
        codes: "",
        rest: rest.to_owned(),
    }
}

/// The marker of a list item as it is shown, and the text after it.
fn list_marker(text: &str) -> Option<(String, &str)> {
    if let Some(rest) = ["- ", "* ", "+ "].iter().find_map(|mark| text.strip_prefix(mark)) {
        let rest = rest.trim_start();
        let boxes = [("[ ] ", "☐ "), ("[x] ", "☑ "), ("[X] ", "☑ ")];
        let ticked = boxes
            .iter()
            .find_map(|(mark, shown)| rest.strip_prefix(mark).map(|rest| ((*shown).to_owned(), rest)));
        return Some(ticked.unwrap_or(("• ".to_owned(), rest)));
    }
    let digits = text.chars().take_while(char::is_ascii_digit).count();
    let rest = text[digits..].strip_prefix(['.', ')'])?.strip_prefix(' ')?;
    (1..=9)
        .contains(&digits)
        .then(|| (format!("{} ", &text[..=digits]), rest.trim_start()))
}

impl ProseLine {
    /// Begins a line with these marks, which are written at once.
    fn begin(first: &str, indent: &str, codes: &'static str, style: AnsiStyle, out: &mut String) -> Self {
        out.push_str(&style.dim(first));
        Self {
            inline: InlineParser::default(),
            column: display_width(first),
            indent_width: display_width(indent),
            indent: style.dim(indent),
            codes,
            space: false,
            word: Vec::new(),
            word_width: 0,
        }
    }

    fn add(&mut self, piece: InlinePiece, style: AnsiStyle, width: usize, out: &mut String) {
        for c in piece.text.chars() {
            if c == ' ' {
                self.flush_word(style, width, out);
                self.space = true;
                continue;
            }
            // A word that is longer than a line is broken where the line ends.
            if self.word_width + char_width(c) > width.saturating_sub(self.indent_width).max(8) {
                self.flush_word(style, width, out);
                self.space = false;
            }
            match self.word.last_mut() {
                Some((marks, text)) if *marks == piece.marks => text.push(c),
                _ => self.word.push((piece.marks, c.to_string())),
            }
            self.word_width += char_width(c);
        }
    }

    /// Writes the word, on a new line if it does not fit into this one.
    fn flush_word(&mut self, style: AnsiStyle, width: usize, out: &mut String) {
        if self.word.is_empty() {
            return;
        }
        let space = usize::from(std::mem::take(&mut self.space) && self.column > 0);
        if self.column > self.indent_width && self.column + space + self.word_width > width {
            out.push('\n');
            out.push_str(&self.indent);
            self.column = self.indent_width;
        } else if space > 0 {
            out.push(' ');
            self.column += 1;
        }
        for (marks, text) in self.word.drain(..) {
            out.push_str(&style.codes(&marks.codes(self.codes), &text));
        }
        self.column += std::mem::take(&mut self.word_width);
    }
}

#[cfg(test)]
mod tests;
