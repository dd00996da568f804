//! `program.json`: what an installed program is, written beside its tree.

use std::{collections::BTreeMap, fmt, str::FromStr};

use oubliette_protocol::{
    Error, Result,
    id::quoted,
    program::{PackageRef, ProgramSpec},
};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use sha2::{Digest as _, Sha256};

/// Directory in which programs are seen inside a sandbox, each under its id.
pub const PROGRAMS_INSIDE: &str = "/opt/programs";

/// The id of a program: registry, name and version in readable form, and a hash that tells apart what looks alike.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(try_from = "String", into = "String")]
pub struct ProgramId(String);

impl ProgramId {
    /// The id of a package, installed with its scripts or without.
    pub fn of(package: &PackageRef, scripts: bool) -> Self {
        let plain = |text: &str, most: usize| {
            let mut out = String::new();
            for c in text.chars() {
                match c {
                    'a'..='z' | '0'..='9' | '.' => out.push(c),
                    'A'..='Z' => out.push(c.to_ascii_lowercase()),
                    _ if out.is_empty() || out.ends_with('-') => {}
                    _ => out.push('-'),
                }
            }
            out.truncate(most);
            out.trim_end_matches(['-', '.']).to_owned()
        };
        let hash = Sha256::digest(format!("{package} scripts={scripts}"));
        Self(format!(
            "{}-{}-{}-{}",
            package.registry.as_str(),
            plain(&package.name, 60),
            plain(&package.version, 30),
            &hex::encode(hash)[..8]
        ))
    }

    /// The id of the program that a definition names.
    pub fn of_spec(spec: &ProgramSpec) -> Result<Self> {
        Ok(Self::of(&spec.package()?, spec.scripts))
    }

    /// The id as text.
    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// The directory at which the program is seen inside a sandbox.
    pub(crate) fn inside(&self) -> String {
        format!("{PROGRAMS_INSIDE}/{self}")
    }
}

impl fmt::Display for ProgramId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for ProgramId {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let plain = (1..=120).contains(&text.len())
            && text.bytes().next().is_some_and(|b| b.is_ascii_lowercase())
            && text
                .bytes()
                .all(|b| b.is_ascii_lowercase() || b.is_ascii_digit() || matches!(b, b'-' | b'.'));
        match plain {
            true => Ok(Self(text.to_owned())),
            false => Err(Error::invalid(format!(
                "{} is not the id of a program; `oubliette program list` shows them",
                quoted(text)
            ))),
        }
    }
}

impl TryFrom<String> for ProgramId {
    type Error = Error;

    fn try_from(text: String) -> Result<Self> {
        text.parse()
    }
}

impl From<ProgramId> for String {
    fn from(id: ProgramId) -> Self {
        id.0
    }
}

/// An installed program.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProgramManifest {
    /// Its id, which is the name of its directory.
    pub program_id: ProgramId,
    /// The package: `npm:name@1.2.3` or `pypi:name==1.2.3`.
    pub package: String,
    /// Whether install scripts were run.
    pub scripts: bool,
    /// Its commands, by name.
    pub bins: BTreeMap<String, BinCommand>,
    /// The command that is run when a definition names none; absent when it has to.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub default_bin: Option<String>,
    /// The program that has the Node.js it runs with; absent: the host's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub node: Option<ProgramId>,
    /// Packages whose install scripts were not run.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub skipped_scripts: Vec<String>,
    /// Size of its files, in bytes.
    pub bytes: u64,
    /// Number of its files.
    pub files: u64,
    /// When it was installed.
    pub installed_at: jiff::Timestamp,
    /// SHA-256 of its lock.
    pub lock_sha256: String,
}

/// How a command of a program is started. Paths are relative to the program's tree.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct BinCommand {
    /// What runs the file.
    pub interpreter: Interpreter,
    /// Arguments of the interpreter before the file.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub options: Vec<String>,
    /// The file.
    pub file: String,
}

/// What runs the file of a command.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum Interpreter {
    /// The system: the file is executable.
    None,
    /// Node.js.
    Node,
    /// The Python of the program's environment.
    Python,
}

impl ProgramManifest {
    /// The command that a definition asks for.
    pub(crate) fn command(&self, bin: Option<&str>) -> Result<&BinCommand> {
        let names = || {
            self.bins
                .keys()
                .map(String::as_str)
                .collect::<Vec<_>>()
                .join(", ")
        };
        match bin.or(self.default_bin.as_deref()) {
            Some(bin) => self.bins.get(bin).ok_or_else(|| {
                Error::invalid(format!(
                    "bin: {} has no command {}; it has {}",
                    self.package,
                    quoted(bin),
                    names()
                ))
            }),
            None => Err(Error::invalid(format!(
                "bin: {} has several commands, say which: {}",
                self.package,
                names()
            ))),
        }
    }
}

/// The command that is run when none is named: the only one, or the one called like the package.
pub(crate) fn default_bin(package: &PackageRef, bins: &BTreeMap<String, BinCommand>) -> Option<String> {
    let mut distinct: Vec<&BinCommand> = Vec::new();
    for command in bins.values() {
        if !distinct.contains(&command) {
            distinct.push(command);
        }
    }
    match distinct.len() {
        0 => None,
        1 => bins.keys().next().cloned(),
        _ => bins.keys().find(|name| *name == package.short_name()).cloned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_readable_and_differ_where_packages_do() {
        let id = |text: &str, scripts| ProgramId::of(&text.parse().unwrap(), scripts);
        let one = id("npm:@modelcontextprotocol/server-everything@2026.8.31", false);
        assert!(
            one.as_str()
                .starts_with("npm-modelcontextprotocol-server-everything-2026.8.31-"),
            "{one}"
        );
        assert_eq!(one.as_str().parse::<ProgramId>().unwrap(), one);
        assert_ne!(id("npm:@a/b@1.0.0", false), id("npm:a-b@1.0.0", false));
        assert_ne!(id("npm:a@1.0.0", false), id("npm:a@1.0.0", true));
        for bad in ["", "..", ".", "a/b", "../x", "A", "-x"] {
            assert!(bad.parse::<ProgramId>().is_err(), "{bad:?}");
        }
    }

    #[test]
    fn a_command_is_chosen_by_name_or_because_it_is_the_only_one() {
        let package: PackageRef = "npm:@a/tool@1.0.0".parse().unwrap();
        let command = |file: &str| BinCommand {
            interpreter: Interpreter::Node,
            options: Vec::new(),
            file: file.to_owned(),
        };
        let bins = |names: &[(&str, &str)]| {
            let pairs = names
                .iter()
                .map(|(name, file)| ((*name).to_owned(), command(file)));
            pairs.collect::<BTreeMap<_, _>>()
        };
        assert_eq!(default_bin(&package, &bins(&[("x", "1")])).as_deref(), Some("x"));
        assert_eq!(
            default_bin(&package, &bins(&[("tool", "1"), ("other", "2")])).as_deref(),
            Some("tool")
        );
        assert_eq!(
            default_bin(&package, &bins(&[("a", "1"), ("b", "1")])).as_deref(),
            Some("a")
        );
        assert_eq!(default_bin(&package, &bins(&[("a", "1"), ("b", "2")])), None);
    }
}
