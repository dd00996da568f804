//! What an agent that asked for progress hears while its call waits.

use std::{collections::VecDeque, convert::Infallible, sync::Arc, time::Duration};

use oubliette_relay::{CallOptions, Progress};
use parking_lot::Mutex;
use rmcp::model::{ProgressNotificationParam, ProgressToken};
use tokio::sync::Notify;

/// How often an agent that asked for progress hears that its call still waits.
const STILL_HERE: Duration = Duration::from_secs(5);
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
    agent: &impl Tell,
) -> T {
    tokio::select! {
        outcome = calling => outcome,
        never = keep_patient(token, reports, agent) => match never {},
    }
}

async fn keep_patient(token: ProgressToken, reports: &Reports, agent: &impl Tell) -> Infallible {
    // Each value must be above the last, and a sign of life must not overtake a later report.
    const STEP: f64 = 0.001;
    let mut last = 0.0_f64;
    loop {
        let heard = tokio::time::timeout(STILL_HERE, reports.next()).await.ok();
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
