//! Limits that several sandboxes share: those of one session.
//!
//! An agent may run many commands at once, each in a sandbox of its own, besides its own sandbox and those of its tool
//! servers. Limits that held for each of them alone would be multiplied by their number. So a session has one
//! [`SandboxGroup`], and its limits hold for all sandboxes that run in it together: by a cgroup, and where there is none
//! by counting ([`crate::local`]'s `group_watch`).

use std::cell::RefCell;
use std::collections::HashSet;
use std::os::unix::fs::MetadataExt;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use oubliette_os::{DiskUsage, DiskWriters, StoppedWriters, disk_usage};
use rustix::process::Pid;

use crate::driver::{PinnedImage, SandboxError};
use crate::handle::ProcessTreeControl;
use crate::local::cgroup::{Cgroup, SandboxCgroup};
use crate::nameless_files::nameless_usage;
use crate::process_table::StoppedProcesses;
use crate::{ResourceLimits, spec::SandboxSpec};

/// Maximum number of sandboxes that run in a group at once. Each costs the host a few processes and mounts of
/// Oubliette's own, which no limit of the group counts.
const MAX_SANDBOXES: usize = 64;

/// Sandboxes whose limits hold for all of them together.
#[derive(Clone)]
pub struct SandboxGroup {
    shared: Arc<Mutex<GroupState>>,
}

struct GroupState {
    label: String,
    limits: ResourceLimits,
    members: Vec<GroupMember>,
    next_member: u64,
    /// Created with the first sandbox, where the host has cgroups.
    cgroup: Option<Arc<Cgroup>>,
    /// The image of its sandboxes, where the driver has images.
    image: Option<PinnedImage>,
}

/// A sandbox of the group, once it runs with its process and the means to kill it.
struct GroupMember {
    number: u64,
    running: Option<(Option<Pid>, Arc<ProcessTreeControl>)>,
    /// Its temporary directory on disk, if it has one.
    scratch: Option<PathBuf>,
}

impl SandboxGroup {
    /// A group with these limits. `label` is a name for logs.
    pub fn new(label: impl Into<String>, limits: ResourceLimits) -> Self {
        let state = GroupState {
            label: label.into(),
            limits,
            members: Vec::new(),
            next_member: 0,
            cgroup: None,
            image: None,
        };
        Self {
            shared: Arc::new(Mutex::new(state)),
        }
    }

    /// Changes the limits, for sandboxes that run already too.
    pub fn set_limits(&self, limits: &ResourceLimits) {
        let mut state = self.state();
        if state.limits == *limits {
            return;
        }
        state.limits = limits.clone();
        state.apply_limits();
    }

    /// Sets the image from which sandboxes of the group are started from now on.
    pub fn set_image(&self, image: Option<PinnedImage>) {
        self.state().image = image;
    }

    pub(crate) fn image(&self) -> Option<PinnedImage> {
        self.state().image.clone()
    }

    /// A name for logs.
    pub(crate) fn label(&self) -> String {
        self.state().label.clone()
    }

    /// Kills every sandbox that runs in the group.
    pub fn kill(&self) {
        for (_, tree) in self.snapshot().running {
            tree.kill();
        }
    }

    fn state(&self) -> MutexGuard<'_, GroupState> {
        self.shared.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a sandbox that is about to start. `first` is the cgroup of all sandboxes, where there are any.
    pub(crate) fn join(&self, first: Option<&Arc<Cgroup>>) -> Result<GroupMembership, SandboxError> {
        let mut state = self.state();
        if state.members.len() >= MAX_SANDBOXES {
            return Err(SandboxError::LimitExceeded(format!(
                "{MAX_SANDBOXES} sandboxes of this session run already, its most; let one end first"
            )));
        }
        if state.cgroup.is_none()
            && let Some(first) = first
        {
            match first.create_child("session") {
                Ok(cgroup) => state.cgroup = Some(Arc::new(cgroup)),
                Err(error) => {
                    tracing::warn!(%error, label = state.label, "creating a cgroup for a session failed; its sandboxes are counted instead");
                }
            }
        }
        let number = state.next_member;
        state.next_member += 1;
        state.members.push(GroupMember {
            number,
            running: None,
            scratch: None,
        });
        state.apply_limits();
        Ok(GroupMembership {
            group: self.clone(),
            number,
        })
    }

