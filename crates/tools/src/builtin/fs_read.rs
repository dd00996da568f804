//! `fs_read`: a range of a file, as text when it is text, else as base64.

use std::{fs::File, os::unix::fs::FileExt, path::Path};

use base64::{Engine, engine::general_purpose::STANDARD as BASE64};
use oubliette_protocol::{Result, tool::CallResult};
use rustix::fs::OFlags;
use serde::Deserialize;
use serde_json::{Value, json};

use super::{
    beneath::{self, Root},
    object_schema,
    path::{Allowed, Parts},
};

/// What one call reads when it does not say.
const DEFAULT_LIMIT: u64 = 256 * 1024;
/// The most one call reads.
const MAX_LIMIT: u64 = 1024 * 1024;

/// What a call asks for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Asked {
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
                "description": format!("Most bytes to read; {DEFAULT_LIMIT} when absent."),
            },
        }),
        &["path"],
    )
}

pub(super) fn run(workspace: &Path, allowed: &Allowed, asked: Asked) -> Result<CallResult> {
    let parts = Parts::read(&asked.path)?;
    let offset = asked.offset.unwrap_or(0);
    let limit = asked.limit.unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT);
    let root = Root::open(workspace)?;
    let (bytes, size) = root.within(allowed, &parts, beneath::existing, |spot| {
        // Without O_NONBLOCK opening a FIFO would wait for its writer for ever.
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY;
        let found = spot.open(flags)?;
        let stat = found.only_name()?;
        let size = u64::try_from(stat.st_size).unwrap_or(0);
        Ok((read_range(&found.file.into(), offset, limit, size)?, size))
    })?;
    Ok(show(&parts, bytes, offset, size))
}

fn read_range(file: &File, offset: u64, limit: u64, size: u64) -> std::io::Result<Vec<u8>> {
    let wanted = limit.min(size.saturating_sub(offset));
    let mut bytes = vec![0; usize::try_from(wanted).unwrap_or(usize::MAX)];
    let mut filled = 0;
    while filled < bytes.len() {
        match file.read_at(&mut bytes[filled..], offset + filled as u64) {
            // It shrank while it was read.
            Ok(0) => break,
            Ok(n) => filled += n,
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    bytes.truncate(filled);
    Ok(bytes)
}

fn show(parts: &Parts, mut bytes: Vec<u8>, offset: u64, size: u64) -> CallResult {
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
        "path": parts.inside(), "size": size, "offset": offset, "length": length,
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
