//! `library_*`: definitions as files, exchanged with directories elsewhere. Unlike `agent_*` and `catalog_*`, which show and
//! take the JSON of one definition, these carry every file of it as it is, also binary ones and secrets.

use std::{borrow::Cow, collections::BTreeMap, sync::Arc};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use oubliette_home::DefinitionLibrary;
use oubliette_protocol::{
    Error, Result, Scope, Slug,
    agent::AgentDefinition,
    library::{DefinitionFiles, DefinitionKey, DefinitionKind, LibraryChange, LibraryFile},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ActionCall, ActionHandler, Effect, StateOwner, agent, input, run_blocking};
use crate::definitions::digest::definition_digest;

/// Maximum size of all files of one push, in bytes.
pub(crate) const MAX_PUSH_BYTES: usize = 20 * 1024 * 1024;
/// Maximum size of a request that pushes, in bytes: the files as base64, and names.
const MAX_PUSH_BODY_BYTES: usize = 32 * 1024 * 1024;
/// Mode of files that come without one.
const DEFAULT_MODE: u32 = 0o600;
/// Maximum length of what the audit log has of a push, in characters.
const MAX_TARGET_CHARS: usize = 1_000;

/// `library_list`.
#[derive(Debug, Default, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LibraryList {
    /// Maximum number of entries to return, 1 to 1000. Default: 100.
    #[serde(default)]
    pub limit: Option<u32>,
    /// `next_cursor` of the previous answer, to read the entries after it. Absent: from the start.
    #[serde(default)]
    pub cursor: Option<String>,
}

/// `library_read`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LibraryRead {
    /// "agent": an agent; "tool": a catalog entry.
    pub kind: DefinitionKind,
    /// Slug of the agent, or id of the catalog entry.
    pub id: Slug,
}

/// `library_push`.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct LibraryPush {
    /// Definitions to create or replace, each with all its files: what it has besides is removed. Their files may have 20 MiB
    /// together. Default: none.
    #[serde(default)]
    pub puts: Vec<PushedDefinition>,
    /// Definitions to delete. Default: none.
    #[serde(default)]
    pub deletes: Vec<NamedDefinition>,
    /// Whether to check everything and say what would change, and change nothing. Default: false.
    #[serde(default)]
    pub dry_run: bool,
}

/// A definition, by name.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct NamedDefinition {
    /// "agent": an agent; "tool": a catalog entry.
    pub kind: DefinitionKind,
    /// Slug of the agent, or id of the catalog entry.
    pub id: Slug,
}

/// A definition with all its files.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PushedDefinition {
    /// "agent": an agent; "tool": a catalog entry.
    pub kind: DefinitionKind,
    /// Slug of the agent, or id of the catalog entry.
    pub id: Slug,
    /// Its files, at most 1000 with 16 MiB together: agent.json or tool.json, files beside it of at most 1 MiB, and an agent's
    /// `home/…`.
    pub files: Vec<PushedFile>,
}

/// A file of a definition: its content is either text or base64.
#[derive(Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub(crate) struct PushedFile {
    /// Path in the definition's folder, for example "agent.json" or "home/.config/settings.json".
    pub path: String,
    /// Permissions as at most 4 octal digits, 0 to 777, for example "755". Default: "600".
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub mode: Option<String>,
    /// The content, if it is UTF-8 text. Either this or `base64`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub text: Option<String>,
    /// The content as base64. Either this or `text`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub base64: Option<String>,
}

/// Without the content, which may hold secrets.
impl std::fmt::Debug for PushedFile {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "PushedFile({:?})", self.path)
    }
}

/// Result of `library_list`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct LibraryPage {
    /// The definitions, agents first, by id.
    definitions: Vec<ListedDefinition>,
    /// The cursor of the next page; absent on the last.
    #[serde(skip_serializing_if = "Option::is_none")]
    next_cursor: Option<String>,
}

