//! Whether a process still runs.

use std::fs;

use rustix::{
    io::Errno,
    process::{Pid, test_kill_process},
};

/// Whether the process with this id runs. One that has ended does not, also while its parent has not waited for it (a
/// zombie): what it held is released. In doubt it runs.
pub fn process_runs(pid: i32) -> bool {
    // Zero is how the kernel shows a process of another namespace.
    let Some(id) = Pid::from_raw(pid.max(0)) else {
        return true;
    };
    if test_kill_process(id) == Err(Errno::SRCH) {
        return false;
    }
    match fs::read_to_string(format!("/proc/{pid}/stat")) {
        // The state follows the program's name, which stands in parentheses and may contain some.
        Ok(stat) => !stat
            .rsplit_once(") ")
            .is_some_and(|(_, rest)| rest.starts_with(['Z', 'X'])),
        Err(_) => true,
    }
}
