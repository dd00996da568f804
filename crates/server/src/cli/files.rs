//! Files and stdin, as arguments of commands.

use std::{io::Read as _, path::Path};

use oubliette_protocol::{Error, Result, agent::MAX_DEFINITION_BYTES};
use serde_json::Value;

/// A file's text; `-` is stdin.
pub fn text(path: &Path) -> Result<String> {
    let mut text = String::new();
    let most = MAX_DEFINITION_BYTES as u64;
    let read = match path.as_os_str() == "-" {
        true => std::io::stdin().lock().take(most + 1).read_to_string(&mut text),
        false => std::fs::File::open(path).and_then(|file| file.take(most + 1).read_to_string(&mut text)),
    };
    read.map_err(|e| Error::invalid(format!("{}: {e}", name(path))))?;
    match text.len() > MAX_DEFINITION_BYTES {
        true => Err(Error::invalid(format!(
            "{} is larger than {MAX_DEFINITION_BYTES} bytes",
            name(path)
        ))),
        false => Ok(text),
    }
}

/// A file's JSON object.
pub fn object(path: &Path) -> Result<Value> {
    let value: Value = serde_json::from_str(&text(path)?)
        .map_err(|e| Error::invalid(format!("{} is not JSON: {e}", name(path))))?;
    match value.is_object() {
        true => Ok(value),
        false => Err(Error::invalid(format!("{} must hold a JSON object", name(path)))),
    }
}

/// What people call it.
fn name(path: &Path) -> String {
    match path.as_os_str() == "-" {
        true => "stdin".into(),
        false => path.display().to_string(),
    }
}

/// The name a definition's file suggests: its folder's for `<name>/agent.json`, else its own.
pub fn suggested(path: &Path, usual: &str) -> Option<String> {
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
