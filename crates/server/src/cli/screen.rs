//! The part of the terminal that changes while a turn runs: the line being written, and a footer below it (running calls,
//! status, what is being typed). Everything above is printed once and belongs to the terminal's own history.
//!
//! The footer is erased before anything is printed and drawn again after it, in one write. Lines end with a carriage return
//! too, so that it works in raw mode.

use std::io::Write as _;

use super::style::display_width;

/// Prints text above a footer.
#[derive(Default)]
pub(crate) struct Screen {
    /// The last line printed, if no newline has ended it.
    partial: String,
    footer: Vec<String>,
    /// Widths of the lines drawn last that may still change, first to last; the cursor is at the end of the last.
    drawn: Vec<usize>,
}

impl Screen {
    /// Prints text, which may end inside a line.
    pub(crate) fn print(&mut self, text: &str) {
        let mut out = self.erase();
        // The unfinished line was erased with the footer.
        out.push_str(&self.partial);
        out.push_str(&text.replace('\n', "\r\n"));
        match text.rsplit_once('\n') {
            Some((_, last)) => last.clone_into(&mut self.partial),
            None => self.partial.push_str(text),
        }
        self.draw_footer(&mut out);
        write_stdout(&out);
    }

    /// Ends the line that was begun.
    pub(crate) fn end_line(&mut self) {
        if !self.partial.is_empty() {
            self.print("\n");
        }
    }

    /// Shows these lines below the text, each at most as wide as the terminal, instead of those before.
    pub(crate) fn set_footer(&mut self, footer: Vec<String>) {
        if self.footer == footer && self.drawn.len() > usize::from(!self.partial.is_empty()) {
            return;
        }
        self.footer = footer;
        self.redraw();
    }

    /// Draws the unfinished line and the footer again, for example after the terminal's size changed.
    pub(crate) fn redraw(&mut self) {
        let mut out = self.erase();
        out.push_str(&self.partial);
        self.draw_footer(&mut out);
        write_stdout(&out);
    }

    /// Ends the line that was begun and removes the footer, so that others may print.
    pub(crate) fn close(&mut self) {
        self.footer.clear();
        self.end_line();
        self.redraw();
        self.drawn.clear();
    }

    /// Codes that move to the first line drawn and clear from there.
    fn erase(&mut self) -> String {
        let rows = drawn_rows(&self.drawn, terminal_columns());
        self.drawn.clear();
        match rows {
            0 => String::new(),
            1 => "\r\x1b[J".to_owned(),
            rows => format!("\r\x1b[{}A\x1b[J", rows - 1),
        }
    }

    /// Draws the footer after the unfinished line, and notes what may have to be erased.
    fn draw_footer(&mut self, out: &mut String) {
        self.drawn.clear();
        if !self.partial.is_empty() {
            self.drawn.push(visible_width(&self.partial));
        }
        for line in &self.footer {
            if !self.drawn.is_empty() {
                out.push_str("\r\n");
            }
            out.push_str(line);
            self.drawn.push(visible_width(line));
        }
    }
}

/// How many rows of the terminal lines of these widths take; a terminal that became narrower has wrapped them.
fn drawn_rows(widths: &[usize], columns: usize) -> usize {
    widths.iter().map(|width| width.div_ceil(columns).max(1)).sum()
}

/// The terminal's width as it is; 80 if unknown.
fn terminal_columns() -> usize {
    match crossterm::terminal::size() {
        Ok((columns, _)) if columns > 0 => usize::from(columns),
        _ => 80,
    }
}

/// The columns a line takes, without the colour codes in it.
fn visible_width(line: &str) -> usize {
    let mut parts = line.split("\x1b[");
    let plain = display_width(parts.next().unwrap_or_default());
    let coloured = parts.map(|part| display_width(part.split_once('m').map_or("", |(_, text)| text)));
    plain + coloured.sum::<usize>()
}

fn write_stdout(text: &str) {
    let mut out = std::io::stdout().lock();
    let _ = out.write_all(text.as_bytes());
    let _ = out.flush();
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn colour_codes_take_no_columns() {
        assert_eq!(visible_width("a\x1b[1mbc\x1b[0m d"), 5);
        assert_eq!(visible_width("\x1b[2m日\x1b[0m"), 2);
    }

    #[test]
    fn lines_that_a_narrow_terminal_wrapped_count_as_several() {
        assert_eq!(drawn_rows(&[], 80), 0);
        assert_eq!(drawn_rows(&[0, 79], 80), 2);
        assert_eq!(drawn_rows(&[79, 10], 40), 3);
    }
}
