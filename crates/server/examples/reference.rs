//! Writes the reference pages of the book, or man pages: `reference pages docs/src` and `reference man DIR`.

#![allow(clippy::print_stdout, reason = "a program for developers")]

use std::{fs, io, path::Path, process::ExitCode};

use oubliette_server::testing::reference;

fn main() -> ExitCode {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let args: Vec<&str> = args.iter().map(String::as_str).collect();
    let written = match args.as_slice() {
        ["pages", dir] => write_pages(Path::new(dir)),
        ["man", dir] => clap_mangen::generate_to(reference::command_tree(), dir),
        _ => {
            eprintln!("usage: reference pages|man DIR");
            return ExitCode::from(2);
        }
    };
    match written {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("error: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Writes the pages that are not current.
fn write_pages(dir: &Path) -> io::Result<()> {
    for page in reference::pages() {
        let path = dir.join(&page.file);
        if fs::read_to_string(&path).is_ok_and(|present| present == page.text) {
            continue;
        }
        if let Some(folder) = path.parent() {
            fs::create_dir_all(folder)?;
        }
        fs::write(&path, &page.text)?;
        println!("wrote {}", path.display());
    }
    Ok(())
}