/// A definition and what its files are.
#[derive(Debug, Serialize, JsonSchema)]
struct ListedDefinition {
    /// "agent": an agent; "tool": a catalog entry.
    kind: DefinitionKind,
    /// Slug of the agent, or id of the catalog entry.
    id: String,
    /// How many files it has.
    #[serde(skip_serializing_if = "Option::is_none")]
    files: Option<usize>,
    /// Size of its files, in bytes.
    #[serde(skip_serializing_if = "Option::is_none")]
    bytes: Option<usize>,
    /// Hash of all its files: their paths, modes and contents.
    #[serde(skip_serializing_if = "Option::is_none")]
    sha256: Option<String>,
    /// Why its files cannot be read; absent if they can.
    #[serde(skip_serializing_if = "Option::is_none")]
    error: Option<String>,
}

/// Result of `library_push`.
#[derive(Debug, Serialize, JsonSchema)]
pub(crate) struct LibraryPushed {
    /// Definitions that are new.
    added: Vec<NamedDefinition>,
    /// Definitions that were replaced by others.
    changed: Vec<NamedDefinition>,
    /// Definitions that were deleted.
    deleted: Vec<NamedDefinition>,
    /// Definitions that were the same already.
    unchanged: Vec<NamedDefinition>,
    /// Whether nothing was changed because that was asked for.
    dry_run: bool,
}

impl ActionHandler for LibraryList {
    type Output = LibraryPage;

    const NAME: &'static str = "library_list";
    const DESCRIPTION: &'static str = "List agents and catalog entries with the hash of all their files, to compare them with a directory elsewhere.";
    const SCOPE: Scope = Scope::Admin;
    // As for `library_read`: hashes of files with secrets are for those who may read them.
    const EFFECT: Effect = Effect::Stream;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let library = call.app.library.clone();
        run_blocking(move || {
            let keys: BTreeMap<String, DefinitionKey> = library
                .keys()
                .into_iter()
                .map(|key| (key.to_string(), key))
                .collect();
            let rows = keys.iter().map(|(name, key)| (name.as_str(), key));
            let (keys, next_cursor) = input::page_of_sorted(rows, self.limit, self.cursor.as_deref())?;
            let definitions = keys.into_iter().map(|key| list_one(&library, key)).collect();
            Ok(LibraryPage {
                definitions,
                next_cursor,
            })
        })
        .await
    }
}

fn list_one(library: &DefinitionLibrary, key: &DefinitionKey) -> ListedDefinition {
    let read = library.dir().read(key);
    let found = read.as_ref().ok();
    ListedDefinition {
        kind: key.kind,
        id: key.id().to_owned(),
        files: found.map(|found| found.files.len()),
        bytes: found.map(|found| found.files.iter().map(|file| file.content.len()).sum()),
        sha256: found.map(definition_digest),
        error: read.err().map(|error| error.message),
    }
}

impl ActionHandler for LibraryRead {
    type Output = PushedDefinition;

    const NAME: &'static str = "library_read";
    const DESCRIPTION: &'static str =
        "Read all files of an agent or catalog entry as they are, secrets in them included.";
    const SCOPE: Scope = Scope::Admin;
    // It changes nothing, but what it shows is to be in the audit log.
    const EFFECT: Effect = Effect::Stream;
    const STATE_OWNER: StateOwner = StateOwner::Server;

    fn target(&self) -> Option<Cow<'_, str>> {
        Some(format!("{}/{}", self.kind.folder(), self.id).into())
    }

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let library = call.app.library.clone();
        run_blocking(move || {
            let key = DefinitionKey::parse(self.kind, self.id.as_str())?;
            let found = library.dir().read(&key)?;
            Ok(PushedDefinition::from(found))
        })
        .await
    }
}

impl ActionHandler for LibraryPush {
    type Output = LibraryPushed;

    const NAME: &'static str = "library_push";
    const DESCRIPTION: &'static str = "Create, replace and delete agents and catalog entries with all their files: all of them, or nothing if one is wrong. Running sessions take it up as they do agent_put and catalog_put.";
    const SCOPE: Scope = Scope::Admin;
    const EFFECT: Effect = Effect::Set;
    const STATE_OWNER: StateOwner = StateOwner::Server;
    const MAX_BODY_BYTES: usize = MAX_PUSH_BODY_BYTES;

