//! Where a program in a sandbox sees the paths of its spec.

use std::path::{Path, PathBuf};

use crate::spec::{CLIENT, HOME, SandboxSpec, WORKSPACE};

/// Maps a spec's inside paths to the paths the program sees.
///
/// In a mount namespace they are the same. Without one (levels `landlock` and `none`) there is no `/workspace`:
/// the program sees the host's paths, and [`SandboxPaths::resolve`] returns them.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct SandboxPaths {
    /// Pairs of inside path and host path that differ; deepest inside path first.
    host_paths: Vec<(PathBuf, PathBuf)>,
}

impl SandboxPaths {
    /// The identity mapping, for a mount namespace.
    pub fn as_specified() -> Self {
        Self::default()
    }

    /// The mapping to host paths, for a sandbox without a mount namespace.
    pub(crate) fn of_host(spec: &SandboxSpec, client: &Path) -> Self {
        let mut host_paths: Vec<(PathBuf, PathBuf)> = Vec::new();
        host_paths.extend(
            spec.workspace
                .iter()
                .map(|host| (PathBuf::from(WORKSPACE), host.clone())),
        );
        host_paths.extend(spec.home.iter().map(|host| (PathBuf::from(HOME), host.clone())));
        host_paths.extend(
            spec.mounts
                .iter()
                .map(|mount| (mount.inside.clone(), mount.host.clone())),
        );
        host_paths.extend(
            spec.sockets
                .iter()
                .map(|socket| (socket.inside.clone(), socket.host.clone())),
        );
        if !host_paths.iter().any(|(inside, _)| inside == Path::new(CLIENT)) {
            host_paths.push((PathBuf::from(CLIENT), client.to_path_buf()));
        }
        host_paths.retain(|(inside, host)| inside != host);
        host_paths.sort_by_key(|(inside, _)| std::cmp::Reverse(inside.components().count()));
        Self { host_paths }
    }

    /// The path under which the program sees what the spec calls `inside`.
    pub fn resolve(&self, inside: impl AsRef<Path>) -> PathBuf {
        let inside = inside.as_ref();
        self.host_paths
            .iter()
            .find_map(|(from, to)| {
                let rest = inside.strip_prefix(from).ok()?;
                // Joining an empty rest would add a trailing slash, which is an error for a file.
                Some(if rest.as_os_str().is_empty() {
                    to.clone()
                } else {
                    to.join(rest)
                })
            })
            .unwrap_or_else(|| inside.to_path_buf())
    }

    /// Rewrites an argument or environment value: inside paths, also in a `:`-separated list, become the paths
    /// the program sees; everything else is unchanged.
    pub(crate) fn rewrite_word(&self, word: &str) -> String {
        if self.host_paths.is_empty() || !word.contains('/') {
            return word.to_owned();
        }
        let seen: Vec<String> = word
            .split(':')
            .map(|part| {
                let path = Path::new(part);
                let below = self.host_paths.iter().any(|(from, _)| path.starts_with(from));
                if below {
                    self.resolve(path).to_string_lossy().into_owned()
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
    use crate::spec::{BindMount, SocketMount};

    fn paths() -> SandboxPaths {
        let mut spec = SandboxSpec::new("t", ["true"]);
        spec.workspace = Some("/srv/w".into());
        spec.mounts = vec![BindMount::read_only("/srv/deep", "/workspace/deep")];
        spec.sockets = vec![SocketMount::new("/run/s/relay.sock", "/mcp/relay.sock")];
        SandboxPaths::of_host(&spec, Path::new("/usr/lib/oubliette-client"))
    }

    #[test]
    fn the_deepest_mount_wins() {
        assert_eq!(paths().resolve("/workspace"), Path::new("/srv/w"));
        assert_eq!(paths().resolve("/workspace/a/b"), Path::new("/srv/w/a/b"));
        assert_eq!(paths().resolve("/workspace/deep/b"), Path::new("/srv/deep/b"));
        assert_eq!(paths().resolve("/workspacex"), Path::new("/workspacex"));
        assert_eq!(paths().resolve(CLIENT), Path::new("/usr/lib/oubliette-client"));
    }

    #[test]
    fn words_are_rewritten_only_where_they_are_paths() {
        assert_eq!(paths().rewrite_word("/mcp/relay.sock"), "/run/s/relay.sock");
        assert_eq!(
            paths().rewrite_word("/workspace/bin:/usr/bin"),
            "/srv/w/bin:/usr/bin"
        );
        assert_eq!(
            paths().rewrite_word("http://127.0.0.1:1/workspace"),
            "http://127.0.0.1:1/workspace"
        );
        assert_eq!(paths().rewrite_word("look in /workspace"), "look in /workspace");
        assert_eq!(
            SandboxPaths::as_specified().rewrite_word("/workspace"),
            "/workspace"
        );
    }
}
