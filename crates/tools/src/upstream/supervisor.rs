//! The task that starts, watches, restarts and stops one server. It is a single task, so that two of these
//! never happen at the same time.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use jiff::Timestamp;
use oubliette_protocol::{Error, Result};
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;

use super::{
    UpstreamSpec,
    connection::UpstreamConnection,
    fault::{FaultRemedy, UpstreamFault},
    handshake::McpLifecycle,
    limits,
    state::{UpstreamPhase, UpstreamState},
};

/// A command from [`super::Upstream`] to its supervisor.
pub(super) enum SupervisorCommand {
    /// Start the server again at once, whatever its phase and restart count; answered when it is up or failed.
    Restart(oneshot::Sender<Result<()>>),
    /// Stop the server for this reason and end the task; answered when nothing of it runs any more.
    Stop(String, oneshot::Sender<()>),
}

/// The supervising task of one server.
pub(super) struct UpstreamSupervisor {
    pub(super) spec: UpstreamSpec,
    pub(super) state: Arc<UpstreamState>,
    pub(super) commands: mpsc::Receiver<SupervisorCommand>,
    /// Cancelled when the [`super::Upstream`] is dropped.
    pub(super) abandoned: CancellationToken,
}

/// Why watching a running server ended.
enum WatchOutcome {
    Lost(Arc<str>),
    Control(ControlEvent),
}

/// A command, or the stop that follows from the [`super::Upstream`] being dropped.
enum ControlEvent {
    Restart(oneshot::Sender<Result<()>>),
    Stop(String, Option<oneshot::Sender<()>>),
}

impl UpstreamSupervisor {
    /// Runs the server until it is stopped. With a `start_gate`, the first start waits until the gate's sender
    /// is dropped.
    pub(super) async fn run(mut self, start_gate: Option<oneshot::Receiver<()>>) {
        let mut lifecycle = McpLifecycle::default();
        // `restarts`: since the server last ran stably. `waiting`: restart requests to answer after the next start.
        let mut restarts: u32 = 0;
        let mut waiting: Vec<oneshot::Sender<Result<()>>> = Vec::new();
        if let Some(start_gate) = start_gate
            && let Err((reason, done)) =
                run_unless_stopped(start_gate, &mut self.commands, &self.abandoned, &mut waiting).await
        {
            return self.finish(None, &reason, done).await;
        }
        loop {
            self.state.set_starting(restarts + 1);
            let begun = Instant::now();
            // Dropping this future half way kills the process it has started.
            let opening = Box::pin(UpstreamConnection::open(&self.spec, lifecycle));
            let opened = run_unless_stopped(opening, &mut self.commands, &self.abandoned, &mut waiting).await;
            let opened = match opened {
                Ok(opened) => opened,
                Err((reason, done)) => return self.finish(None, &reason, done).await,
            };
            let (fault, was_up) = match opened {
                Ok((connection, tools)) => {
                    lifecycle = connection.lifecycle();
                    let took = begun.elapsed().as_millis().try_into().unwrap_or(u64::MAX);
                    self.state.set_ready(connection.clone(), tools, took);
                    waiting.drain(..).for_each(|asked| drop(asked.send(Ok(()))));
                    let up = Instant::now();
                    match self.watch(&connection).await {
                        WatchOutcome::Control(ControlEvent::Stop(reason, done)) => {
                            return self.finish(Some(&connection), &reason, done).await;
                        }
                        WatchOutcome::Control(ControlEvent::Restart(asked)) => {
                            self.state.withdraw_connection();
                            connection.close("it is being restarted").await;
                            self.state.set_stopped("restart", UpstreamPhase::Starting);
                            waiting.push(asked);
                            restarts = 0;
                            continue;
                        }
                        WatchOutcome::Lost(reason) => {
                            if connection.has_answered_call() || up.elapsed() >= limits::STABLE_UPTIME {
                                restarts = 0;
                            }
                            (kill_and_report(&connection, &reason).await, true)
                        }
                    }
                }
                Err(fault) => (fault, false),
            };

            let may_restart =
                fault.remedy == FaultRemedy::Restart && restarts < self.spec.server.restart.max_attempts;
            // The first restart after a crash is immediate; calls made meanwhile wait for it (`Starting`).
            let pause = match (may_restart, was_up && restarts == 0) {
                (false, _) => None,
                (true, true) => Some(Duration::ZERO),
                (true, false) => Some(restart_backoff(restarts)),
            };
            let phase = if pause == Some(Duration::ZERO) {
                UpstreamPhase::Starting
            } else {
                UpstreamPhase::Down
            };
            self.state
                .set_failed(&fault, phase, pause.map(|pause| Timestamp::now() + pause));
            let failure = || {
                Err(Error::unavailable(format!(
                    "{}: {}",
                    self.spec.server.id,
                    fault.with_stderr()
                )))
            };
            waiting.drain(..).for_each(|asked| drop(asked.send(failure())));
            restarts += 1;
            if pause == Some(Duration::ZERO) {
                continue;
            }
            let rest = async {
                match pause {
                    Some(pause) => tokio::time::sleep(pause).await,
                    None => std::future::pending().await,
                }
            };
            tokio::select! {
                () = rest => {}
                event = next_control_event(&mut self.commands, &self.abandoned) => match event {
                    ControlEvent::Stop(reason, done) => return self.finish(None, &reason, done).await,
                    ControlEvent::Restart(asked) => {
                        waiting.push(asked);
                        restarts = 0;
                    }
                },
            }
        }
    }

