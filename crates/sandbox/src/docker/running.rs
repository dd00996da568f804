//! One container, from its start to its removal.
//!
//! A task owns it, so that dropping a handle or the future that starts it leaves no container. However it ends, the
//! container is removed before its end is known.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use bollard::models::ContainerState;
use bollard::query_parameters::{
    CreateContainerOptions, InspectContainerOptions, LogsOptions, RemoveContainerOptions,
    StartContainerOptions, WaitContainerOptions,
};
use futures::StreamExt as _;
use rustix::process::Pid;
use tokio::sync::{oneshot, watch};

use super::engine::is_not_found;
use super::{DockerDriverInner, configuration, image};
use crate::container::launch_order::{self, ImageEnv};
use crate::driver::{PinnedImage, SandboxError};
use crate::group::GroupMembership;
use crate::handle::{
    ExceededLimit, ExitCause, ProcessTreeControl, RunningSandbox, SandboxExit, SandboxHandle,
};
use crate::stage::server_end::{StageDoor, StageLink, StagePipes};
use crate::supervise::{ControlChannel, START_TIMEOUT, StartFailure};
use crate::{IsolationLevel, SandboxPaths, SandboxSpec};

/// How long a container whose program has ended may take to hand over what is left of its output, and to end.
const LAST_OUTPUT: Duration = Duration::from_secs(10);
/// How often the engine is asked again when it does not answer.
const RETRY: Duration = Duration::from_millis(500);
/// How long it is asked about the end of a container.
const ASK_ABOUT_END: Duration = Duration::from_secs(5);
/// Maximum bytes of a container's own output that are quoted in an error.
const MAX_QUOTED_BYTES: usize = 1000;

type ContainerStart = Result<RunningSandbox, SandboxError>;

/// Starts a container. Returns when the program itself runs.
pub(super) async fn start(
    driver: Arc<DockerDriverInner>,
    spec: SandboxSpec,
    image: PinnedImage,
    membership: GroupMembership,
    session: String,
) -> ContainerStart {
    let (started, answer) = oneshot::channel();
    tokio::spawn(run(driver, spec, image, membership, session, started));
    answer
        .await
        .map_err(|_| SandboxError::Setup("the runtime is shutting down".into()))?
}

/// A container that was created.
struct Container {
    driver: Arc<DockerDriverInner>,
    name: String,
    image: PinnedImage,
}

/// A container whose program runs.
struct StartedContainer {
    link: StageLink,
    control: ControlChannel,
    tree: Arc<ProcessTreeControl>,
    pipes: StartedPipes,
    pid: Option<Pid>,
}

/// The program's pipes without the control socket.
struct StartedPipes {
    stdin: tokio::process::ChildStdin,
    stdout: tokio::process::ChildStdout,
    stderr: tokio::process::ChildStderr,
}

async fn run(
    driver: Arc<DockerDriverInner>,
    spec: SandboxSpec,
    image: PinnedImage,
    membership: GroupMembership,
    session: String,
    mut started: oneshot::Sender<ContainerStart>,
) {
    let container = Container {
        name: driver.next_stage(),
        driver,
        image,
    };
    let start = container.start(spec, &session);
    let begun = tokio::select! {
        begun = start => begun,
        // Nobody waits for it any more.
        () = started.closed() => {
            container.remove().await;
            return;
        }
    };
    let mut running = match begun {
        Ok(running) => running,
        Err(error) => {
            container.remove().await;
            drop(membership);
            let _ = started.send(Err(error));
            return;
        }
    };
    membership.set_running(running.pid, running.tree.clone());
    let (exit_sender, exit) = watch::channel(None);
    let handle = SandboxHandle::new(
        running.pid,
        IsolationLevel::Namespaces,
        running.tree.clone(),
        exit,
    );
    let StartedPipes {
        stdin,
        stdout,
        stderr,
    } = running.pipes;
    // If the caller has stopped waiting, the handle is dropped here, which kills the sandbox.
    drop(started.send(Ok(RunningSandbox {
        stdin,
        stdout,
        stderr,
        handle,
        paths: SandboxPaths::as_specified(),
    })));
    let ended = container
        .wait_for_end(&mut running.control, &running.tree, &running.link)
        .await;
    container.remove().await;
    // What was received is still read from the pipes.
    running.link.close();
    drop(membership);
    exit_sender.send_replace(Some(ended));
}

