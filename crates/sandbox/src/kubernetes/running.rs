//! One pod, from its start to its removal.
//!
//! A task owns it, so that dropping a handle or the future that starts it leaves no pod. A program that has ended by itself
//! has ended for good when its pod's connection is closed: nothing waits for the cluster then. Otherwise the pod is gone
//! before its end is known.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use k8s_openapi::api::core::v1::Event;
use kube::api::{ListParams, LogParams};
use tokio::sync::{oneshot, watch};

use super::KubernetesDriverInner;
use super::cluster::is_answer;
use super::pod_status::{self, StartProblem};
use super::pod_watch::{PodState, TrackedPod};
use super::sandbox_object::ObjectKind;
use crate::container::launch_order::{self, ImageEnv};
use crate::driver::{PinnedImage, SandboxError};
use crate::group::GroupMembership;
use crate::handle::{
    ExceededLimit, ExitCause, ProcessTreeControl, RunningSandbox, SandboxExit, SandboxHandle,
};
use crate::stage::ClosedPort;
use crate::stage::server_end::{StageDoor, StageLink, StagePipes};
use crate::supervise::{ControlChannel, START_TIMEOUT, StartFailure};
use crate::{IsolationLevel, SandboxPaths, SandboxSpec};

/// How long a pod may take to be given a node: an autoscaler may have to start one.
const SCHEDULE_TIMEOUT: Duration = Duration::from_secs(60);
/// How long it may take until its first process connects: a large image may have to be pulled.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(300);
/// How long a pod whose program has ended may take to hand over what is left of its output.
const LAST_OUTPUT: Duration = Duration::from_secs(10);
/// How long the cluster may take to say why a container was killed.
const STATUS_TIMEOUT: Duration = Duration::from_secs(3);
/// How long a pod that was killed may take to end by itself, and then by the cluster.
const OWN_END: Duration = Duration::from_secs(2);
const CLUSTER_END: Duration = Duration::from_secs(15);
/// Time before the cluster is asked again when it did not answer.
const RETRY: Duration = Duration::from_millis(500);
/// Maximum bytes of a pod's own output that are quoted in an error.
const MAX_QUOTED_BYTES: i64 = 1000;

type PodStart = Result<RunningSandbox, SandboxError>;

/// Starts a pod. Returns when the program itself runs.
pub(super) async fn start(
    driver: Arc<KubernetesDriverInner>,
    spec: SandboxSpec,
    image: PinnedImage,
    membership: GroupMembership,
    session: String,
) -> PodStart {
    let kind = driver.object_kind().await?;
    let name = driver.next_stage();
    let tracked = driver.watch().await?.track(&name);
    let pod = SandboxPod {
        driver,
        name,
        kind,
        image,
        tracked,
    };
    let (started, answer) = oneshot::channel();
    tokio::spawn(run(pod, spec, membership, session, started));
    answer
        .await
        .map_err(|_| SandboxError::Setup("the runtime is shutting down".into()))?
}

/// A pod that is created.
struct SandboxPod {
    driver: Arc<KubernetesDriverInner>,
    name: String,
    kind: ObjectKind,
    image: PinnedImage,
    tracked: TrackedPod,
}

/// A pod whose program runs.
struct StartedPod {
    link: StageLink,
    control: ControlChannel,
    tree: Arc<ProcessTreeControl>,
    stdin: tokio::process::ChildStdin,
    stdout: tokio::process::ChildStdout,
    stderr: tokio::process::ChildStderr,
}

async fn run(
    pod: SandboxPod,
    spec: SandboxSpec,
    membership: GroupMembership,
    session: String,
    mut started: oneshot::Sender<PodStart>,
) {
    let begun = tokio::select! {
        begun = pod.start(spec, &session) => begun,
        // Nobody waits for it any more.
        () = started.closed() => {
            pod.remove().await;
            return;
        }
    };
    let mut running = match begun {
        Ok(running) => running,
        Err(error) => {
            drop(membership);
            let _ = started.send(Err(error));
            pod.remove().await;
            return;
        }
    };
    // No process of it is one of this machine's.
    membership.set_running(None, running.tree.clone());
    let (exit_sender, exit) = watch::channel(None);
    let handle = SandboxHandle::new(None, IsolationLevel::Namespaces, running.tree.clone(), exit);
    // If the caller has stopped waiting, the handle is dropped here, which kills the sandbox.
    drop(started.send(Ok(RunningSandbox {
        stdin: running.stdin,
        stdout: running.stdout,
        stderr: running.stderr,
        handle,
        paths: SandboxPaths::as_specified(),
    })));
    let (ended, is_gone) = pod
        .wait_for_end(&mut running.control, &running.tree, &running.link)
        .await;
    // What was received is still read from the pipes. A stage that comes again is refused, and ends.
    running.link.close();
    if !is_gone {
        pod.remove().await;
        let gone = pod
            .tracked
            .when(|state| pod_status::has_ended(state).then_some(()));
        let _ = tokio::time::timeout(CLUSTER_END, gone).await;
    }
    drop(membership);
    exit_sender.send_replace(Some(ended));
    if is_gone {
        pod.remove().await;
    }
}

