//! The life of one server: started, watched, brought back, stopped. One task does all of it, so that no two
//! of these things ever happen at once.

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
    board::{Board, Phase},
    connection::Connection,
    fault::{Cure, Fault},
    handshake::Lifecycle,
    limits,
};

/// What can be asked of a supervisor.
pub(super) enum Order {
    /// Start again, now, whatever happened before.
    Restart(oneshot::Sender<Result<()>>),
    /// Stop for good.
    Stop(String, oneshot::Sender<()>),
}

/// The one task of a server.
pub(super) struct Supervisor {
    pub(super) spec: UpstreamSpec,
    pub(super) board: Arc<Board>,
    pub(super) orders: mpsc::Receiver<Order>,
    /// Cancelled when nobody holds the server any more.
    pub(super) abandoned: CancellationToken,
}

/// Why a running server is left.
enum Leave {
    Lost(Arc<str>),
    Asked(Wish),
}

/// An order, or the lack of anyone to give one.
enum Wish {
    Restart(oneshot::Sender<Result<()>>),
    Stop(String, Option<oneshot::Sender<()>>),
}

impl Supervisor {
    /// Runs the server until it is stopped, from when its place is free.
    pub(super) async fn run(mut self, place: Option<oneshot::Receiver<()>>) {
        let mut lifecycle = Lifecycle::default();
        // Restarts since it was last well, and who waits for the next start.
        let mut restarts: u32 = 0;
        let mut waiting: Vec<oneshot::Sender<Result<()>>> = Vec::new();
        if let Some(place) = place
            && let Err((reason, done)) =
                unless_stopped(place, &mut self.orders, &self.abandoned, &mut waiting).await
        {
            return self.finish(None, &reason, done).await;
        }
        loop {
            self.board.starting(restarts + 1);
            let begun = Instant::now();
            // Dropped half made, it ends what was begun.
            let opening = Box::pin(Connection::open(&self.spec, lifecycle));
            let opened = unless_stopped(opening, &mut self.orders, &self.abandoned, &mut waiting).await;
            let opened = match opened {
                Ok(opened) => opened,
                Err((reason, done)) => return self.finish(None, &reason, done).await,
            };
            let (fault, was_up) = match opened {
                Ok((connection, tools)) => {
                    lifecycle = connection.lifecycle();
                    let took = begun.elapsed().as_millis().try_into().unwrap_or(u64::MAX);
                    self.board.ready(connection.clone(), tools, took);
                    waiting.drain(..).for_each(|asked| drop(asked.send(Ok(()))));
                    let up = Instant::now();
                    match self.watch(&connection).await {
                        Leave::Asked(Wish::Stop(reason, done)) => {
                            return self.finish(Some(&connection), &reason, done).await;
                        }
                        Leave::Asked(Wish::Restart(asked)) => {
                            self.board.leaving();
                            connection.close("it is being restarted").await;
                            self.board.stopped("restart", Phase::Coming);
                            waiting.push(asked);
                            restarts = 0;
                            continue;
                        }
                        Leave::Lost(reason) => {
                            if connection.has_served() || up.elapsed() >= limits::SETTLED_IN {
                                restarts = 0;
                            }
                            (bury(&connection, &reason).await, true)
                        }
                    }
                }
                Err(fault) => (fault, false),
            };

            let left = fault.cure == Cure::Restart && restarts < self.spec.server.restart.max_attempts;
            // The first restart after a crash is immediate, and those who call meanwhile wait for it.
            let pause = match (left, was_up && restarts == 0) {
                (false, _) => None,
                (true, true) => Some(Duration::ZERO),
                (true, false) => Some(pause(restarts)),
            };
            let phase = if pause == Some(Duration::ZERO) {
                Phase::Coming
            } else {
                Phase::Down
            };
            self.board
                .failed(&fault, phase, pause.map(|pause| Timestamp::now() + pause));
            let said = || {
                Err(Error::unavailable(format!(
                    "{}: {}",
                    self.spec.server.id,
                    fault.with_tail()
                )))
            };
            waiting.drain(..).for_each(|asked| drop(asked.send(said())));
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
                wish = next(&mut self.orders, &self.abandoned) => match wish {
                    Wish::Stop(reason, done) => return self.finish(None, &reason, done).await,
                    Wish::Restart(asked) => {
                        waiting.push(asked);
                        restarts = 0;
                    }
                },
            }
        }
    }

    /// Watches a running server until there is a reason to leave it.
    async fn watch(&mut self, connection: &Connection) -> Leave {
        let (board, spec) = (&self.board, &self.spec);
        tokio::select! {
            biased;
            wish = next(&mut self.orders, &self.abandoned) => Leave::Asked(wish),
            reason = connection.lost() => Leave::Lost(reason),
            reason = health(connection, board, spec) => Leave::Lost(reason.into()),
            () = follow(connection, board) => Leave::Lost("it is closed".into()),
        }
    }

    async fn finish(&self, connection: Option<&Connection>, reason: &str, done: Option<oneshot::Sender<()>>) {
        if let Some(connection) = connection {
            self.board.leaving();
            connection.close(&format!("it was stopped: {reason}")).await;
        }
        self.board.stopped(reason, Phase::Stopped);
        if let Some(done) = done {
            let _ = done.send(());
        }
    }
}

