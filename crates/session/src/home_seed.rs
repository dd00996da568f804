//! Writes the files of a definition's `home/` into the new home directory of an agent.

use std::{fs::OpenOptions, io::Write as _, os::unix::fs::OpenOptionsExt, path::Path};

use oubliette_home::HomeFile;
use oubliette_protocol::{Error, Result};

/// Writes the files into a directory that no agent has seen yet. `expand` replaces references in files that are text.
pub(crate) fn write(dir: &Path, files: &[HomeFile], expand: impl Fn(&str) -> String) -> Result<()> {
    for file in files {
        let path = dir.join(&file.path);
        if let Some(parent) = path.parent() {
            std::fs::create_dir_all(parent).map_err(Error::internal)?;
        }
        let mut target = OpenOptions::new()
            .write(true)
            .create_new(true)
            .mode(file.mode)
            .open(&path)
            .map_err(Error::internal)?;
        let expanded = std::str::from_utf8(&file.content).map(&expand);
        let content = expanded
            .as_ref()
            .map_or(&file.content[..], |text| text.as_bytes());
        target.write_all(content).map_err(Error::internal)?;
    }
    Ok(())
}
