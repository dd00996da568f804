//! How long the processor is had at once.

use std::{io, time::Duration};

/// Asks for the processor in slices of this length for the calling thread, and for none that it starts.
///
/// A thread that works in short bursts is served sooner so, and gives up less when it yields; its share of the
/// processor stays the same. Any thread may ask. A kernel before Linux 6.12 takes no notice.
#[allow(unsafe_code)]
pub fn ask_slices(length: Duration) -> io::Result<()> {
    let nice = rustix::process::getpriority_process(None)?;
    let attributes = libc::sched_attr {
        size: size_of::<libc::sched_attr>() as u32,
        sched_policy: libc::SCHED_OTHER as u32,
        sched_flags: libc::SCHED_FLAG_RESET_ON_FORK as u64,
        sched_nice: nice,
        sched_priority: 0,
        sched_runtime: u64::try_from(length.as_nanos()).unwrap_or(u64::MAX),
        sched_deadline: 0,
        sched_period: 0,
    };
    // SAFETY: the structure outlives the call and tells its own size; thread 0 is the calling one.
    let result = unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const attributes, 0) };
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the kernel says of the calling thread.
    #[allow(unsafe_code)]
    fn attributes() -> libc::sched_attr {
        // SAFETY: all fields are numbers, and zero is one; the kernel writes no more than it is told may be written.
        unsafe {
            let mut attributes: libc::sched_attr = std::mem::zeroed();
            let size = size_of::<libc::sched_attr>();
            assert_eq!(
                libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0),
                0
            );
            attributes
        }
    }

    #[test]
    fn a_thread_keeps_its_niceness_and_its_children_get_nothing() {
        let before = attributes();
        ask_slices(Duration::from_micros(100)).unwrap();
        let after = attributes();
        assert_eq!(after.sched_nice, before.sched_nice);
        assert_eq!(after.sched_policy, before.sched_policy);
        assert_eq!(after.sched_flags, libc::SCHED_FLAG_RESET_ON_FORK as u64);
        // Kernels that know no slices tell none.
        assert!(
            [0, 100_000].contains(&after.sched_runtime),
            "{}",
            after.sched_runtime
        );
        let child = std::thread::spawn(attributes).join().unwrap();
        assert_eq!(
            (child.sched_flags, child.sched_runtime),
            (0, before.sched_runtime)
        );
    }
}
