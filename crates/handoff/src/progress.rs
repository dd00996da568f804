//! Progress notifications to an agent, or another MCP client, while its call is open: what is reported, and a heartbeat
//! when nothing is.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oubliette_relay::{ProgressCallback, ProgressReport};
use parking_lot::Mutex;
use rmcp::model::{ProgressNotificationParam, ProgressToken};
use tokio::sync::{Notify, watch};

/// The time between two ticks of a [`Heartbeat`].
const TICK: Duration = Duration::from_secs(1);
/// An agent is told that its call is still open after this many ticks without a report.
const HEARTBEAT_TICKS: u64 = 5;
/// How many reports of one call may wait to be sent to the agent.
const MAX_QUEUED_REPORTS: usize = 16;

/// The reports of one call that have not been sent to the agent yet.
#[derive(Debug, Default)]
pub struct ProgressReports {
    queue: Mutex<VecDeque<ProgressReport>>,
    more: Notify,
}

impl ProgressReports {
    /// A function that queues reports. A report that finds the queue full is dropped: reports only show that a call
    /// is alive.
    pub fn queueing(self: &Arc<Self>) -> ProgressCallback {
        let reports = self.clone();
        Arc::new(move |report| reports.push(report))
    }

    fn push(&self, report: ProgressReport) {
        let mut queue = self.queue.lock();
        if queue.len() < MAX_QUEUED_REPORTS {
            queue.push_back(report);
            self.more.notify_one();
        }
    }

    async fn next(&self) -> ProgressReport {
        loop {
            if let Some(report) = self.queue.lock().pop_front() {
                return report;
            }
            self.more.notified().await;
        }
    }
}

/// One timer for all open calls. A timer for each call would wake the process once more for every call.
#[derive(Debug, Clone)]
pub struct Heartbeat(Arc<HeartbeatState>);

#[derive(Debug)]
struct HeartbeatState {
    ticks: watch::Sender<u64>,
    /// Whether the timer's task runs; it ends at a tick that finds no subscriber.
    running: AtomicBool,
}

impl Default for Heartbeat {
    fn default() -> Self {
        Self(Arc::new(HeartbeatState {
            ticks: watch::Sender::new(0),
            running: AtomicBool::new(false),
        }))
    }
}

impl Heartbeat {
    /// Subscribes to the ticks; starts the timer if it does not run.
    fn subscribe(&self) -> watch::Receiver<u64> {
        let receiver = self.0.ticks.subscribe();
        if !self.0.running.swap(true, Ordering::AcqRel) {
            tokio::spawn(self.clone().run());
        }
        receiver
    }

    async fn run(self) {
        loop {
            tokio::time::sleep(TICK).await;
            self.0.ticks.send_modify(|count| *count += 1);
            if self.0.ticks.receiver_count() == 0 {
                self.0.running.store(false, Ordering::Release);
                // A call may have subscribed just before and seen the timer running.
                if self.0.ticks.receiver_count() == 0 || self.0.running.swap(true, Ordering::AcqRel) {
                    return;
                }
            }
        }
    }
}

/// Sends progress notifications to whoever made a call.
pub trait ProgressNotifier: Sync {
    /// Sends one. Errors are ignored: a client that is gone is noticed where its messages are read.
    fn notify(&self, params: ProgressNotificationParam) -> impl Future<Output = ()> + Send;
}

/// Waits for a call. Meanwhile its client is sent the call's reports, and a heartbeat when there are none.
pub async fn with_progress<T>(
    call: impl Future<Output = T>,
    token: ProgressToken,
    reports: &ProgressReports,
    heartbeat: &Heartbeat,
    client: &impl ProgressNotifier,
) -> T {
    tokio::select! {
        biased;
        outcome = call => outcome,
        never = send_reports(token, reports, heartbeat, client) => match never {},
    }
}

async fn send_reports(
    token: ProgressToken,
    reports: &ProgressReports,
    heartbeat: &Heartbeat,
    client: &impl ProgressNotifier,
) -> Infallible {
    // MCP wants each value above the last. A heartbeat adds so little that it does not overtake the next report.
    const HEARTBEAT_STEP: f64 = 0.001;
    let mut last = 0.0_f64;
    let mut ticks = heartbeat.subscribe();
    loop {
        let due = *ticks.borrow() + HEARTBEAT_TICKS;
        let report = tokio::select! {
            biased;
            report = reports.next() => Some(report),
            // The sender lives as long as `heartbeat`: waiting cannot fail.
            _ = ticks.wait_for(|count| *count >= due) => None,
        };
        last = match &report {
            Some(report) if report.progress > last => report.progress,
            _ => last + HEARTBEAT_STEP,
        };
        let mut params = ProgressNotificationParam::new(token.clone(), last);
        params.total = report.as_ref().and_then(|report| report.total);
        params.message = report.map_or_else(|| Some("still waiting".into()), |report| report.message);
        client.notify(params).await;
    }
}
