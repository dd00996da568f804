//! The process.

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

use crate::{Api, settles, within};

/// Where the three programs are: `OUBLIETTE_BIN_DIR`, else beside the test program.
pub fn programs() -> Result<PathBuf> {
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
            "{name} is not built: cargo build -p oubliette -p oubliette-bridge -p oubliette-agent"
        );
    }
    Ok(dir.to_owned())
}

/// One `oubliette serve`, killed when dropped.
#[derive(Debug)]
pub struct Server {
    folder: tempfile::TempDir,
    programs: PathBuf,
    port: u16,
    _kept: TcpSocket,
    child: Option<Child>,
    admin: Api,
}

impl Server {
    /// Starts one in a fresh home with this configuration.
    pub async fn start(config: &str) -> Result<Self> {
        let folder = tempfile::Builder::new().prefix("oub").tempdir()?;
        let home = folder.path().join("h");
        fs::create_dir(&home)?;
        fs::write(home.join("oubliette.toml"), config)?;
        // Bound and not listened on, it is nobody else's, whether the server runs or not.
        let kept = TcpSocket::new_v4()?;
        kept.set_reuseaddr(true)?;
        kept.bind(([127, 0, 0, 1], 0).into())?;
        let port = kept.local_addr()?.port();
        let mut server = Self {
            folder,
            programs: programs()?,
            port,
            _kept: kept,
            child: None,
            admin: Api::new("", ""),
        };
        server.run().await?;
        server.admin = server.principal("admin").await?;
        Ok(server)
    }

    /// Starts the process; returns when it is ready.
    pub async fn run(&mut self) -> Result<()> {
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
        let http = crate::api::http();
        settles("the server to be ready", || async {
            match http.get(&url).send().await {
                Ok(answer) if answer.status().is_success() => Ok(()),
                Ok(answer) => Err(format!("HTTP {}", answer.status())),
                Err(why) => Err(why.to_string()),
            }
        })
        .await
        .with_context(|| self.log())
    }

    /// kill -9.
    pub async fn kill(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the server runs")?;
        child.kill().await?;
        Ok(())
    }

    /// SIGTERM; returns when it has ended in order.
    pub async fn stop(&mut self) -> Result<()> {
        let mut child = self.child.take().context("the server runs")?;
        let pid = child.id().and_then(|id| Pid::from_raw(id.cast_signed()));
        kill_process(pid.context("the server runs")?, Signal::TERM)?;
        let status = within("the server to stop", child.wait()).await??;
        ensure!(
            status.success(),
            "the server exited with {status}: {}",
            self.log()
        );
        Ok(())
    }

    /// Its home.
    pub fn home(&self) -> PathBuf {
        self.folder.path().join("h")
    }

    /// Where its programs are.
    pub fn programs(&self) -> &Path {
        &self.programs
    }

    /// Its address.
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

    /// What it said.
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    /// Its tools, as an admin.
    pub fn admin(&self) -> &Api {
        &self.admin
    }

    /// Its tools under a new token.
    pub async fn principal(&self, scope: &str) -> Result<Api> {
        Ok(Api::new(&self.url(), &self.token(scope).await?))
    }

    /// A new token.
    pub async fn token(&self, scope: &str) -> Result<String> {
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

    /// What it holds of the system, and what waits in it.
    pub async fn footprint(&self) -> Result<Footprint> {
        Footprint::read(&self.admin.metrics().await?, self.status("Threads:")?)
    }

    /// What it holds once it holds the same twice in a row, and no caller anything.
    pub async fn at_rest(&self) -> Result<Footprint> {
        let last = Mutex::new(None);
        settles("the server to be at rest", || async {
            let now = self.footprint().await.map_err(|e| e.to_string())?;
            let before = last.lock().unwrap_or_else(PoisonError::into_inner).replace(now);
            match before == Some(now) && now.calls == 0 && now.held == 0 {
                true => Ok(now),
                false => {
                    tokio::time::sleep(Duration::from_millis(300)).await;
                    Err(format!("{now:?}, just before {before:?}"))
                }
            }
        })
        .await
    }

    /// Nothing may be left of what was done since: a few tasks and descriptors come and go by themselves.
    pub async fn nothing_left(&self, before: Footprint) -> Result<Footprint> {
        settles("nothing to be left", || async {
            let now = self.footprint().await.map_err(|e| e.to_string())?;
            let good = now.calls == 0
                && now.held == 0
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
    pub fn resident(&self) -> Result<u64> {
        Ok(self.status("VmRSS:")? * 1024)
    }

    /// A number the system keeps about its process.
    fn status(&self, field: &str) -> Result<u64> {
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

/// What a server holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Open descriptors.
    pub descriptors: u64,
    /// Tasks of its runtime.
    pub tasks: u64,
    /// Threads.
    pub threads: u64,
    /// Caller calls that wait.
    pub calls: u64,
    /// Streams, polls and waiting messages of callers.
    pub held: u64,
    /// Sessions in memory.
    pub sessions: u64,
}

impl Footprint {
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
            calls: sum("oubliette_caller_calls_open")?,
            held: sum("oubliette_callers_held")?,
            sessions: sum("oubliette_sessions_live")?,
        })
    }
}
