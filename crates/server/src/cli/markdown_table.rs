//! Tables in Markdown: rows are collected until the table ends, then laid out in columns that fit the terminal. Cells that
//! are too wide are wrapped at words; where columns would be too narrow to read, each row becomes a list of its fields.

use super::{
    markdown_inline::{InlineParser, TextMarks},
    style::{AnsiStyle, char_width, display_width},
};

/// After this many rows the columns are fixed and later rows follow at once, so that a table without end is shown, too.
const MAX_COLLECTED_ROWS: usize = 200;
/// The most columns; the cells of further ones are part of the last.
const MAX_COLUMNS: usize = 24;
/// Columns narrower than this cannot be read: the rows are shown as lists.
const MIN_READABLE_WIDTH: usize = 6;
/// What stands between two columns.
const COLUMN_GAP: &str = " │ ";

/// Text with its marks.
type MarkedText = Vec<(TextMarks, String)>;

/// On which side a column's text stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum CellAlign {
    Left,
    Centre,
    Right,
}

/// A table that is being read.
#[derive(Debug)]
pub(crate) struct MarkdownTable {
    aligns: Vec<CellAlign>,
    header: Vec<MarkedText>,
    rows: Vec<Vec<MarkedText>>,
    /// The columns' widths, once they are fixed.
    layout: Option<TableLayout>,
}

/// How a table's rows are shown.
#[derive(Debug, Clone, PartialEq, Eq)]
enum TableLayout {
    /// In columns of these widths.
    Columns(Vec<usize>),
    /// As lists of fields, because the columns would be too narrow.
    Lists,
}

impl MarkdownTable {
    /// The table that begins with this row, if `separator` is what stands between a header and its rows.
    pub(crate) fn begin(header: &str, separator: &str) -> Option<Self> {
        let header: Vec<MarkedText> = split_cells(header).iter().map(|cell| parse_cell(cell)).collect();
        let aligns: Option<Vec<CellAlign>> = split_cells(separator)
            .iter()
            .map(|cell| parse_align(cell))
            .collect();
        let aligns = aligns.filter(|aligns| aligns.len() == header.len())?;
        Some(Self {
            aligns,
            header,
            rows: Vec::new(),
            layout: None,
        })
    }

    /// Takes the next row; shows what is known by then.
    pub(crate) fn add_row(&mut self, row: &str, width: usize, style: AnsiStyle, out: &mut String) {
        let row: Vec<MarkedText> = split_cells(row).iter().map(|cell| parse_cell(cell)).collect();
        match &self.layout {
            Some(layout) => self.write_row(&row, layout, width, style, out),
            None => self.rows.push(row),
        }
        if self.rows.len() >= MAX_COLLECTED_ROWS {
            self.finish(width, style, out);
        }
    }

    /// Shows the rows that were collected.
    pub(crate) fn finish(&mut self, width: usize, style: AnsiStyle, out: &mut String) {
        if self.layout.is_some() {
            return;
        }
        let layout = self
            .layout
            .insert(layout_columns(&self.header, &self.rows, width))
            .clone();
        if let TableLayout::Columns(widths) = &layout {
            self.write_columns(&self.header, widths, "1", style, out);
            let rule: Vec<String> = widths.iter().map(|width| "─".repeat(*width)).collect();
            out.push_str(&style.dim(&rule.join("─┼─")));
            out.push('\n');
        }
        for row in std::mem::take(&mut self.rows) {
            self.write_row(&row, &layout, width, style, out);
        }
    }

    fn write_row(
        &self,
        row: &[MarkedText],
        layout: &TableLayout,
        width: usize,
        style: AnsiStyle,
        out: &mut String,
    ) {
        match layout {
            TableLayout::Columns(widths) => self.write_columns(row, widths, "", style, out),
            TableLayout::Lists => self.write_list(row, width, style, out),
        }
    }