impl SandboxPod {
    async fn start(&self, spec: SandboxSpec, session: &str) -> Result<StartedPod, SandboxError> {
        let driver = &self.driver;
        driver.ownership.give(&spec).await?;
        let failed = |error| SandboxError::setup("the pod's files", error);
        driver.user_files.write().map_err(failed)?;
        let (listener, address) = (driver.listener().await?, driver.stage_address().await?);
        let dir = driver.stage_dir(&self.name);
        // Tried until it is known to be closed: trying takes a moment.
        let closed_port = match driver.closed_port() {
            Some(ClosedPort::Unreached) => None,
            Some(ClosedPort::Reached) | None => Some(listener.closed_port()),
        };
        let user = driver.pods.user;
        let door =
            StageDoor::open_remote(dir, &self.name, user, listener, address, closed_port).map_err(failed)?;
        let pod = driver
            .pods
            .pod(&self.name, &spec, &self.image, session, door.dir())?;
        let (link, connected) = door.serve(spec.sockets.clone(), driver.config.grace);
        let program = spec.argv.first().cloned().unwrap_or_default();
        let order = launch_order::order(spec, ImageEnv::OfFirstProcess, &[]);

        self.kind.create(&driver.cluster, &pod).await?;
        tokio::select! {
            connected = connected => {
                let said = connected.map_err(|_| link.start_error())?;
                driver.note_closed_port(said)?;
            }
            problem = self.start_failure() => return Err(problem),
            () = self.unscheduled() => return Err(self.still_waiting(SCHEDULE_TIMEOUT).await),
            () = tokio::time::sleep(CONNECT_TIMEOUT) => return Err(self.still_waiting(CONNECT_TIMEOUT).await),
        }
        let start_payload = async {
            let pipes = StagePipes::connect(&link).map_err(failed)?;
            let tree = Arc::new(ProcessTreeControl::new(pipes.control));
            let mut control = ControlChannel::new(tree.clone());
            if let Err(failure) = control.start_payload(&order).await {
                return Err(self.payload_error(failure, &program).await);
            }
            Ok((pipes.stdin, pipes.stdout, pipes.stderr, tree, control))
        };
        let started = tokio::time::timeout(START_TIMEOUT, start_payload).await;
        let (stdin, stdout, stderr, tree, control) = started.map_err(|_| {
            let seconds = START_TIMEOUT.as_secs();
            SandboxError::Setup(format!("nothing runs in the pod after {seconds} s"))
        })??;
        Ok(StartedPod {
            link,
            control,
            tree,
            stdin,
            stdout,
            stderr,
        })
    }

    /// Waits until it is certain that the pod does not start, and says why.
    async fn start_failure(&self) -> SandboxError {
        let image = &self.image.name;
        match self
            .tracked
            .when(|state| pod_status::start_failure(state, image))
            .await
        {
            StartProblem::Error(error) => error,
            StartProblem::Ended => self.died_early().await,
        }
    }

    /// Waits until the pod should have a node and has none.
    async fn unscheduled(&self) {
        let scheduled = self.tracked.when(|state| match state {
            PodState::Seen(pod) => pod_status::is_scheduled(pod).then_some(()),
            PodState::Unseen | PodState::Gone => None,
        });
        if tokio::time::timeout(SCHEDULE_TIMEOUT, scheduled).await.is_ok() {
            std::future::pending::<()>().await;
        }
    }

    /// Why the pod has not started in time.
    async fn still_waiting(&self, limit: Duration) -> SandboxError {
        let state = self.tracked.state();
        if let (PodState::Unseen, Ok(client)) = (&state, self.driver.cluster.client().await)
            && let Some(said) = self.kind.told(&self.driver.cluster, client, &self.name).await
        {
            return SandboxError::Unavailable {
                reason: format!("the controller of Sandbox objects has made no pod: {said}"),
                remedy: "Look at its log; without its kinds installed, Oubliette makes pods itself.".into(),
            };
        }
        pod_status::still_waiting(&state, &self.events().await, limit.as_secs())
    }

    async fn events(&self) -> Vec<Event> {
        let Ok(client) = self.driver.cluster.client().await else {
            return Vec::new();
        };
        let of_pod = ListParams::default().fields(&format!("involvedObject.name={}", self.name));
        let listed = self.driver.cluster.events(client).list(&of_pod).await;
        listed.map(|listed| listed.items).unwrap_or_default()
    }

