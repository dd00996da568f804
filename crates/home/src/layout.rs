//! The paths of all files in the home directory.

use std::{
    ffi::OsString,
    os::unix::ffi::OsStrExt,
    path::{Path, PathBuf},
};

use oubliette_protocol::{Error, ProjectId, Result, SessionId, WorkspaceId};

use crate::{LibraryDir, safe_fs};

/// Maximum length of a Unix socket's path in bytes (`sun_path` without its NUL).
const MAX_SOCKET_PATH: usize = 107;
/// The longest socket name used in a session's socket directory.
const SOCKET_NAME: &str = "relay.sock";

/// The home directory's paths. The directory need not exist: see [`HomeDir::create`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct HomeDir {
    root: PathBuf,
    /// Directory of sockets: `root/run`, or a private directory elsewhere when that path is too long for them.
    sockets: PathBuf,
    /// Directory of projects, if it is not in the home.
    projects: Option<PathBuf>,
}

impl HomeDir {
    /// Finds the home: the flag `--home`, else `OUBLIETTE_HOME`, else `~/.oubliette`.
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

    /// The home at this path.
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
        if sockets_fit(&own) {
            return Ok(Self {
                root,
                sockets: own,
                projects: None,
            });
        }
        // Named after a hash of the home's path, so that every process of this home uses the same directory
        // and no other home does.
        let name = format!(
            "oubliette-{:016x}",
            oubliette_os::fnv1a(root.as_os_str().as_bytes())
        );
        let elsewhere = runtime.filter(|dir| dir.is_absolute()).map(|dir| dir.join(&name));
        let sockets = elsewhere
            .filter(|dir| sockets_fit(dir))
            .unwrap_or_else(|| PathBuf::from(format!("/tmp/{name}-{}", rustix::process::geteuid().as_raw())));
        Ok(Self {
            root,
            sockets,
            projects: None,
        })
    }

    /// The same home with the directory of projects, which has their workspaces, elsewhere: `[workspaces] dir`.
    #[must_use]
    pub fn with_projects_dir(mut self, dir: Option<PathBuf>) -> Self {
        self.projects = dir;
        self
    }

    /// Creates missing directories with mode 0700, and checks that the socket directories belong to this user.
    pub fn create(&self) -> Result<()> {
        safe_fs::create_private_dir(&self.root)?;
        for dir in [
            self.agents_dir(),
            self.tools_dir(),
            self.projects_dir(),
            self.sessions_dir(),
        ] {
            safe_fs::create_private_dir(&dir)?;
        }
        safe_fs::create_private_dir(&self.run_dir())?;
        safe_fs::ensure_owned_dir(&self.run_dir())?;
        safe_fs::create_private_dir(&self.sockets)?;
        safe_fs::ensure_owned_dir(&self.sockets)
    }

    /// The home directory itself.
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The server's configuration, `oubliette.toml`.
    pub fn config_path(&self) -> PathBuf {
        self.root.join("oubliette.toml")
    }

    /// The database file.
    pub fn database_path(&self) -> PathBuf {
        self.root.join("oubliette.db")
    }

    /// The first admin token, as text, mode 0600.
    pub fn admin_token_path(&self) -> PathBuf {
        self.root.join("admin.token")
    }

    /// Directory of agent definitions, `<slug>/agent.json`.
    pub fn agents_dir(&self) -> PathBuf {
        self.root.join("agents")
    }

    /// Directory of catalog entries, `<id>/tool.json`.
    pub fn tools_dir(&self) -> PathBuf {
        self.root.join("tools")
    }

    /// The copy of the definitions that a database holds, `library/{agents,tools}`. Only the server writes there.
    pub fn library_copy(&self) -> LibraryDir {
        LibraryDir::at(self.root.join("library"))
    }

    /// Directory of installed programs, `<program_id>/`.
    pub fn programs_dir(&self) -> PathBuf {
        self.root.join("programs")
    }

    /// Directory of the caches of a project's tool servers, `<catalog id>/`.
    pub fn caches_dir(&self, project: &ProjectId) -> PathBuf {
        self.project_dir(project).join("caches")
    }

    /// Directory of all projects.
    pub fn projects_dir(&self) -> PathBuf {
        match &self.projects {
            Some(dir) => dir.clone(),
            None => self.root.join("projects"),
        }
    }

    /// Directory of one project.
    pub fn project_dir(&self, project: &ProjectId) -> PathBuf {
        self.projects_dir().join(project.as_str())
    }

    /// Directory of one workspace, which a sandbox sees as `/workspace`.
    pub fn workspace_dir(&self, project: &ProjectId, workspace: &WorkspaceId) -> PathBuf {
        self.project_dir(project)
            .join("workspaces")
            .join(workspace.as_str())
    }

    /// Directory in which files are put together before they are moved into one of the project's workspaces. On the
    /// same file system as they are, and out of an agent's reach.
    pub fn uploads_dir(&self, project: &ProjectId) -> PathBuf {
        self.project_dir(project).join("uploads")
    }

    /// Directory of all sessions.
    pub fn sessions_dir(&self) -> PathBuf {
        self.root.join("sessions")
    }

    /// Directory of one session's private files, such as its agent's home.
    pub fn session_dir(&self, session: &SessionId) -> PathBuf {
        self.sessions_dir().join(session.as_str())
    }

    /// Directory of files that are useful only while the server runs.
    pub fn run_dir(&self) -> PathBuf {
        self.root.join("run")
    }

    /// Directory of sockets: the run directory, unless its path is too long for a socket.
    pub fn sockets_dir(&self) -> &Path {
        &self.sockets
    }

    /// The socket on which the running server takes commands.
    pub fn control_socket(&self) -> PathBuf {
        self.sockets.join("control.sock")
    }

    /// The secret that a client of the control socket has to send, made anew at every start. Always in the home itself,
    /// which no sandbox can read, also when the sockets are elsewhere.
    pub fn control_secret_path(&self) -> PathBuf {
        self.run_dir().join("control.secret")
    }

    /// Directory of one session's sockets; `<dir>/relay.sock` is short enough for a socket path.
    pub fn socket_dir(&self, session: &SessionId) -> PathBuf {
        self.sockets.join(session.as_str())
    }

    /// Creates a session's socket directory with mode 0700.
    pub fn create_socket_dir(&self, session: &SessionId) -> Result<PathBuf> {
        let dir = self.socket_dir(session);
        safe_fs::create_private_dir(&dir)?;
        safe_fs::ensure_owned_dir(&dir)?;
        Ok(dir)
    }
}

