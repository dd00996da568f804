//! A path as a call or a policy writes it: relative to the workspace, or absolute as seen in the sandbox.

use oubliette_protocol::{Error, Result, id::quoted};
use oubliette_sandbox::spec::WORKSPACE;

const LONGEST: usize = 4_096;

/// A path beneath the workspace, in its parts. It holds no `..`, no `.`, no empty part and no NUL. That is
/// for clear words to whoever asks: what keeps a path inside is how it is opened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Parts(Vec<String>);

impl Parts {
    /// Reads a path.
    pub(super) fn read(path: &str) -> Result<Self> {
        let refuse = |why: &str| Err(Error::invalid(format!("path {}: {why}", quoted(path))));
        if path.is_empty() || path.len() > LONGEST {
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

    /// As the sandbox sees it.
    pub(super) fn inside(&self) -> String {
        self.0
            .iter()
            .fold(WORKSPACE.to_owned(), |path, part| path + "/" + part)
    }
}

/// The paths a policy opens.
#[derive(Debug)]
pub(super) struct Allowed {
    /// Widest first.
    paths: Vec<Parts>,
}

impl Allowed {
    /// Reads a policy. A path outside the workspace opens nothing.
    pub(super) fn new(paths: &[String]) -> Self {
        let mut paths: Vec<Parts> = paths.iter().filter_map(|path| Parts::read(path).ok()).collect();
        paths.sort_by_key(|parts| parts.0.len());
        Self { paths }
    }

    /// The allowed paths that a path is beneath, or is, by whole parts; widest first.
    pub(super) fn above<'a>(&'a self, asked: &'a Parts) -> Result<Vec<&'a [String]>> {
        let above = self
            .paths
            .iter()
            .filter(|allowed| asked.0.starts_with(&allowed.0));
        let above: Vec<&[String]> = above.map(Parts::as_slice).collect();
        match above.is_empty() {
            false => Ok(above),
            true => {
                let why = format!("{} is not beneath a path the policy allows", asked.inside());
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
            assert_eq!(Parts::read(path).unwrap().inside(), inside, "{path}");
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
            assert_eq!(Parts::read(path).unwrap_err().code, code, "{path}");
        }
        assert!(Parts::read(&"a/".repeat(5_000)).is_err());
    }

    #[test]
    fn an_allowed_path_is_a_prefix_by_whole_parts() {
        let allowed = Allowed::new(&["notes/".into(), "/workspace/out/x".into(), "/etc".into()]);
        let ask = |path: &str| allowed.above(&Parts::read(path).unwrap()).is_ok();
        assert!(ask("notes/a") && ask("notes") && ask("/workspace/notes/a/b") && ask("out/x/y"));
        assert!(!ask("notesx/a") && !ask("out") && !ask("etc/passwd") && !ask("."));
        assert!(
            Allowed::new(&[".".into()])
                .above(&Parts::read("any/thing").unwrap())
                .is_ok()
        );
        assert!(Allowed::new(&[]).above(&Parts::read("a").unwrap()).is_err());
    }

    proptest! {
        #[test]
        fn no_path_keeps_a_way_up(path in "[a./\\x00]{0,30}") {
            if let Ok(parts) = Parts::read(&path) {
                prop_assert!(parts.as_slice().iter().all(|p| p != ".." && p != "." && !p.is_empty() && !p.contains('/')));
            }
        }
    }
}
