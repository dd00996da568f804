//! Characters of other people's text that a person would not see, or that would change how the rest is shown.

/// Whether a character acts on the terminal, changes the direction of writing, or cannot be seen: text with it could look
/// like other text. A newline and a tab are not among them.
pub(crate) fn is_hidden_char(c: char) -> bool {
    (c.is_control() && c != '\n' && c != '\t')
        || matches!(c, '\u{ad}' | '\u{34f}' | '\u{61c}' | '\u{115f}' | '\u{1160}' | '\u{17b4}' | '\u{17b5}'
            | '\u{180b}'..='\u{180f}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}'
            | '\u{3164}' | '\u{fe00}'..='\u{fe0f}' | '\u{feff}' | '\u{ffa0}' | '\u{fff9}'..='\u{fffb}'
            | '\u{1bca0}'..='\u{1bca3}' | '\u{1d173}'..='\u{1d17a}' | '\u{e0000}'..='\u{e0fff}')
}

/// Whether a character has to be written out where a person decides by what is shown: it is hidden, or looks like a space and
/// is none.
pub(crate) fn is_deceptive_char(c: char) -> bool {
    let is_plain_space = matches!(c, ' ' | '\n' | '\t');
    is_hidden_char(c) || (c.is_whitespace() && !is_plain_space) || c == '\u{2800}'
}

/// A text in which such characters are written as JSON writes them.
pub(crate) fn write_out_deceptive_chars(text: &str) -> String {
    let mut shown = String::with_capacity(text.len());
    for c in text.chars() {
        match is_deceptive_char(c) {
            true => shown.extend(
                c.encode_utf16(&mut [0; 2])
                    .iter()
                    .map(|unit| format!("\\u{unit:04x}")),
            ),
            false => shown.push(c),
        }
    }
    shown
}