    /// Writes a row in columns, on as many lines as its longest cell takes.
    fn write_columns(
        &self,
        row: &[MarkedText],
        widths: &[usize],
        codes: &str,
        style: AnsiStyle,
        out: &mut String,
    ) {
        let none = MarkedText::new();
        let cells: Vec<Vec<MarkedText>> = widths
            .iter()
            .enumerate()
            .map(|(n, width)| wrap_cell(row.get(n).unwrap_or(&none), *width))
            .collect();
        let height = cells.iter().map(Vec::len).max().unwrap_or(1).max(1);
        for at in 0..height {
            let mut line = String::new();
            for (n, (cell, width)) in cells.iter().zip(widths).enumerate() {
                let text = cell.get(at).unwrap_or(&none);
                let missing = width.saturating_sub(marked_width(text));
                let before = match self.aligns.get(n) {
                    Some(CellAlign::Right) => missing,
                    Some(CellAlign::Centre) => missing / 2,
                    Some(CellAlign::Left) | None => 0,
                };
                if n > 0 {
                    line.push_str(&style.dim(COLUMN_GAP));
                }
                line.push_str(&" ".repeat(before));
                line.push_str(&write_marked(text, codes, style));
                // Nothing follows the last column.
                if n + 1 < widths.len() {
                    line.push_str(&" ".repeat(missing - before));
                }
            }
            out.push_str(line.trim_end());
            out.push('\n');
        }
    }

    /// Writes a row as a list: each field with its column's name before it.
    fn write_list(&self, row: &[MarkedText], width: usize, style: AnsiStyle, out: &mut String) {
        for (n, cell) in row.iter().enumerate().filter(|(_, cell)| !cell.is_empty()) {
            let mut field = match self.header.get(n) {
                Some(name) if !name.is_empty() => {
                    [&name[..], &[(TextMarks::default(), ": ".into())]].concat()
                }
                _ => MarkedText::new(),
            };
            field.extend(cell.iter().cloned());
            let mark = if n == 0 { "• " } else { "  " };
            for (at, line) in wrap_cell(&field, width.saturating_sub(4).max(1))
                .iter()
                .enumerate()
            {
                out.push_str(&style.dim(if at == 0 { mark } else { "    " }));
                out.push_str(&write_marked(line, "", style));
                out.push('\n');
            }
        }
    }
}

/// Whether a line of source is a row of a table, as far as it alone can show.
pub(crate) fn is_row(text: &str) -> bool {
    text.starts_with('|')
}

/// The cells of a row. A `|` after a backslash is text.
fn split_cells(row: &str) -> Vec<String> {
    let row = row.trim();
    let row = row.strip_prefix('|').unwrap_or(row);
    let mut cells = vec![String::new()];
    let mut is_escaped = false;
    for c in row.chars() {
        let last = cells.len() - 1;
        match c {
            '|' if is_escaped => {
                cells[last].pop();
                cells[last].push('|');
            }
            '|' if cells.len() < MAX_COLUMNS => cells.push(String::new()),
            _ => cells[last].push(c),
        }
        is_escaped = c == '\\' && !is_escaped;
    }
    // The last `|` ends the row; it begins no cell.
    if cells.len() > 1 && cells.last().is_some_and(|cell| cell.trim().is_empty()) {
        cells.pop();
    }
    cells.iter().map(|cell| cell.trim().to_owned()).collect()
}

/// What a cell of the line below the header says about its column; absent if it is no such cell.
fn parse_align(cell: &str) -> Option<CellAlign> {
    let (is_left, rest) = cell.strip_prefix(':').map_or((false, cell), |rest| (true, rest));
    let (is_right, dashes) = rest.strip_suffix(':').map_or((false, rest), |rest| (true, rest));
    let is_separator = !dashes.is_empty() && dashes.chars().all(|c| c == '-');
    is_separator.then_some(match (is_left, is_right) {
        (true, true) => CellAlign::Centre,
        (false, true) => CellAlign::Right,
        (_, false) => CellAlign::Left,
    })
}

fn parse_cell(cell: &str) -> MarkedText {
    let pieces = InlineParser::default().push(cell, true);
    pieces
        .into_iter()
        .map(|piece| (piece.marks, piece.text))
        .collect()
}

fn marked_width(text: &MarkedText) -> usize {
    text.iter().map(|(_, text)| display_width(text)).sum()
}