    async fn run(self, call: &ActionCall<'_>) -> Result<Self::Output> {
        let names = self
            .puts
            .iter()
            .map(|put| format!("{}/{}", put.kind.folder(), put.id))
            .chain(
                self.deletes
                    .iter()
                    .map(|key| format!("-{}/{}", key.kind.folder(), key.id)),
            );
        let target: String = names
            .collect::<Vec<_>>()
            .join(", ")
            .chars()
            .take(MAX_TARGET_CHARS)
            .collect();
        call.note_target(&target);
        let dry_run = self.dry_run;
        let library = call.app.library.clone();
        let (plan, report) = run_blocking(move || {
            let given = self.into_change()?;
            let report = compare(&library, &given)?;
            let is_same = |put: &DefinitionFiles| report.unchanged.iter().any(|same| same.is(&put.key));
            let plan = LibraryChange {
                puts: given.puts.into_iter().filter(|put| !is_same(put)).collect(),
                deletes: given.deletes,
            };
            library.check_change(&plan)?;
            Ok((plan, report))
        })
        .await?;
        check_deleted_agents(call, &plan).await?;
        let report = LibraryPushed { dry_run, ..report };
        if !dry_run && !plan.is_empty() {
            let plan = Arc::new(plan);
            call.app.definitions.change(move |_| Ok((*plan).clone())).await?;
        }
        Ok(report)
    }
}

impl LibraryPush {
    fn into_change(self) -> Result<LibraryChange> {
        let mut bytes = 0;
        let mut change = LibraryChange::default();
        for put in self.puts {
            let definition = DefinitionFiles::try_from(put)?;
            definition.check()?;
            bytes += definition
                .files
                .iter()
                .map(|file| file.content.len())
                .sum::<usize>();
            if bytes > MAX_PUSH_BYTES {
                return Err(Error::limit_exceeded(format!(
                    "the files have more than {} MiB together: push fewer definitions at once",
                    MAX_PUSH_BYTES >> 20
                )));
            }
            change.puts.push(definition);
        }
        let keys = self
            .deletes
            .iter()
            .map(|key| DefinitionKey::parse(key.kind, key.id.as_str()));
        change.deletes = keys.collect::<Result<_>>()?;
        Ok(change)
    }
}

/// What a change makes of the library.
fn compare(library: &DefinitionLibrary, change: &LibraryChange) -> Result<LibraryPushed> {
    let mut report = LibraryPushed {
        added: Vec::new(),
        changed: Vec::new(),
        deleted: change
            .deletes
            .iter()
            .map(NamedDefinition::of)
            .collect::<Result<_>>()?,
        unchanged: Vec::new(),
        dry_run: false,
    };
    for put in &change.puts {
        let list = match (library.has(&put.key), library.dir().read(&put.key)) {
            (false, _) => &mut report.added,
            (true, Ok(present)) if definition_digest(&present) == definition_digest(put) => {
                &mut report.unchanged
            }
            (true, _) => &mut report.changed,
        };
        list.push(NamedDefinition::of(&put.key)?);
    }
    Ok(report)
}

/// Refuses to delete agents that something uses when the change is made.
async fn check_deleted_agents(call: &ActionCall<'_>, change: &LibraryChange) -> Result<()> {
    let deleted = change
        .deletes
        .iter()
        .filter(|key| key.kind == DefinitionKind::Agent);
    let deleted: Vec<Slug> = deleted.map(|key| key.id().parse()).collect::<Result<_>>()?;
    if deleted.is_empty() {
        return Ok(());
    }
    let mut agents: BTreeMap<Slug, Arc<AgentDefinition>> = call
        .app
        .library
        .agents()
        .iter()
        .filter(|(slug, _)| !deleted.contains(slug))
        .map(|(slug, entry)| (slug.clone(), entry.definition.clone()))
        .collect();
    for put in change
        .puts
        .iter()
        .filter(|put| put.key.kind == DefinitionKind::Agent)
    {
        if let Ok(definition) = AgentDefinition::parse(put.main_text()?) {
            agents.insert(put.key.id().parse()?, Arc::new(definition));
        }
    }
    for slug in &deleted {
        agent::check_unused(call.app, slug, &agents).await?;
    }
    Ok(())
}

impl NamedDefinition {
    fn of(key: &DefinitionKey) -> Result<Self> {
        Ok(Self {
            kind: key.kind,
            id: key.id().parse()?,
        })
    }

