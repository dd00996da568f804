//! The processes of the host, as `/proc` shows them: which descends from which, and what each uses.

use std::collections::{HashMap, HashSet};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal};

/// How long processes may take until they have stopped. A thread that waits for a processor stops when it gets one.
const STOP_TIMEOUT: Duration = Duration::from_secs(1);
/// How often it is looked whether they have.
const STOP_POLL: Duration = Duration::from_millis(1);

/// What a process, or several together, use.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct ProcessUsage {
    /// Private memory.
    pub(crate) bytes: u64,
    /// Processes and threads.
    pub(crate) processes: u64,
}

impl ProcessUsage {
    pub(crate) fn add(&mut self, other: ProcessUsage) {
        self.bytes = self.bytes.saturating_add(other.bytes);
        self.processes = self.processes.saturating_add(other.processes);
    }
}

/// Every process: its parent and what it uses.
pub(crate) struct ProcessTable(HashMap<i32, (i32, ProcessUsage)>);

impl ProcessTable {
    pub(crate) fn read() -> Self {
        let mut processes = HashMap::new();
        for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
            let name = entry.file_name();
            if let Some(pid) = name.to_str().and_then(|name| name.parse::<i32>().ok())
                && let Ok(status) = std::fs::read_to_string(entry.path().join("status"))
                && let Some(process) = parse_status(&status)
            {
                processes.insert(pid, process);
            }
        }
        Self(processes)
    }

    /// What the processes at and below each of these use together.
    pub(crate) fn usage_below(&self, tops: impl Iterator<Item = i32>) -> HashMap<i32, ProcessUsage> {
        let mut sums: HashMap<i32, ProcessUsage> = tops.map(|pid| (pid, ProcessUsage::default())).collect();
        for (pid, top) in self.tops(|pid| sums.contains_key(&pid)) {
            if let (Some(sum), Some((_, usage))) = (sums.get_mut(&top), self.0.get(&pid)) {
                sum.add(*usage);
            }
        }
        sums
    }

    /// Every process that is at or below a top, with that top.
    fn tops(&self, is_top: impl Fn(i32) -> bool) -> Vec<(i32, i32)> {
        // The top that each process is below, as far as it is known.
        let mut known: HashMap<i32, Option<i32>> = HashMap::new();
        let mut all = Vec::new();
        for pid in self.0.keys() {
            let mut way = Vec::new();
            let mut at = *pid;
            let found = loop {
                if is_top(at) {
                    break Some(at);
                }
                if let Some(found) = known.get(&at) {
                    break *found;
                }
                way.push(at);
                // Bounded, because a pid that is reused meanwhile could make a cycle.
                match self.0.get(&at) {
                    Some((parent, _)) if *parent > 1 && way.len() <= self.0.len() => at = *parent,
                    Some(_) | None => break None,
                }
            };
            known.extend(way.into_iter().map(|at| (at, found)));
            all.extend(found.map(|top| (*pid, top)));
        }
        all
    }
}

/// The pids of the processes at and below each of these, a parent before its children.
pub(crate) fn processes_below(tops: impl IntoIterator<Item = i32>) -> Vec<i32> {
    let mut found: Vec<i32> = tops.into_iter().collect();
    let mut known: HashSet<i32> = found.iter().copied().collect();
    let mut next = 0;
    while let Some(pid) = found.get(next) {
        let children = children_of(*pid);
        found.extend(children.into_iter().filter(|child| known.insert(*child)));
        next += 1;
    }
    found
}

/// Processes that are stopped until this is dropped.
pub(crate) struct StoppedProcesses {
    /// Parents before their children.
    pids: Vec<i32>,
    are_all_stopped: bool,
    /// How often each of their threads had been switched out when they were stopped.
    switches: HashMap<(i32, String), u64>,
}

impl StoppedProcesses {
    /// Stops all processes below these, which go on: they end their sandbox when the server ends. Parents are stopped
    /// before their children and continued after them, so that none sees its children stop. `tops` is asked again and
    /// again, because others may be starting. Blocks the thread until all have stopped, for a second at most.
    pub(crate) fn stop_below(tops: impl Fn() -> Vec<i32>) -> Self {
        let mut stopped = Self::stop_all_below(tops);
        stopped.switches = switches_of_all(&stopped.pids);
        stopped
    }

