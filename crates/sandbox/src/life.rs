//! A sandbox's life, from its first moment until it is reaped.
//!
//! One task a sandbox owns the child process: it sends the order, waits for the payload to run, then for its
//! end, and reaps. Handles only point to it, so that none of them, dropped at any moment, leaves a zombie or
//! a survivor.

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

use crate::driver::SandboxError;
use crate::handle::{Exit, Handle, Reach, Running};
use crate::launch::{Child, Launched};
use crate::local::cgroup::Group;
use crate::wire::{Family, News, Order};
use crate::{Level, Paths};

/// The inner stage has this long to get the payload running.
const START: Duration = Duration::from_secs(20);
/// After a kill, the inner stage has this long to go before the process above it is killed too.
const ESCALATE: Duration = Duration::from_secs(2);
/// How much of stderr goes into an error.
const TAIL: usize = 2000;

/// What stays as long as the sandbox does.
pub(crate) struct Kit {
    pub(crate) level: Level,
    pub(crate) paths: Paths,
    /// Removed at the end.
    pub(crate) scratch: Option<PathBuf>,
}

/// Hands the order to what was launched and waits until the payload runs. Also says which Landlock the
/// inner stage found.
pub(crate) async fn supervise(
    launched: Launched,
    order: Order,
    kit: Kit,
) -> Result<(Running, i32), SandboxError> {
    let (started, answer) = oneshot::channel();
    let task = prepare(launched, order, kit, started).map_err(|error| SandboxError::setup("pipes", error))?;
    tokio::spawn(task);
    answer
        .await
        .map_err(|_| SandboxError::Setup("the runtime is shutting down".into()))?
}

type Answer = Result<(Running, i32), SandboxError>;

fn prepare(
    launched: Launched,
    order: Order,
    kit: Kit,
    started: oneshot::Sender<Answer>,
) -> io::Result<impl Future<Output = ()> + Send> {
    let Launched {
        child,
        stdin,
        stdout,
        stderr,
        control,
        info,
        group,
    } = launched;
    control.set_nonblocking(true)?;
    let reach = Arc::new(Reach::new(UnixStream::from_std(control)?));
    let pipes = Pipes {
        stdin: ChildStdin::from_std(stdin.into())?,
        stdout: ChildStdout::from_std(stdout.into())?,
        stderr: ChildStderr::from_std(stderr.into())?,
    };
    let end = watch_end(child.pidfd.clone())?;
    Ok(live(
        Life {
            end,
            child,
            reach,
            group,
            info,
            news: Vec::new(),
        },
        pipes,
        order,
        kit,
        started,
    ))
}

#[allow(unsafe_code)]
fn watch_end(pidfd: Arc<OwnedFd>) -> io::Result<AsyncFd<Arc<OwnedFd>>> {
    // SAFETY: the Arc keeps the descriptor open as long as the AsyncFd, and always names the same one.
    Ok(unsafe { AsyncFd::register_with_interest(pidfd, Interest::READABLE) }?)
}

struct Pipes {
    stdin: ChildStdin,
    stdout: ChildStdout,
    stderr: ChildStderr,
}

struct Life {
    end: AsyncFd<Arc<OwnedFd>>,
    child: Child,
    reach: Arc<Reach>,
    group: Option<Group>,
    info: Option<OwnedFd>,
    news: Vec<u8>,
}

async fn live(mut life: Life, pipes: Pipes, order: Order, kit: Kit, started: oneshot::Sender<Answer>) {
    let Kit {
        level,
        paths,
        scratch,
    } = kit;
    let program = order.argv.first().cloned().unwrap_or_default();
    let begun = match tokio::time::timeout(START, life.begin(&order)).await {
        Ok(begun) => begun,
        Err(_) => Err(Broken::Setup(format!("nothing runs after {} s", START.as_secs()))),
    };
    // The order holds secrets and has been delivered.
    drop(order);
    let (exit_sender, exit) = watch::channel(None);
    match begun {
        Ok(landlock) => {
            let handle = Handle::new(life.child.pid, level, life.reach.clone(), exit);
            let Pipes {
                stdin,
                stdout,
                stderr,
            } = pipes;
            // If nobody waits any more, the handle is dropped here, and that kills.
            drop(started.send(Ok((
                Running {
                    stdin,
                    stdout,
                    stderr,
                    handle,
                    paths,
                },
                landlock,
            ))));
            let ended = life.run().await;
            finish(life, scratch).await.publish(ended, &exit_sender);
        }
        Err(broken) => {
            life.reach.kill();
            life.child.kill();
            let status = life.reap().await;
            let error = broken.explain(program, pipes.stderr, status).await;
            finish(life, scratch).await;
            drop(started.send(Err(error)));
        }
    }
}

/// Why the payload does not run.
enum Broken {
    Program(String),
    Setup(String),
    /// The other end closed without a word: bubblewrap said why on stderr.
    Silent,
}

