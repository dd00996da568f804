//! The history of `oubliette chat`: what was typed, a file per server, which only its owner can read.

use std::{
    os::unix::fs::{OpenOptionsExt as _, PermissionsExt as _},
    path::PathBuf,
};

use oubliette_home::{HomeDir, safe_fs};
use reedline::{FileBackedHistory, History};

use super::ServerTarget;

/// The most lines that are kept.
const MAX_LINES: usize = 1_000;
/// A larger file is shortened to its newest half when it is opened.
const MAX_FILE_BYTES: u64 = 1024 * 1024;

/// Where the history of one server is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct HistoryFile(PathBuf);

impl HistoryFile {
    /// `HOME/history/chat-local`, or `chat-` and the URL of a server elsewhere.
    pub(crate) fn of(home: &HomeDir, target: &ServerTarget) -> Self {
        let name = match target {
            ServerTarget::Home => "local".to_owned(),
            ServerTarget::Remote(remote) => file_name(remote.url()),
        };
        Self(home.root().join("history").join(format!("chat-{name}")))
    }

    /// Makes the file if it is missing, private in any case, and not too large.
    fn prepare(&self) -> Option<()> {
        safe_fs::create_private_dir(self.0.parent()?).ok()?;
        let file = std::fs::OpenOptions::new()
            .create(true)
            .append(true)
            .mode(0o600)
            .open(&self.0)
            .ok()?;
        file.set_permissions(std::fs::Permissions::from_mode(0o600))
            .ok()?;
        if file.metadata().ok()?.len() > MAX_FILE_BYTES {
            let text = std::fs::read(&self.0).ok()?;
            let half = text.len().saturating_sub(MAX_FILE_BYTES as usize / 2);
            let start = text[half..]
                .iter()
                .position(|b| *b == b'\n')
                .map_or(text.len(), |at| half + at + 1);
            safe_fs::write_atomic(&self.0, &text[start..], 0o600).ok()?;
        }
        Some(())
    }
}

/// Opens the history; none if that fails, for example because the home cannot be written to. The history is then kept in
/// memory.
pub(crate) fn open(file: HistoryFile) -> Option<Box<dyn History>> {
    file.prepare()?;
    let history = FileBackedHistory::with_file(MAX_LINES, file.0).ok()?;
    Some(Box::new(history))
}

/// A URL as part of a file's name.
fn file_name(url: &str) -> String {
    let letter = |c: char| match c.is_ascii_alphanumeric() || c == '.' {
        true => c,
        false => '-',
    };
    url.chars().take(150).map(letter).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_file_is_private_and_bounded() {
        let dir = tempfile::tempdir().unwrap();
        let home = HomeDir::at(dir.path().join("h")).unwrap();
        let file = HistoryFile::of(&home, &ServerTarget::Home);
        std::fs::create_dir_all(file.0.parent().unwrap()).unwrap();
        std::fs::write(&file.0, "0123456789abcde\n".repeat(100_000)).unwrap();
        std::fs::set_permissions(&file.0, std::fs::Permissions::from_mode(0o644)).unwrap();
        file.prepare().unwrap();
        let kept = std::fs::metadata(&file.0).unwrap();
        assert_eq!(kept.permissions().mode() & 0o777, 0o600);
        assert!(
            kept.len() <= MAX_FILE_BYTES / 2 && kept.len().is_multiple_of(16),
            "{}",
            kept.len()
        );
        assert!(open(file).is_some());
    }

    #[test]
    fn every_server_has_a_file_of_its_own() {
        assert_eq!(file_name("https://a.example:8443/x"), "https---a.example-8443-x");
        assert_ne!(file_name("http://a"), file_name("http://b"));
    }
}
