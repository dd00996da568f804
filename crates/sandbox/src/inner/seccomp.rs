//! Seccomp: denies system calls that no agent, compiler or tool server needs but kernel exploits use.
//!
//! It is a list of denied calls, not of allowed ones, because programs nobody foresaw must run. A denied call
//! fails with EPERM, as for any unprivileged user, which programs can handle; calls that have an older fallback
//! fail with ENOSYS, so that programs use it.

use std::collections::BTreeMap;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen as Len, SeccompCmpOp as Op, SeccompCondition as Cond,
    SeccompFilter, SeccompRule, TargetArch, sock_filter,
};

use super::StageError;
use crate::control_protocol::PayloadConfinement;

/// `file_setattr`, the same number on every architecture.
const SYS_FILE_SETATTR: libc::c_long = 469;

/// Calls that are denied whatever their arguments.
const DENIED_CALLS: &[libc::c_long] = &[
    // Mounts and other changes of the file system tree.
    libc::SYS_mount,
    libc::SYS_umount2,
    libc::SYS_pivot_root,
    libc::SYS_chroot,
    libc::SYS_move_mount,
    libc::SYS_open_tree,
    libc::SYS_fsopen,
    libc::SYS_fsconfig,
    libc::SYS_fsmount,
    libc::SYS_fspick,
    libc::SYS_mount_setattr,
    libc::SYS_quotactl,
    libc::SYS_quotactl_fd,
    // Sets project ids, as FS_IOC_FSSETXATTR does.
    SYS_FILE_SETATTR,
    libc::SYS_swapon,
    libc::SYS_swapoff,
    // Access to files by handle, which bypasses the permissions of directories.
    libc::SYS_name_to_handle_at,
    libc::SYS_open_by_handle_at,
    libc::SYS_fanotify_init,
    // Namespaces.
    libc::SYS_unshare,
    libc::SYS_setns,
    // Access to other processes.
    libc::SYS_ptrace,
    libc::SYS_process_vm_readv,
    libc::SYS_process_vm_writev,
    libc::SYS_process_madvise,
    libc::SYS_pidfd_getfd,
    libc::SYS_kcmp,
    // The kernel and its settings.
    libc::SYS_bpf,
    libc::SYS_perf_event_open,
    libc::SYS_userfaultfd,
    libc::SYS_kexec_load,
    libc::SYS_kexec_file_load,
    libc::SYS_init_module,
    libc::SYS_finit_module,
    libc::SYS_delete_module,
    libc::SYS_reboot,
    libc::SYS_syslog,
    libc::SYS_acct,
    libc::SYS_settimeofday,
    libc::SYS_clock_settime,
    libc::SYS_vhangup,
    // Keyrings are not namespaced: they would be those of the host's user.
    libc::SYS_add_key,
    libc::SYS_request_key,
    libc::SYS_keyctl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_iopl,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_ioperm,
    #[cfg(target_arch = "x86_64")]
    libc::SYS_modify_ldt,
];

/// Calls that are denied where there are no namespaces: shared memory, semaphores and queues are those of the host's
/// user, and Landlock does not cover them. Those already made are reached by a number that can be guessed, so not only
/// `*get` is denied.
const DENIED_WITHOUT_NAMESPACES: &[libc::c_long] = &[
    libc::SYS_shmget,
    libc::SYS_shmat,
    libc::SYS_shmctl,
    libc::SYS_semget,
    libc::SYS_semop,
    libc::SYS_semtimedop,
    libc::SYS_semctl,
    libc::SYS_msgget,
    libc::SYS_msgsnd,
    libc::SYS_msgrcv,
    libc::SYS_msgctl,
    libc::SYS_mq_open,
    libc::SYS_mq_unlink,
];

/// Calls that change limits or priorities of the process whose id is their first argument, which may be any process of
/// the same user; 0 is the caller itself. Landlock does not cover them.
const BY_PROCESS_ID: [libc::c_long; 5] = [
    libc::SYS_prlimit64,
    libc::SYS_sched_setaffinity,
    libc::SYS_sched_setscheduler,
    libc::SYS_sched_setparam,
    libc::SYS_sched_setattr,
];

