//! Running git in a sandbox.
//!
//! Files of a workspace may be changed by an agent at any moment, and a remote repository is somebody else's, so git
//! never runs on the host: a file exchanged for a link, or a fault in git, reaches nothing but a sandbox that holds
//! that workspace alone, without the server's network, home or identities. Each run is one sandbox that executes one
//! fixed shell script.

use std::{
    collections::HashMap,
    path::{Path, PathBuf},
    sync::Arc,
    time::Duration,
};

use oubliette_egress::EgressProxy;
use oubliette_home::HomeDir;
use oubliette_os::DiskWatch;
use oubliette_protocol::{Error, ProjectId, Result};
use oubliette_sandbox::{
    BindMount, IsolationLevel, KillOnDrop, PortForward, ResourceLimits, SandboxDriver, SandboxError,
    SandboxReport, SandboxSpec, SocketMount,
};
use parking_lot::Mutex;
use tokio::sync::{OnceCell, OwnedSemaphorePermit, Semaphore};

use super::output::{END_MARK_VARIABLE, EndMark, GitOutput, PRINT_END_MARK, WaitFor, read_output};
use crate::config::{GitConfig, ServerConfig};

/// How many git sandboxes may run at once for one project; more wait.
const MAX_PER_PROJECT: usize = 4;
/// How many git sandboxes may run at once; more wait.
const MAX_RUNNING: usize = 16;
/// Maximum number of open files of each process.
const MAX_OPEN_FILES: u64 = 1024;
/// Minimum time between two measurements of what git writes.
const DISK_WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// Beginning of the name of a socket that the proxy serves for one clone.
pub(super) const SOCKET_PREFIX: &str = "git-";
/// The signal of a process that wrote a file beyond its limit.
const SIGXFSZ: i32 = 25;

/// Path of the workspace inside.
pub(super) const WORK_TREE: &str = "/git/workspace";
/// Path inside of what is kept of a workspace's first content.
pub(super) const BASELINE: &str = "/git/baseline";
/// Path inside of an empty repository.
pub(super) const REPOSITORY: &str = "/git/repository";

/// Settings of every git command. They override those of any repository: nothing of a workspace is executed, even
/// though that would hurt only the sandbox.
const SETTINGS: [(&str, &str); 19] = [
    ("core.hooksPath", "/dev/null"),
    ("core.fsmonitor", "false"),
    ("core.attributesFile", "/dev/null"),
    ("core.excludesFile", "/dev/null"),
    ("core.pager", "cat"),
    ("core.quotePath", "false"),
    ("core.autocrlf", "false"),
    ("core.untrackedCache", "false"),
    // Larger files are binary: they are not compared line by line.
    ("core.bigFileThreshold", "5m"),
    ("credential.helper", ""),
    ("submodule.recurse", "false"),
    ("gc.auto", "0"),
    ("maintenance.auto", "false"),
    ("protocol.ext.allow", "never"),
    ("commit.gpgSign", "false"),
    ("user.name", "Oubliette"),
    ("user.email", "oubliette@localhost"),
    ("safe.directory", "*"),
    // Redirects only of the first request; each goes through the proxy like any other.
    ("http.followRedirects", "initial"),
];

/// Environment of every git command: no configuration of the machine or user, no prompts.
const ENVIRONMENT: [(&str, &str); 8] = [
    ("GIT_CONFIG_NOSYSTEM", "1"),
    ("GIT_CONFIG_GLOBAL", "/dev/null"),
    ("GIT_ATTR_NOSYSTEM", "1"),
    ("GIT_TERMINAL_PROMPT", "0"),
    ("GIT_ASKPASS", "/bin/false"),
    ("SSH_ASKPASS", "/bin/false"),
    ("GIT_OPTIONAL_LOCKS", "0"),
    ("GIT_NO_LAZY_FETCH", "1"),
];

/// Runs git in sandboxes, with the limits and identities of the configuration.
pub struct GitSandboxes {
    pub(super) driver: Arc<dyn SandboxDriver>,
    pub(super) proxy: Arc<EgressProxy>,
    pub(super) config: GitConfig,
    pub(super) sockets_dir: PathBuf,
    /// Path on the host of the empty repository that workspaces are compared with.
    pub(super) empty_repository: PathBuf,
    /// Set when it has been made, before the first run.
    pub(super) empty_repository_made: OnceCell<()>,
    limits: ResourceLimits,
    running: Arc<Semaphore>,
    running_by_project: Mutex<HashMap<ProjectId, Arc<Semaphore>>>,
}

