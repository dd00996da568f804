//! Counting the memory and the processes of groups whose limits no cgroup keeps.
//!
//! Every process of the host is read from `/proc`, given to the sandbox it descends from, and summed up. When a group
//! exceeds a limit its largest sandboxes are killed. That is later than the kernel would notice; between two counts a
//! session can take what its processes get in that time, each of them still bounded by its rlimits.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use rustix::process::Pid;

use super::cgroup::OUR_PROCESSES;
use crate::group::{GroupSnapshot, SandboxGroup};
use crate::handle::{ExceededLimit, ProcessTreeControl};
use crate::process_table::{ProcessTable, ProcessUsage, children_of};

/// Time between two counts; at least twenty times as long as a count takes.
pub(crate) const INTERVAL: Duration = Duration::from_millis(250);
const MAX_LOAD: u32 = 20;
/// The type of a file system in memory, as `statfs` says it.
const TMPFS_MAGIC: i128 = 0x0102_1994;

/// The groups of a driver that are counted.
#[derive(Debug, Default)]
pub(crate) struct GroupWatch {
    state: Mutex<WatchState>,
}

#[derive(Debug, Default)]
struct WatchState {
    groups: Vec<SandboxGroup>,
    /// Whether the counting task runs.
    running: bool,
}

impl GroupWatch {
    /// Counts a group from now on until no sandbox runs in it. `total` are the limits of all groups together, in bytes
    /// and processes.
    pub(crate) fn add(self: &Arc<Self>, group: &SandboxGroup, total: (u64, u64)) {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        if !state.groups.iter().any(|other| other.is_same(group)) {
            state.groups.push(group.clone());
        }
        if !state.running {
            state.running = true;
            tokio::spawn(self.clone().run(total));
        }
    }

    async fn run(self: Arc<Self>, total: (u64, u64)) {
        let mut pause = INTERVAL;
        loop {
            tokio::time::sleep(pause).await;
            let groups = {
                let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
                state.groups.retain(|group| !group.is_empty());
                if state.groups.is_empty() {
                    state.running = false;
                    return;
                }
                state.groups.clone()
            };
            let counted = tokio::task::spawn_blocking(move || {
                let begun = Instant::now();
                count_and_kill(&groups, total);
                begun.elapsed()
            });
            let took = counted.await.unwrap_or_default();
            pause = INTERVAL.max(took * MAX_LOAD);
        }
    }
}

fn count_and_kill(groups: &[SandboxGroup], total: (u64, u64)) {
    let snapshots: Vec<GroupSnapshot> = groups.iter().map(SandboxGroup::snapshot).collect();
    let tops = snapshots.iter().flat_map(GroupSnapshot::top_pids);
    let usage = ProcessTable::read().usage_below(tops);
    let mut left = Vec::new();
    for snapshot in &snapshots {
        let used = |(pid, tree): (Pid, Arc<ProcessTreeControl>)| MeasuredSandbox {
            label: snapshot.label.clone(),
            usage: {
                let mut usage = usage.get(&pid.as_raw_pid()).copied().unwrap_or_default();
                usage.bytes = usage.bytes.saturating_add(memory_files(pid.as_raw_pid()));
                usage
            },
            tree,
        };
        let seen = snapshot.running.iter();
        let seen = seen.filter_map(|(pid, tree)| Some(((*pid)?, tree.clone())));
        let running = seen.map(used).collect();
        let (memory, pids) = snapshot.uncounted;
        let limits = (
            snapshot
                .limits
                .memory_mb
                .filter(|_| memory)
                .map_or(u64::MAX, |mb| mb << 20),
            snapshot.limits.pids.filter(|_| pids).unwrap_or(u64::MAX),
        );
        left.extend(kill_until_below(running, limits, "a session exceeds its limits"));
    }
    kill_until_below(left, total, "all sessions together exceed their limits");
}

/// Bytes of files that a sandbox has in memory: what is in its temporary file systems.
fn memory_files(top: i32) -> u64 {
    let Some(inside) = children_of(top).first().copied() else {
        return 0;
    };
    let used = |dir: &&str| {
        let found = rustix::fs::statfs(format!("/proc/{inside}/root/{dir}")).ok()?;
        // A directory of the host, mounted there, is not in memory.
        let blocks = found.f_blocks.saturating_sub(found.f_bfree);
        (i128::from(found.f_type) == TMPFS_MAGIC)
            .then(|| blocks.saturating_mul(u64::try_from(found.f_bsize).unwrap_or(0)))
    };
    ["tmp", "dev/shm", "run", "home/agent"]
        .iter()
        .filter_map(used)
        .fold(0, u64::saturating_add)
}

/// A running sandbox and what it uses.
struct MeasuredSandbox {
    label: String,
    usage: ProcessUsage,
    tree: Arc<ProcessTreeControl>,
}

/// Kills the largest sandboxes until the rest is within the limits, in bytes and processes. Returns the rest.
fn kill_until_below(
    mut running: Vec<MeasuredSandbox>,
    (max_bytes, max_processes): (u64, u64),
    why: &str,
) -> Vec<MeasuredSandbox> {
    loop {
        let mut sum = ProcessUsage::default();
        running.iter().for_each(|sandbox| sum.add(sandbox.usage));
        let own = OUR_PROCESSES * running.len() as u64;
        let overrun = match () {
            () if sum.bytes > max_bytes => ExceededLimit::Memory,
            () if sum.processes > max_processes.saturating_add(own) => ExceededLimit::Processes,
            () => return running,
        };
        let size = |sandbox: &MeasuredSandbox| match overrun {
            ExceededLimit::Memory => sandbox.usage.bytes,
            ExceededLimit::Processes => sandbox.usage.processes,
        };
        let largest = (0..running.len()).max_by_key(|at| size(&running[*at]));
        let Some(largest) = largest else { return running };
        let sandbox = running.swap_remove(largest);
        tracing::warn!(
            label = sandbox.label,
            used_mb = sum.bytes >> 20,
            processes = sum.processes,
            "{why}; the largest sandbox is killed"
        );
        sandbox.tree.kill_for(overrun);
    }
}