    /// Watches a running server until it is lost or a command comes.
    async fn watch(&mut self, connection: &UpstreamConnection) -> WatchOutcome {
        let (state, spec) = (&self.state, &self.spec);
        tokio::select! {
            biased;
            event = next_control_event(&mut self.commands, &self.abandoned) => WatchOutcome::Control(event),
            reason = connection.wait_until_lost() => WatchOutcome::Lost(reason),
            reason = watch_health(connection, state, spec) => WatchOutcome::Lost(reason.into()),
            () = follow_tool_list(connection, state) => WatchOutcome::Lost("it is closed".into()),
        }
    }

    /// Closes the connection, if there is one, publishes the stop and answers the command.
    async fn finish(
        &self,
        connection: Option<&UpstreamConnection>,
        reason: &str,
        done: Option<oneshot::Sender<()>>,
    ) {
        if let Some(connection) = connection {
            self.state.withdraw_connection();
            connection.close(&format!("it was stopped: {reason}")).await;
        }
        self.state.set_stopped(reason, UpstreamPhase::Stopped);
        if let Some(done) = done {
            let _ = done.send(());
        }
    }
}

/// The next command; dropping the [`super::Upstream`] counts as a stop.
async fn next_control_event(
    commands: &mut mpsc::Receiver<SupervisorCommand>,
    abandoned: &CancellationToken,
) -> ControlEvent {
    let dropped = || ControlEvent::Stop("nobody uses it any more".into(), None);
    tokio::select! {
        biased;
        command = commands.recv() => match command {
            Some(SupervisorCommand::Restart(asked)) => ControlEvent::Restart(asked),
            Some(SupervisorCommand::Stop(reason, done)) => ControlEvent::Stop(reason, Some(done)),
            None => dropped(),
        },
        () = abandoned.cancelled() => dropped(),
    }
}

/// Awaits `future` (the start gate, or a start) unless a stop comes first. Restart requests that arrive
/// meanwhile are put into `waiting`: the start under way answers them.
async fn run_unless_stopped<T>(
    mut future: impl Future<Output = T> + Unpin,
    commands: &mut mpsc::Receiver<SupervisorCommand>,
    abandoned: &CancellationToken,
    waiting: &mut Vec<oneshot::Sender<Result<()>>>,
) -> Result<T, (String, Option<oneshot::Sender<()>>)> {
    loop {
        tokio::select! {
            biased;
            output = &mut future => return Ok(output),
            event = next_control_event(commands, abandoned) => match event {
                ControlEvent::Stop(reason, done) => return Err((reason, done)),
                ControlEvent::Restart(asked) => waiting.push(asked),
            },
        }
    }
}

/// Kills what is left of a lost connection and returns why it was lost, with the tail of its stderr.
async fn kill_and_report(connection: &Arc<UpstreamConnection>, reason: &str) -> UpstreamFault {
    let reason = connection.mask_secrets(reason);
    let fault = UpstreamFault::new(&reason);
    // The tail of stderr is complete once the process tree is dead. Closing may take longer; the restart need
    // not wait for that.
    let rest = tokio::spawn({
        let connection = connection.clone();
        async move { connection.kill(&reason).await }
    });
    let _ = tokio::time::timeout(limits::DRAIN_TIMEOUT, rest).await;
    UpstreamFault {
        stderr: connection.stderr_tail(),
        ..fault
    }
}

/// Checks a server's health at the interval of its definition; returns the reason once `failures` checks in a
/// row were missed. Never returns without a `healthCheck`.
async fn watch_health(connection: &UpstreamConnection, state: &UpstreamState, spec: &UpstreamSpec) -> String {
    let Some(check) = spec.server.health_check else {
        return std::future::pending().await;
    };
    let mut missed = 0;
    loop {
        tokio::time::sleep(Duration::from_millis(check.interval_ms)).await;
        let found = connection
            .check_health(Duration::from_millis(check.timeout_ms))
            .await;
        state.record_check_time();
        match found {
            Ok(()) => {
                missed = 0;
                state.set_check_result(None);
            }
            Err(why) => {
                missed += 1;
                if missed >= check.failures {
                    return format!("{why}, {missed} times in a row");
                }
                state.set_check_result(Some(why));
            }
        }
    }
}

/// Reads the tool list again whenever the server reports a change (`notifications/tools/list_changed`).
async fn follow_tool_list(connection: &UpstreamConnection, state: &UpstreamState) {
    loop {
        connection.wait_list_changed().await;
        match connection.list_tools().await {
            Ok(tools) => state.set_tools(tools),
            Err(fault) => {
                tracing::warn!(server = %state.id, reason = %fault.reason, "tools/list failed after a list change; the previous tools are kept")
            }
        }
        // A bound on how often a list that changes all the time is read.
        tokio::time::sleep(limits::RELIST_INTERVAL).await;
    }
}

/// The pause before another start: it doubles up to a maximum, with jitter, so that servers that went down
/// together are not restarted at the same moment.
fn restart_backoff(restarts: u32) -> Duration {
    let doubled = limits::MIN_BACKOFF
        .saturating_mul(1 << restarts.min(16))
        .min(limits::MAX_BACKOFF);
    doubled.mul_f64(rand::random_range(0.5..1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn restart_backoff_doubles_up_to_its_maximum() {
        for restarts in 0..64 {
            let most = limits::MIN_BACKOFF
                .saturating_mul(1 << restarts.min(16))
                .min(limits::MAX_BACKOFF);
            let pause = restart_backoff(restarts);
            assert!(pause >= most / 2 && pause <= most, "{restarts}: {pause:?}");
        }
    }
}