impl GitSandboxes {
    /// Sandboxes are started by `driver`; clones reach the network through `proxy`. There must be no other server of
    /// this home: sockets of clones that a killed one left are removed.
    pub fn new(
        driver: Arc<dyn SandboxDriver>,
        proxy: Arc<EgressProxy>,
        home: &HomeDir,
        config: &ServerConfig,
    ) -> Self {
        remove_leftover_sockets(home.sockets_dir());
        Self {
            empty_repository: home.run_dir().join("git-empty"),
            empty_repository_made: OnceCell::new(),
            driver,
            proxy,
            config: config.git.clone(),
            sockets_dir: home.sockets_dir().to_owned(),
            limits: ResourceLimits {
                memory_mb: Some(config.sandbox.memory_mb),
                cpus: Some(config.sandbox.cpus),
                pids: Some(config.sandbox.pids),
                workspace_mb: Some(config.sandbox.workspace_mb),
                open_files: Some(MAX_OPEN_FILES),
            },
            running: Arc::new(Semaphore::new(MAX_RUNNING)),
            running_by_project: Mutex::default(),
        }
    }

    /// What its sandboxes can do on this machine.
    pub(crate) async fn probe_sandbox(&self) -> SandboxReport {
        self.driver.probe().await
    }

    /// The isolation level of its sandboxes.
    pub(super) fn level(&self) -> IsolationLevel {
        self.driver.level()
    }

    /// Maximum size of a workspace, in MiB.
    pub(super) fn workspace_mb(&self) -> u64 {
        self.limits.workspace_mb.unwrap_or(u64::MAX)
    }

    /// Runs a script. Reaching a limit is an error; what git reports itself is in the output. Nothing of the sandbox is
    /// left when it returns, except after a successful script that writes nothing on the host.
    pub(super) async fn run(&self, project: &ProjectId, script: GitScript) -> Result<GitOutput> {
        let timeout = script.timeout;
        let Ok(permits) = tokio::time::timeout(timeout, self.permits(project)).await else {
            return Err(Error::limit_exceeded(format!(
                "{MAX_PER_PROJECT} git commands of this project, or {MAX_RUNNING} in all, are still running; try again \
                 later"
            )));
        };
        let permits = permits?;
        let (max_stdout, written) = (script.max_stdout, script.written.clone());
        let end_mark = EndMark::new();
        let spec = self.spec(script, &end_mark);
        let timed_out = || {
            Error::timeout(format!(
                "git took longer than {} s and was stopped",
                timeout.as_secs()
            ))
        };
        let deadline = tokio::time::Instant::now() + timeout;
        let running = tokio::time::timeout_at(deadline, self.driver.spawn(spec))
            .await
            .map_err(|_| timed_out())?
            .map_err(start_error)?;
        let handle = running.handle.clone();
        // The places are taken until the sandbox is gone, whenever that is.
        let gone = tokio::spawn({
            let handle = handle.clone();
            async move {
                handle.wait().await;
                drop(permits);
            }
        });
        let kill = KillOnDrop(handle);
        let watch = written.map(|dir| DiskWatch::new([dir], self.workspace_mb()).every(DISK_WATCH_INTERVAL));
        let wait = if watch.is_some() {
            WaitFor::Sandbox
        } else {
            WaitFor::Script
        };
        let stopped = tokio::select! {
            output = read_output(running, max_stdout, &end_mark, wait) => {
                let output = self.check_limits(output)?;
                return match watch {
                    Some(watch) if watch.measure().await.over => Err(self.disk_error()),
                    _ => Ok(output),
                };
            }
            () = tokio::time::sleep_until(deadline) => timed_out(),
            () = exceeded(watch.as_ref()) => self.disk_error(),
        };
        drop(kill);
        let _ = gone.await;
        Err(stopped)
    }

    /// The error for a repository that does not fit into a workspace.
    fn disk_error(&self) -> Error {
        Error::limit_exceeded(format!(
            "the workspace would hold more than the {} MiB of [sandbox] workspace_mb in oubliette.toml",
            self.workspace_mb()
        ))
    }

    async fn permits(&self, project: &ProjectId) -> Result<[OwnedSemaphorePermit; 2]> {
        let of_project = {
            let mut by_project = self.running_by_project.lock();
            // Nobody holds or waits for these any more.
            by_project.retain(|_, slots| Arc::strong_count(slots) > 1);
            by_project
                .entry(project.clone())
                .or_insert_with(|| Arc::new(Semaphore::new(MAX_PER_PROJECT)))
                .clone()
        };
        // The project's first: what waits there takes no place of another project.
        let of_project = of_project.acquire_owned().await.map_err(Error::internal)?;
        let of_all = self
            .running
            .clone()
            .acquire_owned()
            .await
            .map_err(Error::internal)?;
        Ok([of_project, of_all])
    }

