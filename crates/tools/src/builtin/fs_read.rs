//! `fs_read`: a range of a file, as text when it is text, else as base64.

use std::{fs::File, os::unix::fs::FileExt, path::Path};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use oubliette_protocol::{Result, tool::CallResult};
use rustix::fs::OFlags;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    beneath::{self, WorkspaceRoot},
    object_schema,
    path::{AllowedPaths, PathInWorkspace},
};

/// How many bytes one call reads by default.
const DEFAULT_LIMIT: u64 = 256 * 1024;
/// How many bytes one call reads at most.
const MAX_LIMIT: u64 = 1024 * 1024;

/// The arguments of a call.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct FsReadArguments {
    path: String,
    #[serde(default)]
    offset: Option<u64>,
    #[serde(default)]
    limit: Option<u64>,
}

pub(super) fn schema() -> Value {
    object_schema(
        json!({
            "path": { "type": "string", "description": "Relative to /workspace, or absolute beneath it." },
            "offset": { "type": "integer", "minimum": 0, "description": "First byte to read; 0 when absent." },
            "limit": {
                "type": "integer", "minimum": 0, "maximum": MAX_LIMIT,
                "description": format!("How many bytes to read at most; {DEFAULT_LIMIT} when absent, never more than {MAX_LIMIT}."),
            },
        }),
        &["path"],
    )
}

pub(super) fn run(
    workspace: &Path,
    allowed: &AllowedPaths,
    arguments: FsReadArguments,
) -> Result<CallResult> {
    let parts = PathInWorkspace::parse(&arguments.path)?;
    let offset = arguments.offset.unwrap_or(0);
    let limit = arguments.limit.unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT);
    let root = WorkspaceRoot::open(workspace)?;
    let (bytes, size) = root.try_allowed_paths(allowed, &parts, beneath::open_directory, |location| {
        // Without O_NONBLOCK opening a FIFO would block until there is a writer.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let found = location.open(flags)?;
        let stat = found.require_single_name()?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        Ok((read_range(&found.file.into(), offset, limit, size)?, size))
    })?;
    Ok(build_result(&parts, bytes, offset, size))
}

fn read_range(file: &File, offset: u64, limit: u64, size: u64) -> std::io::Result<Vec<u8>> {
    let wanted = limit.min(size.saturating_sub(offset));
    let mut bytes = vec![0; usize::try_from(wanted).unwrap_or(usize::MAX)];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            // The file was truncated while it was read.
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn build_result(parts: &PathInWorkspace, mut bytes: Vec<u8>, offset: u64, size: u64) -> CallResult {
    if offset + (bytes.len() as u64) < size {
        cut_to_whole_characters(&mut bytes);
    }
    let length = bytes.len() as u64;
    let end = offset.saturating_add(length);
    let (encoding, content) = match String::from_utf8(bytes) {
        Ok(text) => ("utf8", text),
        Err(binary) => ("base64", BASE64.encode(binary.as_bytes())),
    };
    let more = end < size;
    let mut result = CallResult::text(content.clone());
    if more {
        let note = format!("[bytes {offset} to {end} of {size}; read on with offset {end}]");
        result.content.push(json!({ "type": "text", "text": note }));
    }
    result.structured_content = Some(json!({
        "path": parts.sandbox_path(), "size": size, "offset": offset, "length": length,
        "encoding": encoding, "content": content, "truncated": more,
        "next_offset": more.then_some(end),
    }));
    result
}

/// A range that ends inside a character of text ends before it: the next range starts with it.
fn cut_to_whole_characters(bytes: &mut Vec<u8>) {
    if let Err(error) = std::str::from_utf8(bytes)
        && error.error_len().is_none()
        && error.valid_up_to() > 0
    {
        bytes.truncate(error.valid_up_to());
    }
}
