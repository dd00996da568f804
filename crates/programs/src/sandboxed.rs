//! Runs one step of an installation in a sandbox that reaches the package registries and nothing else.

use std::{os::fd::AsFd as _, path::PathBuf, sync::Arc, time::Duration};

use oubliette_egress::{EgressProxy, EgressRefusal, OnRefusal, ProxyLimits, SandboxListener};
use oubliette_os::{DescriptorWorker, DiskWatch, PassedDescriptors, UntrustedListener, UntrustedSocket};
use oubliette_protocol::{Error, ErrorCode, Result};
use oubliette_sandbox::{
    BindMount, IsolationLevel, KillOnDrop, PortForward, ResourceLimits, SandboxDriver, SandboxError,
    SandboxExit, SandboxGroup, SandboxSpec, SocketMount,
};
use parking_lot::Mutex;
use tokio::{
    io::{AsyncBufReadExt as _, AsyncRead, AsyncReadExt as _, BufReader},
    time::Instant,
};
use tokio_util::sync::{CancellationToken, DropGuard};

use crate::{
    progress::ProgressHandle,
    registries::{CertificateFile, RegistryHosts, RegistrySecrets},
};

/// The proxy's socket and port inside.
const PROXY_SOCKET: &str = "/run/oubliette/proxy.sock";
const PROXY_PORT: u16 = 3128;
/// Path inside of the directory for downloads and temporary files.
pub(crate) const SCRATCH_INSIDE: &str = "/install";
/// Beginning of the paths inside of files with the operator's certificates.
const CERTIFICATES_INSIDE: &str = "/run/oubliette/certificates";
/// Beginning of the name of a proxy's socket.
const SOCKET_PREFIX: &str = "program-";
/// Maximum length of stdout, in bytes.
const MAX_STDOUT_BYTES: u64 = 8 << 20;
/// How many bytes of stderr are kept: the last lines.
const MAX_STDERR_BYTES: usize = 32 * 1024;
/// Maximum length of one line of stderr, in bytes.
const MAX_LINE_BYTES: u64 = 16 * 1024;
/// Minimum time between two measurements of what is written.
const DISK_WATCH_INTERVAL: Duration = Duration::from_millis(500);
/// The signal of a process that wrote a file beyond its limit.
const SIGXFSZ: i32 = 25;

/// The bounds of an installation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InstallLimits {
    /// How long it may take.
    pub timeout: Duration,
    /// What it may have on disk, downloads included, in MiB.
    pub disk_mb: u64,
}

impl Default for InstallLimits {
    fn default() -> Self {
        Self {
            timeout: Duration::from_secs(600),
            disk_mb: 4096,
        }
    }
}

/// Starts the sandboxes of installations.
#[derive(Clone)]
pub(crate) struct InstallSandboxes {
    pub(crate) driver: Arc<dyn SandboxDriver>,
    pub(crate) sockets_dir: PathBuf,
    pub(crate) limits: InstallLimits,
}

/// What all steps of one installation share.
pub(crate) struct InstallRun {
    pub(crate) sandboxes: InstallSandboxes,
    /// Directory on the host for everything the installation writes.
    pub(crate) dir: PathBuf,
    pub(crate) deadline: Instant,
    pub(crate) progress: ProgressHandle,
}

/// One step: a command, and what its sandbox holds.
pub(crate) struct InstallStep<'a> {
    pub(crate) argv: Vec<String>,
    pub(crate) env: Vec<(String, String)>,
    pub(crate) mounts: Vec<BindMount>,
    pub(crate) cwd: String,
    /// The registries it reaches; `None`: no network.
    pub(crate) hosts: Option<&'a RegistryHosts>,
    pub(crate) secrets: &'a RegistrySecrets,
    pub(crate) certificates: &'a [CertificateFile],
}

/// How a step ended and what it printed, with secrets masked.
pub(crate) struct StepOutput {
    pub(crate) exit: SandboxExit,
    pub(crate) stdout: Vec<u8>,
    pub(crate) stderr: String,
    /// The last connection that the proxy refused or could not make.
    pub(crate) refusal: Option<EgressRefusal>,
}

impl StepOutput {
    pub(crate) fn success(&self) -> bool {
        self.exit.success()
    }

    /// Whether a registry could not be reached.
    pub(crate) fn registry_unreachable(&self) -> bool {
        let refusal = self.refusal.as_ref();
        refusal.is_some_and(|refusal| refusal.code != ErrorCode::NotAllowed.as_str())
    }

    /// An error for what the proxy reports, if it reported anything.
    pub(crate) fn connection_error(&self, what: &str, hosts: &RegistryHosts) -> Option<Error> {
        let refusal = self.refusal.as_ref()?;
        let message = match refusal.code == ErrorCode::NotAllowed.as_str() {
            true => format!(
                "{what}: {}. An installation reaches only the registries that the operator's own configuration \
                 names: {hosts}",
                refusal.message
            ),
            false => format!(
                "{what}: the package registry cannot be reached: {}. Try again when it can, or name another one in \
                 npm's or pip's configuration",
                refusal.message
            ),
        };
        Some(Error::unavailable(message).with_cause(self.stderr.as_str()))
    }
}

