//! `fs_write`: a file written whole, or added to. Nobody ever sees half of a replaced file.

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
    beneath::{self, DIRECTORY, Fault, Found, Links, Root, Spot},
    object_schema,
    path::{Allowed, Parts},
    room::Room,
    sweep::unfinished,
};

/// The most one call writes.
const MAX_BYTES: usize = 8 * 1024 * 1024;

/// What a call asks for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
    path: String,
    content: String,
    #[serde(default)]
    encoding: Encoding,
    #[serde(default)]
    mode: How,
}

#[derive(Debug, Clone, Copy, Default, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Encoding {
    #[default]
    Utf8,
    Base64,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum How {
    #[default]
    Replace,
    Append,
    Create,
}

pub(super) fn schema() -> Value {
    object_schema(
        json!({
            "path": { "type": "string", "description": "Relative to /workspace, or absolute beneath it." },
            "content": { "type": "string" },
            "encoding": { "enum": ["utf8", "base64"], "description": "How content is written; utf8 when absent." },
            "mode": {
                "enum": ["replace", "append", "create"],
                "description": "replace (when absent): the whole file, atomically; append: at its end; create: only if it does not exist.",
            },
        }),
        &["path", "content"],
    )
}

pub(super) fn run(workspace: &Path, allowed: &Allowed, room: &Room, asked: Asked) -> Result<CallResult> {
    let parts = Parts::read(&asked.path)?;
    if parts.as_slice().is_empty() {
        return Err(Error::invalid("path names the workspace itself, not a file"));
    }
    let bytes = match asked.encoding {
        Encoding::Utf8 => asked.content.into_bytes(),
        Encoding::Base64 => BASE64
            .decode(&asked.content)
            .map_err(|e| Error::invalid(format!("content is not base64: {e}")))?,
    };
    if bytes.len() > MAX_BYTES {
        return Err(Error::limit_exceeded(format!(
            "content has {} bytes; one call writes at most {MAX_BYTES}",
            bytes.len()
        )));
    }
    room.admit(workspace, bytes.len())?;
    let root = Root::open(workspace)?;
    let owner = fs::fstat(&root.dir).map_err(Error::internal)?;
    let make = |dir: &OwnedFd, parts: &[String]| make_directories(dir, parts, Links::Never, &owner);
    let created = root.within(allowed, &parts, make, |spot| {
        write(spot, &bytes, asked.mode, &owner)
    })?;
    let (path, length) = (parts.inside(), bytes.len());
    let verb = match (asked.mode, created) {
        (_, true) => "created",
        (How::Append, false) => "appended to",
        (How::Replace | How::Create, false) => "replaced",
    };
    Ok(CallResult {
        structured_content: Some(json!({ "path": path, "bytes": length, "created": created })),
        ..CallResult::text(format!("{verb} {path} ({length} bytes)"))
    })
}

/// Writes at a spot; says whether the file is new.
fn write(spot: Spot<'_>, bytes: &[u8], how: How, owner: &Stat) -> Result<bool, Fault> {
    let Some((name, parents)) = spot.rest.split_last() else {
        return Err(Errno::ISDIR.into());
    };
    let parent = make_directories(&spot.base, parents, spot.links, owner)?;
    let there = match fs::statat(&parent, name.as_str(), AtFlags::SYMLINK_NOFOLLOW) {
        Ok(stat) => Some(stat),
        Err(Errno::NOENT) => None,
        Err(errno) => return Err(errno.into()),
    };
    match (&there, how) {
        (Some(_), How::Create) => return Err(Errno::EXIST.into()),
        (Some(stat), _) => beneath::plain(stat)?,
        (None, _) => {}
    }
    match (there, how) {
        (Some(_), How::Append) => append(&parent, name, bytes).map(|()| false),
        (there, _) => {
            // Another may have made the file since: only `replace` may put its own in that place.
            let over = if how == How::Replace {
                RenameFlags::empty()
            } else {
                RenameFlags::NOREPLACE
            };
            put(&parent, name, bytes, there.as_ref(), over, owner).map(|()| there.is_none())
        }
    }
}

fn append(parent: &OwnedFd, name: &str, bytes: &[u8]) -> Result<(), Fault> {
    let parts = [name.to_owned()];
    let flags = OFlags::WRONLY | OFlags::APPEND | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::NOFOLLOW;
    let file = beneath::open(parent, &parts, flags, Mode::empty(), Links::Never)?;
    let found = Found::new(file, parent.try_clone()?, name);
    found.only_name()?;
    let mut file = File::from(found.file);
    let before = file.seek(SeekFrom::End(0))?;
    let written = file.write_all(bytes).and_then(|()| file.sync_data());
    written.map_err(|error| {
        // All or nothing: what was added before the disk was full goes again.
        let _ = file.set_len(before);
        error.into()
    })
}

/// Writes a file beside its place, then moves it there.
fn put(
    parent: &OwnedFd,
    name: &str,
    bytes: &[u8],
    replaced: Option<&Stat>,
    over: RenameFlags,
    owner: &Stat,
) -> Result<(), Fault> {
    let beside = unfinished();
    let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = fs::openat(parent, beside.as_str(), flags, Mode::from_raw_mode(0o644))?;
    let placed = fill(file, bytes, replaced, owner).and_then(|()| move_over(parent, &beside, name, over));
    if placed.is_err() {
        let _ = fs::unlinkat(parent, beside.as_str(), AtFlags::empty());
    }
    placed
}

fn fill(file: OwnedFd, bytes: &[u8], replaced: Option<&Stat>, owner: &Stat) -> Result<(), Fault> {
    belong_to(&file, owner);
    if let Some(stat) = replaced {
        // A script stays executable; nothing becomes set-uid.
        fs::fchmod(&file, Mode::from_raw_mode(stat.st_mode & 0o777))?;
    }
    let mut file = File::from(file);
    file.write_all(bytes)?;
    Ok(file.sync_all()?)
}

fn move_over(parent: &OwnedFd, from: &str, to: &str, over: RenameFlags) -> Result<(), Fault> {
    match fs::renameat_with(parent, from, parent, to, over) {
        // Not every file system can rename without replacing; linking never replaces.
        Err(Errno::INVAL | Errno::NOSYS) if over == RenameFlags::NOREPLACE => {
            fs::linkat(parent, from, parent, to, AtFlags::empty())?;
            Ok(fs::unlinkat(parent, from, AtFlags::empty())?)
        }
        result => Ok(result?),
    }
}

/// Opens a directory beneath another, making what is missing.
fn make_directories(base: &OwnedFd, parts: &[String], links: Links, owner: &Stat) -> Result<OwnedFd, Errno> {
    let whole = beneath::open(base, parts, DIRECTORY, Mode::empty(), links);
    if !matches!(whole, Err(Errno::NOENT)) {
        return whole;
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
                // A handle made with O_PATH cannot be chowned; one that can be read can.
                if let Ok(dir) = fs::openat(&made, ".", OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty()) {
                    belong_to(&dir, owner);
                }
                made
            }
            result => result?,
        };
    }
    Ok(dir)
}

/// What the server makes belongs to whoever owns the workspace: in the sandbox the agent is not the
/// server's user when the server is root.
fn belong_to(file: &OwnedFd, owner: &Stat) {
    let Ok(mine) = fs::fstat(file) else { return };
    if (mine.st_uid, mine.st_gid) != (owner.st_uid, owner.st_gid) {
        let (uid, gid) = (
            rustix::fs::Uid::from_raw(owner.st_uid),
            rustix::fs::Gid::from_raw(owner.st_gid),
        );
        let _ = fs::fchown(file, Some(uid), Some(gid));
    }
}