async fn next(orders: &mut mpsc::Receiver<Order>, abandoned: &CancellationToken) -> Wish {
    let nobody = || Wish::Stop("nobody uses it any more".into(), None);
    tokio::select! {
        biased;
        order = orders.recv() => match order {
            Some(Order::Restart(asked)) => Wish::Restart(asked),
            Some(Order::Stop(reason, done)) => Wish::Stop(reason, Some(done)),
            None => nobody(),
        },
        () = abandoned.cancelled() => nobody(),
    }
}

/// Waits for what comes before the server is up, or for the order to stop; who asks for a restart meanwhile is
/// told when it is up.
async fn unless_stopped<T>(
    mut coming: impl Future<Output = T> + Unpin,
    orders: &mut mpsc::Receiver<Order>,
    abandoned: &CancellationToken,
    waiting: &mut Vec<oneshot::Sender<Result<()>>>,
) -> Result<T, (String, Option<oneshot::Sender<()>>)> {
    loop {
        tokio::select! {
            biased;
            come = &mut coming => return Ok(come),
            wish = next(orders, abandoned) => match wish {
                Wish::Stop(reason, done) => return Err((reason, done)),
                Wish::Restart(asked) => waiting.push(asked),
            },
        }
    }
}

/// Ends what is left of a lost connection and says why it was lost.
async fn bury(connection: &Arc<Connection>, reason: &str) -> Fault {
    let reason = connection.masked(reason);
    let fault = Fault::new(&reason);
    // What it said last is there when its tree is gone; how long the rest takes concerns nobody.
    let rest = tokio::spawn({
        let connection = connection.clone();
        async move { connection.kill(&reason).await }
    });
    let _ = tokio::time::timeout(limits::LAST_WORDS, rest).await;
    Fault {
        stderr: connection.stderr(),
        ..fault
    }
}

/// Checks a server's health as often as its definition says; returns when it counts as down.
async fn health(connection: &Connection, board: &Board, spec: &UpstreamSpec) -> String {
    let Some(check) = spec.server.health_check else {
        return std::future::pending().await;
    };
    let mut missed = 0;
    loop {
        tokio::time::sleep(Duration::from_millis(check.interval_ms)).await;
        let found = connection.check(Duration::from_millis(check.timeout_ms)).await;
        board.heard();
        match found {
            Ok(()) => {
                missed = 0;
                board.checked(None);
            }
            Err(why) => {
                missed += 1;
                if missed >= check.failures {
                    return format!("{why}, {missed} times in a row");
                }
                board.checked(Some(why));
            }
        }
    }
}

/// Reads the tool list again whenever the server says that it has changed.
async fn follow(connection: &Connection, board: &Board) {
    loop {
        connection.list_changed().await;
        match connection.list().await {
            Ok(tools) => board.relisted(tools),
            Err(fault) => {
                tracing::warn!(server = %board.id, reason = %fault.reason, "the changed tool list was not read")
            }
        }
        // One that changes all the time is read now and then.
        tokio::time::sleep(limits::LIST_PAUSE).await;
    }
}

/// The pause before another start: twice as long each time, and never the same for two servers that went
/// down together.
fn pause(restarts: u32) -> Duration {
    let doubled = limits::FIRST_PAUSE
        .saturating_mul(1 << restarts.min(16))
        .min(limits::LONGEST_PAUSE);
    doubled.mul_f64(rand::random_range(0.5..1.0))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pauses_grow_and_are_bounded() {
        for restarts in 0..64 {
            let most = limits::FIRST_PAUSE
                .saturating_mul(1 << restarts.min(16))
                .min(limits::LONGEST_PAUSE);
            let pause = pause(restarts);
            assert!(pause >= most / 2 && pause <= most, "{restarts}: {pause:?}");
        }
    }
}
