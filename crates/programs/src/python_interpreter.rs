//! The host's Python interpreters: which one a package needs, and which of those that are there will do.

use std::{path::Path, time::Duration};

use oubliette_protocol::{Error, program::PackageRef};

use crate::{
    sandboxed::StepOutput,
    version_range::{InterpreterVersion, python_specifier_allows},
};

/// The host's directories in which interpreters are looked for. Every sandbox sees them.
pub(crate) const INTERPRETER_DIRS: [&str; 2] = ["/usr/local/bin", "/usr/bin"];
/// What every sandbox sees of the host's files: an interpreter and its library have to be in it.
pub(crate) const SEEN_DIR: &str = "/usr";
/// How long an interpreter may take to say its version.
const VERSION_TIMEOUT: Duration = Duration::from_secs(5);

/// The Python that pip says the package needs, if that is why it failed.
pub(crate) fn wanted_python(version: &str, output: &StepOutput) -> Option<String> {
    if output.success() {
        return None;
    }
    // "requires a different Python: 3.11.2 not in '>=3.12'", or before a list of versions "Requires-Python >=3.12".
    let text = &output.stderr;
    let exact = text
        .split("requires a different Python: ")
        .nth(1)
        .and_then(|rest| rest.split('\'').nth(1));
    let ignored = || {
        let rest = text
            .split("Ignored the following versions that require a different python version: ")
            .nth(1)?;
        let line = rest.lines().next()?;
        // The package's own version, else one of a package it needs.
        let own = format!("{version} Requires-Python ");
        let after = line.split(own.as_str()).nth(1);
        after
            .or_else(|| line.split("Requires-Python ").nth(1))?
            .split(';')
            .next()
    };
    let wanted = exact.or_else(ignored)?.trim();
    let plain = |c: char| c.is_ascii_alphanumeric() || "<>=!~.,* ".contains(c);
    (wanted.len() <= 100 && wanted.chars().all(plain)).then(|| wanted.to_owned())
}

/// The newest interpreter in these folders, `python3.N`, that satisfies a specifier and whose file is below `seen`.
///
/// The path is that of the file itself, not of a link to it: an environment made with a link looks for Python's library
/// beside the link.
pub(crate) async fn find_interpreter(dirs: &[&str], seen: &str, specifier: &str) -> Option<String> {
    let seen = Path::new(seen).canonicalize().ok()?;
    let mut found: Vec<(u64, String)> = Vec::new();
    for dir in dirs {
        for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
            let name = entry.file_name();
            let minor = name.to_str().and_then(|name| name.strip_prefix("python3."));
            if let Some(minor) = minor.and_then(|minor| minor.parse().ok()) {
                found.push((minor, format!("{dir}/python3.{minor}")));
            }
        }
    }
    found.sort();
    for (minor, path) in found.into_iter().rev() {
        let file = Path::new(&path).canonicalize().ok();
        let Some(file) = file.filter(|file| file.starts_with(&seen)) else {
            continue;
        };
        // Its name does not say which 3.N.x it is.
        let named = InterpreterVersion {
            major: 3,
            minor,
            patch: 0,
        };
        let version = interpreter_version(&path).await.unwrap_or(named);
        if python_specifier_allows(specifier, version) {
            return file.to_str().map(str::to_owned);
        }
    }
    None
}

