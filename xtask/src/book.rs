//! The book: its reference is written from the code, mdBook makes the pages, and what the server embeds is gathered in
//! `docs/book`: pages, and the files they refer to. mdBook's own scripts, styles and fonts stay behind.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::Path,
};

use anyhow::{Context, Result, bail};
use serde_json::json;

use crate::{
    links,
    process::{remove_built_folder, run},
    setup,
};

/// Maximum length of a section's text in the search index, in characters.
const MAX_INDEXED_CHARS: usize = 4_000;

/// Writes the reference, builds the book and checks the links of all documents.
pub(crate) fn run_docs(root: &Path) -> Result<()> {
    write_reference(root)?;
    build_book(root)?;
    links::check_documents(root)
}

/// Writes the reference pages into `docs/src`.
pub(crate) fn write_reference(root: &Path) -> Result<()> {
    let args = [
        "run",
        "--quiet",
        "-p",
        "oubliette",
        "--example",
        "reference",
        "--",
    ];
    run(root, "cargo", &[&args[..], &["pages", "docs/src"]].concat())
}

/// Compiles and runs the book's Rust code, but for what is marked `ignore`: that comes from examples, which have tests of their own.
pub(crate) fn test_book(root: &Path) -> Result<()> {
    let mdbook = setup::install_mdbook(root)?.to_string_lossy().into_owned();
    run(root, &mdbook, &["test", "docs"])
}

/// Builds the book into `docs/book`; an error if a link leads nowhere or a page holds what the server's policy refuses.
pub(crate) fn build_book(root: &Path) -> Result<()> {
    let mdbook = setup::install_mdbook(root)?.to_string_lossy().into_owned();
    run(root, &mdbook, &["build", "docs"])?;
    let built = root.join("target/book");
    let pages = read_pages(&built)?;
    let mut needed: BTreeSet<String> = pages.keys().cloned().collect();
    let mut wrong = Vec::new();
    for (name, page) in &pages {
        check_policy(name, page, &mut wrong);
        for link in links::html_links(page) {
            let Some((file, fragment)) = links::page_target(name, link) else {
                continue;
            };
            if let Some(target) = pages.get(&file) {
                if !fragment.is_empty() && !target.contains(&format!("id=\"{fragment}\"")) {
                    wrong.push(format!("{name}: {file} has no #{fragment}"));
                }
            } else if built.join(&file).is_file() {
                needed.insert(file);
            } else {
                wrong.push(format!("{name}: there is no {file}"));
            }
        }
    }
    if !wrong.is_empty() {
        bail!("the book has mistakes:\n  {}", wrong.join("\n  "));
    }
    let book = root.join("docs/book");
    remove_built_folder(&book)?;
    fs::create_dir_all(&book)?;
    for file in &needed {
        fs::copy(built.join(file), book.join(file)).with_context(|| format!("cannot copy {file}"))?;
    }
    fs::write(book.join("search.json"), search_index(&pages)).context("cannot write the search index")?;
    println!("the book is in docs/book: {} pages", pages.len());
    Ok(())
}

/// The pages that mdBook wrote, by file name. All are in one folder, so that links between them need no path.
fn read_pages(built: &Path) -> Result<BTreeMap<String, String>> {
    let mut pages = BTreeMap::new();
    for entry in fs::read_dir(built).context("mdbook wrote no book")? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if name.ends_with(".html") && name != "toc.html" {
            pages.insert(name, fs::read_to_string(entry.path())?);
        }
    }
    Ok(pages)
}

/// Notes inline scripts, styles and handlers: the server's Content-Security-Policy refuses them.
fn check_policy(name: &str, page: &str, wrong: &mut Vec<String>) {
    let tags = page.split('<').skip(1).filter_map(|rest| rest.split_once('>'));
    for (tag, _) in tags {
        let inline = tag.starts_with("style")
            || (tag.starts_with("script") && !tag.contains(" src="))
            || tag.contains(" style=\"")
            || tag.contains(" onclick=");
        if inline {
            wrong.push(format!(
                "{name}: <{tag}> is inline, and the server's policy refuses it"
            ));
        }
    }
}

/// The sections of all pages as JSON: page, title, link and text.
fn search_index(pages: &BTreeMap<String, String>) -> String {
    let mut sections = Vec::new();
    for (name, page) in pages {
        let main = page.split_once("<main>").map_or("", |(_, rest)| rest);
        let main = main.split_once("<footer>").map_or(main, |(main, _)| main);
        let mut page_title = String::new();
        for (id, heading, text) in split_sections(main) {
            if page_title.is_empty() {
                page_title.clone_from(&heading);
            }
            let text: String = text.chars().take(MAX_INDEXED_CHARS).collect();
            sections.push(json!({
                "page": page_title, "title": heading, "link": format!("{name}#{id}"), "text": text,
            }));
        }
    }
    json!(sections).to_string()
}

/// The headings of a page with their ids and the text up to the next one.
fn split_sections(main: &str) -> Vec<(String, String, String)> {
    let mut sections: Vec<(String, String, String)> = Vec::new();
    for part in main.split("<h").skip(1) {
        // `1 id="name">…</h1>…`
        let id = part
            .split_once("id=\"")
            .and_then(|(_, rest)| rest.split_once('"'));
        let closed = part.split_once('>').and_then(|(_, rest)| rest.split_once("</h"));
        if let (true, Some((id, _)), Some((heading, text))) = (part.starts_with(['1', '2', '3']), id, closed)
        {
            let text = text.split_once('>').map_or("", |(_, text)| text);
            sections.push((id.to_owned(), plain_text(heading), plain_text(text)));
        } else if let Some((_, _, text)) = sections.last_mut() {
            // Another tag, such as <hr>.
            text.push_str(&plain_text(&format!("<h{part}")));
        }
    }
    sections
}

/// HTML without tags and with characters for entities, words separated by single spaces.
fn plain_text(html: &str) -> String {
    let mut text = String::with_capacity(html.len());
    let mut in_tag = false;
    for c in html.chars() {
        match c {
            '<' => in_tag = true,
            '>' => {
                in_tag = false;
                text.push(' ');
            }
            _ if !in_tag => text.push(c),
            _ => {}
        }
    }
    let entities = [
        ("&lt;", "<"),
        ("&gt;", ">"),
        ("&quot;", "\""),
        ("&#39;", "'"),
        ("&amp;", "&"),
    ];
    for (entity, character) in entities {
        text = text.replace(entity, character);
    }
    text.split_whitespace().collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sections_are_found_with_their_text() {
        let html = "<h1 id=\"a\"><a class=\"header\" href=\"#a\">One</a></h1>\n<p>x &lt;y&gt;</p><h2 id=\"b\">Two</h2><hr><p>z</p>";
        let sections = split_sections(html);
        assert_eq!(sections[0], ("a".into(), "One".into(), "x <y>".into()));
        assert_eq!(sections[1], ("b".into(), "Two".into(), "z".into()));
    }

    #[test]
    fn what_is_inline_is_noted() {
        let mut wrong = Vec::new();
        check_policy(
            "p",
            "<script src=\"a.js\" defer></script><p>style=\"</p>",
            &mut wrong,
        );
        assert!(wrong.is_empty(), "{wrong:?}");
        check_policy("p", "<script>x</script><p style=\"color:red\">", &mut wrong);
        assert_eq!(wrong.len(), 2, "{wrong:?}");
    }
}
