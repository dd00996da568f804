//! A definition as its files: `agent.json` or `tool.json`, what lies beside it, and the files of an agent's `home/`. This is
//! how definitions are stored in a database and exchanged with directories.

use std::{collections::BTreeSet, fmt};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{
    CatalogId, Error, Result, Slug,
    agent::{MAX_DEFINITION_BYTES, check_file_name},
    id::quoted,
};

/// Maximum number of files of one definition.
pub const MAX_LIBRARY_FILES: usize = 1_000;
/// Maximum size of all files of one definition, in bytes.
pub const MAX_LIBRARY_FILE_BYTES: usize = 16 * 1024 * 1024;
/// Maximum number of definitions of one library.
pub const MAX_LIBRARY_DEFINITIONS: usize = 10_000;
/// Maximum number of names in a path below `home/`.
pub const MAX_SEED_DEPTH: usize = 16;
/// The folder beside `agent.json` with the files that an agent's home begins with.
const SEED_FOLDER: &str = "home";
/// Maximum length of a file's name, in bytes.
const MAX_NAME_BYTES: usize = 255;

/// What a definition defines.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
#[schemars(inline)]
pub enum DefinitionKind {
    /// A catalog entry: `tools/<id>/tool.json`.
    // First, because agents refer to tools.
    Tool,
    /// An agent: `agents/<slug>/agent.json`.
    Agent,
}

impl DefinitionKind {
    /// Both kinds.
    pub const ALL: [Self; 2] = [Self::Tool, Self::Agent];

    /// Its name in rows and arguments.
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Agent => "agent",
            Self::Tool => "tool",
        }
    }

    /// The directory that holds all definitions of this kind.
    pub fn folder(self) -> &'static str {
        match self {
            Self::Agent => "agents",
            Self::Tool => "tools",
        }
    }

    /// The file that every definition of this kind has.
    pub fn main_file(self) -> &'static str {
        match self {
            Self::Agent => "agent.json",
            Self::Tool => "tool.json",
        }
    }
}

impl std::str::FromStr for DefinitionKind {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        match text {
            "agent" => Ok(Self::Agent),
            "tool" => Ok(Self::Tool),
            _ => Err(Error::invalid(format!("{} is not agent or tool", quoted(text)))),
        }
    }
}

/// Which definition: its kind and its slug or catalog id, which are of one form.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize)]
pub struct DefinitionKey {
    /// Agent or catalog entry.
    pub kind: DefinitionKind,
    id: Slug,
}

impl DefinitionKey {
    /// The key of the definition with this id.
    pub fn parse(kind: DefinitionKind, id: &str) -> Result<Self> {
        Ok(Self {
            kind,
            id: id.parse()?,
        })
    }

    /// The key of an agent.
    pub fn agent(slug: &Slug) -> Self {
        Self {
            kind: DefinitionKind::Agent,
            id: slug.clone(),
        }
    }

    /// The key of a catalog entry.
    pub fn tool(id: &CatalogId) -> Result<Self> {
        Self::parse(DefinitionKind::Tool, id.as_str())
    }

    /// Its slug or catalog id.
    pub fn slug(&self) -> &Slug {
        &self.id
    }

    /// Its slug or catalog id, as text.
    pub fn id(&self) -> &str {
        self.id.as_str()
    }
}

/// As its directory: `agents/writer`.
impl fmt::Display for DefinitionKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.kind.folder(), self.id)
    }
}

/// One file of a definition.
#[derive(Clone, PartialEq, Eq)]
pub struct LibraryFile {
    /// Path in the definition's directory, with `/` between names.
    pub path: String,
    /// Permissions, 0 to 0o777.
    pub mode: u32,
    /// Its content.
    pub content: Vec<u8>,
}

/// Without the content, which may hold secrets.
impl fmt::Debug for LibraryFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bytes = self.content.len();
        write!(
            f,
            "LibraryFile({:?}, mode {:o}, {bytes} bytes)",
            self.path, self.mode
        )
    }
}

/// All files of one definition.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DefinitionFiles {
    /// Which definition.
    pub key: DefinitionKey,
    /// Its files, by path.
    pub files: Vec<LibraryFile>,
}

impl DefinitionFiles {
    /// The text of `agent.json` or `tool.json`.
    pub fn main_text(&self) -> Result<&str> {
        let name = self.key.kind.main_file();
        let at = |why: &str| Error::invalid(format!("{}/{name}: {why}", self.key));
        let file = self.files.iter().find(|file| file.path == name);
        let file = file.ok_or_else(|| at("is missing"))?;
        std::str::from_utf8(&file.content).map_err(|_| at("is not UTF-8 text"))
    }

