//! Supervision of a sandbox, from its start until it is reaped.
//!
//! One task per sandbox owns the child process: it sends the launch order, waits until the payload runs, then for
//! its end, and reaps it. Handles only refer to it, so that dropping one at any moment leaves neither a zombie
//! nor a running process.

use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use rustix::process::{Pid, PidfdFlags, WaitIdStatus};
use tokio::io::unix::AsyncFd;
use tokio::io::{AsyncReadExt, Interest};
use tokio::net::UnixStream;
use tokio::process::{ChildStderr, ChildStdin, ChildStdout};
use tokio::sync::{oneshot, watch};

use crate::control_protocol::{DescendantCleanup, InnerStageReport, LaunchOrder};
use crate::driver::SandboxError;
use crate::group::GroupMembership;
use crate::handle::{ExceededLimit, ProcessTreeControl, RunningSandbox, SandboxExit, SandboxHandle};
use crate::launch::{ChildProcess, LaunchedProcess};
use crate::local::cgroup::SandboxCgroup;
use crate::socket_peers::SocketPeersEntry;
use crate::{IsolationLevel, SandboxPaths};

/// Maximum time until the payload runs.
pub(crate) const START_TIMEOUT: Duration = Duration::from_secs(20);
/// How long the inner stage may take to end after a kill before the process above it is killed too.
const KILL_GRACE: Duration = Duration::from_secs(2);
/// Maximum length of a report of the inner stage.
const MAX_REPORT_BYTES: usize = 64 * 1024;
/// Maximum bytes of stderr quoted in an error.
const MAX_STDERR_BYTES: usize = 2000;

/// What belongs to a sandbox besides its process.
pub(crate) struct SandboxResources {
    pub(crate) level: IsolationLevel,
    pub(crate) paths: SandboxPaths,
    /// Temporary directory, removed when the sandbox ends.
    pub(crate) scratch: Option<PathBuf>,
    /// Lets its processes use its sockets until it ends, where no namespace does.
    pub(crate) socket_peers: Option<SocketPeersEntry>,
    /// Its place in its group, given up when the sandbox has ended.
    pub(crate) membership: Option<GroupMembership>,
}

/// Sends the launch order to the inner stage and waits until the payload runs. Also returns the Landlock ABI
/// version the inner stage found.
pub(crate) async fn supervise(
    launched: LaunchedProcess,
    order: LaunchOrder,
    resources: SandboxResources,
) -> Result<(RunningSandbox, i32), SandboxError> {
    let (started, answer) = oneshot::channel();
    let task =
        prepare(launched, order, resources, started).map_err(|error| SandboxError::setup("pipes", error))?;
    tokio::spawn(task);
    answer
        .await
        .map_err(|_| SandboxError::Setup("the runtime is shutting down".into()))?
}

/// The running sandbox and its Landlock ABI version, or why it did not start.
type StartOutcome = Result<(RunningSandbox, i32), SandboxError>;

/// Makes the child's descriptors asynchronous and builds the supervising task.
fn prepare(
    launched: LaunchedProcess,
    order: LaunchOrder,
    resources: SandboxResources,
    started: oneshot::Sender<StartOutcome>,
) -> io::Result<impl Future<Output = ()> + Send> {
    let LaunchedProcess {
        child,
        stdin,
        stdout,
        stderr,
        control,
        bwrap_info,
        group,
    } = launched;
    control.set_nonblocking(true)?;
    let tree = Arc::new(ProcessTreeControl::new(UnixStream::from_std(control)?));
    let pipes = StdioPipes {
        stdin: ChildStdin::from_std(stdin.into())?,
        stdout: ChildStdout::from_std(stdout.into())?,
        stderr: ChildStderr::from_std(stderr.into())?,
    };
    let exit_watch = watch_exit(child.pidfd.clone())?;
    Ok(run_sandbox(
        SandboxSupervisor {
            exit_watch,
            child,
            control: ControlChannel::new(tree),
            group,
            bwrap_info,
        },
        pipes,
        order,
        resources,
        started,
    ))
}

