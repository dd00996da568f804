//! What is where inside.

use std::path::{Path, PathBuf};

use crate::spec::{CLIENT, HOME, Spec, WORKSPACE};

/// How a spec's inside paths look to the program.
///
/// In a mount namespace they are what the spec says. Without one (levels `landlock` and `none`) there is no
/// `/workspace`: the program sees the host's own paths, and [`Paths::see`] tells which.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Paths {
    /// Inside path, host path; longest inside path first.
    moved: Vec<(PathBuf, PathBuf)>,
}

impl Paths {
    /// Everything is where the spec says.
    pub fn as_specified() -> Self {
        Self::default()
    }

    /// Everything is where it is on the host.
    pub(crate) fn of_host(spec: &Spec, client: &Path) -> Self {
        let mut moved: Vec<(PathBuf, PathBuf)> = Vec::new();
        moved.extend(
            spec.workspace
                .iter()
                .map(|host| (PathBuf::from(WORKSPACE), host.clone())),
        );
        moved.extend(spec.home.iter().map(|host| (PathBuf::from(HOME), host.clone())));
        moved.extend(
            spec.mounts
                .iter()
                .map(|mount| (mount.inside.clone(), mount.host.clone())),
        );
        moved.extend(
            spec.sockets
                .iter()
                .map(|socket| (socket.inside.clone(), socket.host.clone())),
        );
        if !moved.iter().any(|(inside, _)| inside == Path::new(CLIENT)) {
            moved.push((PathBuf::from(CLIENT), client.to_path_buf()));
        }
        moved.retain(|(inside, host)| inside != host);
        moved.sort_by_key(|(inside, _)| std::cmp::Reverse(inside.components().count()));
        Self { moved }
    }

    /// The path under which the program finds what the spec calls `inside`.
    pub fn see(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        self.moved
            .iter()
            .find_map(|(from, to)| {
                let rest = inside.strip_prefix(from).ok()?;
                // Joining an empty rest would add a slash, which a file does not bear.
                Some(if rest.as_os_str().is_empty() {
                    to.clone()
                } else {
                    to.join(rest)
                })
            })
            .unwrap_or_else(|| inside.to_path_buf())
    }

    /// A word of argv or environment: if it is an inside path, or a `:` list with such paths, as the
    /// program sees it; else unchanged.
    pub(crate) fn see_in(&self, word: &str) -> String {
        if self.moved.is_empty() || !word.contains('/') {
            return word.to_owned();
        }
        let seen: Vec<String> = word
            .split(':')
            .map(|part| {
                let path = Path::new(part);
                let below = self.moved.iter().any(|(from, _)| path.starts_with(from));
                if below {
                    self.see(path).to_string_lossy().into_owned()
                } else {
                    part.to_owned()
                }
            })
            .collect();
        seen.join(":")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::spec::{Mount, Socket};

    fn paths() -> Paths {
        let mut spec = Spec::new("t", ["true"]);
        spec.workspace = Some("/srv/w".into());
        spec.mounts = vec![Mount::read_only("/srv/deep", "/workspace/deep")];
        spec.sockets = vec![Socket::new("/run/s/relay.sock", "/mcp/relay.sock")];
        Paths::of_host(&spec, Path::new("/usr/lib/oubliette-client"))
    }

    #[test]
    fn the_deepest_mount_wins() {
        assert_eq!(paths().see("/workspace"), Path::new("/srv/w"));
        assert_eq!(paths().see("/workspace/a/b"), Path::new("/srv/w/a/b"));
        assert_eq!(paths().see("/workspace/deep/b"), Path::new("/srv/deep/b"));
        assert_eq!(paths().see("/workspacex"), Path::new("/workspacex"));
        assert_eq!(paths().see(CLIENT), Path::new("/usr/lib/oubliette-client"));
    }

    #[test]
    fn words_are_changed_only_where_they_are_paths() {
        assert_eq!(paths().see_in("/mcp/relay.sock"), "/run/s/relay.sock");
        assert_eq!(paths().see_in("/workspace/bin:/usr/bin"), "/srv/w/bin:/usr/bin");
        assert_eq!(
            paths().see_in("http://127.0.0.1:1/workspace"),
            "http://127.0.0.1:1/workspace"
        );
        assert_eq!(paths().see_in("look in /workspace"), "look in /workspace");
        assert_eq!(Paths::as_specified().see_in("/workspace"), "/workspace");
    }
}
