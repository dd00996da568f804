//! Other processes: their memory, their children, and finding one by its arguments.

use std::{fs, time::Duration};

use anyhow::{Context, Result};
use rustix::process::{Pid, Signal, kill_process};

/// Memory of one process or several, in KiB.
#[derive(Debug, Default, Clone, Copy)]
pub(crate) struct Memory {
    /// All that is resident.
    pub(crate) rss: f64,
    /// Shared pages counted by their share.
    pub(crate) pss: f64,
}

/// Of one process.
pub(crate) fn memory(pid: u32) -> Result<Memory> {
    let text = fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).context("the process is gone")?;
    let field = |name: &str| {
        let line = text
            .lines()
            .find_map(|line| line.strip_prefix(name))
            .unwrap_or_default();
        line.trim().trim_end_matches(" kB").parse().unwrap_or(0.0)
    };
    Ok(Memory {
        rss: field("Rss:"),
        pss: field("Pss:"),
    })
}

/// Of all of them; those that went meanwhile count nothing.
pub(crate) fn memory_of(pids: &[u32]) -> Memory {
    pids.iter()
        .filter_map(|pid| memory(*pid).ok())
        .fold(Memory::default(), |sum, one| Memory {
            rss: sum.rss + one.rss,
            pss: sum.pss + one.pss,
        })
}

/// A process once its memory has stopped growing.
pub(crate) async fn settled(pid: u32) -> Result<Memory> {
    let mut before = memory(pid)?;
    for _ in 0..20 {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let now = memory(pid)?;
        if (now.rss - before.rss).abs() < 64.0 {
            return Ok(now);
        }
        before = now;
    }
    Ok(before)
}

/// Every process below this one, itself not among them.
pub(crate) fn below(pid: u32) -> Vec<u32> {
    let parents: Vec<(u32, u32)> = all().filter_map(|pid| Some((pid, parent(pid)?))).collect();
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

/// Processes whose first arguments are these.
pub(crate) fn with_arguments(wanted: &[&str]) -> Vec<u32> {
    all().filter(|pid| starts_with(*pid, wanted)).collect()
}

fn starts_with(pid: u32, wanted: &[&str]) -> bool {
    let Ok(line) = fs::read(format!("/proc/{pid}/cmdline")) else {
        return false;
    };
    let mut arguments = line.split(|byte| *byte == 0);
    wanted
        .iter()
        .all(|wanted| arguments.next() == Some(wanted.as_bytes()))
}

/// Kills a process that this run started.
pub(crate) fn kill(pid: u32, signal: Signal) {
    if let Some(pid) = i32::try_from(pid).ok().and_then(Pid::from_raw) {
        let _ = kill_process(pid, signal);
    }
}

fn all() -> impl Iterator<Item = u32> {
    let entries = fs::read_dir("/proc").into_iter().flatten().flatten();
    entries.filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

fn parent(pid: u32) -> Option<u32> {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    let (_, rest) = stat.rsplit_once(')')?;
    rest.split_whitespace().nth(1)?.parse().ok()
}
