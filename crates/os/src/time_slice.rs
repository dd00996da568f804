//! Requesting a scheduler time slice for a thread.

use std::{io, time::Duration};

/// Sets the scheduler time slice of the calling thread (`sched_setattr`); threads it starts do not inherit it.
///
/// With a short slice, a thread that works in short bursts is scheduled sooner and loses less when it yields; its
/// share of the processor stays the same. It needs no privilege. Kernels before Linux 6.12 ignore it. A thread
/// whose scheduling policy is not SCHED_OTHER, because the operator chose another, is left as it is.
pub fn request_time_slice(length: Duration) -> io::Result<()> {
    let mut attributes = attributes()?;
    if attributes.sched_policy != libc::SCHED_OTHER as u32 {
        return Ok(());
    }
    attributes.sched_flags |= libc::SCHED_FLAG_RESET_ON_FORK as u64;
    attributes.sched_runtime = u64::try_from(length.as_nanos()).unwrap_or(u64::MAX);
    set(&attributes)
}

/// The calling thread's scheduling attributes.
#[allow(unsafe_code)]
fn attributes() -> io::Result<libc::sched_attr> {
    let mut attributes = libc::sched_attr {
        size: 0,
        sched_policy: 0,
        sched_flags: 0,
        sched_nice: 0,
        sched_priority: 0,
        sched_runtime: 0,
        sched_deadline: 0,
        sched_period: 0,
    };
    let size = size_of::<libc::sched_attr>();
    // SAFETY: the kernel writes no more than this size, into a structure of numbers; thread 0 is the calling one.
    check(unsafe { libc::syscall(libc::SYS_sched_getattr, 0, &raw mut attributes, size, 0) })?;
    Ok(attributes)
}

#[allow(unsafe_code)]
fn set(attributes: &libc::sched_attr) -> io::Result<()> {
    // SAFETY: the structure outlives the call and contains its own size; thread 0 is the calling one.
    check(unsafe { libc::syscall(libc::SYS_sched_setattr, 0, &raw const *attributes, 0) })
}

fn check(result: libc::c_long) -> io::Result<()> {
    match result {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_thread_keeps_its_nice_value_and_its_children_do_not_inherit_the_slice() {
        let before = attributes().unwrap();
        request_time_slice(Duration::from_micros(100)).unwrap();
        let after = attributes().unwrap();
        assert_eq!(after.sched_nice, before.sched_nice);
        assert_eq!(after.sched_policy, before.sched_policy);
        assert_eq!(after.sched_flags, libc::SCHED_FLAG_RESET_ON_FORK as u64);
        // Kernels without time slices report 0.
        assert!(
            [0, 100_000].contains(&after.sched_runtime),
            "{}",
            after.sched_runtime
        );
        let child = std::thread::spawn(attributes).join().unwrap().unwrap();
        assert_eq!(
            (child.sched_flags, child.sched_runtime),
            (0, before.sched_runtime)
        );
    }

    #[test]
    fn a_thread_with_a_policy_of_its_own_keeps_it() {
        let mut own = attributes().unwrap();
        own.sched_policy = libc::SCHED_BATCH as u32;
        set(&own).unwrap();
        request_time_slice(Duration::from_micros(100)).unwrap();
        let after = attributes().unwrap();
        assert_eq!(after.sched_policy, own.sched_policy);
        assert_ne!(after.sched_runtime, 100_000);
    }
}
