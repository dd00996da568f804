//! A program: a pinned package of a registry that Oubliette installs itself and runs in sandboxes.

use std::{fmt, str::FromStr};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::{Error, id::quoted, strict::FieldError};

/// Maximum length of a package's name, in bytes: npm's own limit.
const MAX_NAME_BYTES: usize = 214;
/// Maximum length of a version, in bytes.
const MAX_VERSION_BYTES: usize = 64;
/// Maximum length of the name of a command of a package, in bytes.
const MAX_BIN_BYTES: usize = 100;
/// Maximum number of extras of a Python package.
const MAX_EXTRAS: usize = 16;

/// A program, as `agent.json` and `tool.json` name it: exactly one of `npm` and `pypi`, pinned to one version.
#[derive(Debug, Clone, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
pub struct ProgramSpec {
    /// An npm package with its exact version: `name@1.2.3` or `@scope/name@1.2.3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub npm: Option<String>,
    /// A PyPI package with its exact version: `name==1.2.3`, or `name[extra]==1.2.3`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pypi: Option<String>,
    /// The command of the package to run, 1 to 100 bytes, no path. Default: its only one, or the one named like the
    /// package.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bin: Option<String>,
    /// Whether the package's install scripts are run, in the sandbox of the installation. Default: false.
    #[serde(default, skip_serializing_if = "is_false")]
    pub scripts: bool,
}

#[allow(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn is_false(flag: &bool) -> bool {
    !flag
}

impl ProgramSpec {
    /// A pinned package with the default command and without install scripts.
    pub fn of(package: &PackageRef) -> Self {
        let text = package.pinned_text();
        let (npm, pypi) = match package.registry {
            PackageRegistry::Npm => (Some(text), None),
            PackageRegistry::Pypi => (None, Some(text)),
        };
        Self {
            npm,
            pypi,
            bin: None,
            scripts: false,
        }
    }

    /// The package it names.
    pub fn package(&self) -> Result<PackageRef, FieldError> {
        match (&self.npm, &self.pypi) {
            (Some(text), None) => {
                PackageRef::parse_npm(text).map_err(|error| FieldError::at("npm", error.message))
            }
            (None, Some(text)) => {
                PackageRef::parse_pypi(text).map_err(|error| FieldError::at("pypi", error.message))
            }
            (Some(_), Some(_)) => Err(FieldError::at(
                "pypi",
                "a program is one package: keep npm or pypi",
            )),
            (None, None) => Err(FieldError::at(
                "",
                r#"must name a package: {"npm": "name@1.2.3"} or {"pypi": "name==1.2.3"}"#,
            )),
        }
    }

    /// Checks package, version and command; `field` is where the definition has it.
    pub fn check(&self, field: &str) -> Result<(), FieldError> {
        let beneath = |error: FieldError| match error.field.as_str() {
            "" => FieldError::at(field, error.reason),
            inner => FieldError::at(format!("{field}.{inner}"), error.reason),
        };
        self.package().map_err(beneath)?;
        match self.bin.as_deref().map(check_bin_name) {
            Some(Err(why)) => Err(FieldError::at(format!("{field}.bin"), why)),
            Some(Ok(())) | None => Ok(()),
        }
    }
}

impl fmt::Display for ProgramSpec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.npm, &self.pypi) {
            (Some(npm), _) => write!(f, "npm:{npm}"),
            (None, Some(pypi)) => write!(f, "pypi:{pypi}"),
            (None, None) => f.write_str("no package"),
        }
    }
}

/// Where a package comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub enum PackageRegistry {
    /// The npm registry.
    Npm,
    /// The Python package index.
    Pypi,
}

impl PackageRegistry {
    /// Its name in definitions and on the command line.
    pub fn as_str(self) -> &'static str {
        match self {
            PackageRegistry::Npm => "npm",
            PackageRegistry::Pypi => "pypi",
        }
    }
}

/// A package with its exact version.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct PackageRef {
    /// Its registry.
    pub registry: PackageRegistry,
    /// Its name; that of an npm package with its scope.
    pub name: String,
    /// The extras of a Python package.
    pub extras: Vec<String>,
    /// Its version.
    pub version: String,
}

impl PackageRef {
    /// Parses `name@1.2.3`.
    pub fn parse_npm(text: &str) -> Result<Self, Error> {
        // The first character may be the @ of a scope.
        let at = text.char_indices().skip(1).find(|(_, c)| *c == '@');
        let (name, version) = match at {
            Some((at, _)) => (&text[..at], &text[at + 1..]),
            None => (text, ""),
        };
        check_npm_name(name)?;
        if !is_exact_npm_version(version) {
            return Err(unpinned(text, &format!("{name}@1.2.3")));
        }
        Ok(Self {
            registry: PackageRegistry::Npm,
            name: name.to_owned(),
            extras: Vec::new(),
            version: version.to_owned(),
        })
    }

