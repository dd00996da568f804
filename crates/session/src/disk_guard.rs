//! Stops a session that has more on disk than it may have, at any time while something of it runs.
//!
//! Everything its sandboxes can write counts: the workspace, the homes of its agents, temporary directories on disk, and
//! files that were removed and are still open.

use std::{sync::Arc, time::Duration};

use oubliette_os::DiskWatch;
use oubliette_protocol::{Error, debug::DebugBody};
use tokio::{sync::watch, task::JoinHandle};

use crate::{agent_plan::AgentPlan, processes::SessionEnv};

/// How often sandboxes are killed until the session's task has stopped everything: one may just have been starting.
const KILL_INTERVAL: Duration = Duration::from_millis(100);

/// Tells the session's task that the limit was exceeded.
#[derive(Debug, Clone)]
pub(crate) struct DiskAlarm(Arc<watch::Sender<Option<Error>>>);

impl DiskAlarm {
    pub(crate) fn new() -> Self {
        Self(Arc::new(watch::Sender::new(None)))
    }

    /// Waits until the limit is exceeded.
    pub(crate) async fn raised(&self) {
        // The sender lives as long as `self`, so waiting cannot fail.
        let _ = self.0.subscribe().wait_for(Option::is_some).await;
    }

    /// The error, if the limit was exceeded since the last call.
    pub(crate) fn take(&self) -> Option<Error> {
        self.0.send_replace(None)
    }

    fn raise(&self, error: Error) {
        self.0.send_replace(Some(error));
    }
}

/// Watches what a session has on disk until it is dropped. When that exceeds the limit, it raises the alarm and kills
/// every sandbox of the session.
pub(crate) struct DiskGuard(Option<JoinHandle<()>>);

impl DiskGuard {
    pub(crate) fn start(env: &SessionEnv, plan: &AgentPlan) -> Self {
        let Some(limit) = plan.limits.workspace_mb else {
            return Self(None);
        };
        let home = &env.deps.home;
        let workspace = home.workspace_dir(&plan.project.project_id, &plan.workspace.workspace_id);
        let (group, alarm, debug) = (
            env.sandbox_group.clone(),
            env.disk_alarm.clone(),
            env.debug.clone(),
        );
        let watch =
            DiskWatch::new([workspace, home.session_dir(&env.session)], limit).with_writers(group.clone());
        let (session, agent) = (env.session.clone(), plan.entry.slug.clone());
        Self(Some(tokio::spawn(async move {
            let usage = watch.exceeded().await;
            tracing::warn!(%session, limit, used_mb = usage.bytes >> 20, "a session exceeds its disk limit; it is stopped");
            let reason = format!(
                "the session has more than {limit} MiB on disk, in its workspace, its home and files it has open; it was \
                 stopped, and will be again until something is removed"
            );
            debug.record(
                Some(&agent),
                DebugBody::LimitExceeded {
                    limit: "disk".to_owned(),
                    reason: reason.clone(),
                },
            );
            // Before the kill, so that whoever notices that finds the reason.
            alarm.raise(Error::limit_exceeded(reason));
            loop {
                group.kill();
                tokio::time::sleep(KILL_INTERVAL).await;
            }
        })))
    }
}

impl Drop for DiskGuard {
    fn drop(&mut self) {
        if let Some(task) = &self.0 {
            task.abort();
        }
    }
}
