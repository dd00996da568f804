//! The files of a home that are backed up. Agents write most of them while they are read, so nothing is trusted: each entry is
//! opened by name relative to its open parent, without following links.

use std::{ffi::CStr, fs::File, io, os::fd::OwnedFd};

use oubliette_home::{HomeDir, safe_fs::io_error};
use oubliette_protocol::Result;
use rustix::{
    fs::{AtFlags, FileType, Mode, OFlags, SeekFrom, Stat},
    io::Errno,
};

use super::{
    CancelFlag,
    home_path::{HomePath, PROJECT_FOLDERS, folder_place},
    manifest::HomeEntryKind,
};
use crate::open_folder::{OpenFolder, open_entry};

/// A file with more bytes of holes than this is left out: a program can make one of any size, and it would be read for ever.
const MAX_HOLE_BYTES: u64 = 1 << 30;
/// Maximum names of left-out entries that are kept.
const MAX_NAMED: usize = 10;

/// An entry that is backed up.
pub(crate) struct WalkedEntry {
    pub(crate) path: HomePath,
    pub(crate) kind: HomeEntryKind,
    /// Permissions, without set-id bits.
    pub(crate) mode: u32,
    /// When its content last changed, in seconds since 1970.
    pub(crate) modified: u64,
    /// Of a file: the open file and its size.
    pub(crate) file: Option<(File, u64)>,
}

/// What cannot be backed up: sockets, pipes, devices, files that may not be read, and files of holes.
#[derive(Debug, Default)]
pub(crate) struct SkippedEntries {
    pub(crate) count: u64,
    /// The first of them, each with the reason.
    pub(crate) examples: Vec<String>,
}

impl SkippedEntries {
    fn add(&mut self, path: &[u8], why: &str) {
        self.count += 1;
        if self.examples.len() < MAX_NAMED {
            let path = String::from_utf8_lossy(path);
            self.examples.push(format!("{path}: {why}"));
        }
    }
}

/// Passes every entry of these folders to `each`, folders before what is in them. Returns what was left out.
pub(crate) fn walk_home(
    home: &HomeDir,
    folders: &[&str],
    cancel: &CancelFlag,
    each: &mut dyn FnMut(WalkedEntry) -> Result<()>,
) -> Result<SkippedEntries> {
    let mut left_out = SkippedEntries::default();
    for name in folders {
        let path = folder_place(home, name);
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = match rustix::fs::open(&path, flags, Mode::empty()) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => continue,
            Err(error) => return Err(io_error("read", &path, error.into())),
        };
        let mut open = vec![OpenFolder::new(folder, name.as_bytes().to_vec())];
        while let Some(folder) = open.last_mut() {
            cancel.check()?;
            let Some(name) = folder.next_name().map_err(|e| io_error("list", &path, e))? else {
                open.pop();
                continue;
            };
            if is_skipped(&folder.path, &name) {
                continue;
            }
            let path = [&folder.path, &b"/"[..], name.to_bytes()].concat();
            match look_at(&folder.folder, &name, path, each, &mut left_out)? {
                None => {}
                Some(folder) => open.push(folder),
            }
        }
    }
    Ok(left_out)
}

/// Whether an entry is not part of a backup: caches and uploads of projects, unfinished files of the server.
fn is_skipped(folder: &[u8], name: &CStr) -> bool {
    let mut parts = folder.split(|b| *b == b'/');
    match (parts.next(), parts.next(), parts.next()) {
        (Some(b"projects"), Some(_), None) => !PROJECT_FOLDERS
            .iter()
            .any(|known| known.as_bytes() == name.to_bytes()),
        (_, None, _) => name.to_bytes().starts_with(b"."),
        _ => false,
    }
}

/// Passes an entry on. Returns it if it is a folder to go into.
fn look_at(
    folder: &OwnedFd,
    name: &CStr,
    path: Vec<u8>,
    each: &mut dyn FnMut(WalkedEntry) -> Result<()>,
    left_out: &mut SkippedEntries,
) -> Result<Option<OpenFolder<Vec<u8>>>> {
    // Removed since it was listed.
    let Ok(stat) = rustix::fs::statat(folder, name, AtFlags::SYMLINK_NOFOLLOW) else {
        return Ok(None);
    };
    let opened = |flags: OFlags| open_entry(folder, name, flags);
    let (kind, opened) = match FileType::from_raw_mode(stat.st_mode) {
        FileType::Directory => (HomeEntryKind::Folder, opened(OFlags::DIRECTORY).map(Some)),
        // NONBLOCK: it may have become a pipe since it was looked at.
        FileType::RegularFile => (HomeEntryKind::File, opened(OFlags::NONBLOCK).map(Some)),
        FileType::Symlink => match rustix::fs::readlinkat(folder, name, Vec::new()) {
            Ok(target) => (HomeEntryKind::Link(target.into_bytes()), Ok(None)),
            Err(_) => return Ok(None),
        },
        _ => {
            left_out.add(&path, "not a file, folder or link");
            return Ok(None);
        }
    };
    let opened = match opened {
        Ok(opened) => opened,
        Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => return Ok(None),
        Err(error) => {
            left_out.add(&path, &io::Error::from(error).to_string());
            return Ok(None);
        }
    };
    let home_path = match HomePath::parse(&path, &kind) {
        Ok(home_path) => home_path,
        Err(_) => {
            left_out.add(&path, "not a path that a backup holds");
            return Ok(None);
        }
    };
    let mut entry = WalkedEntry {
        path: home_path,
        mode: stat.st_mode & 0o777,
        modified: u64::try_from(stat.st_mtime).unwrap_or(0),
        file: None,
        kind,
    };
    let Some(opened) = opened else {
        each(entry)?;
        return Ok(None);
    };
    if entry.kind == HomeEntryKind::Folder {
        each(entry)?;
        return Ok(Some(OpenFolder::new(opened, path)));
    }
    let Ok(stat) = rustix::fs::fstat(&opened) else {
        return Ok(None);
    };
    // Replaced since it was looked at.
    if FileType::from_raw_mode(stat.st_mode) != FileType::RegularFile {
        return Ok(None);
    }
    let size = u64::try_from(stat.st_size).unwrap_or(0);
    if has_large_holes(&opened, &stat, size) {
        left_out.add(&path, "mostly holes");
        return Ok(None);
    }
    entry.file = Some((File::from(opened), size));
    each(entry)?;
    Ok(None)
}

/// Whether a file is much larger than what is stored of it. Blocks alone do not tell: file systems compress.
fn has_large_holes(file: &OwnedFd, stat: &Stat, size: u64) -> bool {
    let stored = u64::try_from(stat.st_blocks).unwrap_or(0).saturating_mul(512);
    if size <= stored.saturating_add(MAX_HOLE_BYTES) {
        return false;
    }
    let (mut at, mut holes) = (0, 0_u64);
    while at < size && holes <= MAX_HOLE_BYTES {
        let data = match rustix::fs::seek(file, SeekFrom::Data(at)) {
            Ok(data) => data,
            // No data any more.
            Err(Errno::NXIO) => size,
            Err(_) => return false,
        };
        holes += data.saturating_sub(at);
        at = match rustix::fs::seek(file, SeekFrom::Hole(data)) {
            Ok(hole) if hole > data => hole,
            _ => size,
        };
    }
    let _ = rustix::fs::seek(file, SeekFrom::Start(0));
    holes > MAX_HOLE_BYTES
}
