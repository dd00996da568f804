//! Paths in calls and policies: relative to the workspace, or absolute as seen in the sandbox.

use oubliette_protocol::{Error, Result, id::quoted};
use oubliette_sandbox::spec::WORKSPACE;

const MAX_PATH_BYTES: usize = 4_096;

/// A path beneath the workspace, split into its parts. It contains no `..`, no `.`, no empty part and no NUL.
/// Checking this gives clear errors; what keeps a path inside the workspace is how it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct PathInWorkspace(Vec<String>);

impl PathInWorkspace {
    /// Parses a path.
    pub(super) fn parse(path: &str) -> Result<Self> {
        let refuse = |why: &str| Err(Error::invalid(format!("path {}: {why}", quoted(path))));
        if path.is_empty() || path.len() > MAX_PATH_BYTES {
            return refuse("must be 1 to 4096 bytes");
        }
        if path.contains('\0') {
            return refuse("must hold no NUL");
        }
        let inside = match path.strip_prefix('/') {
            None => path,
            Some(_) => match path.strip_prefix(WORKSPACE) {
                Some(rest) if rest.is_empty() || rest.starts_with('/') => rest,
                _ => {
                    let why = format!("{} is outside {WORKSPACE}", quoted(path));
                    return Err(Error::not_allowed(why));
                }
            },
        };
        let parts: Vec<String> = inside
            .split('/')
            .filter(|part| !part.is_empty() && *part != ".")
            .map(str::to_owned)
            .collect();
        if parts.iter().any(|part| part == "..") {
            return Err(Error::not_allowed(format!(
                "path {} holds .., which is not followed",
                quoted(path)
            )));
        }
        Ok(Self(parts))
    }

    pub(super) fn as_slice(&self) -> &[String] {
        &self.0
    }

    /// The absolute path as the sandbox sees it.
    pub(super) fn sandbox_path(&self) -> String {
        self.0
            .iter()
            .fold(WORKSPACE.to_owned(), |path, part| path + "/" + part)
    }
}

/// The paths a policy allows.
#[derive(Debug)]
pub(super) struct AllowedPaths {
    /// Shortest first.
    paths: Vec<PathInWorkspace>,
}

impl AllowedPaths {
    /// Parses a policy's paths. One outside the workspace is ignored: it allows nothing.
    pub(super) fn new(paths: &[String]) -> Self {
        let mut paths: Vec<PathInWorkspace> = paths
            .iter()
            .filter_map(|path| PathInWorkspace::parse(path).ok())
            .collect();
        paths.sort_by_key(|parts| parts.0.len());
        Self { paths }
    }

    /// The allowed paths that equal a path or contain it, compared by whole parts; shortest first.
    pub(super) fn covering<'a>(&'a self, asked: &'a PathInWorkspace) -> Result<Vec<&'a [String]>> {
        let above = self
            .paths
            .iter()
            .filter(|allowed| asked.0.starts_with(&allowed.0));
        let above: Vec<&[String]> = above.map(PathInWorkspace::as_slice).collect();
        match above.is_empty() {
            false => Ok(above),
            true => {
                let why = format!("{} is not beneath a path the policy allows", asked.sandbox_path());
                Err(Error::not_allowed(why))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use oubliette_protocol::ErrorCode;
    use proptest::prelude::*;

    #[test]
    fn paths_are_relative_or_as_seen_in_the_sandbox() {
        for (path, inside) in [
            ("a/b", "/workspace/a/b"),
            ("./a//b/", "/workspace/a/b"),
            ("/workspace/a/./b", "/workspace/a/b"),
            ("/workspace", "/workspace"),
            (".", "/workspace"),
        ] {
            assert_eq!(
                PathInWorkspace::parse(path).unwrap().sandbox_path(),
                inside,
                "{path}"
            );
        }
        for (path, code) in [
            ("", ErrorCode::InvalidArgument),
            ("a\0b", ErrorCode::InvalidArgument),
            ("/etc/passwd", ErrorCode::NotAllowed),
            ("/workspacex/a", ErrorCode::NotAllowed),
            ("//workspace/a", ErrorCode::NotAllowed),
            ("a/../b", ErrorCode::NotAllowed),
            ("..", ErrorCode::NotAllowed),
            ("/workspace/../etc", ErrorCode::NotAllowed),
        ] {
            assert_eq!(PathInWorkspace::parse(path).unwrap_err().code, code, "{path}");
        }
        assert!(PathInWorkspace::parse(&"a/".repeat(5_000)).is_err());
    }

    #[test]
    fn an_allowed_path_is_a_prefix_by_whole_parts() {
        let allowed = AllowedPaths::new(&["notes/".into(), "/workspace/out/x".into(), "/etc".into()]);
        let ask = |path: &str| allowed.covering(&PathInWorkspace::parse(path).unwrap()).is_ok();
        assert!(ask("notes/a") && ask("notes") && ask("/workspace/notes/a/b") && ask("out/x/y"));
        assert!(!ask("notesx/a") && !ask("out") && !ask("etc/passwd") && !ask("."));
        assert!(
            AllowedPaths::new(&[".".into()])
                .covering(&PathInWorkspace::parse("any/thing").unwrap())
                .is_ok()
        );
        assert!(
            AllowedPaths::new(&[])
                .covering(&PathInWorkspace::parse("a").unwrap())
                .is_err()
        );
    }

    proptest! {
        #[test]
        fn a_parsed_path_never_contains_dot_dot(path in "[a./\\x00]{0,30}") {
            if let Ok(parts) = PathInWorkspace::parse(&path) {
                prop_assert!(parts.as_slice().iter().all(|p| p != ".." && p != "." && !p.is_empty() && !p.contains('/')));
            }
        }
    }
}
