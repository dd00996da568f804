//! Which path in the home is what.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, ProjectId, Result, SessionId, WorkspaceId};

use crate::disk;

/// The longest path a Unix socket can have.
pub const MAX_SOCKET_PATH: usize = 107;
/// The longest socket name put into a session's socket directory.
const SOCKET_NAME: &str = "relay.sock";

/// The home directory. Holding one does not mean that it exists: see [`Home::create`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Home {
    root: PathBuf,
    /// Where sockets go: `root/run`, or a private directory elsewhere when the home is too deep.
    sockets: PathBuf,
}

impl Home {
    /// `--home` > `OUBLIETTE_HOME` > `~/.oubliette`.
    pub fn locate(flag: Option<PathBuf>, env: impl Fn(&str) -> Option<OsString>) -> Result<Self> {
        let set = |name: &str| env(name).filter(|value| !value.is_empty());
        let root = match (flag, set("OUBLIETTE_HOME"), set("HOME")) {
            (Some(flag), _, _) if !flag.as_os_str().is_empty() => flag,
            (Some(_), _, _) => return Err(Error::invalid("--home is empty: name a directory")),
            (None, Some(home), _) => home.into(),
            (None, None, Some(user)) => Path::new(&user).join(".oubliette"),
            (None, None, None) => {
                return Err(Error::invalid(
                    "no home directory: give --home DIR or set OUBLIETTE_HOME (HOME is not set either)",
                ));
            }
        };
        Self::with_runtime(root, set("XDG_RUNTIME_DIR").map(PathBuf::from))
    }

    /// A home at a known place.
    pub fn at(root: impl Into<PathBuf>) -> Result<Self> {
        let runtime = std::env::var_os("XDG_RUNTIME_DIR")
            .filter(|v| !v.is_empty())
            .map(PathBuf::from);
        Self::with_runtime(root.into(), runtime)
    }

    fn with_runtime(root: PathBuf, runtime: Option<PathBuf>) -> Result<Self> {
        let root = std::path::absolute(&root)
            .map_err(|e| Error::invalid(format!("{} cannot be a home: {e}", root.display())))?;
        let own = root.join("run");
        if fits(&own) {
            return Ok(Self { root, sockets: own });
        }
        // Named after the home, so that every run of it finds the same sockets and no other home does.
        let name = format!("oubliette-{:016x}", fnv1a(root.as_os_str().as_bytes()));
        let elsewhere = runtime.filter(|dir| dir.is_absolute()).map(|dir| dir.join(&name));
        let sockets = elsewhere
            .filter(|dir| fits(dir))
            .unwrap_or_else(|| PathBuf::from(format!("/tmp/{name}-{}", rustix::process::geteuid().as_raw())));
        Ok(Self { root, sockets })
    }

    /// Makes what is missing of it, for its owner alone.
    pub fn create(&self) -> Result<()> {
        disk::private_dir(&self.root)?;
        for dir in [
            self.agents_dir(),
            self.tools_dir(),
            self.projects_dir(),
            self.sessions_dir(),
        ] {
            disk::private_dir(&dir)?;
        }
        disk::private_dir(&self.run_dir())?;
        disk::owned_dir(&self.run_dir())?;
        disk::private_dir(&self.sockets)?;
        disk::owned_dir(&self.sockets)
    }

    /// The home itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// `oubliette.toml`.
    pub fn config_path(&self) -> PathBuf {
        self.root.join("oubliette.toml")
    }

    /// The database.
    pub fn database_path(&self) -> PathBuf {
        self.root.join("oubliette.db")
    }

    /// The first admin token, as text, mode 0600.
    pub fn admin_token_path(&self) -> PathBuf {
        self.root.join("admin.token")
    }

    /// `agents/<slug>/agent.json` live here.
    pub fn agents_dir(&self) -> PathBuf {
        self.root.join("agents")
    }

    /// `tools/<id>/tool.json` live here.
    pub fn tools_dir(&self) -> PathBuf {
        self.root.join("tools")
    }

    /// Every project's folder.
    pub fn projects_dir(&self) -> PathBuf {
        self.root.join("projects")
    }

    /// One project's folder.
    pub fn project_dir(&self, project: &ProjectId) -> PathBuf {
        self.projects_dir().join(project.as_str())
    }

    /// One workspace: what a sandbox sees as `/workspace`.
    pub fn workspace_dir(&self, project: &ProjectId, workspace: &WorkspaceId) -> PathBuf {
        self.project_dir(project)
            .join("workspaces")
            .join(workspace.as_str())
    }