fn write_marked(text: &MarkedText, codes: &str, style: AnsiStyle) -> String {
    text.iter()
        .map(|(marks, text)| style.codes(&marks.codes(codes), text))
        .collect()
}

/// The widths of the columns. Where not everything fits, columns that need less than their share keep what they need, and
/// the others share what is left.
fn layout_columns(header: &[MarkedText], rows: &[Vec<MarkedText>], width: usize) -> TableLayout {
    let count = rows.iter().map(Vec::len).max().unwrap_or(0).max(header.len());
    let mut widths: Vec<usize> = vec![1; count];
    for row in rows.iter().map(Vec::as_slice).chain([header]) {
        for (width, cell) in widths.iter_mut().zip(row) {
            *width = (*width).max(marked_width(cell));
        }
    }
    let gaps = display_width(COLUMN_GAP) * count.saturating_sub(1);
    let room = width.saturating_sub(gaps);
    if widths.iter().sum::<usize>() <= room {
        return TableLayout::Columns(widths);
    }
    let mut by_width: Vec<usize> = (0..count).collect();
    by_width.sort_by_key(|n| widths[*n]);
    let (mut left, mut columns) = (room, count);
    for n in by_width {
        let share = left / columns;
        if widths[n] > share && share < MIN_READABLE_WIDTH {
            return TableLayout::Lists;
        }
        widths[n] = widths[n].min(share);
        left -= widths[n];
        columns -= 1;
    }
    TableLayout::Columns(widths)
}

/// Wraps a cell at words; a word that is longer than a line is broken where the line ends.
fn wrap_cell(cell: &MarkedText, width: usize) -> Vec<MarkedText> {
    let mut lines = Vec::new();
    let (mut line, mut column) = (MarkedText::new(), 0);
    let (mut word, mut word_width) = (MarkedText::new(), 0);
    let mut space: Option<TextMarks> = None;
    let letters = cell
        .iter()
        .flat_map(|(marks, text)| text.chars().map(|c| (*marks, c)));
    // A space at the end writes the last word.
    for (marks, c) in letters.chain([(TextMarks::default(), ' ')]) {
        let is_full = word_width + char_width(c) > width;
        if (c == ' ' || is_full) && !word.is_empty() {
            let gap = usize::from(space.is_some() && column > 0);
            if column > 0 && column + gap + word_width > width {
                lines.push(std::mem::take(&mut line));
                column = 0;
            } else if let (Some(marks), 1) = (space, gap) {
                push_char(&mut line, marks, ' ');
                column += 1;
            }
            for (marks, text) in word.drain(..) {
                text.chars().for_each(|c| push_char(&mut line, marks, c));
            }
            column += std::mem::take(&mut word_width);
            space = None;
        }
        match c {
            ' ' => space = space.or(Some(marks)),
            c => {
                push_char(&mut word, marks, c);
                word_width += char_width(c);
            }
        }
    }
    if !line.is_empty() {
        lines.push(line);
    }
    lines
}

