//! The marks inside a line of Markdown: emphasis, code and links, read while the line is still being written.

/// A mark whose end has not come is held back up to this many bytes; then it is shown as it is.
const MAX_HELD_BYTES: usize = 1_000;

/// How a piece of text is marked.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct TextMarks {
    bold: bool,
    italic: bool,
    struck: bool,
    code: bool,
    link: bool,
    /// The address of a link, shown after its text.
    address: bool,
}

impl TextMarks {
    /// The ANSI codes of the marks, after those of the line.
    pub(crate) fn codes(self, line: &str) -> String {
        let marks = [
            (self.bold && line.is_empty(), "1"),
            (self.address, "2"),
            (self.italic, "3"),
            (self.link && line.is_empty(), "4"),
            (self.struck, "9"),
            (self.code, "36"),
        ];
        let line = (!line.is_empty()).then_some(line);
        let marks = marks.iter().filter_map(|(is_on, code)| is_on.then_some(*code));
        line.into_iter().chain(marks).collect::<Vec<_>>().join(";")
    }
}

/// Text with the same marks.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct InlinePiece {
    /// The text, without the marks.
    pub text: String,
    /// Its marks.
    pub marks: TextMarks,
}

/// Reads one line.
#[derive(Debug, Default)]
pub(crate) struct InlineParser {
    unread: String,
    /// The character before `unread`.
    before: Option<char>,
    /// The emphasis that is open, outermost first.
    open: Vec<&'static str>,
}

/// The marks of emphasis, longest first.
const EMPHASIS: [&str; 5] = ["**", "__", "~~", "*", "_"];