    /// Every session's folder.
    pub fn sessions_dir(&self) -> PathBuf {
        self.root.join("sessions")
    }

    /// What belongs to one session alone, such as its agent's private home.
    pub fn session_dir(&self, session: &SessionId) -> PathBuf {
        self.sessions_dir().join(session.as_str())
    }

    /// What does not outlive the server.
    pub fn run_dir(&self) -> PathBuf {
        self.root.join("run")
    }

    /// Where the sockets are: the run directory unless the home is too deep for a socket's path.
    pub fn sockets_dir(&self) -> &Path {
        &self.sockets
    }

    /// Where commands reach the running server.
    pub fn control_socket(&self) -> PathBuf {
        self.sockets.join("control.sock")
    }

    /// One session's socket directory; `<dir>/relay.sock` is short enough to be a socket.
    pub fn socket_dir(&self, session: &SessionId) -> PathBuf {
        self.sockets.join(session.as_str())
    }

    /// Makes a session's socket directory, for its owner alone.
    pub fn create_socket_dir(&self, session: &SessionId) -> Result<PathBuf> {
        let dir = self.socket_dir(session);
        disk::private_dir(&dir)?;
        disk::owned_dir(&dir)?;
        Ok(dir)
    }
}

/// Whether sockets of sessions below this directory have short enough paths.
fn fits(sockets: &Path) -> bool {
    const SESSION_ID: usize = "gogol_".len() + 26;
    sockets.as_os_str().len() + 1 + SESSION_ID + 1 + SOCKET_NAME.len() <= MAX_SOCKET_PATH
}

/// A hash that is the same in every run and every version.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, b| {
        (hash ^ u64::from(*b)).wrapping_mul(0x0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use oubliette_protocol::ErrorCode;

    fn env<'a>(vars: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        |name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into())
    }

    #[test]
    fn the_flag_goes_before_the_variable_before_the_users_home() {
        let vars = [("OUBLIETTE_HOME", "/from/env"), ("HOME", "/users/me")];
        let at = |flag: Option<&str>, vars: &[(&str, &str)]| {
            Home::locate(flag.map(PathBuf::from), env(vars))
                .unwrap()
                .root()
                .to_path_buf()
        };
        assert_eq!(at(Some("/from/flag"), &vars), Path::new("/from/flag"));
        assert_eq!(at(None, &vars), Path::new("/from/env"));
        assert_eq!(at(None, &vars[1..]), Path::new("/users/me/.oubliette"));
        assert_eq!(
            at(None, &[("OUBLIETTE_HOME", ""), vars[1]]),
            Path::new("/users/me/.oubliette")
        );
        let error = Home::locate(None, env(&[])).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.contains("--home"), "{error}");
    }

    #[test]
    fn a_relative_home_becomes_absolute() {
        assert!(
            Home::locate(Some("some/home".into()), env(&[]))
                .unwrap()
                .root()
                .is_absolute()
        );
    }

    #[test]
    fn sockets_stay_short_however_deep_the_home_is() {
        let session = SessionId::generate();
        let runtime = format!("/run/{}", "r".repeat(90));
        for depth in [1, 20, 58, 59, 60, 61, 200, 2000] {
            for vars in [
                vec![],
                vec![("XDG_RUNTIME_DIR", "/run/user/1000")],
                vec![("XDG_RUNTIME_DIR", &*runtime)],
            ] {
                let home = Home::locate(Some(format!("/{}", "h".repeat(depth)).into()), env(&vars)).unwrap();
                let socket = home.socket_dir(&session).join(SOCKET_NAME);
                assert!(
                    socket.as_os_str().len() <= MAX_SOCKET_PATH,
                    "{}",
                    socket.display()
                );
                assert!(home.control_socket().as_os_str().len() <= MAX_SOCKET_PATH);
            }
        }
        let near = Home::locate(Some("/h".into()), env(&[])).unwrap();
        assert!(near.socket_dir(&session).starts_with("/h/run"));
    }

    #[test]
    fn two_deep_homes_have_different_sockets() {
        let deep = |name: &str| Home::at(format!("/{}/{name}", "d".repeat(100))).unwrap();
        assert_ne!(deep("a").control_socket(), deep("b").control_socket());
        assert_eq!(deep("a").control_socket(), deep("a").control_socket());
    }
}