    fn is(&self, key: &DefinitionKey) -> bool {
        self.kind == key.kind && self.id.as_str() == key.id()
    }
}

impl From<DefinitionFiles> for PushedDefinition {
    fn from(definition: DefinitionFiles) -> Self {
        let file = |file: LibraryFile| {
            let (text, base64) = match String::from_utf8(file.content) {
                Ok(text) => (Some(text), None),
                Err(bytes) => (None, Some(BASE64_STANDARD.encode(bytes.as_bytes()))),
            };
            PushedFile {
                path: file.path,
                mode: Some(format!("{:o}", file.mode)),
                text,
                base64,
            }
        };
        Self {
            kind: definition.key.kind,
            id: definition.key.slug().clone(),
            files: definition.files.into_iter().map(file).collect(),
        }
    }
}

impl TryFrom<PushedDefinition> for DefinitionFiles {
    type Error = Error;

    fn try_from(pushed: PushedDefinition) -> Result<Self> {
        let key = DefinitionKey::parse(pushed.kind, pushed.id.as_str())?;
        let mut files = Vec::new();
        for file in pushed.files {
            let bad = |field: &str, why: &str| {
                Err(Error::invalid(format!(
                    "{key}/{}: {field}: {why}",
                    file.path.escape_debug()
                )))
            };
            let content = match (file.text, file.base64) {
                (Some(text), None) => text.into_bytes(),
                (None, Some(encoded)) => match BASE64_STANDARD.decode(encoded) {
                    Ok(content) => content,
                    Err(_) => return bad("base64", "is not base64"),
                },
                (Some(_), Some(_)) => return bad("text", "give text or base64, not both"),
                (None, None) => return bad("text", "give the content as text or base64"),
            };
            let mode = match &file.mode {
                None => DEFAULT_MODE,
                Some(digits) if digits.len() <= 4 && digits.bytes().all(|digit| digit.is_ascii_digit()) => {
                    match u32::from_str_radix(digits, 8) {
                        Ok(mode) if mode <= 0o777 => mode,
                        _ => return bad("mode", "must be octal digits, 0 to 777"),
                    }
                }
                Some(_) => return bad("mode", "must be octal digits, 0 to 777"),
            };
            files.push(LibraryFile {
                path: file.path,
                mode,
                content,
            });
        }
        files.sort_by(|one, other| one.path.cmp(&other.path));
        Ok(DefinitionFiles { key, files })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    fn parse(definition: serde_json::Value) -> Result<DefinitionFiles> {
        let pushed: PushedDefinition =
            serde_json::from_value(definition).map_err(|e| Error::invalid(e.to_string()))?;
        pushed.try_into()
    }

    #[test]
    fn files_are_read_back_as_they_were_sent() {
        let given = json!({ "kind": "agent", "id": "a", "files": [
            { "path": "agent.json", "mode": "644", "text": "{}" },
            { "path": "home/bin", "mode": "755", "base64": "/wA=" },
        ] });
        let read = parse(given.clone()).unwrap();
        assert_eq!(
            (read.files[1].mode, &read.files[1].content[..]),
            (0o755, &[0xff, 0][..])
        );
        assert_eq!(serde_json::to_value(PushedDefinition::from(read)).unwrap(), given);
    }

    #[test]
    fn a_wrong_file_is_refused_with_its_path_and_field() {
        let refused = |file: serde_json::Value, said: &str| {
            let message = parse(json!({ "kind": "tool", "id": "t", "files": [file] }))
                .unwrap_err()
                .message;
            assert!(message.contains(said), "{message}");
        };
        refused(json!({ "path": "x" }), "tools/t/x: text");
        refused(json!({ "path": "x", "text": "", "base64": "" }), "not both");
        refused(json!({ "path": "x", "base64": "!" }), "tools/t/x: base64");
        refused(
            json!({ "path": "x", "text": "", "mode": "999" }),
            "tools/t/x: mode",
        );
        refused(json!({ "path": "x", "text": "", "mode": "+7" }), "mode");
        refused(json!({ "path": "x", "text": "", "mode": "4755" }), "mode");
        refused(json!({ "path": "x", "text": "", "more": 1 }), "unknown field");
    }
}