    fn stop_all_below(tops: impl Fn() -> Vec<i32>) -> Self {
        let deadline = Instant::now() + STOP_TIMEOUT;
        let mut known = HashSet::new();
        let mut stopped = Self {
            pids: Vec::new(),
            are_all_stopped: false,
            switches: HashMap::new(),
        };
        loop {
            // The signal alone stops nobody: one thread of a process has to run to receive it, and until then the other
            // threads go on. And only when all have stopped, the list of processes after that is complete.
            let have_stopped = stopped.pids.iter().all(|pid| is_stopped(*pid));
            let tops = tops();
            let mut found = processes_below(tops.iter().copied());
            found.retain(|pid| !tops.contains(pid) && known.insert(*pid));
            if found.is_empty() && have_stopped {
                stopped.are_all_stopped = true;
                return stopped;
            }
            found.iter().for_each(|pid| send(*pid, Signal::STOP));
            stopped.pids.extend(found);
            if Instant::now() > deadline {
                let mut late = stopped.pids.iter().filter(|pid| !is_stopped(**pid));
                stopped.are_all_stopped = late.all(|pid| waits_for_stopped_child(*pid));
                return stopped;
            }
            std::thread::sleep(STOP_POLL);
        }
    }

    /// Whether all stopped, and none has run since. A process can have the kernel continue it: with a timer, or a
    /// directory it watches, whose signal is SIGCONT. It can also stop itself again afterwards.
    pub(crate) fn have_not_run(&self) -> bool {
        self.are_all_stopped && switches_of_all(&self.pids) == self.switches
    }
}

impl Drop for StoppedProcesses {
    fn drop(&mut self) {
        self.pids.iter().rev().for_each(|pid| send(*pid, Signal::CONT));
    }
}

/// Sends a signal to a process, which may have ended.
fn send(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = rustix::process::kill_process(pid, signal);
    }
}

/// Whether every thread of a process is stopped, or has ended.
fn is_stopped(pid: i32) -> bool {
    thread_states(pid).iter().all(|state| b"TtZX".contains(state))
}

/// Whether the threads of a process that are not stopped wait in the kernel, and a child of it is stopped: after `vfork` a
/// thread waits so until the child runs a program, which a stopped one does not.
fn waits_for_stopped_child(pid: i32) -> bool {
    thread_states(pid).iter().all(|state| b"DTtZX".contains(state))
        && children_of(pid).into_iter().any(is_stopped)
}

/// The state of each thread of a process, by its letter in `/proc/<pid>/task/<tid>/stat`. A thread that has ended has none.
fn thread_states(pid: i32) -> Vec<u8> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    threads
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|thread| parse_state(&std::fs::read(thread.path().join("stat")).ok()?))
        .collect()
}

/// The threads of processes that can run, by process and thread, each with how often it was switched out.
fn switches_of_all(pids: &[i32]) -> HashMap<(i32, String), u64> {
    pids.iter().flat_map(|pid| switches_of(*pid)).collect()
}

/// The threads of a process that can run, each with how often it was switched out.
fn switches_of(pid: i32) -> impl Iterator<Item = ((i32, String), u64)> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    threads.into_iter().flatten().flatten().filter_map(move |thread| {
        let status = std::fs::read_to_string(thread.path().join("status")).ok()?;
        let switches = parse_switches(&status)?;
        Some(((pid, thread.file_name().into_string().ok()?), switches))
    })
}

/// How often a thread was switched out, from `/proc/<pid>/task/<tid>/status`; none if it has ended.
fn parse_switches(status: &str) -> Option<u64> {
    let (mut sum, mut has_ended) = (0, false);
    for (name, value) in status.lines().filter_map(|line| line.split_once(':')) {
        match name {
            "State" => has_ended = value.trim_start().starts_with(['Z', 'X']),
            "voluntary_ctxt_switches" | "nonvoluntary_ctxt_switches" => {
                sum += value.trim().parse::<u64>().ok()?;
            }
            _ => {}
        }
    }
    (!has_ended).then_some(sum)
}

/// The state is behind the name, which is in parentheses and may contain some.
fn parse_state(stat: &[u8]) -> Option<u8> {
    let name_end = stat.iter().rposition(|byte| *byte == b')')?;
    stat.get(name_end + 2).copied()
}

/// The children of a process, those of all its threads.
pub(crate) fn children_of(pid: i32) -> Vec<i32> {
    let threads = std::fs::read_dir(format!("/proc/{pid}/task"));
    let mut children = Vec::new();
    for thread in threads.into_iter().flatten().flatten() {
        let text = std::fs::read_to_string(thread.path().join("children")).unwrap_or_default();
        children.extend(text.split_whitespace().filter_map(|pid| pid.parse::<i32>().ok()));
    }
    children
}

