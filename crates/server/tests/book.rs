//! The book and README: the reference is current, definitions and configurations in them are valid, commands exist.
//! `tests/python/test_book.py` runs what can be run.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::{fs, path::PathBuf};

use oubliette_protocol::{agent::AgentDefinition, catalog::ToolDefinition};
use oubliette_server::testing::{ServerConfig, reference};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A fenced block: where it is, what follows the fence, and its text.
struct Snippet {
    place: String,
    info: String,
    text: String,
}

/// The fenced blocks of README and of the pages written by hand.
fn snippets() -> Vec<Snippet> {
    let mut files = vec![root().join("README.md")];
    for entry in fs::read_dir(root().join("docs/src")).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_string_lossy().into_owned();
        if name.ends_with(".md") && !name.starts_with("reference-") {
            files.push(path);
        }
    }
    let mut snippets: Vec<Snippet> = Vec::new();
    for file in files {
        let text = fs::read_to_string(&file).unwrap();
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        let mut open = false;
        for (number, line) in text.lines().enumerate() {
            match (line.strip_prefix("```"), open) {
                (Some(info), false) => {
                    open = true;
                    snippets.push(Snippet {
                        place: format!("{name}:{}", number + 1),
                        info: info.trim().to_owned(),
                        text: String::new(),
                    });
                }
                (Some(_), true) => open = false,
                (None, true) => {
                    let last = snippets.last_mut().unwrap();
                    last.text.push_str(line);
                    last.text.push('\n');
                }
                (None, false) => {}
            }
        }
        assert!(!open, "{name} has a block without an end");
    }
    snippets
}

#[test]
fn the_reference_is_current() {
    for page in reference::pages() {
        let path = root().join("docs/src").join(&page.file);
        let present = fs::read_to_string(&path).unwrap_or_default();
        assert!(
            present == page.text,
            "{} is not what the code says: run `cargo xtask docs`",
            path.display()
        );
    }
}

#[test]
fn every_page_is_in_the_contents() {
    let summary = fs::read_to_string(root().join("docs/src/SUMMARY.md")).unwrap();
    for entry in fs::read_dir(root().join("docs/src")).unwrap() {
        let name = entry.unwrap().file_name().to_string_lossy().into_owned();
        if name.ends_with(".md") && name != "SUMMARY.md" {
            assert!(
                summary.contains(&format!("({name})")),
                "{name} is not in SUMMARY.md"
            );
        }
    }
}

#[test]
fn definitions_and_configurations_in_the_book_are_valid() {
    let (mut agents, mut tools, mut configs) = (0, 0, 0);
    for Snippet { place, info, text } in snippets() {
        match info.as_str() {
            "json agent" => {
                AgentDefinition::parse(&text).unwrap_or_else(|error| panic!("{place}: {error}"));
                agents += 1;
            }
            "json tool" => {
                ToolDefinition::parse(&text).unwrap_or_else(|error| panic!("{place}: {error}"));
                tools += 1;
            }
            "json" => {
                serde_json::from_str::<serde_json::Value>(&text)
                    .unwrap_or_else(|error| panic!("{place}: {error}"));
            }
            "toml" => {
                // Every key that a snippet names is set; the database is the snippet's to say.
                let env = |name: &str| {
                    (name != "OUBLIETTE_STORE_URL")
                        .then(|| "whsec_c2VjcmV0c2VjcmV0c2VjcmV0c2VjcmV0".to_owned())
                };
                ServerConfig::parse(&text, &place, &env).unwrap_or_else(|error| panic!("{}", error.message));
                configs += 1;
            }
            "sh" | "sh host" | "text" | "nginx" | "yaml" | "python" | "js" | "rust,ignore" => {}
            other => panic!(
                "{place}: blocks are marked with what they are, so that they are checked; not {other:?}"
            ),
        }
    }
    assert!(
        agents > 5 && tools > 4 && configs > 8,
        "{agents} {tools} {configs}"
    );
}

#[test]
fn commands_in_the_book_exist() {
    let mut checked = 0;
    for Snippet { place, info, text } in snippets() {
        if !info.starts_with("sh") {
            continue;
        }
        let text = text.replace("\\\n", " ");
        let mut here_document = None;
        for line in text.lines() {
            if let Some(end) = here_document {
                if line == end {
                    here_document = None;
                }
                continue;
            }
            if line.contains("<<'JSON'") {
                here_document = Some("JSON");
            }
            let line = line.trim_start().trim_start_matches("sudo -u oubliette ");
            let line = line.trim_start_matches("target/release/");
            if !line.starts_with("oubliette ") {
                continue;
            }
            let words = shell_words(line);
            let parsed = reference::command_tree().try_get_matches_from(&words);
            if let Err(error) = parsed {
                panic!("{place}: {line}\n{error}");
            }
            checked += 1;
        }
    }
    assert!(checked > 40, "{checked}");
}

/// The words of a simple command, up to a comment, a pipe or a redirection.
fn shell_words(line: &str) -> Vec<String> {
    let mut words = Vec::new();
    let mut word: Option<String> = None;
    let mut quote = None;
    for c in line.chars() {
        match (quote, c) {
            (Some(open), c) if c == open => quote = None,
            (Some(_), c) => word.get_or_insert_default().push(c),
            (None, '\'' | '"') => {
                quote = Some(c);
                word.get_or_insert_default();
            }
            (None, ' ') => words.extend(word.take()),
            (None, '#') if word.is_none() => break,
            (None, '|' | '>' | '<' | ';' | '&') => break,
            (None, c) => word.get_or_insert_default().push(c),
        }
    }
    words.extend(word);
    words
}
