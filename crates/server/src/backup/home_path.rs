//! Which paths of a home a backup may hold.

use std::{
    ffi::OsStr,
    os::unix::ffi::OsStrExt as _,
    path::{Path, PathBuf},
};

use oubliette_home::HomeDir;
use oubliette_protocol::{Error, Result, id::quoted};

use super::{CONFIG_NAME, manifest::HomeEntryKind};

/// Folders of the home that are backed up.
pub(crate) const FOLDERS: [&str; 4] = ["agents", "tools", "projects", "sessions"];
/// The one of them that has the projects and their workspaces.
pub(crate) const PROJECTS_FOLDER: &str = "projects";
/// Those of them that hold definitions, unless they are in the database.
pub(crate) const DEFINITION_FOLDERS: [&str; 2] = ["agents", "tools"];
/// Where a folder of the home is: projects may be elsewhere, in `[workspaces] dir`.
pub(crate) fn folder_place(home: &HomeDir, name: &str) -> PathBuf {
    match name {
        PROJECTS_FOLDER => home.projects_dir(),
        _ => home.root().join(name),
    }
}

/// Folders of a project that are backed up: not caches and unfinished uploads.
pub(crate) const PROJECT_FOLDERS: [&str; 2] = ["workspaces", "git"];
/// Maximum length of a path, in bytes.
const MAX_PATH_BYTES: usize = 8192;
/// Maximum number of folders of a path.
const MAX_PARTS: usize = 256;

/// A path relative to the home, of ordinary names, in one of the folders that are backed up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HomePath {
    bytes: Vec<u8>,
    parts: usize,
}

impl HomePath {
    /// Checks the path of an entry that is of this kind.
    pub(crate) fn parse(bytes: &[u8], kind: &HomeEntryKind) -> Result<Self> {
        let bad = |why: &str| Error::invalid(format!("{} {why}", quoted(&String::from_utf8_lossy(bytes))));
        let bytes = bytes.strip_suffix(b"/").unwrap_or(bytes);
        let parts: Vec<&[u8]> = bytes.split(|b| *b == b'/').collect();
        let is_ordinary = |part: &&[u8]| {
            !part.is_empty() && part.len() <= 255 && *part != b"." && *part != b".." && !part.contains(&0)
        };
        if bytes.len() > MAX_PATH_BYTES || parts.len() > MAX_PARTS || !parts.iter().all(is_ordinary) {
            return Err(bad("is not a path that a backup may hold"));
        }
        let path = Self {
            bytes: bytes.to_vec(),
            parts: parts.len(),
        };
        if bytes == CONFIG_NAME.as_bytes() {
            return match kind {
                HomeEntryKind::File => Ok(path),
                HomeEntryKind::Folder | HomeEntryKind::Link(_) => Err(bad("is not a file")),
            };
        }
        // What the server itself opens by name is a real folder: a link in its place would lead anywhere.
        let (is_known, first_free) = match parts.as_slice() {
            [b"agents" | b"tools", _, ..] => (true, 3),
            // Beneath `homes` are the directories that become an agent's home.
            [b"sessions", _, ..] => (true, 5),
            [b"projects", _] => (true, 5),
            [b"projects", _, folder, ..] => {
                (PROJECT_FOLDERS.iter().any(|known| known.as_bytes() == *folder), 5)
            }
            _ => (false, 0),
        };
        let is_plain = |id: &&[u8]| {
            id[0] != b'.'
                && id
                    .iter()
                    .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.'))
        };
        if !is_known || !parts.get(1).is_some_and(is_plain) {
            return Err(bad("is not a part of a home that a backup holds"));
        }
        if *kind != HomeEntryKind::Folder && parts.len() < first_free {
            return Err(bad("is in the place of a folder"));
        }
        Ok(path)
    }

    /// The first part: a folder of the home, or the configuration.
    pub(crate) fn group(&self) -> &str {
        let end = self.bytes.iter().position(|b| *b == b'/');
        std::str::from_utf8(&self.bytes[..end.unwrap_or(self.bytes.len())]).unwrap_or_default()
    }

    pub(crate) fn as_bytes(&self) -> &[u8] {
        &self.bytes
    }

    pub(crate) fn as_path(&self) -> &Path {
        Path::new(OsStr::from_bytes(&self.bytes))
    }

    /// Whether it is directly in the home.
    pub(crate) fn is_at_top(&self) -> bool {
        self.parts == 1
    }
}

impl std::fmt::Display for HomePath {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&quoted(&String::from_utf8_lossy(&self.bytes)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_ordinary_paths_of_what_is_backed_up_are_taken() {
        let link = || HomeEntryKind::Link(b"/etc".to_vec());
        for (good, kind) in [
            ("oubliette.toml", HomeEntryKind::File),
            ("agents/writer/agent.json", HomeEntryKind::File),
            ("agents/writer/", HomeEntryKind::Folder),
            ("projects/p", HomeEntryKind::Folder),
            ("projects/p/workspaces/w", HomeEntryKind::Folder),
            ("projects/p/workspaces/w/a", link()),
            ("projects/p/git/w.git/HEAD", HomeEntryKind::File),
            ("sessions/s/homes", HomeEntryKind::Folder),
            ("sessions/s/homes/writer", HomeEntryKind::Folder),
            ("sessions/s/homes/writer/a", link()),
        ] {
            assert!(HomePath::parse(good.as_bytes(), &kind).is_ok(), "{good}");
        }
        for (bad, kind) in [
            ("", HomeEntryKind::Folder),
            ("/etc/passwd", HomeEntryKind::File),
            ("agents", link()),
            ("agents/writer", link()),
            ("agents/.x/y", HomeEntryKind::File),
            ("agents/../x", HomeEntryKind::File),
            ("agents/a/../../../x", HomeEntryKind::File),
            ("agents//x", HomeEntryKind::File),
            ("agents/a/\0", HomeEntryKind::File),
            ("projects/p/workspaces", link()),
            ("projects/p/workspaces/w", link()),
            ("projects/p/uploads/x/y", HomeEntryKind::File),
            ("sessions/s/homes", link()),
            ("sessions/s/homes/writer", link()),
            ("sessions/s/homes/writer", HomeEntryKind::File),
            ("oubliette.toml", link()),
            ("oubliette.toml/x", HomeEntryKind::File),
            ("oubliette.db", HomeEntryKind::File),
            ("admin.token", HomeEntryKind::File),
            ("run/control.secret", HomeEntryKind::File),
        ] {
            assert!(HomePath::parse(bad.as_bytes(), &kind).is_err(), "{bad}");
        }
        let long = format!("agents/a/{}", "x".repeat(256));
        assert!(HomePath::parse(long.as_bytes(), &HomeEntryKind::File).is_err());
        let deep = format!("agents/a/{}x", "d/".repeat(300));
        assert!(HomePath::parse(deep.as_bytes(), &HomeEntryKind::File).is_err());
    }
}