    fn spec(&self, script: GitScript, end_mark: &EndMark) -> SandboxSpec {
        let mut settings: Vec<(String, String)> = SETTINGS
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        settings.extend(script.settings);
        let mut env: Vec<(String, String)> = ENVIRONMENT
            .iter()
            .map(|(name, value)| ((*name).to_owned(), (*value).to_owned()))
            .collect();
        env.push(("GIT_CONFIG_COUNT".into(), settings.len().to_string()));
        for (index, (name, value)) in settings.into_iter().enumerate() {
            env.push((format!("GIT_CONFIG_KEY_{index}"), name));
            env.push((format!("GIT_CONFIG_VALUE_{index}"), value));
        }
        env.extend(script.env);
        env.push((END_MARK_VARIABLE.into(), end_mark.text().to_owned()));
        let text = format!("(\n{}\n)\n{PRINT_END_MARK}", script.text);
        let argv = ["sh".to_owned(), "-c".to_owned(), text, "git".to_owned()];
        SandboxSpec {
            mounts: script.mounts,
            sockets: script.sockets,
            forwards: script.forwards,
            env,
            limits: self.limits.clone(),
            cwd: WORK_TREE.into(),
            ..SandboxSpec::new("git", argv.into_iter().chain(script.arguments))
        }
    }

    /// An error if git ended because it reached a limit, or is not installed.
    fn check_limits(&self, output: GitOutput) -> Result<GitOutput> {
        if output.truncated {
            return Ok(output);
        }
        let says = |text: &str| output.stderr.contains(text);
        let over = |what: String| Err(Error::limit_exceeded(what).with_cause(output.stderr.trim()));
        if output.out_of_memory()
            || !output.success() && (says("ut of memory") || says("Cannot allocate memory"))
        {
            let most = self.limits.memory_mb.unwrap_or_default();
            return over(format!(
                "git needed more memory than the {most} MiB of [sandbox] memory_mb in oubliette.toml"
            ));
        }
        let too_large = output.ended_by(SIGXFSZ) || says("signal 25") || says("File too large");
        if !output.success() && too_large {
            let most = self.workspace_mb();
            return over(format!(
                "git needed a file larger than the {most} MiB of [sandbox] workspace_mb in oubliette.toml"
            ));
        }
        if !output.success() && says("No space left on device") {
            return over("git ran out of disk space".into());
        }
        if !output.success() && output.too_many_processes() {
            let most = self.limits.pids.unwrap_or_default();
            return over(format!(
                "git needed more processes than the {most} of [sandbox] pids in oubliette.toml"
            ));
        }
        if output.code() == Some(127) {
            let missing = Error::unavailable("git is not installed on the server; install git");
            return Err(missing.with_cause(output.stderr.trim()));
        }
        Ok(output)
    }
}

/// A shell script that runs git, and what its sandbox holds.
pub(super) struct GitScript {
    /// The script. It is fixed: anything variable is an argument or in the environment.
    text: &'static str,
    /// Its arguments, `$1` onwards. Never a secret: arguments are visible in the host's process list.
    pub(super) arguments: Vec<String>,
    pub(super) mounts: Vec<BindMount>,
    pub(super) sockets: Vec<SocketMount>,
    pub(super) forwards: Vec<PortForward>,
    /// Git settings in addition to [`SETTINGS`].
    pub(super) settings: Vec<(String, String)>,
    pub(super) env: Vec<(String, String)>,
    /// Folder on the host, among the mounts, that must not become larger than a workspace may be.
    pub(super) written: Option<PathBuf>,
    /// Stdout beyond this many bytes is dropped, and git stopped.
    pub(super) max_stdout: usize,
    timeout: Duration,
}

impl GitScript {
    pub(super) fn new(text: &'static str, timeout: Duration) -> Self {
        Self {
            text,
            arguments: Vec::new(),
            mounts: Vec::new(),
            sockets: Vec::new(),
            forwards: Vec::new(),
            settings: Vec::new(),
            env: Vec::new(),
            written: None,
            max_stdout: 4096,
            timeout,
        }
    }
}

/// Waits until a watched folder is too large; for ever if none is watched.
async fn exceeded(watch: Option<&DiskWatch>) {
    match watch {
        Some(watch) => drop(watch.exceeded().await),
        None => std::future::pending().await,
    }
}

/// Removes the sockets of clones that a killed server did not finish.
fn remove_leftover_sockets(dir: &Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        if entry
            .file_name()
            .to_str()
            .is_some_and(|name| name.starts_with(SOCKET_PREFIX))
        {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn start_error(error: SandboxError) -> Error {
    match error {
        SandboxError::Unavailable { .. } => Error::unavailable(format!(
            "git runs only in a sandbox, and none can be started: {error}"
        )),
        error => {
            Error::unavailable("the sandbox for git could not be started; `oubliette doctor` may tell why")
                .with_cause(error)
        }
    }
}