/// Whether the sockets of sessions below this directory have short enough paths.
fn sockets_fit(sockets: &Path) -> bool {
    const SESSION_ID: usize = "gogol_".len() + 26;
    sockets.as_os_str().len() + 1 + SESSION_ID + 1 + SOCKET_NAME.len() <= MAX_SOCKET_PATH
}

#[cfg(test)]
mod tests {
    use super::*;
    use oubliette_protocol::ErrorCode;

    fn env<'a>(vars: &'a [(&'a str, &'a str)]) -> impl Fn(&str) -> Option<OsString> + 'a {
        |name| vars.iter().find(|(n, _)| *n == name).map(|(_, v)| v.into())
    }

    #[test]
    fn the_flag_precedes_the_variable_which_precedes_the_users_home() {
        let vars = [("OUBLIETTE_HOME", "/from/env"), ("HOME", "/users/me")];
        let at = |flag: Option<&str>, vars: &[(&str, &str)]| {
            HomeDir::locate(flag.map(PathBuf::from), env(vars))
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
        let error = HomeDir::locate(None, env(&[])).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidArgument);
        assert!(error.message.contains("--home"), "{error}");
    }

    #[test]
    fn a_relative_home_becomes_absolute() {
        assert!(
            HomeDir::locate(Some("some/home".into()), env(&[]))
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
                let home =
                    HomeDir::locate(Some(format!("/{}", "h".repeat(depth)).into()), env(&vars)).unwrap();
                let socket = home.socket_dir(&session).join(SOCKET_NAME);
                assert!(
                    socket.as_os_str().len() <= MAX_SOCKET_PATH,
                    "{}",
                    socket.display()
                );
                assert!(home.control_socket().as_os_str().len() <= MAX_SOCKET_PATH);
            }
        }
        let near = HomeDir::locate(Some("/h".into()), env(&[])).unwrap();
        assert!(near.socket_dir(&session).starts_with("/h/run"));
    }

    #[test]
    fn two_deep_homes_have_different_sockets() {
        let deep = |name: &str| HomeDir::at(format!("/{}/{name}", "d".repeat(100))).unwrap();
        assert_ne!(deep("a").control_socket(), deep("b").control_socket());
        assert_eq!(deep("a").control_socket(), deep("a").control_socket());
    }
}