/// What stands at the beginning of the text that is unread.
enum NextItem {
    /// This many bytes of text without marks.
    Text(usize),
    /// A character that a backslash takes the meaning from, after the backslash.
    Escaped(char),
    /// Code: bytes of the mark on each side, bytes of the code.
    Code(usize, usize),
    /// A link: bytes of all of it, its text, its address.
    Link(usize, String, String),
    Open(&'static str),
    Close(&'static str),
    /// It depends on what comes.
    Incomplete,
}

impl InlineParser {
    /// Takes more of the line; with `is_whole` the line ends here, and nothing is held back.
    pub(crate) fn push(&mut self, text: &str, is_whole: bool) -> Vec<InlinePiece> {
        self.unread.push_str(text);
        let mut pieces = Vec::new();
        while !self.unread.is_empty() {
            let mut used = match self.next_item(is_whole) {
                NextItem::Text(bytes) => {
                    pieces.push(self.piece(&self.unread[..bytes]));
                    bytes
                }
                NextItem::Escaped(c) => {
                    pieces.push(self.piece(&c.to_string()));
                    1 + c.len_utf8()
                }
                NextItem::Code(mark, code) => {
                    let mut piece = self.piece(trim_code(&self.unread[mark..mark + code]));
                    piece.marks.code = true;
                    pieces.push(piece);
                    2 * mark + code
                }
                NextItem::Link(bytes, text, address) => {
                    let mut link = self.piece(&text);
                    link.marks.link = true;
                    pieces.push(link);
                    if address != text && !address.is_empty() {
                        let mut shown = self.piece(&format!(" ({address})"));
                        shown.marks.address = true;
                        pieces.push(shown);
                    }
                    bytes
                }
                NextItem::Open(mark) => {
                    self.open.push(mark);
                    mark.len()
                }
                NextItem::Close(mark) => {
                    if let Some(at) = self.open.iter().rposition(|open| *open == mark) {
                        self.open.truncate(at);
                    }
                    mark.len()
                }
                NextItem::Incomplete => break,
            };
            used = used.clamp(1, self.unread.len());
            self.before = self.unread[..used].chars().last();
            self.unread.drain(..used);
        }
        if is_whole {
            self.open.clear();
            self.before = None;
        }
        pieces
    }

    fn piece(&self, text: &str) -> InlinePiece {
        let is_open = |marks: [&str; 2]| self.open.iter().any(|open| marks.contains(open));
        InlinePiece {
            text: text.to_owned(),
            marks: TextMarks {
                bold: is_open(["**", "__"]),
                italic: is_open(["*", "_"]),
                struck: is_open(["~~", "~~"]),
                ..TextMarks::default()
            },
        }
    }

    fn next_item(&self, is_whole: bool) -> NextItem {
        // No mark reaches further than what may be held back: the rest of a long line changes nothing.
        let (text, is_whole) = match self.unread.char_indices().find(|(at, _)| *at > MAX_HELD_BYTES) {
            Some((end, _)) => (&self.unread[..end], true),
            None => (self.unread.as_str(), is_whole),
        };
        let incomplete = |literal: usize| match is_whole {
            true => NextItem::Text(literal),
            false => NextItem::Incomplete,
        };
        match text.chars().next().unwrap_or_default() {
            '\\' => match text[1..].chars().next() {
                Some(c) if c.is_ascii_punctuation() => NextItem::Escaped(c),
                Some(_) => NextItem::Text(1),
                None => incomplete(1),
            },
            '`' => {
                let mark = text.len() - text.trim_start_matches('`').len();
                match closing_run(text, mark) {
                    // The run that closes it may go on, and then it does not.
                    Some(code) if is_whole || 2 * mark + code < text.len() => NextItem::Code(mark, code),
                    _ => incomplete(mark),
                }
            }
            '[' | '!' => match read_link(text) {
                LinkRead::Link(bytes, shown, address) => NextItem::Link(bytes, shown, address),
                LinkRead::None => NextItem::Text(1),
                LinkRead::Incomplete => incomplete(1),
            },
            '*' | '_' | '~' => self.emphasis(text, is_whole, incomplete),
            _ => {
                let end = text
                    .find(['\\', '`', '[', '!', '*', '_', '~'])
                    .unwrap_or(text.len());
                NextItem::Text(end)
            }
        }
    }

    fn emphasis(&self, text: &str, is_whole: bool, incomplete: impl Fn(usize) -> NextItem) -> NextItem {
        let mark_char = &text[..1];
        let run = text.len() - text.trim_start_matches(mark_char).len();
        // The run may go on, and what follows it decides.
        if text.len() == run && !is_whole {
            return incomplete(run);
        }
        let Some(mark) = EMPHASIS.into_iter().find(|mark| text.starts_with(mark)) else {
            return NextItem::Text(run);
        };
        let is_word = |c: Option<char>| c.is_some_and(char::is_alphanumeric);
        let after = text[run..].chars().next();
        let closes = self.before.is_some_and(|c| !c.is_whitespace()) && !(mark_char == "_" && is_word(after));
        // Three marks close what was opened last, whichever of the two it is.
        let open = self
            .open
            .iter()
            .rev()
            .find(|open| open.starts_with(mark_char) && text.starts_with(**open));
        if let (true, Some(open)) = (closes, open) {
            return NextItem::Close(open);
        }
        let opens = run <= 3
            && after.is_some_and(|c| !c.is_whitespace())
            && !(mark_char == "_" && is_word(self.before))
            && !self.open.contains(&mark);
        if !opens {
            return NextItem::Text(run);
        }
        match closing_emphasis(&text[mark.len()..], mark, is_whole) {
            Some(true) => NextItem::Open(mark),
            Some(false) => NextItem::Text(run),
            None => incomplete(run),
        }
    }
}

/// The bytes between a run of backticks and the next run of the same length.
fn closing_run(text: &str, mark: usize) -> Option<usize> {
    let mut at = mark;
    while let Some(found) = text[at..].find('`') {
        let start = at + found;
        let run = text[start..].len() - text[start..].trim_start_matches('`').len();
        if run == mark && start > mark {
            return Some(start - mark);
        }
        at = start + run;
    }
    None
}

/// Whether a mark of emphasis is closed in the rest of the line; none if that may still come.
fn closing_emphasis(text: &str, mark: &str, is_whole: bool) -> Option<bool> {
    let mut before = None;
    let mut rest = text;
    while let Some(c) = rest.chars().next() {
        let run = rest.len() - rest.trim_start_matches(&mark[..1]).len();
        if run == 0 {
            before = Some(c);
            rest = &rest[c.len_utf8()..];
            continue;
        }
        let after = rest[run..].chars().next();
        if after.is_none() && !is_whole {
            return None;
        }
        let follows_text = before.is_some_and(|c: char| !c.is_whitespace());
        let ends_word = !mark.starts_with('_') || !after.is_some_and(char::is_alphanumeric);
        if (run == mark.len() || run == 3) && follows_text && ends_word {
            return Some(true);
        }
        before = mark.chars().next();
        rest = &rest[run..];
    }
    is_whole.then_some(false)
}

/// What was found where a link may begin.
enum LinkRead {
    Link(usize, String, String),
    None,
    Incomplete,
}

/// Reads `[text](address)` or `![text](address)`.
fn read_link(text: &str) -> LinkRead {
    let inner = text.strip_prefix('!').unwrap_or(text);
    let Some(inner) = inner.strip_prefix('[') else {
        return if inner.is_empty() {
            LinkRead::Incomplete
        } else {
            LinkRead::None
        };
    };
    let Some(end) = inner.find([']', '[']) else {
        return LinkRead::Incomplete;
    };
    let (shown, rest) = (&inner[..end], &inner[end..]);
    let Some(rest) = rest.strip_prefix(']') else {
        return LinkRead::None;
    };
    let Some(address) = rest.strip_prefix('(') else {
        return if rest.is_empty() {
            LinkRead::Incomplete
        } else {
            LinkRead::None
        };
    };
    match address.find([')', ' ']) {
        Some(end) if address[end..].starts_with(')') => {
            let bytes = text.len() - address.len() + end + 1;
            let plain: String = shown.chars().filter(|c| !"*_`".contains(*c)).collect();
            LinkRead::Link(bytes, plain, address[..end].to_owned())
        }
        Some(_) => LinkRead::None,
        None => LinkRead::Incomplete,
    }
}

/// One space on each side of code is part of the marks.
fn trim_code(code: &str) -> &str {
    match code.strip_prefix(' ').and_then(|code| code.strip_suffix(' ')) {
        Some(inner) if !inner.trim().is_empty() => inner,
        _ => code,
    }
}
