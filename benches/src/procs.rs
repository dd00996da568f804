//! Information about other processes, from `/proc`: memory, descendants, command lines.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

/// Memory of one process, or the sum over several, in KiB.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct ProcessMemory {
    /// Resident set size.
    pub(crate) rss: f64,
    /// Proportional set size: shared pages are divided among the processes that share them.
    pub(crate) pss: f64,
}

/// The memory of one process.
pub(crate) fn process_memory(pid: u32) -> Result<ProcessMemory> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).context("the process is gone")?;
    let field = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or_default();
        line.trim().trim_end_matches(" kB").parse().unwrap_or(0.0)
    };
    Ok(ProcessMemory {
        rss: field("Rss:"),
        pss: field("Pss:"),
    })
}

/// The summed memory of several processes; those that have exited count as zero.
pub(crate) fn total_memory(pids: &[u32]) -> ProcessMemory {
    pids.iter()
        .filter_map(|pid| process_memory(*pid).ok())
        .fold(ProcessMemory::default(), |sum, one| ProcessMemory {
            rss: sum.rss + one.rss,
            pss: sum.pss + one.pss,
        })
}

/// The memory of a process once it has stopped changing, or after 6 s.
pub(crate) async fn memory_once_stable(pid: u32) -> Result<ProcessMemory> {
    let mut before = process_memory(pid)?;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = process_memory(pid)?;
        if (now.rss - before.rss).abs() < 64.0 {
            return Ok(now);
        }
        before = now;
    }
    Ok(before)
}

/// Processor time of the whole machine since it started, in clock ticks.
#[derive(Debug, Clone, Copy)]
pub(crate) struct MachineCpuTime {
    busy: u64,
    total: u64,
}

impl MachineCpuTime {
    pub(crate) fn now() -> Result<Self> {
        let text = fs::read_to_string("/proc/stat")?;
        let line = text.lines().next().unwrap_or_default();
        // user, nice, system, idle, iowait, irq, softirq, steal; guest time is part of user's.
        let ticks: Vec<u64> = line
            .split_whitespace()
            .skip(1)
            .take(8)
            .filter_map(|ticks| ticks.parse().ok())
            .collect();
        let idle: u64 = ticks.iter().skip(3).take(2).sum();
        let total: u64 = ticks.iter().sum();
        Ok(Self {
            busy: total - idle,
            total,
        })
    }

    /// The share of the processors that was busy since an earlier reading, from 0 to 1.
    pub(crate) fn busy_since(self, earlier: Self) -> f64 {
        let total = self.total.saturating_sub(earlier.total);
        self.busy.saturating_sub(earlier.busy) as f64 / total.max(1) as f64
    }
}

/// All descendants of a process.
pub(crate) fn descendants(pid: u32) -> Vec<u32> {
    let parents: Vec<(u32, u32)> = all_pids()
        .filter_map(|pid| Some((pid, parent_pid(pid)?)))
        .collect();
    let mut found = vec![pid];
    let mut at = 0;
    while let Some(&parent) = found.get(at) {
        found.extend(
            parents
                .iter()
                .filter(|(_, of)| *of == parent)
                .map(|(pid, _)| *pid),
        );
        at += 1;
    }
    found.split_off(1)
}

/// The processes whose command line begins with these arguments.
pub(crate) fn pids_with_arguments(wanted: &[&str]) -> Vec<u32> {
    all_pids()
        .filter(|pid| command_line_starts_with(*pid, wanted))
        .collect()
}

fn command_line_starts_with(pid: u32, wanted: &[&str]) -> bool {
    let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else {
        return false;
    };
    let mut arguments = line.split(|byte| *byte == 0);
    wanted
        .iter()
        .all(|wanted| arguments.next() == Some(wanted.as_bytes()))
}

/// Sends a signal to a process that this run started.
pub(crate) fn send_signal(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

fn all_pids() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn parent_pid(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}