fn push_char(text: &mut MarkedText, marks: TextMarks, c: char) {
    match text.last_mut() {
        Some((last, text)) if *last == marks => text.push(c),
        _ => text.push((marks, c.to_string())),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn render(text: &str, width: usize, style: AnsiStyle) -> String {
        let mut lines = text.lines();
        let mut table = MarkdownTable::begin(lines.next().unwrap(), lines.next().unwrap()).unwrap();
        let mut out = String::new();
        lines.for_each(|line| table.add_row(line, width, style, &mut out));
        table.finish(width, style, &mut out);
        out
    }

    fn plain(text: &str, width: usize) -> String {
        render(text, width, AnsiStyle::plain())
    }

    #[test]
    fn columns_are_aligned_as_the_separator_says() {
        let text = "| name | n | mid |\n|:---|--:|:-:|\n| a | 1 | x |\n| longer | 200 | yyyyy |";
        assert_eq!(
            plain(text, 40),
            "name   │   n │  mid\n───────┼─────┼──────\na      │   1 │   x\nlonger │ 200 │ yyyyy\n"
        );
    }

    #[test]
    fn wide_characters_take_two_columns() {
        let shown = plain(
            "| 名前 | x |\n|---|---|\n| 日本語 | 1 |\n| ab | 2 |\n| é | 3 |",
            40,
        );
        assert_eq!(
            shown,
            "名前   │ x\n───────┼──\n日本語 │ 1\nab     │ 2\né      │ 3\n"
        );
        let at: Vec<usize> = shown
            .lines()
            .map(|line| display_width(line.split(['│', '┼']).next().unwrap()))
            .collect();
        assert_eq!(at, [7; 5]);
    }

    #[test]
    fn a_wide_cell_is_wrapped_in_its_column() {
        let text = "| key | value |\n|---|---|\n| a | one two three four five six |";
        assert_eq!(
            plain(text, 22),
            "key │ value\n────┼─────────────────\na   │ one two three\n    │ four five six\n"
        );
        // A word that is longer than its column is broken.
        assert_eq!(
            plain("| k |\n|-|\n| abcdefghij |", 8),
            "k\n────────\nabcdefgh\nij\n"
        );
    }

    #[test]
    fn columns_too_narrow_to_read_become_lists() {
        let text =
            "| a | b | c | d |\n|-|-|-|-|\n| one thing | two things | three things | four |\n| x | | z | |";
        assert_eq!(
            plain(text, 24),
            "• a: one thing\n  b: two things\n  c: three things\n  d: four\n• a: x\n  c: z\n"
        );
    }

    #[test]
    fn cells_have_marks_and_escaped_bars() {
        let shown = render(
            "| **h** | c |\n|---|---|\n| `a\\|b` | *i* |",
            40,
            AnsiStyle::coloured(),
        );
        assert!(
            shown.contains("\x1b[36ma|b\x1b[0m") && shown.contains("\x1b[3mi\x1b[0m"),
            "{shown:?}"
        );
        assert!(shown.starts_with("\x1b[1mh\x1b[0m  "), "{shown:?}");
    }

    #[test]
    fn a_row_may_have_more_or_fewer_cells() {
        assert_eq!(
            plain("| a | b |\n|---|---|\n| 1 |\n| 1 | 2 | 3 |", 40),
            "a │ b │\n──┼───┼──\n1 │   │\n1 │ 2 │ 3\n"
        );
        assert!(MarkdownTable::begin("| a | b |", "|---|").is_none());
        assert!(MarkdownTable::begin("| a |", "| b |").is_none());
        assert!(MarkdownTable::begin("| a |", "|::-|").is_none());
    }

    #[test]
    fn a_table_without_end_is_shown_while_it_grows() {
        let mut table = MarkdownTable::begin("| a |", "|---|").unwrap();
        let mut out = String::new();
        for n in 0..=MAX_COLLECTED_ROWS {
            table.add_row(&format!("| {n} |"), 40, AnsiStyle::plain(), &mut out);
        }
        assert_eq!(out.lines().count(), 2 + MAX_COLLECTED_ROWS + 1);
        assert!(out.ends_with(&format!("\n{MAX_COLLECTED_ROWS}\n")));
    }

    proptest! {
        #[test]
        fn a_table_fits_and_loses_nothing(
            cells in prop::collection::vec(prop::collection::vec("[a-z日é]{0,9}( [a-z日é]{1,9}){0,3}", 1..7), 1..6),
            width in 20usize..90,
        ) {
            let columns = cells.iter().map(Vec::len).max().unwrap_or(1);
            let row = |cells: &[String]| format!("| {} |", cells.join(" | "));
            let header = vec!["h".to_owned(); columns];
            let separator = vec!["---".to_owned(); columns];
            let mut lines = vec![row(&header), row(&separator)];
            lines.extend(cells.iter().map(|cells| row(cells)));
            let shown = plain(&lines.join("\n"), width);
            prop_assert!(shown.lines().all(|line| display_width(line) <= width), "{shown}");
            let letters = |text: &str| {
                let mut letters: Vec<char> = text.chars().filter(|c| c.is_alphabetic() && *c != 'h').collect();
                letters.sort_unstable();
                letters
            };
            prop_assert_eq!(letters(&shown), letters(&cells.concat().concat()));
        }
    }
}