    /// Parses `name==1.2.3` or `name[extra]==1.2.3`.
    pub fn parse_pypi(text: &str) -> Result<Self, Error> {
        let (name, version) = text.split_once("==").unwrap_or((text, ""));
        let (name, extras) = split_pypi_extras(name.trim())?;
        let version = version.trim();
        if !is_exact_pypi_version(version) {
            return Err(unpinned(text, &format!("{name}==1.2.3")));
        }
        Ok(Self {
            registry: PackageRegistry::Pypi,
            name,
            extras,
            version: version.to_owned(),
        })
    }

    /// The package as definitions write it, without the registry: `name@1.2.3` or `name==1.2.3`.
    pub fn pinned_text(&self) -> String {
        match self.registry {
            PackageRegistry::Npm => format!("{}@{}", self.name, self.version),
            PackageRegistry::Pypi if self.extras.is_empty() => format!("{}=={}", self.name, self.version),
            PackageRegistry::Pypi => {
                format!("{}[{}]=={}", self.name, self.extras.join(","), self.version)
            }
        }
    }

    /// The last part of the name, without the scope of an npm package.
    pub fn short_name(&self) -> &str {
        self.name.rsplit('/').next().unwrap_or(&self.name)
    }
}

impl fmt::Display for PackageRef {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.registry.as_str(), self.pinned_text())
    }
}

impl FromStr for PackageRef {
    type Err = Error;

    /// Parses `npm:name@1.2.3` or `pypi:name==1.2.3`.
    fn from_str(text: &str) -> Result<Self, Error> {
        match text.split_once(':') {
            Some(("npm", rest)) => Self::parse_npm(rest),
            Some(("pypi", rest)) => Self::parse_pypi(rest),
            _ => Err(Error::invalid(format!(
                "{} is no package: write npm:NAME@1.2.3 or pypi:NAME==1.2.3",
                quoted(text)
            ))),
        }
    }
}

fn unpinned(text: &str, example: &str) -> Error {
    Error::invalid(format!(
        "{} has no exact version: write it as {}",
        quoted(text),
        quoted(example)
    ))
}

/// Checks the name of an npm package: letters, digits, `-`, `.`, `_` and `~`, each part beginning with a letter or digit,
/// with a scope or without one.
pub fn check_npm_name(name: &str) -> Result<(), Error> {
    let part = |part: &str| {
        part.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
            && part
                .bytes()
                .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'.' | b'_' | b'~'))
    };
    let valid = name.len() <= MAX_NAME_BYTES
        && match name.strip_prefix('@') {
            Some(scoped) => scoped
                .split_once('/')
                .is_some_and(|(scope, rest)| part(scope) && part(rest)),
            None => part(name),
        };
    match valid {
        true => Ok(()),
        false => Err(Error::invalid(format!(
            "{} is not the name of an npm package",
            quoted(name)
        ))),
    }
}

/// Checks a Python package's name, which may be followed by `[extra,…]`; returns name and extras.
pub fn split_pypi_extras(text: &str) -> Result<(String, Vec<String>), Error> {
    let invalid = || Error::invalid(format!("{} is not the name of a Python package", quoted(text)));
    let (name, extras) = match text.split_once('[') {
        Some((name, rest)) => {
            let extras = rest.strip_suffix(']').ok_or_else(invalid)?;
            let extras = extras.split(',').map(|extra| extra.trim().to_owned());
            (name.trim(), extras.collect::<Vec<_>>())
        }
        None => (text, Vec::new()),
    };
    let valid = |part: &str| {
        let (mut bytes, alphanumeric) = (part.bytes(), |b: u8| b.is_ascii_alphanumeric());
        part.len() <= MAX_NAME_BYTES
            && bytes.next().is_some_and(alphanumeric)
            && part.bytes().next_back().is_some_and(alphanumeric)
            && bytes.all(|b| alphanumeric(b) || matches!(b, b'-' | b'.' | b'_'))
    };
    match valid(name) && extras.len() <= MAX_EXTRAS && extras.iter().all(|extra| valid(extra)) {
        true => Ok((name.to_owned(), extras)),
        false => Err(invalid()),
    }
}