/// Registers a pidfd, which becomes readable when its process ends.
#[allow(unsafe_code)]
fn watch_exit(pidfd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the Arc keeps the descriptor open as long as the AsyncFd exists, and always yields the same one.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?)
}

struct StdioPipes {
    stdin: ChildStdin,
    stdout: ChildStdout,
    stderr: ChildStderr,
}

/// The child process of one sandbox and everything needed to follow and end it.
struct SandboxSupervisor {
    exit_watch: AsyncFd<Arc<OwnedFd>>,
    child: ChildProcess,
    control: ControlChannel,
    group: Option<SandboxCgroup>,
    bwrap_info: Option<OwnedFd>,
}

/// The driver's end of the control protocol.
pub(crate) struct ControlChannel {
    tree: Arc<ProcessTreeControl>,
    /// Bytes received from the inner stage that are not yet a complete line.
    report_buffer: Vec<u8>,
}

/// The supervising task: starts the payload, waits for its end and cleans up.
async fn run_sandbox(
    mut supervisor: SandboxSupervisor,
    pipes: StdioPipes,
    order: LaunchOrder,
    resources: SandboxResources,
    started: oneshot::Sender<StartOutcome>,
) {
    let SandboxResources {
        level,
        paths,
        scratch,
        socket_peers: _socket_peers,
        membership,
    } = resources;
    let program = order.argv.first().cloned().unwrap_or_default();
    let begun = match tokio::time::timeout(START_TIMEOUT, supervisor.start_payload(&order)).await {
        Ok(begun) => begun,
        Err(_) => Err(StartFailure::Setup(format!(
            "nothing runs after {} s",
            START_TIMEOUT.as_secs()
        ))),
    };
    // It holds secrets and is not needed any more.
    drop(order);
    let (exit_sender, exit) = watch::channel(None);
    match begun {
        Ok(landlock) => {
            if let Some(membership) = &membership {
                membership.set_running(Some(supervisor.child.pid), supervisor.control.tree.clone());
            }
            let handle = SandboxHandle::new(
                Some(supervisor.child.pid),
                level,
                supervisor.control.tree.clone(),
                exit,
            );
            let StdioPipes {
                stdin,
                stdout,
                stderr,
            } = pipes;
            // If the caller has stopped waiting, the handle is dropped here, which kills the sandbox.
            drop(started.send(Ok((
                RunningSandbox {
                    stdin,
                    stdout,
                    stderr,
                    handle,
                    paths,
                },
                landlock,
            ))));
            let ended = supervisor.wait_for_end().await;
            let outcome = clean_up(supervisor, scratch).await;
            drop(membership);
            outcome.publish(ended, &exit_sender);
        }
        Err(broken) => {
            supervisor.control.tree.kill();
            let status = supervisor.reap_or_kill().await;
            let error = broken.into_error(program, pipes.stderr, status).await;
            clean_up(supervisor, scratch).await;
            drop(membership);
            drop(started.send(Err(error)));
        }
    }
}

/// Why the payload does not run.
pub(crate) enum StartFailure {
    Program(String),
    Setup(String),
    /// The control socket was closed without a report; bubblewrap writes the reason to stderr.
    Silent,
}

impl StartFailure {
    async fn into_error(
        self,
        program: String,
        stderr: ChildStderr,
        status: Option<WaitIdStatus>,
    ) -> SandboxError {
        match self {
            StartFailure::Program(reason) => SandboxError::Program { program, reason },
            StartFailure::Setup(reason) => SandboxError::Setup(reason),
            StartFailure::Silent => {
                let mut said = Vec::new();
                let mut head = stderr.take(MAX_STDERR_BYTES as u64);
                let _ = tokio::time::timeout(Duration::from_millis(500), head.read_to_end(&mut said)).await;
                let said = String::from_utf8_lossy(&said).trim().to_owned();
                let code = status.and_then(|status| status.exit_status());
                SandboxError::Setup(match (said.is_empty(), code) {
                    (false, _) => said,
                    (true, Some(code)) => format!("it ended with exit code {code} and without a word"),
                    (true, None) => "it was killed while starting".to_owned(),
                })
            }
        }
    }
}

