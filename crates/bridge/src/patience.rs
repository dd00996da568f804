//! What an agent that asked for progress hears while its call waits.

use std::{
    collections::VecDeque,
    convert::Infallible,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::Duration,
};

use oubliette_relay::{CallOptions, Progress};
use parking_lot::Mutex;
use rmcp::model::{ProgressNotificationParam, ProgressToken};
use tokio::sync::{Notify, watch};

/// How often an agent that asked for progress hears that its call still waits: every so many beats.
const STILL_HERE: u64 = 5;
/// The time between two beats.
const BEAT: Duration = Duration::from_secs(1);
/// How many reports of one call may wait to be passed on.
const MAX_REPORTS: usize = 16;

/// Reports not yet passed on. Small: every waiting call has one.
#[derive(Default)]
pub(crate) struct Reports {
    queue: Mutex<VecDeque<Progress>>,
    more: Notify,
}

impl Reports {
    /// Takes in what is reported on a call made with these options.
    pub(crate) fn hear(self: &Arc<Self>, options: CallOptions) -> CallOptions {
        let reports = self.clone();
        options.on_progress(move |report| reports.push(report))
    }

    /// Reports are for patience, not for the record: one that finds no room is dropped.
    fn push(&self, report: Progress) {
        let mut queue = self.queue.lock();
        if queue.len() < MAX_REPORTS {
            queue.push_back(report);
            self.more.notify_one();
        }
    }

    async fn next(&self) -> Progress {
        loop {
            if let Some(report) = self.queue.lock().pop_front() {
                return report;
            }
            self.more.notified().await;
        }
    }
}

/// One clock for all calls: a timer for each would wake the whole program once more for every call.
#[derive(Clone)]
pub(crate) struct Beat(Arc<Beating>);

struct Beating {
    count: watch::Sender<u64>,
    /// Whether the clock runs; it stops when nobody has listened for a beat.
    runs: AtomicBool,
}

impl Default for Beat {
    fn default() -> Self {
        Self(Arc::new(Beating {
            count: watch::Sender::new(0),
            runs: AtomicBool::new(false),
        }))
    }
}

impl Beat {
    /// Listens to it; it runs from now on.
    fn listen(&self) -> watch::Receiver<u64> {
        let receiver = self.0.count.subscribe();
        if !self.0.runs.swap(true, Ordering::AcqRel) {
            tokio::spawn(self.clone().run());
        }
        receiver
    }

    async fn run(self) {
        loop {
            tokio::time::sleep(BEAT).await;
            self.0.count.send_modify(|count| *count += 1);
            if self.0.count.receiver_count() == 0 {
                self.0.runs.store(false, Ordering::Release);
                // Somebody may have begun to listen just before, and believe it to run.
                if self.0.count.receiver_count() == 0 || self.0.runs.swap(true, Ordering::AcqRel) {
                    return;
                }
            }
        }
    }
}

/// The way to an agent that waits.
pub(crate) trait Tell: Sync {
    fn tell(&self, params: ProgressNotificationParam) -> impl Future<Output = ()> + Send;
}

/// Waits for a call; meanwhile the agent is told what the server reports, and a sign of life when
/// it reports nothing.
pub(crate) async fn patiently<T>(
    calling: impl Future<Output = T>,
    token: ProgressToken,
    reports: &Reports,
    beat: &Beat,
    agent: &impl Tell,
) -> T {
    tokio::select! {
        biased;
        outcome = calling => outcome,
        never = keep_patient(token, reports, beat, agent) => match never {},
    }
}

async fn keep_patient(token: ProgressToken, reports: &Reports, beat: &Beat, agent: &impl Tell) -> Infallible {
    // Each value must be above the last, and a sign of life must not overtake a later report.
    const STEP: f64 = 0.001;
    let mut last = 0.0_f64;
    let mut beats = beat.listen();
    loop {
        let due = *beats.borrow() + STILL_HERE;
        let heard = tokio::select! {
            biased;
            report = reports.next() => Some(report),
            // The sender lives as long as `beat`: waiting cannot fail.
            _ = beats.wait_for(|count| *count >= due) => None,
        };
        last = match &heard {
            Some(report) if report.progress > last => report.progress,
            _ => last + STEP,
        };
        let mut params = ProgressNotificationParam::new(token.clone(), last);
        params.total = heard.as_ref().and_then(|report| report.total);
        params.message = heard.map_or_else(|| Some("still waiting".into()), |report| report.message);
        agent.tell(params).await;
    }
}