/// Whether a text is one exact version of an npm package: three numbers, and a pre-release or not.
pub fn is_exact_npm_version(text: &str) -> bool {
    let (core, pre) = match text.split_once('-') {
        Some((core, pre)) => (core, Some(pre)),
        None => (text, None),
    };
    let number = |part: &str| !part.is_empty() && part.bytes().all(|b| b.is_ascii_digit());
    let mut parts = core.split('.');
    let three = parts.by_ref().take(3).filter(|part| number(part)).count() == 3 && parts.next().is_none();
    let pre = pre.is_none_or(|pre| {
        pre.split('.')
            .all(|part| !part.is_empty() && part.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'))
    });
    text.len() <= MAX_VERSION_BYTES && three && pre
}

/// Whether a text is one exact version of a Python package: begins with a digit and has no wildcard.
pub fn is_exact_pypi_version(text: &str) -> bool {
    text.len() <= MAX_VERSION_BYTES
        && text.bytes().next().is_some_and(|b| b.is_ascii_digit())
        && text
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'!' | b'+' | b'_' | b'-'))
}

/// Checks the name of a command of a package: letters, digits, `_`, `-` and `.`, beginning with a letter or digit.
pub fn check_bin_name(name: &str) -> Result<(), &'static str> {
    let plain = name.len() <= MAX_BIN_BYTES
        && name.bytes().next().is_some_and(|b| b.is_ascii_alphanumeric())
        && name
            .bytes()
            .all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'.'));
    match plain {
        true => Ok(()),
        false => Err("must be the name of a command of the package, not a path or an option"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_pinned_package_is_parsed_and_written_back() {
        for text in [
            "npm:left-pad@1.3.0",
            "npm:@modelcontextprotocol/server-everything@2026.1.14",
            "npm:@a/b@1.0.0-alpha.12",
            "pypi:mcp-server-time==2026.1.26",
            "pypi:mcp[cli,ws]==1.0rc1",
        ] {
            let package: PackageRef = text.parse().unwrap();
            assert_eq!(package.to_string(), text);
            let spec = ProgramSpec::of(&package);
            spec.check("program").unwrap();
            assert_eq!(spec.package().unwrap(), package);
            assert_eq!(spec.to_string(), text);
        }
    }

    #[test]
    fn an_unpinned_package_or_one_that_is_an_option_or_a_path_is_refused() {
        for text in [
            "npm:left-pad",
            "npm:left-pad@latest",
            "npm:left-pad@^1.0.0",
            "npm:left-pad@1.2",
            "npm:left-pad@1.2.x",
            "npm:left-pad@1.2.3.4",
            "npm:left-pad@1.2.3 || 2.0.0",
            "npm:--registry=http@1.0.0",
            "npm:-g@1.0.0",
            "npm:../x@1.0.0",
            "npm:./x@1.0.0",
            "npm:@a/../b@1.0.0",
            "npm:@a@1.0.0",
            "npm:git+https://h/x@1.0.0",
            "npm:@1.0.0",
            "npm:",
            "pypi:x",
            "pypi:x>=1",
            "pypi:x==1.*",
            "pypi:x==",
            "pypi:-r==1.0",
            "pypi:../x==1.0",
            "pypi:x @ https://h==1.0",
            "pypi:x[==1.0",
            "pypi:x[-e]==1.0",
            "pypi:x==1.0 --index-url=y",
            "gem:x@1.0.0",
            "x",
        ] {
            assert!(text.parse::<PackageRef>().is_err(), "{text}");
        }
    }

    #[test]
    fn a_bin_is_a_name_and_never_a_path() {
        for bin in ["server", "mcp-server.js", "x_1"] {
            check_bin_name(bin).unwrap();
        }
        for bin in [
            "",
            "..",
            ".bin",
            "a/b",
            "../../bin/sh",
            "/bin/sh",
            "-e",
            "a b",
            "a\0",
        ] {
            assert!(check_bin_name(bin).is_err(), "{bin:?}");
        }
    }

    #[test]
    fn errors_name_the_field() {
        for (json, field) in [
            (r#"{}"#, "program"),
            (r#"{"npm":"a@1.0.0","pypi":"a==1"}"#, "program.pypi"),
            (r#"{"npm":"a"}"#, "program.npm"),
            (r#"{"pypi":"a"}"#, "program.pypi"),
            (r#"{"npm":"a@1.0.0","bin":"../x"}"#, "program.bin"),
        ] {
            let spec: ProgramSpec = serde_json::from_str(json).unwrap();
            assert_eq!(spec.check("program").unwrap_err().field, field, "{json}");
        }
    }

    proptest! {
        #[test]
        fn what_parses_has_no_character_of_a_path_or_an_option(text in "(npm|pypi):[@a.=/\\-0-9\\[\\]]{0,30}") {
            if let Ok(package) = text.parse::<PackageRef>() {
                prop_assert!(!package.name.starts_with(['-', '.', '/']));
                prop_assert!(!package.name.contains(".."  ) || !package.name.contains("/.."));
                prop_assert_eq!(package.to_string().parse::<PackageRef>().unwrap(), package);
            }
        }
    }
}