impl InstallRun {
    /// The path on the host of the directory for downloads and temporary files.
    pub(crate) fn scratch(&self) -> PathBuf {
        self.dir.join("scratch")
    }

    /// Runs a step to its end. Reaching a limit is an error; what the command reports itself is in the output. Nothing
    /// of the sandbox is left when it returns.
    pub(crate) async fn run(&self, step: InstallStep<'_>) -> Result<StepOutput> {
        let InstallSandboxes {
            driver,
            sockets_dir,
            limits,
        } = &self.sandboxes;
        if step.hosts.is_some() && driver.level() != IsolationLevel::Namespaces {
            return Err(Error::unavailable(format!(
                "programs cannot be installed at isolation level {}: no sandbox reaches the network; install bubblewrap",
                driver.level()
            )));
        }
        let proxy = match step.hosts {
            Some(hosts) => Some(RegistryProxy::serve(driver.clone(), sockets_dir, hosts)?),
            None => None,
        };
        let secrets = step.secrets;
        let program = step.argv.first().cloned().unwrap_or_default();
        let mut spec = self.spec(step, proxy.as_ref());
        // Files that a script has removed and keeps open count too.
        let group = SandboxGroup::new("program", spec.limits.clone());
        spec.group = Some(group.clone());
        let timed_out = || {
            Error::timeout(format!(
                "the installation took longer than {} s and was stopped; nothing of it is used. A slow registry may \
                 need a higher install_timeout of [programs] in oubliette.toml",
                limits.timeout.as_secs()
            ))
        };
        let started = tokio::time::timeout_at(self.deadline, driver.spawn(spec));
        let running = started
            .await
            .map_err(|_| timed_out())?
            .map_err(|error| start_error(error, &program))?;
        let handle = running.handle.clone();
        let kill = KillOnDrop(handle.clone());
        drop(running.stdin);
        let watch = DiskWatch::new([self.dir.clone()], limits.disk_mb)
            .every(DISK_WATCH_INTERVAL)
            .with_writers(group);
        let output = async {
            let (stdout, stderr, exit) = tokio::join!(
                read_stdout(running.stdout),
                read_stderr(running.stderr, &self.progress),
                async {
                    let exit = handle.wait().await;
                    // Whatever it left behind would keep the pipes open.
                    handle.kill();
                    exit
                },
            );
            (stdout, stderr, exit)
        };
        let stopped = tokio::select! {
            (stdout, stderr, exit) = output => {
                let refusal = proxy.as_ref().and_then(|proxy| proxy.refusal.lock().clone());
                let output = StepOutput { exit, stdout, stderr: secrets.mask(&stderr), refusal };
                if watch.measure().await.over {
                    return Err(self.disk_error());
                }
                return self.check_limits(output);
            }
            () = tokio::time::sleep_until(self.deadline) => timed_out(),
            _over = watch.exceeded() => self.disk_error(),
        };
        drop(kill);
        handle.wait().await;
        Err(stopped)
    }

    fn disk_error(&self) -> Error {
        Error::limit_exceeded(format!(
            "the installation needs more than the {} MiB of install_mb of [programs] in oubliette.toml; nothing of it \
             is used",
            self.sandboxes.limits.disk_mb
        ))
    }

    /// An error if the step ended because it reached a limit.
    fn check_limits(&self, output: StepOutput) -> Result<StepOutput> {
        let says = |text: &str| output.stderr.contains(text);
        if output.success() {
            return Ok(output);
        }
        if says("ENOSPC") || says("No space left on device") {
            return Err(Error::limit_exceeded(
                "the disk is full: the installation was stopped and nothing of it is used; make room and install again",
            )
            .with_cause(output.stderr.as_str()));
        }
        let too_large = output.exit.signal == Some(SIGXFSZ) || output.exit.code == Some(128 + SIGXFSZ);
        if too_large || says("EFBIG") || says("File too large") {
            return Err(self.disk_error());
        }
        if output.exit.oom {
            return Err(Error::limit_exceeded(
                "the installation ran out of memory and was stopped; nothing of it is used",
            ));
        }
        Ok(output)
    }