impl Container {
    async fn start(&self, spec: SandboxSpec, session: &str) -> Result<StartedContainer, SandboxError> {
        let driver = &self.driver;
        let defaults = image::defaults(&driver.engine, &self.image).await?;
        driver.ownership.give(&spec).await?;
        let failed = |error| SandboxError::setup("the container's files", error);
        driver.user_files().write().map_err(failed)?;
        let door = StageDoor::open(driver.stage_dir(&self.name), &self.name, driver.user).map_err(failed)?;
        let body = configuration::container(driver, &spec, &self.image, &defaults, session, door.dir())?;
        let (link, connected) = door.serve(spec.sockets.clone(), driver.config.grace);
        let program = spec.argv.first().cloned().unwrap_or_default();
        let order = launch_order::order(spec, ImageEnv::Known(defaults.env), &defaults.volumes);

        let docker = driver.engine.client().await?;
        let options = CreateContainerOptions {
            name: Some(self.name.clone()),
            ..CreateContainerOptions::default()
        };
        docker
            .create_container(Some(options), body)
            .await
            .map_err(|error| driver.engine.failed("creating the container", &error))?;
        docker
            .start_container(&self.name, None::<StartContainerOptions>)
            .await
            .map_err(|error| driver.engine.failed("starting the container", &error))?;
        let start_payload = async {
            tokio::select! {
                connected = connected => drop(connected.map_err(|_| link.start_error())?),
                () = self.died() => return Err(self.died_early().await),
            }
            let pipes = StagePipes::connect(&link).map_err(failed)?;
            let tree = Arc::new(ProcessTreeControl::new(pipes.control));
            let mut control = ControlChannel::new(tree.clone());
            if let Err(failure) = control.start_payload(&order).await {
                return Err(self.start_error(failure, &program).await);
            }
            Ok((
                StartedPipes {
                    stdin: pipes.stdin,
                    stdout: pipes.stdout,
                    stderr: pipes.stderr,
                },
                tree,
                control,
            ))
        };
        let (pipes, tree, control) = match tokio::time::timeout(START_TIMEOUT, start_payload).await {
            Ok(started) => started?,
            Err(_) => {
                return Err(SandboxError::Setup(format!(
                    "the container's first process has not connected after {} s",
                    START_TIMEOUT.as_secs()
                )));
            }
        };
        let state = self.state().await;
        Ok(StartedContainer {
            link,
            control,
            tree,
            pipes,
            pid: state.ok().flatten().and_then(|state| own_pid(&state)),
        })
    }

    /// Why the program does not run, in words for whoever chose the image.
    async fn start_error(&self, failure: StartFailure, program: &str) -> SandboxError {
        let image = &self.image.name;
        match failure {
            StartFailure::Program(reason) => SandboxError::Program {
                program: program.to_owned(),
                reason: format!(
                    "{reason}. The image {image} has to have it, with what it needs: a shell for scripts, a C library for \
                     programs that are linked to one"
                ),
            },
            StartFailure::Setup(reason) => SandboxError::Setup(reason),
            StartFailure::Silent => self.died_early().await,
        }
    }

    /// Waits until the container has ended.
    async fn died(&self) {
        loop {
            let Ok(docker) = self.driver.engine.client().await else {
                tokio::time::sleep(RETRY).await;
                continue;
            };
            let mut end = std::pin::pin!(docker.wait_container(&self.name, None::<WaitContainerOptions>));
            match end.next().await {
                Some(Ok(_) | Err(bollard::errors::Error::DockerContainerWaitError { .. })) => return,
                Some(Err(error)) if is_not_found(&error) => return,
                // The engine went away; the container may still run.
                Some(Err(_)) | None => tokio::time::sleep(RETRY).await,
            }
        }
    }

    /// Why a container ended before its first process connected.
    async fn died_early(&self) -> SandboxError {
        let state = self.state().await.ok().flatten().unwrap_or_default();
        let said = self.own_output().await;
        let mut why = match (state.oom_killed, state.exit_code) {
            (Some(true), _) => "it ran out of memory".to_owned(),
            (_, Some(code)) => format!("exit code {code}"),
            (_, None) => "it was removed".to_owned(),
        };
        for more in [state.error.unwrap_or_default(), said] {
            if !more.trim().is_empty() {
                why = format!("{why}: {}", more.trim());
            }
        }
        SandboxError::Setup(format!(
            "the container of the image {} ended while it was started: {why}",
            self.image.name
        ))
    }

