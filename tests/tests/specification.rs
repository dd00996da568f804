//! Every row of SPECIFICATION.md, and every promise of SECURITY.md, names a test, and every test named exists.

#![allow(clippy::unwrap_used, clippy::expect_used, reason = "tests")]

use std::{collections::HashMap, fs, path::Path};

/// Why a test named in a document cannot be found; `None` if it exists.
fn find_missing_test(
    root: &Path,
    file: &str,
    name: Option<&str>,
    read: &mut HashMap<String, String>,
) -> Option<String> {
    let path = match file.contains('/') {
        true => root.join(file),
        false => root.join("tests/python").join(file),
    };
    if !read.contains_key(file) {
        let Ok(text) = fs::read_to_string(&path) else {
            return Some(format!("there is no {}", path.display()));
        };
        read.insert(file.to_owned(), text);
    }
    let (text, name) = (&read[file], name?);
    let defined = match path.extension()?.to_str()? {
        "py" => format!("def {name}("),
        "rs" => format!("fn {name}("),
        _ => name.to_owned(),
    };
    (!text.contains(&defined)).then(|| format!("{} has no {name}", path.display()))
}

#[test]
fn every_test_named_in_the_specification_exists() {
    assert!(check_named_tests("SPECIFICATION.md", "# ") > 40);
}

#[test]
fn every_promise_of_the_threat_model_names_a_test_that_exists() {
    assert!(check_named_tests("SECURITY.md", "## Promises") > 40);
}

/// Checks the last column of every table after the heading `from`, up to the next heading of its level. Returns how many
/// tests are named.
fn check_named_tests(document: &str, from: &str) -> usize {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = fs::read_to_string(root.join(document)).unwrap();
    let level = from.split(' ').next().unwrap();
    let mut lines = text.lines().skip_while(|line| !line.starts_with(from));
    let heading = lines.next().expect("the heading");
    let part = lines.take_while(|line| line.split(' ').next() != Some(level));
    let (mut wrong, mut read, mut named, mut last) = (Vec::new(), HashMap::new(), 0, None);
    for line in part {
        if line.starts_with('#') {
            last = None;
        }
        let Some(row) = line.strip_prefix("| ").and_then(|row| row.strip_suffix(" |")) else {
            continue;
        };
        let tests = row.rsplit(" | ").next().unwrap();
        if tests == "test" {
            continue;
        }
        let quoted: Vec<&str> = tests.split('`').skip(1).step_by(2).collect();
        if quoted.is_empty() {
            wrong.push(format!("no test in {line:?}"));
        }
        for one in quoted {
            let (file, name) = match one.split_once("::") {
                Some((file, name)) => (file, Some(name)),
                None => (one, None),
            };
            // A command, such as `cargo xtask fuzz`, is no test.
            if one.starts_with("cargo ") {
                continue;
            }
            // `…` stands for the file named before it.
            let file = if file == "…" { last } else { Some(file) };
            last = file;
            named += 1;
            match file {
                Some(file) => wrong.extend(find_missing_test(root, file, name, &mut read)),
                None => wrong.push(format!("{one}: of which file?")),
            }
        }
    }
    assert!(wrong.is_empty(), "{document}, {heading}: {wrong:#?}");
    named
}

#[test]
fn every_test_named_after_a_requirement_is_in_the_specification() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let text = fs::read_to_string(root.join("SPECIFICATION.md")).unwrap();
    for file in fs::read_dir(root.join("tests/python")).unwrap() {
        let path = file.unwrap().path();
        if path.extension().is_none_or(|end| end != "py") {
            continue;
        }
        let names = fs::read_to_string(&path).unwrap();
        let names = names.lines().filter_map(|line| {
            let name = line.trim_start_matches("async ").strip_prefix("def ")?;
            name.split('(').next()
        });
        for name in names.filter(|name| name.starts_with("test_req_")) {
            assert!(text.contains(&format!("::{name}`")), "{name} is not listed");
        }
    }
}
