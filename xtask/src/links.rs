//! Links of the documents: those to files of the tree lead to a file, and, within a page, to a heading. Nothing is
//! fetched.

use std::{
    fs,
    path::{Path, PathBuf},
};

use anyhow::{Result, bail};

/// Folders that hold no documents of ours.
const SKIPPED: [&str; 5] = ["target", "node_modules", ".git", "dist", "book"];

/// Checks the links of every Markdown file of the tree.
pub(crate) fn check_documents(root: &Path) -> Result<()> {
    let mut documents = Vec::new();
    gather(root, &mut documents)?;
    let mut wrong = Vec::new();
    for document in &documents {
        let text = fs::read_to_string(document)?;
        for link in markdown_links(&text) {
            if let Some(why) = broken(document, &text, link) {
                wrong.push(format!(
                    "{}: {why}",
                    document.strip_prefix(root).unwrap_or(document).display()
                ));
            }
        }
    }
    if !wrong.is_empty() {
        bail!("links that lead nowhere:\n  {}", wrong.join("\n  "));
    }
    println!("{} documents, every link leads somewhere", documents.len());
    Ok(())
}

fn gather(dir: &Path, documents: &mut Vec<PathBuf>) -> Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_string_lossy().into_owned();
        let path = entry.path();
        if entry.file_type()?.is_dir() {
            if !SKIPPED.contains(&name.as_str()) && !name.starts_with('.') {
                gather(&path, documents)?;
            }
        } else if name.ends_with(".md") {
            documents.push(path);
        }
    }
    Ok(())
}

/// Why a link of a document leads nowhere.
fn broken(document: &Path, text: &str, link: &str) -> Option<String> {
    if link.contains("://") || link.starts_with("mailto:") {
        return None;
    }
    let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
    let target = match file {
        "" => document.to_owned(),
        file => document.parent()?.join(file),
    };
    if !target.exists() {
        return Some(format!("there is no {link}"));
    }
    if fragment.is_empty() || target.extension().is_none_or(|end| end != "md") {
        return None;
    }
    let read;
    let text = match file {
        "" => text,
        _ => {
            read = fs::read_to_string(&target).ok()?;
            &read
        }
    };
    let mut headings = text.lines().filter(|line| line.starts_with('#'));
    let found = headings.any(|line| heading_id(line.trim_start_matches('#')) == fragment);
    (!found).then(|| format!("{} has no heading for #{fragment}", target.display()))
}

/// The id that a heading gets.
fn heading_id(heading: &str) -> String {
    let kept = heading.trim().chars().filter_map(|c| match c {
        ' ' => Some('-'),
        c if c.is_alphanumeric() || c == '-' || c == '_' => Some(c.to_ascii_lowercase()),
        _ => None,
    });
    kept.collect()
}

/// The targets of `[text](target)` and `![text](target)`, code left out.
fn markdown_links(text: &str) -> Vec<&str> {
    let mut links = Vec::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        }
        if fenced {
            continue;
        }
        let mut rest = line;
        while let Some((before, after)) = rest.split_once("](") {
            let in_code = before.matches('`').count() % 2 == 1;
            let Some((link, after)) = after.split_once(')') else {
                break;
            };
            // In code only if the text of the link is not itself code: [`a`](b).
            if !in_code || before.ends_with('`') {
                links.push(link.split_whitespace().next().unwrap_or_default());
            }
            rest = after;
        }
    }
    links
}

/// The values of `href` and `src` of a page.
pub(crate) fn html_links(page: &str) -> Vec<&str> {
    let values = |name: &str| {
        let parts: Vec<&str> = page
            .split(name)
            .skip(1)
            .filter_map(|rest| rest.split('"').next())
            .collect();
        parts
    };
    [values(" href=\""), values(" src=\"")].concat()
}

/// The file and fragment that a link of the page `name` leads to, if it is one of the book.
pub(crate) fn page_target(name: &str, link: &str) -> Option<(String, String)> {
    if link.contains("://") || link.starts_with("mailto:") || link.starts_with('/') {
        return None;
    }
    let (file, fragment) = link.split_once('#').unwrap_or((link, ""));
    let file = if file.is_empty() { name } else { file };
    Some((file.to_owned(), fragment.to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn links_are_found_and_code_is_not_one() {
        let text = "See [a](b.md#c) and [`d`](e), not `[f](g)`.\n```\n[h](i)\n```\n![j](k.png)";
        assert_eq!(markdown_links(text), ["b.md#c", "e", "k.png"]);
    }

    #[test]
    fn a_heading_has_the_id_that_links_use() {
        assert_eq!(heading_id(" `[server]`"), "server");
        assert_eq!(heading_id("What is safe, by default"), "what-is-safe-by-default");
    }
}
