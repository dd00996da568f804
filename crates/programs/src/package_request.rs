//! A package that may not be pinned yet, as `npx`, `uvx` and their like take it.

use std::fmt;

use oubliette_protocol::{
    Error, Result,
    id::quoted,
    program::{
        PackageRef, PackageRegistry, check_npm_name, is_exact_npm_version, is_exact_pypi_version,
        split_pypi_extras,
    },
};

use crate::manifest::ProgramId;

/// A package by name, with or without a version, range or tag.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PackageRequest {
    /// Its registry.
    pub registry: PackageRegistry,
    /// Its name.
    pub name: String,
    /// The extras of a Python package.
    pub extras: Vec<String>,
    /// A version, range or tag of npm, or a specifier of Python with its operator; empty: the newest.
    range: String,
}

impl PackageRequest {
    /// Parses npm's `name`, `name@version`, `name@range` and `name@tag`. Paths, URLs and repositories are refused.
    pub fn parse_npm(text: &str) -> Result<Self> {
        let at = text.char_indices().skip(1).find(|(_, c)| *c == '@');
        let (name, range) = at.map_or((text, ""), |(at, _)| (&text[..at], &text[at + 1..]));
        let plain = |c: char| c.is_ascii_alphanumeric() || " .-_+*^~<>=|".contains(c);
        if check_npm_name(name).is_err()
            || range.len() > 100
            || !range.chars().all(plain)
            || range.starts_with('-')
        {
            return Err(Error::invalid(format!(
                "{} is not a package of the npm registry: only NAME or NAME@VERSION can be a program",
                quoted(text)
            )));
        }
        Ok(Self {
            registry: PackageRegistry::Npm,
            name: name.to_owned(),
            extras: Vec::new(),
            range: range.to_owned(),
        })
    }

    /// Parses `name`, `name==1.2`, `name>=1,<2`, and uv's `name@1.2` and `name@latest`. Paths, URLs and repositories are
    /// refused.
    pub fn parse_pypi(text: &str) -> Result<Self> {
        let refused = || {
            Error::invalid(format!(
                "{} is not a package of the Python index: only NAME, NAME==VERSION or NAME@VERSION can be a program",
                quoted(text)
            ))
        };
        let end = text.find(['=', '<', '>', '~', '!', '@']).unwrap_or(text.len());
        let (name, rest) = text.split_at(end);
        let (name, extras) = split_pypi_extras(name.trim()).map_err(|_| refused())?;
        let range = match rest.strip_prefix('@').map(str::trim) {
            Some("latest") => String::new(),
            Some(version) if is_exact_pypi_version(version) => format!("=={version}"),
            Some(_) => return Err(refused()),
            None => rest.trim().to_owned(),
        };
        let plain = |c: char| c.is_ascii_alphanumeric() || ".-_+*!<>=~,".contains(c);
        match range.len() <= 100 && range.chars().all(plain) {
            true => Ok(Self {
                registry: PackageRegistry::Pypi,
                name,
                extras,
                range,
            }),
            false => Err(refused()),
        }
    }

    /// The package, if the request names one exact version.
    pub(crate) fn pinned(&self) -> Option<PackageRef> {
        let version = match self.registry {
            PackageRegistry::Npm => self.range.as_str(),
            PackageRegistry::Pypi => self.range.strip_prefix("==")?.trim(),
        };
        let exact = match self.registry {
            PackageRegistry::Npm => is_exact_npm_version(version),
            PackageRegistry::Pypi => is_exact_pypi_version(version),
        };
        exact.then(|| PackageRef {
            registry: self.registry,
            name: self.name.clone(),
            extras: self.extras.clone(),
            version: version.to_owned(),
        })
    }

    /// The range or tag for npm; `latest` when none is given.
    pub(crate) fn npm_range(&self) -> String {
        match self.range.is_empty() {
            true => "latest".into(),
            false => self.range.clone(),
        }
    }

    /// The specifier for pip.
    pub(crate) fn pypi_specifier(&self) -> String {
        self.range.clone()
    }

    /// An id for the progress of looking it up.
    pub(crate) fn placeholder_id(&self) -> ProgramId {
        ProgramId::of(
            &PackageRef {
                registry: self.registry,
                name: self.name.clone(),
                extras: Vec::new(),
                version: "0".into(),
            },
            false,
        )
    }
}

impl fmt::Display for PackageRequest {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self {
            registry,
            name,
            range,
            ..
        } = self;
        let at = if *registry == PackageRegistry::Npm && !range.is_empty() {
            "@"
        } else {
            ""
        };
        write!(f, "{}:{name}{at}{range}", registry.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_versions_ranges_and_tags_are_read_and_everything_else_is_refused() {
        for (text, name, pinned) in [
            ("a", "a", None),
            ("@s/a", "@s/a", None),
            ("@s/a@latest", "@s/a", None),
            ("a@^1.0.0", "a", None),
            ("a@1.2.3", "a", Some("npm:a@1.2.3")),
        ] {
            let request = PackageRequest::parse_npm(text).unwrap();
            assert_eq!(request.name, name);
            assert_eq!(request.pinned().map(|p| p.to_string()).as_deref(), pinned);
        }
        for text in [
            "",
            "./a",
            "git+https://h/a",
            "github:a/b",
            "a@http://h",
            "a@file:../x",
            "--x",
            "a@--x",
            "@s",
        ] {
            assert!(PackageRequest::parse_npm(text).is_err(), "{text}");
        }
        for (text, name, pinned) in [
            ("a", "a", None),
            ("a[x]>=1", "a", None),
            ("a@latest", "a", None),
            ("a@1.2", "a", Some("pypi:a==1.2")),
            ("a==1.2", "a", Some("pypi:a==1.2")),
        ] {
            let request = PackageRequest::parse_pypi(text).unwrap();
            assert_eq!(request.name, name);
            assert_eq!(request.pinned().map(|p| p.to_string()).as_deref(), pinned);
        }
        for text in [
            "",
            "./a",
            "git+https://h/a",
            "a @ https://h/x.whl",
            "-r",
            "a==1 --x",
            "a;x",
        ] {
            assert!(PackageRequest::parse_pypi(text).is_err(), "{text}");
        }
    }
}
