//! The server process: start, stop, tokens, and the resources it holds.

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    sync::{Mutex, PoisonError},
    time::Duration,
};

use anyhow::{Context as _, Result, bail, ensure};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use tokio::{
    net::TcpSocket,
    process::{Child, Command},
};

use crate::{ToolApi, wait_until, within_deadline};

/// The directory of the three programs: `OUBLIETTE_BIN_DIR`, or the parent of the test program's directory.
pub fn program_dir() -> Result<PathBuf> {
    if let Some(dir) = std::env::var_os("OUBLIETTE_BIN_DIR") {
        return Ok(dir.into());
    }
    let own = std::env::current_exe()?;
    let dir = own
        .parent()
        .and_then(Path::parent)
        .context("a program lies in a directory")?;
    for name in ["oubliette", "oubliette-client", "oubliette-agent"] {
        ensure!(
            dir.join(name).exists(),
            "{name} is not built: cargo build -p oubliette -p oubliette-client -p oubliette-agent"
        );
    }
    Ok(dir.to_owned())
}

/// One `oubliette serve`, killed when dropped.
#[derive(Debug)]
pub struct SpawnedServer {
    folder: tempfile::TempDir,
    programs: PathBuf,
    port: u16,
    _reserved_port: TcpSocket,
    child: Option<Child>,
    admin: ToolApi,
}

