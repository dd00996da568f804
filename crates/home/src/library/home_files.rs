//! `agents/<slug>/home/`: the files with which the home directory of an agent begins in each session.

use std::{
    fs,
    io::Read as _,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, Result};
use rustix::fs::{Mode, OFlags};

use super::{AgentEntry, DefinitionLibrary};
use crate::safe_fs;

/// The folder beside `agent.json`.
pub(super) const HOME_FOLDER: &str = "home";
/// The most files of one agent's home.
const MAX_FILES: usize = 1_000;
/// The most bytes of one agent's home.
const MAX_BYTES: u64 = 16 * 1024 * 1024;
/// The deepest folder of one agent's home.
const MAX_DEPTH: usize = 16;

/// One file that an agent's home begins with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HomeFile {
    /// Path in the home, of ordinary names only.
    pub path: PathBuf,
    /// Permissions of its owner; the bits for others are not kept.
    pub mode: u32,
    /// Its content.
    pub content: Vec<u8>,
}

impl DefinitionLibrary {
    /// Reads the files of an agent's `home/`; none if there is no such folder. Symbolic links are refused: what they lead to
    /// would be given to the agent.
    pub fn home_files(&self, entry: &AgentEntry) -> Result<Vec<HomeFile>> {
        let root = entry.dir.join(HOME_FOLDER);
        let mut files = Vec::new();
        let mut bytes = 0;
        let mut folders = vec![(PathBuf::new(), 0)];
        while let Some((folder, depth)) = folders.pop() {
            let path = root.join(&folder);
            match fs::symlink_metadata(&path) {
                Ok(seen) if seen.is_dir() => {}
                Ok(_) => return Err(refused(entry, &folder, "is not a folder")),
                Err(_) if depth == 0 => return Ok(files),
                Err(e) => return Err(safe_fs::io_error("look at", &path, e)),
            }
            let listing = fs::read_dir(&path).map_err(|e| safe_fs::io_error("list", &path, e))?;
            for item in listing {
                let item = item.map_err(|e| safe_fs::io_error("list", &path, e))?;
                let name = folder.join(item.file_name());
                let kind = item
                    .file_type()
                    .map_err(|e| safe_fs::io_error("look at", &item.path(), e))?;
                if kind.is_dir() && depth < MAX_DEPTH {
                    folders.push((name, depth + 1));
                } else if kind.is_file() && files.len() < MAX_FILES {
                    let file = read_file(&root, name, MAX_BYTES - bytes, entry)?;
                    bytes += file.content.len() as u64;
                    files.push(file);
                } else if kind.is_dir() || kind.is_file() {
                    let why = format!("is one too many: at most {MAX_FILES} files, {MAX_DEPTH} folders deep");
                    return Err(refused(entry, &name, &why));
                } else {
                    return Err(refused(entry, &name, "is not a plain file or folder"));
                }
            }
        }
        files.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(files)
    }
}

fn read_file(root: &Path, name: PathBuf, most: u64, entry: &AgentEntry) -> Result<HomeFile> {
    let path = root.join(&name);
    let failed = |e: std::io::Error| safe_fs::io_error("read", &path, e);
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let file = rustix::fs::open(&path, flags, Mode::empty()).map_err(|e| failed(e.into()))?;
    let file = fs::File::from(file);
    let mode = file.metadata().map_err(failed)?.permissions().mode();
    let mut content = Vec::new();
    file.take(most + 1).read_to_end(&mut content).map_err(failed)?;
    if content.len() as u64 > most {
        let why = format!("is too large: home/ may hold {} MiB", MAX_BYTES / 1024 / 1024);
        return Err(refused(entry, &name, &why));
    }
    Ok(HomeFile {
        path: name,
        mode: mode & 0o700,
        content,
    })
}

fn refused(entry: &AgentEntry, name: &Path, why: &str) -> Error {
    Error::invalid(format!(
        "agents/{}/{HOME_FOLDER}/{} {why}",
        entry.slug,
        name.display()
    ))
}

/// Checks the name of a file that is written beside `agent.json`: `home/` and a path of ordinary names.
pub(super) fn check_home_path(name: &str) -> Result<(), &'static str> {
    let path = name.strip_prefix("home/").unwrap_or_default();
    let is_ordinary = |part: &str| {
        let bytes = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.');
        !part.is_empty() && part.len() <= 100 && part != "." && part != ".." && part.bytes().all(bytes)
    };
    match path.split('/').count() <= MAX_DEPTH && path.split('/').all(is_ordinary) {
        true => Ok(()),
        false => Err("must be home/ and a path of letters, digits, _, - and ."),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_in_home_cannot_lead_out_of_it() {
        for good in ["home/.factory/settings.json", "home/a", "home/a/b-c_d.e"] {
            assert!(check_home_path(good).is_ok(), "{good}");
        }
        for bad in [
            "home",
            "home/",
            "home//a",
            "home/../a",
            "home/a/..",
            "a",
            "/home/a",
            "home/a b",
            "home/a\0",
        ] {
            assert!(check_home_path(bad).is_err(), "{bad}");
        }
    }
}