/// What is known about the payload's end.
struct PayloadEnd {
    /// Exit code and signal, as reported by the inner stage.
    reported: Option<(Option<i32>, Option<i32>)>,
    /// Exit status of the direct child: bubblewrap, or the inner stage.
    status: Option<WaitIdStatus>,
    /// Whether a kill was requested.
    killed: bool,
    /// The limit of its group for which it was killed.
    overrun: Option<ExceededLimit>,
}

/// What cleaning up found.
struct CleanupOutcome {
    /// Whether the cgroup counted an out-of-memory kill.
    oom: bool,
}

impl CleanupOutcome {
    /// Determines the exit status and sends it to all handles.
    fn publish(self, ended: PayloadEnd, exit: &watch::Sender<Option<SandboxExit>>) {
        let (code, signal) = match (ended.reported, ended.killed, ended.status) {
            (Some(reported), _, _) => reported,
            (None, true, _) => (None, Some(libc::SIGKILL)),
            // Bubblewrap exits with 128 + signal when its child was killed by one.
            (None, false, Some(status)) => match status.exit_status() {
                Some(code) if code > 128 => (None, Some(code - 128)),
                code => (code, status.terminating_signal()),
            },
            (None, false, None) => (None, Some(libc::SIGKILL)),
        };
        exit.send_replace(Some(SandboxExit {
            code,
            signal,
            oom: self.oom || ended.overrun == Some(ExceededLimit::Memory),
            too_many_processes: ended.overrun == Some(ExceededLimit::Processes),
            cause: None,
        }));
    }
}

impl SandboxSupervisor {
    /// Sends the launch order and waits until the payload runs. Returns the Landlock ABI version.
    async fn start_payload(&mut self, order: &LaunchOrder) -> Result<i32, StartFailure> {
        let abi = self.control.start_payload(order).await?;
        if matches!(order.cleanup, DescendantCleanup::Namespace)
            && let Some(init) = self.bwrap_info.take().and_then(|info| open_init_pidfd(&info))
        {
            let _ = self.control.tree.init.set(init);
        }
        Ok(abi)
    }

    /// Waits for the end; kills the child itself when a requested kill does not take effect in time.
    async fn wait_for_end(&mut self) -> PayloadEnd {
        let tree = self.control.tree.clone();
        let kill_timeout = async {
            tree.kill_requested.notified().await;
            tokio::time::sleep(KILL_GRACE).await;
        };
        let mut reported = None;
        tokio::select! {
            () = async { reported = self.control.read_exit_report().await } => {}
            () = kill_timeout => {}
        }
        PayloadEnd {
            reported,
            status: self.reap_or_kill().await,
            killed: self.control.tree.killed.load(Ordering::SeqCst),
            overrun: self.control.tree.overrun.get().copied(),
        }
    }

    /// Reaps the child; kills it with all below it if it does not end by itself, as it does when the inner stage ends
    /// or finds the control socket closed.
    async fn reap_or_kill(&mut self) -> Option<WaitIdStatus> {
        match tokio::time::timeout(KILL_GRACE, self.reap()).await {
            Ok(status) => status,
            Err(_) => {
                self.child.kill_tree();
                self.reap().await
            }
        }
    }

    /// Waits until the child has ended, and reaps it.
    async fn reap(&mut self) -> Option<WaitIdStatus> {
        loop {
            match self.child.try_reap() {
                Ok(Some(status)) => return Some(status),
                Ok(None) => {}
                Err(_) => return None,
            }
            match self.exit_watch.readable().await {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => return None,
            }
        }
    }
}

impl ControlChannel {
    pub(crate) fn new(tree: Arc<ProcessTreeControl>) -> Self {
        Self {
            tree,
            report_buffer: Vec::new(),
        }
    }