    /// Checks names, modes, count and sizes of its files. What is in them is not looked at.
    pub fn check(&self) -> Result<()> {
        let at = |path: &str, why: String| {
            Err(Error::invalid(format!(
                "{}/{}: {why}",
                self.key,
                path.escape_debug()
            )))
        };
        if self.files.len() > MAX_LIBRARY_FILES {
            return Err(Error::invalid(format!(
                "{} has {} files; at most {MAX_LIBRARY_FILES}",
                self.key,
                self.files.len()
            )));
        }
        let mut paths = BTreeSet::new();
        let mut folders = BTreeSet::new();
        let mut bytes = 0;
        for file in &self.files {
            if let Err(why) = check_library_path(self.key.kind, &file.path) {
                return at(&file.path, why.into());
            }
            if file.mode > 0o777 {
                return at(&file.path, format!("mode {:o} is not one of 0 to 777", file.mode));
            }
            if !paths.insert(file.path.as_str()) {
                return at(&file.path, "is there twice".into());
            }
            folders.extend(file.path.match_indices('/').map(|(end, _)| &file.path[..end]));
            if !file.path.contains('/') && file.content.len() > MAX_DEFINITION_BYTES {
                return at(
                    &file.path,
                    format!("is larger than {} KiB", MAX_DEFINITION_BYTES / 1024),
                );
            }
            bytes += file.content.len();
        }
        if let Some(both) = folders.intersection(&paths).next() {
            return at(both, "is a file and a folder".into());
        }
        if bytes > MAX_LIBRARY_FILE_BYTES {
            return Err(Error::invalid(format!(
                "{}: its files have {bytes} bytes; at most {} MiB",
                self.key,
                MAX_LIBRARY_FILE_BYTES / 1024 / 1024
            )));
        }
        self.main_text().map(drop)
    }
}

/// Checks a path of a definition's directory: a plain name beside the main file, or, of an agent, `home/` and names below it.
pub fn check_library_path(kind: DefinitionKind, path: &str) -> std::result::Result<(), &'static str> {
    let Some((folder, rest)) = path.split_once('/') else {
        return check_file_name(path);
    };
    if kind != DefinitionKind::Agent || folder != SEED_FOLDER {
        return Err(match kind {
            DefinitionKind::Agent => "is in a folder; an agent has no folder but home/",
            DefinitionKind::Tool => "is in a folder; a catalog entry has none",
        });
    }
    let names: Vec<&str> = rest.split('/').collect();
    match names.len() <= MAX_SEED_DEPTH && names.iter().all(|name| is_ordinary_name(name)) {
        true => Ok(()),
        false => Err(
            "must be home/ and at most 16 names of at most 255 bytes, none of them . or .. or with control characters",
        ),
    }
}

fn is_ordinary_name(name: &str) -> bool {
    !name.is_empty()
        && name.len() <= MAX_NAME_BYTES
        && name != "."
        && name != ".."
        && !name.contains(|c: char| c.is_control() || c == '/')
}

/// Definitions that are put and deleted together.
#[derive(Debug, Clone, Default)]
pub struct LibraryChange {
    /// Definitions that are put, each with all its files.
    pub puts: Vec<DefinitionFiles>,
    /// Definitions that are deleted.
    pub deletes: Vec<DefinitionKey>,
}

impl LibraryChange {
    /// Whether it changes nothing.
    pub fn is_empty(&self) -> bool {
        self.puts.is_empty() && self.deletes.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(path: &str, content: &[u8]) -> LibraryFile {
        LibraryFile {
            path: path.into(),
            mode: 0o600,
            content: content.to_vec(),
        }
    }

    fn agent(files: Vec<LibraryFile>) -> DefinitionFiles {
        DefinitionFiles {
            key: DefinitionKey::parse(DefinitionKind::Agent, "a").unwrap(),
            files,
        }
    }

    #[test]
    fn paths_stay_in_their_definition() {
        for good in ["agent.json", "script.json", "home/.config/ä b.json", "home/a"] {
            assert!(check_library_path(DefinitionKind::Agent, good).is_ok(), "{good}");
        }
        for bad in [
            "",
            ".",
            "..",
            ".hidden",
            "a b",
            "home",
            "home/",
            "home/..",
            "home/../x",
            "home//x",
            "/etc/passwd",
            "other/x",
            "home/a\0b",
            "home/a\nb",
            "../x",
        ] {
            let refused = check_library_path(DefinitionKind::Agent, bad).is_err();
            // `home` without a slash is a plain name; as a file beside a folder of the name it is refused by `check`.
            assert!(refused || bad == "home", "{bad}");
        }
        assert!(check_library_path(DefinitionKind::Tool, "home/x").is_err());
        let deep = format!("home/{}x", "d/".repeat(MAX_SEED_DEPTH));
        assert!(check_library_path(DefinitionKind::Agent, &deep).is_err());
    }

    #[test]
    fn files_are_bounded_and_of_one_name_each() {
        let main = || file("agent.json", b"{}");
        agent(vec![main(), file("home/run", &[0xff, 0])]).check().unwrap();
        let refused = |files, said: &str| {
            let message = agent(files).check().unwrap_err().message;
            assert!(message.contains(said), "{message}");
        };
        refused(vec![file("x", b"")], "agents/a/agent.json: is missing");
        refused(vec![file("agent.json", &[0xff])], "UTF-8");
        refused(vec![main(), main()], "twice");
        refused(
            vec![main(), file("home", b""), file("home/x", b"")],
            "file and a folder",
        );
        refused(
            vec![main(), file("home/a", b""), file("home/a/b", b"")],
            "file and a folder",
        );
        refused(
            vec![main(), file("x", &vec![0; MAX_DEFINITION_BYTES + 1])],
            "1024 KiB",
        );
        let large = vec![0; MAX_LIBRARY_FILE_BYTES];
        refused(vec![main(), file("home/x", &large)], "16 MiB");
        let many = (0..MAX_LIBRARY_FILES).map(|n| file(&format!("home/{n}"), b""));
        refused(many.chain([main()]).collect(), "at most 1000");
        let mut odd = main();
        odd.mode = 0o4755;
        refused(vec![odd], "mode 4755");
    }
}
