//! Reads files of a tree that a package made: no link is followed, and no more is read than asked for.

use std::{
    fs::File,
    io::{self, Read as _},
    path::Path,
};

use oubliette_os::{SymlinkPolicy, open_beneath};
use rustix::fs::{Mode, OFlags};

/// How much of a file tells how it is run, in bytes.
const START_BYTES: u64 = 512;

fn open(tree: &Path, file: &Path) -> io::Result<File> {
    let root = File::open(tree)?;
    let flags = OFlags::RDONLY | OFlags::NONBLOCK;
    let opened = File::from(open_beneath(
        &root,
        file,
        flags,
        Mode::empty(),
        SymlinkPolicy::Never,
    )?);
    match opened.metadata()?.is_file() {
        true => Ok(opened),
        false => Err(io::Error::other("not a regular file")),
    }
}

/// The text of a file of at most `most` bytes.
pub(crate) fn read_text(tree: &Path, file: &Path, most: u64) -> io::Result<String> {
    let opened = open(tree, file)?;
    if opened.metadata()?.len() > most {
        return Err(io::Error::other(format!("larger than {most} bytes")));
    }
    let mut text = String::new();
    opened.take(most).read_to_string(&mut text)?;
    Ok(text)
}

/// The beginning of a file.
pub(crate) fn read_start(tree: &Path, file: &Path) -> io::Result<Vec<u8>> {
    let mut start = Vec::new();
    open(tree, file)?.take(START_BYTES).read_to_end(&mut start)?;
    Ok(start)
}