impl SpawnedServer {
    /// Starts a server in a fresh home with this oubliette.toml.
    #[allow(
        clippy::disallowed_methods,
        reason = "no agent of these tests makes deep trees"
    )]
    pub async fn start(config: &str) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("oub").tempdir()?;
        let home = folder.path().join("h");
        fs::create_dir(&home)?;
        fs::write(home.join("oubliette.toml"), config)?;
        // Reserves the port for the whole test: a bound socket that does not listen keeps other programs from
        // getting it, also while the server is down. SO_REUSEADDR lets the server bind it as well.
        let kept = TcpSocket::new_v4()?;
        kept.set_reuseaddr(true)?;
        kept.bind(([127, 0, 0, 1], 0).into())?;
        let port = kept.local_addr()?.port();
        let mut server = Self {
            folder,
            programs: program_dir()?,
            port,
            _reserved_port: kept,
            child: None,
            admin: ToolApi::new("", ""),
        };
        server.spawn_and_wait_ready().await?;
        server.admin = server.create_token_client("admin").await?;
        Ok(server)
    }

    /// Starts the process and waits until it is ready.
    pub async fn spawn_and_wait_ready(&mut self) -> Result<()> {
        let log = fs::File::options()
            .create(true)
            .append(true)
            .open(self.log_path())?;
        let child = Command::new(self.programs.join("oubliette"))
            .arg("--home")
            .arg(self.home())
            .args(["serve", "--listen", &format!("127.0.0.1:{}", self.port)])
            .stdin(Stdio::null())
            .stdout(log.try_clone()?)
            .stderr(log)
            .kill_on_drop(true)
            .spawn()?;
        self.child = Some(child);
        let url = format!("{}/ready", self.url());
        let http = crate::api::http_client();
        wait_until("the server to be ready", || async {
            match http.get(&url).send().await {
                Ok(answer) if answer.status().is_success() => Ok(()),
                Ok(answer) => Err(format!("HTTP {}", answer.status())),
                Err(why) => Err(why.to_string()),
            }
        })
        .await
        .with_context(|| self.server_log())
    }

    /// Kills the process with SIGKILL.
    pub async fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the server runs")?;
        child.kill().await?;
        Ok(())
    }

    /// Stops the process with SIGTERM; it must exit successfully.
    pub async fn stop(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the server runs")?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        kill_process(pid.context("the server runs")?, Signal::TERM)?;
        let status = within_deadline("the server to stop", child.wait()).await??;
        ensure!(
            status.success(),
            "the server exited with {status}: {}",
            self.server_log()
        );
        Ok(())
    }

    /// Its home directory.
    pub fn home(&self) -> PathBuf {
        self.folder.path().join("h")
    }

    /// The directory of its programs.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Its base URL.
    pub fn url(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Its port on loopback.
    pub fn port(&self) -> u16 {
        self.port
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    /// Its output so far: the contents of its log file.
    pub fn server_log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// A REST client with an admin token.
    pub fn admin(&self) -> &ToolApi {
        &self.admin
    }

    /// A REST client with a new token of this scope.
    pub async fn create_token_client(&self, scope: &str) -> Result<ToolApi> {
        Ok(ToolApi::new(&self.url(), &self.create_token(scope).await?))
    }

    /// Creates a token of this scope.
    pub async fn create_token(&self, scope: &str) -> Result<String> {
        let args = ["token", "create", "--name", "test", "--scope", scope, "--json"];
        let made = Command::new(self.programs.join("oubliette"))
            .arg("--home")
            .arg(self.home())
            .args(args)
            .stdin(Stdio::null())
            .output()
            .await?;
        if !made.status.success() {
            bail!("no token: {}", String::from_utf8_lossy(&made.stderr));
        }
        let made: Value = serde_json::from_slice(&made.stdout)?;
        Ok(made["token"].as_str().context("a token")?.to_owned())
    }

    /// The resources it holds now, and how many calls and callers wait.
    pub async fn footprint(&self) -> Result<ServerFootprint> {
        ServerFootprint::read(&self.admin.metrics().await?, self.proc_status("Threads:")?)
    }

    /// Waits until two successive footprints are equal and no call or caller is open; returns the footprint.
    pub async fn wait_at_rest(&self) -> Result<ServerFootprint> {
        let last = Mutex::new(None);
        wait_until("the server to be at rest", || async {
            let now = self.footprint().await.map_err(|e| e.to_string())?;
            let before = last.lock().unwrap_or_else(PoisonError::into_inner).replace(now);
            match before == Some(now) && now.open_calls == 0 && now.caller_connections == 0 {
                true => Ok(now),
                false => {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    Err(format!("{now:?}, just before {before:?}"))
                }
            }
        })
        .await
    }

    /// Waits until the resources are back to those of `before`, give or take 4 tasks, threads and descriptors,
    /// which vary by themselves.
    pub async fn check_nothing_left(&self, before: ServerFootprint) -> Result<ServerFootprint> {
        wait_until("nothing to be left", || async {
            let now = self.footprint().await.map_err(|e| e.to_string())?;
            let good = now.open_calls == 0
                && now.caller_connections == 0
                && now.descriptors <= before.descriptors + 4
                && now.tasks <= before.tasks + 4
                && now.threads <= before.threads + 4
                && now.sessions == before.sessions;
            good.then_some(now)
                .ok_or_else(|| format!("{now:?}, before {before:?}"))
        })
        .await
    }

    /// Its resident memory, in bytes.
    pub fn resident_bytes(&self) -> Result<u64> {
        Ok(self.proc_status("VmRSS:")? * 1024)
    }

    /// A number from `/proc/<pid>/status`.
    fn proc_status(&self, field: &str) -> Result<u64> {
        let pid = self
            .child
            .as_ref()
            .and_then(Child::id)
            .context("the server runs")?;
        let status = fs::read_to_string(format!("/proc/{pid}/status"))?;
        let line = status.lines().find_map(|line| line.strip_prefix(field));
        let number = line.with_context(|| field.to_owned())?;
        Ok(number.trim().trim_end_matches(" kB").parse()?)
    }
}

/// The resources a server holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ServerFootprint {
    /// Open file descriptors.
    pub descriptors: u64,
    /// Tasks of the async runtime.
    pub tasks: u64,
    /// Threads.
    pub threads: u64,
    /// Calls of lent tools that wait for an answer.
    pub open_calls: u64,
    /// Open streams, long polls and waiting messages of callers.
    pub caller_connections: u64,
    /// Sessions in memory.
    pub sessions: u64,
}

impl ServerFootprint {
    fn read(text: &str, threads: u64) -> Result<Self> {
        let rows: BTreeMap<&str, f64> = text
            .lines()
            .filter(|line| !line.starts_with('#'))
            .filter_map(|line| line.rsplit_once(' '))
            .filter_map(|(name, value)| Some((name, value.parse().ok()?)))
            .collect();
        let sum = |name: &str| -> Result<u64> {
            let found: Vec<f64> = rows
                .iter()
                .filter(|(key, _)| key.split('{').next() == Some(name))
                .map(|(_, value)| *value)
                .collect();
            ensure!(!found.is_empty(), "no {name} in the metrics");
            Ok(found.iter().sum::<f64>() as u64)
        };
        Ok(Self {
            descriptors: sum("process_open_fds")?,
            tasks: sum("oubliette_tasks")?,
            threads,
            open_calls: sum("oubliette_caller_calls_open")?,
            caller_connections: sum("oubliette_callers_held")?,
            sessions: sum("oubliette_sessions_live")?,
        })
    }
}