    /// Which of memory and processes have a limit that no cgroup keeps.
    pub(crate) fn uncounted(&self) -> (bool, bool) {
        self.state().uncounted()
    }

    /// What is needed to count the group's processes.
    pub(crate) fn snapshot(&self) -> GroupSnapshot {
        let state = self.state();
        GroupSnapshot {
            label: state.label.clone(),
            limits: state.limits.clone(),
            uncounted: state.uncounted(),
            running: state
                .members
                .iter()
                .filter_map(|member| member.running.clone())
                .collect(),
        }
    }

    fn scratch_dirs(&self) -> Vec<PathBuf> {
        let state = self.state();
        state
            .members
            .iter()
            .filter_map(|member| member.scratch.clone())
            .collect()
    }

    /// Whether no sandbox runs or starts in it.
    pub(crate) fn is_empty(&self) -> bool {
        self.state().members.is_empty()
    }

    /// Whether both are the same group.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.shared, &other.shared)
    }
}

/// The sandboxes of a group as those that write into its directories. Their temporary directories on disk are hidden, too:
/// no spec names them.
impl DiskWriters for SandboxGroup {
    fn hidden_usage(&self, devices: &HashSet<u64>, cap: u64) -> DiskUsage {
        let (mut sum, mut devices) = (DiskUsage::NOTHING, devices.clone());
        for dir in self.scratch_dirs() {
            devices.extend(std::fs::metadata(&dir).map(|dir| dir.dev()));
            sum.add(disk_usage(&dir, cap.saturating_sub(sum.bytes)), cap);
            if sum.over {
                return sum;
            }
        }
        sum.add(nameless_usage(self.snapshot().top_pids(), &devices), cap);
        sum
    }

    fn stop(&self) -> Box<dyn StoppedWriters> {
        let before = RefCell::new((0, Vec::new()));
        let processes = StoppedProcesses::stop_below(|| {
            let state = self.state();
            *before.borrow_mut() = (state.next_member, state.starting());
            let running = state.members.iter().filter_map(|member| member.running.as_ref());
            running
                .filter_map(|(pid, _)| Some((*pid)?.as_raw_pid()))
                .collect()
        });
        let (joined, starting) = before.into_inner();
        Box::new(StoppedGroup {
            group: self.clone(),
            processes,
            joined,
            starting,
        })
    }
}

/// A group whose processes are stopped until this is dropped.
struct StoppedGroup {
    group: SandboxGroup,
    processes: StoppedProcesses,
    /// How many sandboxes had joined the group until then.
    joined: u64,
    /// Which of them did not run yet.
    starting: Vec<u64>,
}

impl StoppedWriters for StoppedGroup {
    fn have_not_run(&self) -> bool {
        let state = self.group.state();
        // A sandbox that was started meanwhile, or had been and began to run, was not stopped.
        let has_begun =
            |member: &GroupMember| member.running.is_some() && self.starting.contains(&member.number);
        state.next_member == self.joined
            && !state.members.iter().any(has_begun)
            && self.processes.have_not_run()
    }

    fn saw_starts(&self) -> bool {
        !self.starting.is_empty() || self.group.state().next_member != self.joined
    }
}

impl GroupState {
    /// The sandboxes that do not run yet.
    fn starting(&self) -> Vec<u64> {
        let starting = self.members.iter().filter(|member| member.running.is_none());
        starting.map(|member| member.number).collect()
    }

    fn uncounted(&self) -> (bool, bool) {
        let cgroup = self.cgroup.as_ref();
        let (memory, pids) = cgroup.map_or((false, false), |cgroup| cgroup.controllers());
        (
            self.limits.memory_mb.is_some() && !memory,
            self.limits.pids.is_some() && !pids,
        )
    }

    /// Writes the limits to the cgroup. Those of the processes depend on how many sandboxes there are.
    fn apply_limits(&mut self) {
        let Some(cgroup) = &self.cgroup else { return };
        let set = cgroup
            .set_limits(&self.limits)
            .and_then(|()| match self.limits.pids {
                Some(pids) => cgroup.set_pids(pids, self.members.len()),
                None => Ok(()),
            });
        if let Err(error) = set {
            // A limit below what is used already: the kernel keeps the old one.
            tracing::warn!(%error, label = self.label, "setting the limits of a session failed");
        }
    }
}