    /// What the container's first process wrote before it was connected: why it could not.
    async fn own_output(&self) -> String {
        let Ok(docker) = self.driver.engine.client().await else {
            return String::new();
        };
        let options = LogsOptions {
            stdout: true,
            stderr: true,
            ..LogsOptions::default()
        };
        let mut said = Vec::new();
        let mut lines = std::pin::pin!(docker.logs(&self.name, Some(options)));
        while said.len() < MAX_QUOTED_BYTES
            && let Ok(Some(Ok(line))) = tokio::time::timeout(RETRY, lines.next()).await
        {
            said.extend_from_slice(&line.into_bytes());
        }
        said.truncate(MAX_QUOTED_BYTES);
        String::from_utf8_lossy(&said).into_owned()
    }

    /// The container's state; none if there is no such container.
    async fn state(&self) -> Result<Option<ContainerState>, SandboxError> {
        let engine = &self.driver.engine;
        let docker = engine.client().await?;
        match docker
            .inspect_container(&self.name, None::<InspectContainerOptions>)
            .await
        {
            Ok(found) => Ok(found.state),
            Err(error) if is_not_found(&error) => Ok(None),
            Err(error) => Err(engine.failed("looking at the container", &error)),
        }
    }

    /// Waits until the program has ended, or the container, or the connection to it.
    async fn wait_for_end(
        &self,
        control: &mut ControlChannel,
        tree: &ProcessTreeControl,
        link: &StageLink,
    ) -> SandboxExit {
        enum ContainerEnd {
            Program,
            Container,
            Link(ExitCause),
            Kill,
        }
        let mut reported = None;
        let end = {
            let died = async {
                self.died().await;
                // Everything it sent before is read first.
                link.disconnected().await;
            };
            tokio::pin!(died);
            tokio::select! {
                biased;
                () = tree.kill_requested.notified() => ContainerEnd::Kill,
                report = control.read_exit_report() => {
                    reported = report;
                    // The container hands over the rest of the output, and ends.
                    tokio::select! {
                        () = tree.kill_requested.notified() => {}
                        _ = tokio::time::timeout(LAST_OUTPUT, &mut died) => {}
                    }
                    match reported {
                        Some(_) => ContainerEnd::Program,
                        None => link.cause().map_or(ContainerEnd::Container, ContainerEnd::Link),
                    }
                }
                () = &mut died => ContainerEnd::Container,
                cause = link.ended() => ContainerEnd::Link(cause),
            }
        };
        let killed = tree.killed.load(Ordering::SeqCst);
        let overrun = tree.overrun.get().copied();
        let state = tokio::time::timeout(ASK_ABOUT_END, self.state()).await;
        let (state, reachable) = match state {
            Ok(Ok(state)) => (state.unwrap_or_default(), true),
            Ok(Err(_)) | Err(_) => (ContainerState::default(), false),
        };
        let oom = state.oom_killed == Some(true);
        let cause = match end {
            _ if killed || oom => None,
            ContainerEnd::Program | ContainerEnd::Kill => None,
            ContainerEnd::Link(cause) => Some(cause),
            ContainerEnd::Container if !reachable => Some(ExitCause::EngineUnreachable),
            ContainerEnd::Container => Some(ExitCause::ContainerKilled),
        };
        let (code, signal) = reported.unwrap_or((None, Some(libc::SIGKILL)));
        SandboxExit {
            code,
            signal,
            oom: oom || overrun == Some(ExceededLimit::Memory),
            too_many_processes: overrun == Some(ExceededLimit::Processes),
            cause,
        }
    }

    /// Removes the container, running or not. If the engine does not answer, the container ends by itself when its
    /// grace time is over, and the next start of the server removes it.
    async fn remove(&self) {
        let options = RemoveContainerOptions {
            force: true,
            v: true,
            ..RemoveContainerOptions::default()
        };
        for _ in 0..10 {
            let Ok(docker) = self.driver.engine.client().await else {
                return;
            };
            match docker.remove_container(&self.name, Some(options.clone())).await {
                Ok(()) => return,
                Err(error) if is_not_found(&error) => return,
                Err(error) => {
                    tracing::warn!(%error, container = self.name, "removing a container failed");
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}

/// The pid of a container's first process, if it is one of this host's: an engine in a virtual machine has other ones.
fn own_pid(state: &ContainerState) -> Option<Pid> {
    let pid = Pid::from_raw(i32::try_from(state.pid?).ok()?)?;
    let name = std::fs::read_to_string(format!("/proc/{}/comm", pid.as_raw_pid())).ok()?;
    name.starts_with("oubliette-clien").then_some(pid)
}
