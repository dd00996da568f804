//! `fs_write`: replaces, creates or appends to a file. Replacing is atomic: readers never see half a file.

use std::{
    fs::File,
    io::{Seek, SeekFrom, Write},
    os::fd::OwnedFd,
    path::Path,
};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use oubliette_protocol::{Error, Result, tool::CallResult};
use rustix::{
    fs::{self, AtFlags, Mode, OFlags, RenameFlags, Stat},
    io::Errno,
};
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    beneath::{self, DIRECTORY, FileError, FileLocation, OpenedFile, SymlinkPolicy, WorkspaceRoot},
    object_schema,
    path::{AllowedPaths, PathInWorkspace},
    quota::WorkspaceQuota,
    unfinished::unfinished_name,
};

/// How many bytes one call writes at most.
const MAX_BYTES: usize = 8 * 1024 * 1024;

/// The arguments of a call.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FsWriteArguments {
    path: String,
    content: String,
    #[serde(default)]
    encoding: ContentEncoding,
    #[serde(default)]
    mode: WriteMode,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum ContentEncoding {
    #[default]
    Utf8,
    Base64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum WriteMode {
    #[default]
    Replace,
    Append,
    Create,
}

pub(super) fn schema() -> Value {
    object_schema(
        json!({
            "path": { "type": "string", "description": "Relative to /workspace, or absolute beneath it." },
            "content": {
                "type": "string",
                "description": format!("What to write, encoded as encoding says; at most {MAX_BYTES} bytes when decoded."),
            },
            "encoding": { "enum": ["utf8", "base64"], "description": "utf8 (when absent): content is the text itself; base64: content is base64 of the bytes." },
            "mode": {
                "enum": ["replace", "append", "create"],
                "description": "replace (when absent): the whole file, atomically; append: at its end; create: only if it does not exist.",
            },
        }),
        &["path", "content"],
    )
}

pub(super) fn run(
    workspace: &Path,
    allowed: &AllowedPaths,
    quota: &WorkspaceQuota,
    arguments: FsWriteArguments,
) -> Result<CallResult> {
    let parts = PathInWorkspace::parse(&arguments.path)?;
    if parts.as_slice().is_empty() {
        return Err(Error::invalid("path names the workspace itself, not a file"));
    }
    let bytes = match arguments.encoding {
        ContentEncoding::Utf8 => arguments.content.into_bytes(),
        ContentEncoding::Base64 => BASE64
            .decode(&arguments.content)
            .map_err(|e| Error::invalid(format!("content is not base64: {e}")))?,
    };
    if bytes.len() > MAX_BYTES {
        return Err(Error::limit_exceeded(format!(
            "content has {} bytes; one call writes at most {MAX_BYTES}",
            bytes.len()
        )));
    }
    let _admitted = quota.admit(workspace, bytes.len())?;
    let root = WorkspaceRoot::open(workspace)?;
    let owner = fs::fstat(&root.dir).map_err(Error::internal)?;
    let make = |dir: &OwnedFd, parts: &[String]| make_directories(dir, parts, SymlinkPolicy::Never, &owner);
    let created = root.try_allowed_paths(allowed, &parts, make, |location| {
        write(location, &bytes, arguments.mode, &owner)
    })?;
    let (path, length) = (parts.sandbox_path(), bytes.len());
    let verb = match (arguments.mode, created) {
        (_, true) => "created",
        (WriteMode::Append, false) => "appended to",
        (WriteMode::Replace | WriteMode::Create, false) => "replaced",
    };
    Ok(CallResult {
        structured_content: Some(json!({ "path": path, "bytes": length, "created": created })),
        ..CallResult::text(format!("{verb} {path} ({length} bytes)"))
    })
}

/// Writes a file at a location; returns whether it is new.
fn write(location: FileLocation<'_>, bytes: &[u8], mode: WriteMode, owner: &Stat) -> Result<bool, FileError> {
    let Some((name, parents)) = location.rest.split_last() else {
        return Err(Errno::ISDIR.into());
    };
    let parent = make_directories(&location.base, parents, location.links, owner)?;
    let existing = match fs::statat(&parent, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Some(stat),
        Err(Errno::NOENT) => None,
        Err(errno) => return Err(errno.into()),
    };
    match (&existing, mode) {
        (Some(_), WriteMode::Create) => return Err(Errno::EXIST.into()),
        (Some(stat), _) => beneath::require_regular_file(stat)?,
        (None, _) => {}
    }
    match (existing, mode) {
        (Some(_), WriteMode::Append) => append(&parent, name, bytes).map(|()| false),
        (existing, _) => {
            // The file may have been created by another process since: only `replace` may replace it.
            let rename_flags = if mode == WriteMode::Replace {
                RenameFlags::empty()
            } else {
                RenameFlags::NOREPLACE
            };
            write_and_rename(&parent, name, bytes, existing.as_ref(), rename_flags, owner)
                .map(|()| existing.is_none())
        }
    }
}

fn append(parent: &OwnedFd, name: &str, bytes: &[u8]) -> Result<(), FileError> {
    let parts = [name.to_owned()];
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
    let file = beneath::open(parent, &parts, flags, Mode::empty(), SymlinkPolicy::Never)?;
    let found = OpenedFile::new(file, parent.try_clone()?, name);
    found.require_single_name()?;
    let mut file = File::from(found.file);
    let before = file.seek(SeekFrom::End(0))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_data());
    written.map_err(|error| {
        // All or nothing: a partial append, such as on a full disk, is truncated again.
        let _ = file.set_len(before);
        error.into()
    })
}

