//! Tests of [`super`].

use super::*;
use proptest::prelude::*;

fn render(text: &str, width: usize) -> String {
    let mut renderer = MarkdownRenderer::new(AnsiStyle::plain());
    let mut out = renderer.push(text, width);
    out.push_str(&renderer.finish(width));
    out
}

fn coloured(text: &str) -> String {
    let mut renderer = MarkdownRenderer::new(AnsiStyle::coloured());
    let mut out = renderer.push(text, 40);
    out.push_str(&renderer.finish(40));
    out
}

#[test]
fn words_are_wrapped_and_lists_hang() {
    assert_eq!(render("one two three four", 9), "one two\nthree\nfour\n");
    assert_eq!(
        render("- one two three\n- four", 9),
        "• one two\n  three\n• four\n"
    );
    assert_eq!(render("  1. aa bb cc", 10), "  1. aa bb\n     cc\n");
    assert_eq!(render("> aa bb cc", 7), "│ aa bb\n│ cc\n");
    assert_eq!(render("abcdefghijkl", 8), "abcdefgh\nijkl\n");
    assert_eq!(render("- [x] done\n- [ ] open", 40), "☑ done\n☐ open\n");
}

#[test]
fn blocks_keep_their_shape() {
    assert_eq!(
        render("```rust\nlet  a = *b*;\n\n```\nend", 40),
        "  let  a = *b*;\n  \nend\n"
    );
    assert_eq!(render("# Title\n\n\n\ntext\n", 40), "Title\n\ntext\n");
    assert_eq!(render("a\n---\nb", 5), "a\n─────\nb\n");
    assert_eq!(render("| a | b |\n|---|---|\n", 40), "a │ b\n──┼──\n");
    // A fence that is never closed ends with the text.
    let mut renderer = MarkdownRenderer::new(AnsiStyle::plain());
    renderer.push("```\ncode", 40);
    assert_eq!(renderer.finish(40), "  code\n");
    assert_eq!(renderer.push("*x* y\n", 40), "x y\n");
}

#[test]
fn a_table_is_shown_when_it_has_ended() {
    let text = "before\n| a | b |\n|---|--:|\n| one | 2 |\nafter\n";
    assert_eq!(render(text, 40), "before\na   │ b\n────┼──\none │ 2\nafter\n");
    // Something else is printed in between: the table ends there.
    let mut renderer = MarkdownRenderer::new(AnsiStyle::plain());
    assert_eq!(renderer.push("| a |\n|---|\n| 1 |\n", 40), "");
    assert_eq!(renderer.break_line(40), "a\n─\n1\n");
    // Bars alone are no table.
    assert_eq!(render("| a | b\n| c | d\n\nend", 40), "| a | b\n| c | d\n\nend\n");
    assert_eq!(
        render("| a long line with a bar", 12),
        "| a long\nline with a\nbar\n"
    );
    let long = format!("| {} |\n|---|\n", "word ".repeat(1_000));
    assert!(render(&long, 40).lines().all(|line| display_width(line) <= 40));
}

#[test]
fn emphasis_becomes_codes_and_what_is_no_mark_stays() {
    assert_eq!(coloured("**b** x"), "\x1b[1mb\x1b[0m x\n");
    assert_eq!(coloured("## H"), "\x1b[1mH\x1b[0m\n");
    assert_eq!(coloured("`a*b`"), "\x1b[36ma*b\x1b[0m\n");
    assert_eq!(
        render("2 * 3 * 4, snake_case_name, *args and **kwargs", 80),
        "2 * 3 * 4, snake_case_name, *args and **kwargs\n"
    );
    assert_eq!(
        render("see [the book](https://b.example/x) now", 80),
        "see the book (https://b.example/x) now\n"
    );
    assert_eq!(render("a[0] and [x] end", 80), "a[0] and [x] end\n");
}

#[test]
fn nothing_of_the_text_acts_on_the_terminal() {
    let shown = render(
        "a\x1b[2Jb \u{202e}c\u{200b}d `\x1b]0;t\x07` [x\x1b[1m](\x1b[2mu)\n```\n\x1b[3m\n",
        80,
    );
    assert!(
        !shown.contains(['\x1b', '\x07', '\u{202e}', '\u{200b}']),
        "{shown:?}"
    );
}

proptest! {
    #[test]
    fn how_the_text_is_cut_changes_nothing(text in "[ab *_`\\[\\]()#>|\\-~\n\\\\é日]{0,60}", cut in 0usize..60) {
        let at = text.char_indices().nth(cut).map_or(text.len(), |(at, _)| at);
        let mut renderer = MarkdownRenderer::new(AnsiStyle::coloured());
        let mut out = renderer.push(&text[..at], 20);
        out.push_str(&renderer.push(&text[at..], 20));
        out.push_str(&renderer.finish(20));
        let mut whole = MarkdownRenderer::new(AnsiStyle::coloured());
        let mut expected = whole.push(&text, 20);
        expected.push_str(&whole.finish(20));
        prop_assert_eq!(out, expected);
    }

    #[test]
    fn no_word_is_lost(words in prop::collection::vec("[a-z0-9]{1,12}", 0..30), width in 20usize..80) {
        let shown = render(&words.join(" "), width);
        prop_assert_eq!(shown.split_whitespace().collect::<Vec<_>>(), words);
        prop_assert!(shown.lines().all(|line| display_width(line) <= width));
    }
}
