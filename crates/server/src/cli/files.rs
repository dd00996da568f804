//! Reads files and stdin that are arguments of commands.

use std::{io::Read as _, path::Path};

use oubliette_protocol::{Error, Result, agent::MAX_DEFINITION_BYTES};
use serde_json::Value;

/// Reads a file, or stdin for `-`, of at most [`MAX_DEFINITION_BYTES`].
pub(crate) fn read_text(path: &Path) -> Result<String> {
    let mut text = String::new();
    let most = MAX_DEFINITION_BYTES as u64;
    let read = match path.as_os_str() == "-" {
        true => std::io::stdin().lock().take(most + 1).read_to_string(&mut text),
        false => std::fs::File::open(path).and_then(|file| file.take(most + 1).read_to_string(&mut text)),
    };
    read.map_err(|e| Error::invalid(format!("{}: {e}", display_name(path))))?;
    match text.len() > MAX_DEFINITION_BYTES {
        true => Err(Error::invalid(format!(
            "{} is larger than {MAX_DEFINITION_BYTES} bytes",
            display_name(path)
        ))),
        false => Ok(text),
    }
}

/// Reads a file, or stdin for `-`, that must hold a JSON object.
pub(crate) fn read_json_object(path: &Path) -> Result<Value> {
    let value: Value = serde_json::from_str(&read_text(path)?)
        .map_err(|e| Error::invalid(format!("{} is not JSON: {e}", display_name(path))))?;
    match value.is_object() {
        true => Ok(value),
        false => Err(Error::invalid(format!(
            "{} must hold a JSON object",
            display_name(path)
        ))),
    }
}

/// The arguments of a tool call, from the command line, or from stdin for `-`.
pub(crate) fn read_arguments(given: &str) -> Result<Value> {
    match given {
        "-" => read_json_object("-".as_ref()),
        text => serde_json::from_str(text).map_err(|e| {
            Error::invalid(format!(
                "the arguments are not JSON: {e}; quote them as '{{\"name\": \"value\"}}'"
            ))
        }),
    }
}

/// The path for error texts; `stdin` for `-`.
fn display_name(path: &Path) -> String {
    match path.as_os_str() == "-" {
        true => "stdin".into(),
        false => path.display().to_string(),
    }
}

/// The name to use for a definition when none was given: its folder's name if the file is called `usual`, as in
/// `<name>/agent.json`, else the file's name without its extension.
pub(crate) fn suggested_name(path: &Path, usual: &str) -> Option<String> {
    let file = path.file_name()?.to_str()?;
    match file == usual {
        true => std::path::absolute(path)
            .ok()?
            .parent()?
            .file_name()?
            .to_str()
            .map(str::to_owned),
        false => Path::new(file).file_stem()?.to_str().map(str::to_owned),
    }
}