/// Writes a temporary file in the same directory, then renames it into place.
fn write_and_rename(
    parent: &OwnedFd,
    name: &str,
    bytes: &[u8],
    replaced: Option<&Stat>,
    rename_flags: RenameFlags,
    owner: &Stat,
) -> Result<(), FileError> {
    let temporary = unfinished_name();
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::openat(parent, temporary.as_str(), flags, Mode::from_raw_mode(0o644))?;
    let placed = write_contents(file, bytes, replaced, owner)
        .and_then(|()| rename_into_place(parent, &temporary, name, rename_flags));
    if placed.is_err() {
        let _ = fs::unlinkat(parent, temporary.as_str(), AtFlags::empty());
    }
    placed
}

fn write_contents(
    file: OwnedFd,
    bytes: &[u8],
    replaced: Option<&Stat>,
    owner: &Stat,
) -> Result<(), FileError> {
    chown_to(&file, owner);
    if let Some(stat) = replaced {
        // A replaced script stays executable; set-uid and set-gid bits are dropped.
        fs::fchmod(&file, Mode::from_raw_mode(stat.st_mode & 0o777))?;
    }
    let mut file = File::from(file);
    file.write_all(bytes)?;
    Ok(file.sync_all()?)
}

fn rename_into_place(
    parent: &OwnedFd,
    from: &str,
    to: &str,
    rename_flags: RenameFlags,
) -> Result<(), FileError> {
    match fs::renameat_with(parent, from, parent, to, rename_flags) {
        // Not every file system supports RENAME_NOREPLACE; link(2) never replaces either.
        Err(Errno::INVAL | Errno::NOSYS) if rename_flags == RenameFlags::NOREPLACE => {
            fs::linkat(parent, from, parent, to, AtFlags::empty())?;
            Ok(fs::unlinkat(parent, from, AtFlags::empty())?)
        }
        result => Ok(result?),
    }
}

/// Opens a directory beneath another, creating what is missing.
fn make_directories(
    base: &OwnedFd,
    parts: &[String],
    links: SymlinkPolicy,
    owner: &Stat,
) -> Result<OwnedFd, Errno> {
    let existing = beneath::open(base, parts, DIRECTORY, Mode::empty(), links);
    if !matches!(existing, Err(Errno::NOENT)) {
        return existing;
    }
    let mut dir = base
        .try_clone()
        .map_err(|e| Errno::from_io_error(&e).unwrap_or(Errno::IO))?;
    for (depth, part) in parts.iter().enumerate() {
        let path = &parts[..=depth];
        dir = match beneath::open(base, path, DIRECTORY, Mode::empty(), links) {
            Err(Errno::NOENT) => {
                match fs::mkdirat(&dir, part.as_str(), Mode::from_raw_mode(0o755)) {
                    Ok(()) | Err(Errno::EXIST) => {}
                    Err(errno) => return Err(errno),
                }
                let made = beneath::open(base, path, DIRECTORY, Mode::empty(), links)?;
                // fchown fails on an O_PATH handle, so the directory is opened again for reading.
                if let Ok(dir) = fs::openat(&made, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
                    chown_to(&dir, owner);
                }
                made
            }
            result => result?,
        };
    }
    Ok(dir)
}

/// Gives a new file the workspace's owner: when the server runs as root, the agent in the sandbox is another
/// user and could not change the file otherwise.
fn chown_to(file: &OwnedFd, owner: &Stat) {
    let Ok(mine) = fs::fstat(file) else { return };
    if (mine.st_uid, mine.st_gid) != (owner.st_uid, owner.st_gid) {
        let (uid, gid) = (
            rustix::fs::Uid::from_raw(owner.st_uid),
            rustix::fs::Gid::from_raw(owner.st_gid),
        );
        let _ = fs::fchown(file, Some(uid), Some(gid));
    }
}