/// The version that an interpreter says it is; none if it says nothing within a few seconds.
async fn interpreter_version(path: &str) -> Option<InterpreterVersion> {
    let said = tokio::process::Command::new(path)
        .arg("--version")
        .env_clear()
        .stdin(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .kill_on_drop(true)
        .output();
    let said = tokio::time::timeout(VERSION_TIMEOUT, said).await.ok()?.ok()?;
    let said = String::from_utf8_lossy(&said.stdout);
    said.trim().strip_prefix("Python ")?.parse().ok()
}

/// The error for a package that no interpreter of the host can run. The registries have no package with a whole
/// interpreter for Linux: those that look like one fetch it from elsewhere when they are installed.
pub(crate) fn no_interpreter(package: &PackageRef, wanted: &str) -> Error {
    let oldest = (0..100).find(|minor| {
        let version = InterpreterVersion {
            major: 3,
            minor: *minor,
            patch: 99,
        };
        python_specifier_allows(wanted, version)
    });
    let python = oldest.map_or("3.N".to_owned(), |minor| format!("3.{minor}"));
    Error::unavailable(format!(
        "{package} needs Python {wanted}, which the server does not have, and package registries have no interpreter: \
         install one as python{python} in /usr/local/bin or /usr/bin, with its files below /usr, where sandboxes see them. \
         Your distribution may have it; `UV_PYTHON_INSTALL_DIR=/usr/local/lib/uv-python UV_PYTHON_BIN_DIR=/usr/local/bin \
         uv python install {python}` installs it too"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn an_interpreter_is_judged_by_the_version_it_has_not_by_its_name() {
        use std::os::unix::fs::PermissionsExt as _;
        let dir = tempfile::tempdir().unwrap();
        let put = |name: &str, script: &str| {
            let path = dir.path().join(name);
            std::fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
            std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o755)).unwrap();
            path.to_string_lossy().into_owned()
        };
        let older = put("python3.11", "echo Python 3.11.2");
        let newer = put("python3.12", "echo Python 3.12.8");
        put("python3.13", "exit 1");
        let dirs = [dir.path().to_str().unwrap()];
        for (wanted, expected) in [
            (">=3.12.4,<3.13", Some(&newer)),
            (">=3.11,<3.12.4", Some(&older)),
            (">=3.12.9,<3.13", None),
            (">=3.14", None),
        ] {
            let found = find_interpreter(&dirs, dirs[0], wanted).await;
            assert_eq!(found.as_ref(), expected, "{wanted}");
        }
    }

    #[tokio::test]
    async fn of_a_linked_interpreter_the_file_is_used_and_one_that_no_sandbox_sees_is_not() {
        use std::os::unix::fs::{PermissionsExt as _, symlink};
        let root = tempfile::tempdir().unwrap();
        let root = root.path().canonicalize().unwrap();
        let install = |dir: &str, version: &str| {
            std::fs::create_dir_all(root.join(dir)).unwrap();
            let file = root.join(dir).join("python");
            std::fs::write(&file, format!("#!/bin/sh\necho Python {version}\n")).unwrap();
            std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o755)).unwrap();
            file
        };
        let seen = install("usr/lib/python-3.12", "3.12.1");
        let unseen = install("home/python-3.13", "3.13.0");
        let bin = root.join("usr/bin");
        std::fs::create_dir_all(&bin).unwrap();
        symlink(&seen, bin.join("python3.12")).unwrap();
        symlink(&unseen, bin.join("python3.13")).unwrap();
        symlink(root.join("gone"), bin.join("python3.14")).unwrap();
        let (dirs, usr) = ([bin.to_str().unwrap()], root.join("usr"));
        let found = find_interpreter(&dirs, usr.to_str().unwrap(), ">=3.12").await;
        assert_eq!(found.as_deref(), seen.to_str());
    }

    #[test]
    fn a_python_that_is_missing_is_named_with_how_to_install_it() {
        let package: PackageRef = "pypi:tool==1.0".parse().unwrap();
        for (wanted, python) in [
            (">=3.14", "3.14"),
            (">=3.12.4,<4", "3.12"),
            (">3.13,!=3.14.*", "3.13"),
        ] {
            let text = no_interpreter(&package, wanted).message;
            assert!(text.contains(&format!("uv python install {python}`")), "{text}");
            assert!(
                text.contains(wanted) && text.contains(&format!("python{python} in")),
                "{text}"
            );
        }
        let impossible = no_interpreter(&package, ">=4").message;
        assert!(impossible.contains("python3.N"), "{impossible}");
    }
}