    /// Sends the launch order and waits until the payload runs. Returns the Landlock ABI version.
    pub(crate) async fn start_payload(&mut self, order: &LaunchOrder) -> Result<i32, StartFailure> {
        let json = serde_json::to_vec(order).map_err(|error| StartFailure::Setup(error.to_string()))?;
        let length =
            u32::try_from(json.len()).map_err(|_| StartFailure::Setup("the order is too long".into()))?;
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(json);
        // If the child has ended, reading its reports below shows that.
        let _ = write_all(&self.tree.control, &bytes).await;
        let mut abi = 0;
        loop {
            match self.next_report().await {
                Some(InnerStageReport::Ready { landlock }) => abi = landlock,
                Some(InnerStageReport::Started) => break,
                Some(InnerStageReport::NoProgram { reason }) => return Err(StartFailure::Program(reason)),
                Some(InnerStageReport::Failed { reason }) => return Err(StartFailure::Setup(reason)),
                Some(InnerStageReport::Exited { .. }) | None => return Err(StartFailure::Silent),
            }
        }
        Ok(abi)
    }

    /// Reads reports until the socket closes; returns the payload's exit code and signal, if reported.
    pub(crate) async fn read_exit_report(&mut self) -> Option<(Option<i32>, Option<i32>)> {
        let mut reported = None;
        while let Some(report) = self.next_report().await {
            if let InnerStageReport::Exited { code, signal } = report {
                reported = Some((code, signal));
            }
        }
        reported
    }

    /// The next report of the inner stage; none when it has closed the socket.
    async fn next_report(&mut self) -> Option<InnerStageReport> {
        loop {
            if let Some(end) = self.report_buffer.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.report_buffer.drain(..=end).collect();
                // Here only the inner stage can write: the payload does not inherit the socket. In a container anybody
                // may who took over its first process; that one's payload is all it can lie about.
                return serde_json::from_slice(&line).ok();
            }
            if self.report_buffer.len() > MAX_REPORT_BYTES {
                return None;
            }
            self.tree.control.readable().await.ok()?;
            let mut chunk = [0; 512];
            match self.tree.control.try_read(&mut chunk) {
                Ok(0) => return None,
                Ok(read) => self.report_buffer.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
    }
}

/// How long the removal of a sandbox's temporary directory is waited for.
const SCRATCH_REMOVAL_WAIT: Duration = Duration::from_secs(2);

/// Removes the sandbox's cgroup and temporary directory.
async fn clean_up(supervisor: SandboxSupervisor, scratch: Option<PathBuf>) -> CleanupOutcome {
    let group = supervisor.group;
    if group.is_none() && scratch.is_none() {
        return CleanupOutcome { oom: false };
    }
    let oom = match group {
        Some(group) => group.remove().await,
        None => false,
    };
    if let Some(scratch) = scratch {
        // What a program left there may be large; nobody waits long for it.
        let removal = tokio::spawn(oubliette_os::remove_tree(scratch));
        let _ = tokio::time::timeout(SCRATCH_REMOVAL_WAIT, removal).await;
    }
    CleanupOutcome { oom }
}

async fn write_all(control: &UnixStream, mut bytes: &[u8]) -> io::Result<()> {
    while !bytes.is_empty() {
        control.writable().await?;
        match control.try_write(bytes) {
            Ok(written) => bytes = &bytes[written..],
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Opens a pidfd of the namespace's pid 1. Bubblewrap writes `{"child-pid": N}` before it lets the inner stage
/// run, so it can be read without waiting by now.
fn open_init_pidfd(info: &OwnedFd) -> Option<OwnedFd> {
    #[derive(serde::Deserialize)]
    struct BwrapInfo {
        #[serde(rename = "child-pid")]
        pid: i32,
    }
    let mut text = [0; 512];
    let read = rustix::io::read(info.as_fd(), &mut text).ok()?;
    let info: BwrapInfo = serde_json::from_slice(&text[..read]).ok()?;
    rustix::process::pidfd_open(Pid::from_raw(info.pid)?, PidfdFlags::empty()).ok()
}