impl std::fmt::Debug for SandboxGroup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let state = self.state();
        f.debug_struct("SandboxGroup")
            .field("label", &state.label)
            .field("limits", &state.limits)
            .field("sandboxes", &state.members.len())
            .finish()
    }
}

/// A group's limits and the processes at the top of its running sandboxes.
pub(crate) struct GroupSnapshot {
    pub(crate) label: String,
    pub(crate) limits: ResourceLimits,
    /// Which of memory and processes no cgroup limits.
    pub(crate) uncounted: (bool, bool),
    pub(crate) running: Vec<(Option<Pid>, Arc<ProcessTreeControl>)>,
}

impl GroupSnapshot {
    /// The pids of the processes at the top of the sandboxes.
    pub(crate) fn top_pids(&self) -> impl Iterator<Item = i32> {
        self.running
            .iter()
            .filter_map(|(pid, _)| Some((*pid)?.as_raw_pid()))
    }
}

/// A sandbox's place in its group, given up when dropped.
pub(crate) struct GroupMembership {
    group: SandboxGroup,
    number: u64,
}

impl GroupMembership {
    /// Creates the cgroup of the sandbox itself, if the group has one.
    pub(crate) fn create_cgroup(&self, spec: &SandboxSpec) -> std::io::Result<Option<SandboxCgroup>> {
        let above = self.group.state().cgroup.clone();
        above
            .map(|above| SandboxCgroup::create(&above, &spec.limits))
            .transpose()
    }

    /// Records that the sandbox runs, with the process at its top if that is one of this host's.
    pub(crate) fn set_running(&self, pid: Option<Pid>, tree: Arc<ProcessTreeControl>) {
        self.change(|member| member.running = Some((pid, tree)));
    }

    /// Records the sandbox's temporary directory on disk.
    pub(crate) fn set_scratch(&self, dir: PathBuf) {
        self.change(|member| member.scratch = Some(dir));
    }

    fn change(&self, change: impl FnOnce(&mut GroupMember)) {
        let mut state = self.group.state();
        let mut members = state.members.iter_mut();
        if let Some(member) = members.find(|member| member.number == self.number) {
            change(member);
        }
    }
}

impl Drop for GroupMembership {
    fn drop(&mut self) {
        let mut state = self.group.state();
        state.members.retain(|member| member.number != self.number);
        match state.members.is_empty() {
            // Removed with the last reference: a sandbox's own is removed before.
            true => state.cgroup = None,
            false => state.apply_limits(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_number_of_sandboxes_is_bounded() {
        let group = SandboxGroup::new("test", ResourceLimits::default());
        let mut members: Vec<_> = (0..MAX_SANDBOXES).map(|_| group.join(None).unwrap()).collect();
        assert!(matches!(group.join(None), Err(SandboxError::LimitExceeded(_))));
        members.pop();
        assert!(group.join(None).is_ok());
        drop(members);
        assert!(group.is_empty());
    }

    #[test]
    fn limits_that_no_cgroup_keeps_are_counted() {
        let group = SandboxGroup::new("test", ResourceLimits::default());
        assert_eq!(group.uncounted(), (true, true));
        group.set_limits(&ResourceLimits {
            memory_mb: None,
            ..ResourceLimits::default()
        });
        assert_eq!(group.uncounted(), (false, true));
    }

    #[tokio::test]
    async fn what_begins_to_run_during_a_count_was_not_stopped() {
        let group = SandboxGroup::new("test", ResourceLimits::default());
        let starting = group.join(None).unwrap();
        let stopped = group.stop();
        assert!(stopped.have_not_run() && stopped.saw_starts());
        let (control, _other_end) = tokio::net::UnixStream::pair().unwrap();
        starting.set_running(None, Arc::new(ProcessTreeControl::new(control)));
        assert!(!stopped.have_not_run());
        let stopped = group.stop();
        assert!(stopped.have_not_run() && !stopped.saw_starts());
        let _joined = group.join(None).unwrap();
        assert!(!stopped.have_not_run());
    }
}