    fn spec(&self, step: InstallStep<'_>, proxy: Option<&RegistryProxy>) -> SandboxSpec {
        let mut spec = SandboxSpec::new("program", step.argv);
        spec.cwd = step.cwd.into();
        spec.limits = ResourceLimits {
            workspace_mb: Some(self.sandboxes.limits.disk_mb),
            ..ResourceLimits::default()
        };
        spec.mounts = step.mounts;
        spec.mounts
            .push(BindMount::read_write(self.scratch(), SCRATCH_INSIDE));
        spec.env = vec![
            ("TMPDIR".into(), SCRATCH_INSIDE.into()),
            ("CI".into(), "1".into()),
            ("NO_COLOR".into(), "1".into()),
        ];
        for (number, file) in step.certificates.iter().enumerate() {
            if file.path.is_file() {
                let inside = format!("{CERTIFICATES_INSIDE}-{number}.pem");
                spec.mounts.push(BindMount::read_only(&file.path, &inside));
                spec.env.push((file.variable.into(), inside));
            }
        }
        if let Some(proxy) = proxy {
            spec.sockets.push(SocketMount::new(&proxy.socket, PROXY_SOCKET));
            spec.forwards.push(PortForward {
                port: PROXY_PORT,
                socket: PROXY_SOCKET.into(),
            });
            // Without exceptions: a registry on the host's loopback is reached through the proxy as well.
            for name in ["HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"] {
                let url = format!("http://127.0.0.1:{PROXY_PORT}");
                spec.env.push((name.into(), url));
            }
        }
        spec.env.extend(step.env);
        spec
    }
}

/// Removes sockets that a killed server left.
pub(crate) fn remove_leftover_sockets(dir: &std::path::Path) {
    for entry in std::fs::read_dir(dir).into_iter().flatten().flatten() {
        let name = entry.file_name();
        if name.to_str().is_some_and(|name| name.starts_with(SOCKET_PREFIX)) {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

/// The proxy of one step, on a socket of its own.
struct RegistryProxy {
    socket: PathBuf,
    refusal: Arc<Mutex<Option<EgressRefusal>>>,
    _serving: DropGuard,
}

impl RegistryProxy {
    fn serve(
        driver: Arc<dyn SandboxDriver>,
        sockets_dir: &std::path::Path,
        hosts: &RegistryHosts,
    ) -> Result<Self> {
        let proxy = EgressProxy::only(hosts.entries(), ProxyLimits::default())?;
        let socket = sockets_dir.join(format!("{SOCKET_PREFIX}{}.sock", uuid::Uuid::new_v4().simple()));
        let listener =
            UntrustedListener::bind(&socket, PassedDescriptors::Refused, DescriptorWorker::default())
                .map_err(Error::internal)?;
        let path = socket.clone();
        let admits = move |peer: &UntrustedSocket| driver.may_connect(&path, peer.as_fd());
        let listener = SandboxListener::new(listener, admits);
        let stop = CancellationToken::new();
        let serving = Self {
            socket,
            refusal: Arc::default(),
            _serving: stop.clone().drop_guard(),
        };
        let refusal = serving.refusal.clone();
        let on_refusal: OnRefusal = Arc::new(move |refused| *refusal.lock() = Some(refused.clone()));
        tokio::spawn(proxy.serve_with(listener, stop, on_refusal));
        Ok(serving)
    }
}

impl Drop for RegistryProxy {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.socket);
    }
}

/// Reads stdout; what is beyond the maximum is dropped.
async fn read_stdout(mut stdout: impl AsyncRead + Unpin) -> Vec<u8> {
    let mut bytes = Vec::new();
    let _ = (&mut stdout).take(MAX_STDOUT_BYTES).read_to_end(&mut bytes).await;
    let _ = tokio::io::copy(&mut stdout, &mut tokio::io::sink()).await;
    bytes
}

/// Reads stderr line by line, for the progress, and keeps its end.
async fn read_stderr(stderr: impl AsyncRead + Unpin, progress: &ProgressHandle) -> String {
    let mut reader = BufReader::new(stderr);
    let mut tail = String::new();
    let mut line = Vec::new();
    loop {
        line.clear();
        match (&mut reader)
            .take(MAX_LINE_BYTES)
            .read_until(b'\n', &mut line)
            .await
        {
            Ok(0) | Err(_) => return tail,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&line);
        progress.read_line(&text);
        tail.push_str(&text);
        if tail.len() > 2 * MAX_STDERR_BYTES {
            let cut = tail.len() - MAX_STDERR_BYTES;
            let cut = (cut..tail.len())
                .find(|at| tail.is_char_boundary(*at))
                .unwrap_or(0);
            tail.drain(..cut);
        }
    }
}

fn start_error(error: SandboxError, program: &str) -> Error {
    match error {
        SandboxError::Program { .. } => {
            let package = match program {
                "npm" | "node" => "Node.js with npm",
                _ => "Python 3 with pip",
            };
            Error::unavailable(format!(
                "{program} is not installed on the server in a system directory; install {package}, which installs \
                 programs"
            ))
            .with_cause(error)
        }
        SandboxError::Unavailable { .. } => Error::unavailable(format!(
            "programs are installed only in a sandbox, and none can be started: {error}"
        )),
        error => Error::unavailable(
            "the sandbox of an installation could not be started; `oubliette doctor` may tell why",
        )
        .with_cause(error),
    }
}