/// Calls that take what kind of id their second argument is, and the kind that is one process: with 0 as id, the caller.
const BY_KIND_OF_ID: [(libc::c_long, u64); 2] = [
    (libc::SYS_setpriority, libc::PRIO_PROCESS as u64),
    (libc::SYS_ioprio_set, IOPRIO_WHO_PROCESS),
];
const IOPRIO_WHO_PROCESS: u64 = 1;

/// Every namespace flag of `clone`. (CLONE_NEWTIME has no bit there.)
const NAMESPACE_FLAGS: [libc::c_int; 7] = [
    libc::CLONE_NEWNS,
    libc::CLONE_NEWCGROUP,
    libc::CLONE_NEWUTS,
    libc::CLONE_NEWIPC,
    libc::CLONE_NEWUSER,
    libc::CLONE_NEWPID,
    libc::CLONE_NEWNET,
];

/// Terminal ioctls that inject input into another process's terminal.
const TIOCSTI: u64 = 0x5412;
const TIOCLINUX: u64 = 0x541C;
/// Sets a file's project id: with another one, the file would not count against a project quota of the operator's.
const FS_IOC_FSSETXATTR: u64 = 0x401c_5820;
/// The argument with which `personality` only returns the current value.
const PERSONALITY_QUERY: u64 = 0xffff_ffff;
/// The obsolete socket type for raw packets, from before AF_PACKET.
const SOCK_PACKET: libc::c_int = 10;
const SOCKET_TYPE_MASK: u64 = 0xf;

/// Installs both filters, for this process and all it starts.
pub(super) fn install_filters(confine: &PayloadConfinement) -> Result<(), StageError> {
    let enosys = enosys_filter();
    let eperm = eperm_filter(confine).map_err(|error| StageError::at("seccomp", error))?;
    for program in [&enosys, &eperm] {
        seccompiler::apply_filter(program).map_err(|error| StageError::at("seccomp", error))?;
    }
    Ok(())
}

/// The filter that returns ENOSYS for `clone3`, whose flags a filter cannot inspect (the C library falls back to
/// `clone`), for io_uring, whose operations a filter cannot inspect, and for x32 calls, whose numbers differ from
/// those denied.
fn enosys_filter() -> BpfProgram {
    const LOAD_NUMBER: u16 = 0x20; // BPF_LD | BPF_W | BPF_ABS
    const JUMP_EQUAL: u16 = 0x15; // BPF_JMP | BPF_JEQ | BPF_K
    const JUMP_AT_LEAST: u16 = 0x35; // BPF_JMP | BPF_JGE | BPF_K
    const RETURN: u16 = 0x06; // BPF_RET | BPF_K
    const X32: u32 = 0x4000_0000;
    let calls = [
        libc::SYS_clone3,
        libc::SYS_io_uring_setup,
        libc::SYS_io_uring_enter,
        libc::SYS_io_uring_register,
    ];
    let mut program = vec![sock_filter {
        code: LOAD_NUMBER,
        jt: 0,
        jf: 0,
        k: 0,
    }];
    // A match jumps over the remaining tests and the "allow" after them, to the ENOSYS at the end.
    let mut remaining = calls.len() as u8 + 1;
    program.push(sock_filter {
        code: JUMP_AT_LEAST,
        jt: remaining,
        jf: 0,
        k: X32,
    });
    for call in calls {
        remaining -= 1;
        program.push(sock_filter {
            code: JUMP_EQUAL,
            jt: remaining,
            jf: 0,
            k: call as u32,
        });
    }
    program.push(sock_filter {
        code: RETURN,
        jt: 0,
        jf: 0,
        k: libc::SECCOMP_RET_ALLOW,
    });
    let refuse = libc::SECCOMP_RET_ERRNO | libc::ENOSYS as u32;
    program.push(sock_filter {
        code: RETURN,
        jt: 0,
        jf: 0,
        k: refuse,
    });
    program
}

