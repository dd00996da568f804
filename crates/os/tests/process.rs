//! Whether a process runs. In a program of its own: the child inherits descriptors for a moment, whose ends other tests
//! wait for.
#![allow(clippy::unwrap_used)]

use std::process::{Command, Stdio};

use oubliette_os::process_runs;
use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};

#[test]
fn a_process_runs_until_it_has_ended_not_until_it_is_waited_for() {
    let mut child = Command::new("cat").stdin(Stdio::piped()).spawn().unwrap();
    let pid = child.id() as i32;
    assert!(process_runs(pid));
    drop(child.stdin.take());
    let id = WaitId::Pid(Pid::from_raw(pid).unwrap());
    waitid(id, WaitIdOptions::EXITED | WaitIdOptions::NOWAIT).unwrap();
    assert!(!process_runs(pid), "a zombie");
    child.wait().unwrap();
    assert!(!process_runs(pid));
    assert!(process_runs(0) && process_runs(-1) && process_runs(std::process::id() as i32));
}