    /// Why the program does not run, in words for whoever chose the image.
    async fn payload_error(&self, failure: StartFailure, program: &str) -> SandboxError {
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

    /// Why a pod ended before its first process connected.
    async fn died_early(&self) -> SandboxError {
        let ended = self
            .tracked
            .when(|state| pod_status::has_ended(state).then_some(()));
        let _ = tokio::time::timeout(STATUS_TIMEOUT, ended).await;
        let mut why = match self.tracked.state() {
            PodState::Seen(pod) if pod_status::was_out_of_memory(&pod) => "it ran out of memory".to_owned(),
            PodState::Seen(pod) => match pod_status::terminated(&pod) {
                Some(ended) => {
                    let said = ended.message.as_deref().unwrap_or_default();
                    format!("exit code {} {said}", ended.exit_code)
                        .trim_end()
                        .to_owned()
                }
                None => "its connection was cut".to_owned(),
            },
            PodState::Unseen | PodState::Gone => "it was deleted".to_owned(),
        };
        let said = self.own_output().await;
        if !said.trim().is_empty() {
            why = format!("{why}: {}", said.trim());
        }
        SandboxError::Setup(format!(
            "the pod of the image {} ended while it was started: {why}",
            self.image.name
        ))
    }

    /// What the pod's first process wrote before it was connected: why it could not.
    async fn own_output(&self) -> String {
        let Ok(client) = self.driver.cluster.client().await else {
            return String::new();
        };
        let how = LogParams {
            limit_bytes: Some(MAX_QUOTED_BYTES),
            tail_lines: Some(5),
            ..LogParams::default()
        };
        let said = self.driver.cluster.pods(client).logs(&self.name, &how).await;
        said.unwrap_or_default()
    }

    /// Waits until the program has ended, or the pod, or the connection to it. Also says whether nothing of it runs any more.
    async fn wait_for_end(
        &self,
        control: &mut ControlChannel,
        tree: &ProcessTreeControl,
        link: &StageLink,
    ) -> (SandboxExit, bool) {
        enum PodEnd {
            Program,
            Pod,
            Link(ExitCause),
            Kill,
        }
        let mut reported = None;
        let end = {
            let died = async {
                self.tracked
                    .when(|state| pod_status::has_ended(state).then_some(()))
                    .await;
                // Everything it sent before is read first.
                link.disconnected().await;
            };
            tokio::select! {
                biased;
                () = tree.kill_requested.notified() => PodEnd::Kill,
                report = control.read_exit_report() => {
                    reported = report;
                    // The pod hands over the rest of the output, and ends.
                    tokio::select! {
                        () = tree.kill_requested.notified() => {}
                        _ = tokio::time::timeout(LAST_OUTPUT, link.disconnected()) => {}
                    }
                    match reported {
                        Some(_) => PodEnd::Program,
                        None => link.cause().map_or(PodEnd::Pod, PodEnd::Link),
                    }
                }
                () = died => PodEnd::Pod,
                cause = link.ended() => PodEnd::Link(cause),
            }
        };
        let killed = tree.killed.load(Ordering::SeqCst);
        let (code, signal) = reported.unwrap_or((None, Some(libc::SIGKILL)));
        // A kill is passed on by the connection, at whose end nothing runs any more.
        let is_gone = match end {
            PodEnd::Kill | PodEnd::Program => {
                tokio::time::timeout(OWN_END, link.disconnected()).await.is_ok()
            }
            PodEnd::Pod | PodEnd::Link(_) => false,
        };
        // Only the cluster knows of a killed process for what it was.
        let by_kernel = signal == Some(libc::SIGKILL) && !killed;
        if by_kernel {
            let status = self
                .tracked
                .when(|state| pod_status::has_ended(state).then_some(()));
            let _ = tokio::time::timeout(STATUS_TIMEOUT, status).await;
        }
        let state = self.tracked.state();
        let (oom, lost) = match &state {
            PodState::Seen(pod) => (pod_status::was_out_of_memory(pod), pod_status::cause_of_loss(pod)),
            PodState::Unseen | PodState::Gone => (false, None),
        };
        let cause = match end {
            _ if killed || oom => None,
            PodEnd::Program | PodEnd::Kill => None,
            PodEnd::Link(_) | PodEnd::Pod if lost.is_some() => lost,
            PodEnd::Link(cause) => Some(cause),
            PodEnd::Pod => Some(ExitCause::ContainerKilled),
        };
        let exit = SandboxExit {
            code,
            signal,
            oom: (oom && by_kernel) || tree.overrun.get() == Some(&ExceededLimit::Memory),
            too_many_processes: tree.overrun.get() == Some(&ExceededLimit::Processes),
            cause,
        };
        (exit, is_gone)
    }

    /// Removes the pod, running or not. If the cluster does not answer, the pod ends by itself when its grace time is over,
    /// and the next start of the server removes it.
    async fn remove(&self) {
        let cluster = &self.driver.cluster;
        for _ in 0..10 {
            let Ok(client) = cluster.client().await else {
                return;
            };
            match self.kind.delete(cluster, client, &self.name).await {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(%error, pod = self.name, "removing a pod failed");
                    if is_answer(&error) {
                        return;
                    }
                    tokio::time::sleep(RETRY).await;
                }
            }
        }
    }
}