/// The parent's pid, the number of threads and the private memory from `/proc/<pid>/status`. Memory that is shared with
/// other processes would be counted for each of them.
fn parse_status(status: &str) -> Option<(i32, ProcessUsage)> {
    let (mut parent, mut usage) = (None, ProcessUsage::default());
    for line in status.lines() {
        let Some((name, value)) = line.split_once(':') else {
            continue;
        };
        match name {
            "PPid" => parent = value.trim().parse().ok(),
            "Threads" => usage.processes = value.trim().parse().ok()?,
            "RssAnon" => {
                let kib: u64 = value.trim().strip_suffix("kB")?.trim().parse().ok()?;
                usage.bytes = kib.saturating_mul(1024);
            }
            _ => {}
        }
    }
    Some((parent?, usage))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proc_files_are_read_as_the_kernel_writes_them() {
        let status = "Name:\ta\nPPid:\t42\nRssAnon:\t     300 kB\nThreads:\t9\n";
        let usage = ProcessUsage {
            bytes: 300 << 10,
            processes: 9,
        };
        assert_eq!(parse_status(status), Some((42, usage)));
        assert_eq!(parse_status("Name:\ta\n"), None);
        let own = ProcessTable::read();
        let (_, usage) = own.0[&std::process::id().cast_signed()];
        assert!(usage.bytes > 0 && usage.processes > 0);
    }

    #[test]
    fn children_of_children_are_found_and_stopped() {
        let own = std::process::id().cast_signed();
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", "sleep 600 & echo $!; wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let top = child.id().cast_signed();
        let mut line = String::new();
        let mut stdout = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
        let grandchild: i32 = line.trim().parse().unwrap();
        let below = processes_below([own]);
        assert!(below.contains(&own) && below.contains(&grandchild));
        assert!(!processes_below([grandchild]).contains(&own));
        let stopped = std::iter::repeat_with(|| StoppedProcesses::stop_below(|| vec![top]))
            .find(StoppedProcesses::have_not_run)
            .unwrap();
        assert!(is_stopped(grandchild));
        assert!(!is_stopped(top), "the top goes on");
        drop(stopped);
        while is_stopped(grandchild) {
            std::thread::yield_now();
        }
        send(grandchild, Signal::KILL);
        child.wait().unwrap();
    }

    #[test]
    fn a_process_that_ran_and_stopped_again_is_noticed() {
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", "sh -c 'echo; while :; do kill -STOP $$; done' & wait"])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let top = child.id().cast_signed();
        let mut line = String::new();
        let mut stdout = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
        let below = children_of(top);
        assert_eq!(below.len(), 1);
        let stopped = std::iter::repeat_with(|| StoppedProcesses::stop_below(|| vec![top]))
            .find(StoppedProcesses::have_not_run)
            .unwrap();
        below.iter().for_each(|pid| send(*pid, Signal::CONT));
        while stopped.have_not_run() {
            std::thread::yield_now();
        }
        while !is_stopped(below[0]) {
            std::thread::yield_now();
        }
        assert!(!stopped.have_not_run(), "it is stopped, and ran all the same");
        below.iter().for_each(|pid| send(*pid, Signal::KILL));
        child.wait().unwrap();
    }

    #[test]
    fn a_threads_state_is_read_whatever_its_name() {
        assert_eq!(parse_state(b"42 (a) T (b)) S 1 42"), Some(b'S'));
        assert_eq!(parse_state(b"42 (a)"), None);
        assert_eq!(parse_state(b""), None);
    }

    /// Many threads of which only some have a processor at a time: when it is said that they are stopped, they are.
    #[test]
    fn nothing_runs_once_processes_are_said_to_be_stopped() {
        let loops = "for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; echo; wait";
        let mut child = std::process::Command::new("/bin/sh")
            .args(["-c", loops])
            .stdout(std::process::Stdio::piped())
            .spawn()
            .unwrap();
        let top = child.id().cast_signed();
        let mut line = String::new();
        let mut stdout = std::io::BufReader::new(child.stdout.take().unwrap());
        std::io::BufRead::read_line(&mut stdout, &mut line).unwrap();
        let below: Vec<i32> = children_of(top);
        assert_eq!(below.len(), 8);
        for _ in 0..20 {
            let stopped = StoppedProcesses::stop_below(|| vec![top]);
            // On a machine that is very busy a second may not be enough; it must be said then.
            assert_eq!(
                stopped.are_all_stopped,
                below.iter().all(|pid| is_stopped(*pid)),
                "what was said is true"
            );
        }
        below.iter().for_each(|pid| send(*pid, Signal::KILL));
        child.wait().unwrap();
    }

    #[test]
    fn processes_count_for_the_sandbox_they_descend_from() {
        let usage = |bytes| ProcessUsage { bytes, processes: 1 };
        let table = ProcessTable(HashMap::from([
            (10, (1, usage(1))),
            (11, (10, usage(2))),
            (12, (11, usage(4))),
            (20, (1, usage(8))),
            (30, (1, usage(16))),
            (31, (30, usage(32))),
            // A cycle, as reused pids could make one.
            (40, (41, usage(64))),
            (41, (40, usage(128))),
        ]));
        let sums = table.usage_below([10, 20].into_iter());
        assert_eq!(
            sums[&10],
            ProcessUsage {
                bytes: 7,
                processes: 3
            }
        );
        assert_eq!(sums[&20], usage(8));
        assert_eq!(sums.len(), 2);
    }
}