/// The filter that returns EPERM for denied calls and arguments.
fn eperm_filter(confine: &PayloadConfinement) -> Result<BpfProgram, seccompiler::BackendError> {
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> =
        DENIED_CALLS.iter().map(|call| (*call, Vec::new())).collect();
    // Where Landlock is required there are no namespaces.
    if confine.landlock_required {
        add_rules_without_namespaces(&mut rules)?;
    }
    rules.insert(libc::SYS_socket, socket_rules(confine.inet)?);
    let mut clone = Vec::new();
    for flag in NAMESPACE_FLAGS {
        let flag = flag as u32 as u64;
        clone.push(rule([(0, Len::Qword, Op::MaskedEq(flag), flag)])?);
    }
    rules.insert(libc::SYS_clone, clone);
    let ioctls =
        [TIOCSTI, TIOCLINUX, FS_IOC_FSSETXATTR].map(|request| rule([(1, Len::Dword, Op::Eq, request)]));
    rules.insert(libc::SYS_ioctl, ioctls.into_iter().collect::<Result<_, _>>()?);
    let personality = rule([
        (0, Len::Dword, Op::Ne, 0),
        (0, Len::Dword, Op::Ne, PERSONALITY_QUERY),
    ])?;
    rules.insert(libc::SYS_personality, vec![personality]);
    // Whoever reads on the other end drops such a byte, with the descriptors that came along, and closing those may
    // block it. The server reads sockets that a sandbox shares with it.
    let out_of_band = number(libc::MSG_OOB);
    for (call, flags) in [
        (libc::SYS_sendto, 3),
        (libc::SYS_sendmsg, 2),
        (libc::SYS_sendmmsg, 3),
    ] {
        let rule = rule([(flags, Len::Dword, Op::MaskedEq(out_of_band), out_of_band)])?;
        rules.insert(call, vec![rule]);
    }

    let arch = TargetArch::try_from(std::env::consts::ARCH)?;
    SeccompFilter::new(
        rules,
        SeccompAction::Allow,
        SeccompAction::Errno(libc::EPERM as u32),
        arch,
    )?
    .try_into()
}

fn add_rules_without_namespaces(
    rules: &mut BTreeMap<i64, Vec<SeccompRule>>,
) -> Result<(), seccompiler::BackendError> {
    rules.extend(DENIED_WITHOUT_NAMESPACES.iter().map(|call| (*call, Vec::new())));
    for call in BY_PROCESS_ID {
        rules.insert(call, vec![rule([(0, Len::Dword, Op::Ne, 0)])?]);
    }
    for (call, process) in BY_KIND_OF_ID {
        let other_kind = rule([(0, Len::Dword, Op::Ne, process)])?;
        let other_process = rule([(1, Len::Dword, Op::Ne, 0)])?;
        rules.insert(call, vec![other_kind, other_process]);
    }
    Ok(())
}

/// Denies all sockets but Unix, TCP, UDP and NETLINK_ROUTE; without `inet`, all but Unix sockets.
fn socket_rules(inet: bool) -> Result<Vec<SeccompRule>, seccompiler::BackendError> {
    let (unix, v4, v6, netlink) = (
        number(libc::AF_UNIX),
        number(libc::AF_INET),
        number(libc::AF_INET6),
        number(libc::AF_NETLINK),
    );
    if !inet {
        return Ok(vec![rule([(0, Len::Dword, Op::Ne, unix)])?]);
    }
    let mut rules = vec![
        rule([
            (0, Len::Dword, Op::Ne, unix),
            (0, Len::Dword, Op::Ne, v4),
            (0, Len::Dword, Op::Ne, v6),
            (0, Len::Dword, Op::Ne, netlink),
        ])?,
        rule([
            (0, Len::Dword, Op::Eq, netlink),
            (2, Len::Dword, Op::Ne, number(libc::NETLINK_ROUTE)),
        ])?,
    ];
    for family in [v4, v6] {
        for kind in [libc::SOCK_RAW, SOCK_PACKET] {
            let kind = (1, Len::Dword, Op::MaskedEq(SOCKET_TYPE_MASK), number(kind));
            rules.push(rule([(0, Len::Dword, Op::Eq, family), kind])?);
        }
    }
    Ok(rules)
}

fn number(value: libc::c_int) -> u64 {
    u64::from(value.unsigned_abs())
}

fn rule<const N: usize>(
    conditions: [(u8, Len, Op, u64); N],
) -> Result<SeccompRule, seccompiler::BackendError> {
    let conditions: Result<Vec<Cond>, _> = conditions
        .into_iter()
        .map(|(argument, length, operation, value)| Cond::new(argument, length, operation, value))
        .collect();
    SeccompRule::new(conditions?)
}