impl Broken {
    async fn explain(
        self,
        program: String,
        stderr: ChildStderr,
        status: Option<WaitIdStatus>,
    ) -> SandboxError {
        match self {
            Broken::Program(reason) => SandboxError::Program { program, reason },
            Broken::Setup(reason) => SandboxError::Setup(reason),
            Broken::Silent => {
                let mut said = Vec::new();
                let mut head = stderr.take(TAIL as u64);
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

/// What is known when the payload has gone.
struct Ended {
    news: Option<(Option<i32>, Option<i32>)>,
    status: Option<WaitIdStatus>,
    killed: bool,
}

struct Aftermath {
    oom: bool,
}

impl Aftermath {
    fn publish(self, ended: Ended, exit: &watch::Sender<Option<Exit>>) {
        let (code, signal) = match (ended.news, ended.killed, ended.status) {
            (Some(told), _, _) => told,
            (None, true, _) => (None, Some(libc::SIGKILL)),
            // 128 + signal is how bubblewrap tells of a killed child.
            (None, false, Some(status)) => match status.exit_status() {
                Some(code) if code > 128 => (None, Some(code - 128)),
                code => (code, status.terminating_signal()),
            },
            (None, false, None) => (None, Some(libc::SIGKILL)),
        };
        exit.send_replace(Some(Exit {
            code,
            signal,
            oom: self.oom,
        }));
    }
}

impl Life {
    /// Sends the order; waits until the payload runs.
    async fn begin(&mut self, order: &Order) -> Result<i32, Broken> {
        let json = serde_json::to_vec(order).map_err(|error| Broken::Setup(error.to_string()))?;
        let length = u32::try_from(json.len()).map_err(|_| Broken::Setup("the order is too long".into()))?;
        let mut bytes = length.to_le_bytes().to_vec();
        bytes.extend(json);
        // A child that is gone shows below, in what it said.
        let _ = write_all(&self.reach.control, &bytes).await;
        let mut abi = 0;
        loop {
            match self.next_news().await {
                Some(News::Ready { landlock }) => abi = landlock,
                Some(News::Started) => break,
                Some(News::NoProgram { reason }) => return Err(Broken::Program(reason)),
                Some(News::Failed { reason }) => return Err(Broken::Setup(reason)),
                Some(News::Exited { .. }) | None => return Err(Broken::Silent),
            }
        }
        if matches!(order.family, Family::Namespace)
            && let Some(init) = self.info.take().and_then(|info| init_of(&info))
        {
            let _ = self.reach.init.set(init);
        }
        Ok(abi)
    }

    /// Waits for the end, hurrying it when a kill does not come through.
    async fn run(&mut self) -> Ended {
        let reach = self.reach.clone();
        let patience = async {
            reach.kill_asked.notified().await;
            tokio::time::sleep(ESCALATE).await;
        };
        let mut told = None;
        tokio::select! {
            () = async { told = self.exit_news().await } => {}
            () = patience => {}
        }
        let status = match tokio::time::timeout(ESCALATE, self.reap()).await {
            Ok(status) => status,
            Err(_) => {
                // Its inner stage has ended, or does not heed the kill.
                self.child.kill();
                self.reap().await
            }
        };
        Ended {
            news: told,
            status,
            killed: self.reach.killed.load(Ordering::SeqCst),
        }
    }

    async fn exit_news(&mut self) -> Option<(Option<i32>, Option<i32>)> {
        let mut told = None;
        while let Some(news) = self.next_news().await {
            if let News::Exited { code, signal } = news {
                told = Some((code, signal));
            }
        }
        told
    }

    /// The next line, or nothing when the other end has closed.
    async fn next_news(&mut self) -> Option<News> {
        loop {
            if let Some(end) = self.news.iter().position(|byte| *byte == b'\n') {
                let line: Vec<u8> = self.news.drain(..=end).collect();
                // Only the inner stage can write here, before it starts the payload and after.
                return serde_json::from_slice(&line).ok();
            }
            self.reach.control.readable().await.ok()?;
            let mut chunk = [0; 512];
            match self.reach.control.try_read(&mut chunk) {
                Ok(0) => return None,
                Ok(read) => self.news.extend_from_slice(&chunk[..read]),
                Err(error) if error.kind() == io::ErrorKind::WouldBlock => {}
                Err(_) => return None,
            }
        }
    }

    async fn reap(&mut self) -> Option<WaitIdStatus> {
        loop {
            match self.child.try_reap() {
                Ok(Some(status)) => return Some(status),
                Ok(None) => {}
                Err(_) => return None,
            }
            match self.end.readable().await {
                Ok(mut ready) => ready.clear_ready(),
                Err(_) => return None,
            }
        }
    }
}

/// Frees what the sandbox had on the host.
async fn finish(life: Life, scratch: Option<PathBuf>) -> Aftermath {
    let group = life.group;
    if group.is_none() && scratch.is_none() {
        return Aftermath { oom: false };
    }
    let oom = match group {
        Some(group) => group.end().await,
        None => false,
    };
    if let Some(scratch) = scratch {
        let _ = tokio::fs::remove_dir_all(scratch).await;
    }
    Aftermath { oom }
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

/// Bubblewrap writes `{"child-pid": N}` before it lets the inner stage go on, so it is there by now.
fn init_of(info: &OwnedFd) -> Option<OwnedFd> {
    #[derive(serde::Deserialize)]
    struct Info {
        #[serde(rename = "child-pid")]
        pid: i32,
    }
    let mut text = [0; 512];
    let read = rustix::io::read(info.as_fd(), &mut text).ok()?;
    let info: Info = serde_json::from_slice(&text[..read]).ok()?;
    rustix::process::pidfd_open(Pid::from_raw(info.pid)?, PidfdFlags::empty()).ok()
}
