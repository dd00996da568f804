//! Ending every descendant where no pid namespace does it.
//!
//! The inner stage is a subreaper: whoever loses its parent becomes its child, however often it forked and
//! whatever session it is in. So it has only to kill what hangs below it until nothing does.

use std::collections::{HashMap, HashSet};
use std::time::Duration;

use rustix::io::Errno;
use rustix::process::{Pid, Signal, WaitOptions};

/// Kills and reaps until no child is left.
pub(super) fn end() {
    let me = std::process::id().cast_signed();
    loop {
        for pid in below(me) {
            let _ = rustix::process::kill_process(pid, Signal::KILL);
        }
        loop {
            match rustix::process::wait(WaitOptions::NOHANG) {
                Ok(Some(_)) | Err(Errno::INTR) => {}
                Ok(None) => break,
                Err(_) => return,
            }
        }
        // The killed take a moment to die, and to hand their children up to us.
        std::thread::sleep(Duration::from_millis(1));
    }
}

/// Every process below `root`, by the parents that `/proc` tells.
fn below(root: i32) -> Vec<Pid> {
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
        if let Some(parent) = parent(&stat) {
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

/// `pid (name) state parent …`; the name may hold anything, so the last parenthesis counts.
pub(crate) fn parent(stat: &str) -> Option<i32> {
    stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
}

#[cfg(test)]
mod tests {
    #[test]
    fn the_parent_is_found_behind_a_name_of_any_kind() {
        assert_eq!(super::parent("7 (a) b) R 3) S 42 7 7 0"), Some(42));
        assert_eq!(super::parent("7 (sh) S 1 7 7 0"), Some(1));
        assert_eq!(super::parent(""), None);
    }
}
