//! Killing all descendants where there is no pid namespace.
//!
//! The inner stage is a subreaper: a process that loses its parent becomes its child, however often it forked and
//! whatever session it is in. So it is enough to kill the processes below this one until there are none.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions};

/// Kills and reaps descendants until no child is left.
pub(super) fn kill_all() {
    let me = std::process::id().cast_signed();
    loop {
        for pid in descendants_of(me) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
        // Killed processes take a moment to end and to have their children reparented to this process.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// All descendants of `root`, according to `/proc`.
pub(crate) fn descendants_of(root: i32) -> Vec<Pid> {
    let mut children: HashMap<i32, Vec<i32>> = HashMap::new();
    for entry in std::fs::read_dir("/proc").into_iter().flatten().flatten() {
        let Some(pid) = entry
            .file_name()
            .to_str()
            .and_then(|name| name.parse::<i32>().ok())
        else {
            continue;
        };
        let Ok(stat) = std::fs::read_to_string(entry.path().join("stat")) else {
            continue;
        };
        if let Some(parent) = parent_pid(&stat) {
            children.entry(parent).or_default().push(pid);
        }
    }
    let (mut found, mut rest) = (HashSet::new(), vec![root]);
    while let Some(pid) = rest.pop() {
        for child in children.get(&pid).into_iter().flatten() {
            if found.insert(*child) {
                rest.push(*child);
            }
        }
    }
    found.into_iter().filter_map(Pid::from_raw).collect()
}

/// The parent's pid from `/proc/<pid>/stat`: `pid (name) state parent …`. The name may contain anything, so the
/// last parenthesis ends it.
pub(crate) fn parent_pid(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_parent_is_found_after_a_name_with_parentheses() {
        assert_eq!(super::parent_pid("7 (a) b) R 3) S 42 7 7 0"), Some(42));
        assert_eq!(super::parent_pid("7 (sh) S 1 7 7 0"), Some(1));
        assert_eq!(super::parent_pid(""), None);
    }
}
