//! Escape attempts.

use std::fs::{File, OpenOptions};
use std::io;
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

fn print_result(name: &str, result: io::Result<()>) {
    match result {
        Ok(()) => println!("{name}: ok"),
        Err(error) => println!("{name}: {}", error.raw_os_error().map_or("other".into(), errno)),
    }
}

fn errno(number: i32) -> String {
    let name = match number {
        libc::EPERM => "EPERM",
        libc::EACCES => "EACCES",
        libc::ENOENT => "ENOENT",
        libc::ENOSYS => "ENOSYS",
        libc::EROFS => "EROFS",
        libc::ESRCH => "ESRCH",
        libc::ECONNREFUSED => "ECONNREFUSED",
        libc::ENETUNREACH => "ENETUNREACH",
        libc::ENOSPC => "ENOSPC",
        libc::EAGAIN => "EAGAIN",
        libc::ENOMEM => "ENOMEM",
        libc::EFBIG => "EFBIG",
        libc::EAFNOSUPPORT => "EAFNOSUPPORT",
        libc::EBADF => "EBADF",
        _ => return format!("errno {number}"),
    };
    name.to_owned()
}

#[allow(unsafe_code)]
fn call(name: &str, number: libc::c_long, args: [usize; 5]) {
    let [a, b, c, d, e] = args;
    // SAFETY: every call here is either refused or given arguments (null, bad descriptors, empty sizes)
    // with which it cannot touch this process's memory.
    let result = unsafe { libc::syscall(number, a, b, c, d, e) };
    print_result(
        name,
        if result < 0 {
            Err(io::Error::last_os_error())
        } else {
            Ok(())
        },
    );
}

pub(crate) fn run(command: &str, args: &[String]) -> bool {
    match command {
        "read" => args
            .iter()
            .for_each(|path| print_result(path, std::fs::read(path).map(drop))),
        "list" => args
            .iter()
            .for_each(|path| print_result(path, std::fs::read_dir(path).map(drop))),
        // Only opens the file and writes nothing, in case it succeeds.
        "open-to-write" => args
            .iter()
            .for_each(|path| print_result(path, OpenOptions::new().write(true).open(path).map(drop))),
        "create" => args
            .iter()
            .for_each(|path| print_result(path, File::create(path).map(drop))),
        "connect" => args
            .iter()
            .for_each(|to| print_result(to, TcpStream::connect(to.as_str()).map(drop))),
        "connect-unix" => args
            .iter()
            .for_each(|to| print_result(to, UnixStream::connect(to).map(drop))),
        "connect-abstract" => args
            .iter()
            .for_each(|name| print_result(name, connect_abstract(name))),
        "signal" => args.iter().for_each(|pid| print_result(pid, signal(pid))),
        "mounts" => mounts(),
        "processes" => processes(),
        "namespaces" => namespaces(),
        "sockets" => sockets(),
        "kernel" => kernel(),
        "ipc" => ipc(),
        "other-process" => args.iter().for_each(|pid| other_process(pid)),
        "out-of-band" => out_of_band(),
        "fork" => fork(args),
        "allocate" => allocate(args),
        _ => return false,
    }
    true
}

fn connect_abstract(name: &str) -> io::Result<()> {
    use std::os::linux::net::SocketAddrExt;
    let address = std::os::unix::net::SocketAddr::from_abstract_name(name)?;
    UnixStream::connect_addr(&address).map(drop)
}

#[allow(unsafe_code)]
fn signal(pid: &str) -> io::Result<()> {
    let pid = pid.parse().map_err(io::Error::other)?;
    // SAFETY: signal 0 only checks whether the process may be signalled.
    if unsafe { libc::kill(pid, 0) } == 0 {
        Ok(())
    } else {
        Err(io::Error::last_os_error())
    }
}

fn mounts() {
    call(
        "mount",
        libc::SYS_mount,
        [0, c"/tmp".as_ptr() as usize, c"tmpfs".as_ptr() as usize, 0, 0],
    );
    call(
        "umount",
        libc::SYS_umount2,
        [c"/workspace".as_ptr() as usize, 0, 0, 0, 0],
    );
    call(
        "pivot_root",
        libc::SYS_pivot_root,
        [c"/".as_ptr() as usize, c"/".as_ptr() as usize, 0, 0, 0],
    );
    call(
        "chroot",
        libc::SYS_chroot,
        [c"/tmp".as_ptr() as usize, 0, 0, 0, 0],
    );
    call(
        "fsopen",
        libc::SYS_fsopen,
        [c"tmpfs".as_ptr() as usize, 0, 0, 0, 0],
    );
    call(
        "open_tree",
        libc::SYS_open_tree,
        [0, c"/".as_ptr() as usize, 1, 0, 0],
    );
    call(
        "mount made shared",
        libc::SYS_mount,
        [
            0,
            c"/".as_ptr() as usize,
            0,
            (libc::MS_SHARED | libc::MS_REC) as usize,
            0,
        ],
    );
    call(
        "mount made writable",
        libc::SYS_mount,
        [
            0,
            c"/usr".as_ptr() as usize,
            0,
            (libc::MS_REMOUNT | libc::MS_BIND) as usize,
            0,
        ],
    );
    call("fsmount", libc::SYS_fsmount, [0; 5]);
    call("fsconfig", libc::SYS_fsconfig, [0; 5]);
    call("fspick", libc::SYS_fspick, [0, c"/".as_ptr() as usize, 0, 0, 0]);
    call("fanotify_init", libc::SYS_fanotify_init, [0; 5]);
    call("move_mount", libc::SYS_move_mount, [0; 5]);
    call("mount_setattr", libc::SYS_mount_setattr, [0; 5]);
    call("name_to_handle_at", libc::SYS_name_to_handle_at, [0; 5]);
    call("open_by_handle_at", libc::SYS_open_by_handle_at, [0; 5]);
}

fn processes() {
    call(
        "ptrace traceme",
        libc::SYS_ptrace,
        [libc::PTRACE_TRACEME as usize, 0, 0, 0, 0],
    );
    call(
        "ptrace pid 1",
        libc::SYS_ptrace,
        [libc::PTRACE_SEIZE as usize, 1, 0, 0, 0],
    );
    call("process_vm_readv", libc::SYS_process_vm_readv, [1, 0, 0, 0, 0]);
    call("process_vm_writev", libc::SYS_process_vm_writev, [1, 0, 0, 0, 0]);
    call("process_madvise", libc::SYS_process_madvise, [0; 5]);
    call("kcmp", libc::SYS_kcmp, [1, 1, 0, 0, 0]);
    call("pidfd_getfd", libc::SYS_pidfd_getfd, [0; 5]);
    print_result("memory of pid 1", File::open("/proc/1/mem").map(drop));
    print_result("environment of pid 1", std::fs::read("/proc/1/environ").map(drop));
}

fn namespaces() {
    call(
        "unshare user",
        libc::SYS_unshare,
        [libc::CLONE_NEWUSER as usize, 0, 0, 0, 0],
    );
    call(
        "unshare mount",
        libc::SYS_unshare,
        [libc::CLONE_NEWNS as usize, 0, 0, 0, 0],
    );
    call(
        "unshare time",
        libc::SYS_unshare,
        [libc::CLONE_NEWTIME as usize, 0, 0, 0, 0],
    );
    call("setns", libc::SYS_setns, [0; 5]);
    for (name, flag) in [
        ("clone user", libc::CLONE_NEWUSER),
        ("clone mount", libc::CLONE_NEWNS),
        ("clone net", libc::CLONE_NEWNET),
        ("clone pid", libc::CLONE_NEWPID),
        ("clone uts", libc::CLONE_NEWUTS),
        ("clone ipc", libc::CLONE_NEWIPC),
        ("clone cgroup", libc::CLONE_NEWCGROUP),
        ("clone user and mount", libc::CLONE_NEWUSER | libc::CLONE_NEWNS),
    ] {
        // If it works the child exits below like the parent; the line is then printed twice, as `ok`.
        call(name, libc::SYS_clone, [flag as u32 as usize, 0, 0, 0, 0]);
    }
    call("clone3", libc::SYS_clone3, [0; 5]);
}

fn sockets() {
    let sockets = [
        ("unix", libc::AF_UNIX, libc::SOCK_STREAM, 0),
        ("tcp", libc::AF_INET, libc::SOCK_STREAM, 0),
        ("udp6", libc::AF_INET6, libc::SOCK_DGRAM, 0),
        (
            "routes",
            libc::AF_NETLINK,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            libc::NETLINK_ROUTE,
        ),
        ("raw icmp", libc::AF_INET, libc::SOCK_RAW, libc::IPPROTO_ICMP),
        (
            "raw icmp cloexec",
            libc::AF_INET,
            libc::SOCK_RAW | libc::SOCK_CLOEXEC,
            libc::IPPROTO_ICMP,
        ),
        ("raw6", libc::AF_INET6, libc::SOCK_RAW, libc::IPPROTO_ICMPV6),
        ("packet", libc::AF_PACKET, libc::SOCK_RAW, 0),
        ("audit", libc::AF_NETLINK, libc::SOCK_RAW, 9),
        ("vsock", libc::AF_VSOCK, libc::SOCK_STREAM, 0),
        ("alg", libc::AF_ALG, libc::SOCK_SEQPACKET, 0),
        ("ipsec keys", libc::AF_KEY, libc::SOCK_RAW, 2),
        ("xdp", libc::AF_XDP, libc::SOCK_RAW, 0),
        ("can", libc::AF_CAN, libc::SOCK_RAW, 1),
        ("tipc", libc::AF_TIPC, libc::SOCK_RDM, 0),
        (
            "netfilter",
            libc::AF_NETLINK,
            libc::SOCK_RAW,
            libc::NETLINK_NETFILTER,
        ),
        (
            "uevents",
            libc::AF_NETLINK,
            libc::SOCK_RAW,
            libc::NETLINK_KOBJECT_UEVENT,
        ),
        (
            "sock_diag",
            libc::AF_NETLINK,
            libc::SOCK_RAW,
            libc::NETLINK_SOCK_DIAG,
        ),
        ("bluetooth", libc::AF_BLUETOOTH, libc::SOCK_RAW, 0),
    ];
    for (name, family, kind, protocol) in sockets {
        call(
            name,
            libc::SYS_socket,
            [family as usize, kind as usize, protocol as usize, 0, 0],
        );
    }
}

fn kernel() {
    call("bpf", libc::SYS_bpf, [0; 5]);
    call("perf_event_open", libc::SYS_perf_event_open, [0; 5]);
    call("userfaultfd", libc::SYS_userfaultfd, [0; 5]);
    call("keyctl", libc::SYS_keyctl, [0; 5]);
    call("add_key", libc::SYS_add_key, [0; 5]);
    call("request_key", libc::SYS_request_key, [0; 5]);
    call("kexec_load", libc::SYS_kexec_load, [0; 5]);
    call("init_module", libc::SYS_init_module, [0; 5]);
    call("swapon", libc::SYS_swapon, [0; 5]);
    call("reboot", libc::SYS_reboot, [0; 5]);
    call("kexec_file_load", libc::SYS_kexec_file_load, [0; 5]);
    call("finit_module", libc::SYS_finit_module, [0; 5]);
    call(
        "delete_module",
        libc::SYS_delete_module,
        [c"none".as_ptr() as usize, 0, 0, 0, 0],
    );
    call("swapoff", libc::SYS_swapoff, [0; 5]);
    call("quotactl", libc::SYS_quotactl, [0; 5]);
    call("acct", libc::SYS_acct, [0; 5]);
    call("syslog", libc::SYS_syslog, [3, 0, 0, 0, 0]);
    call("settimeofday", libc::SYS_settimeofday, [0; 5]);
    call("clock_settime", libc::SYS_clock_settime, [0; 5]);
    call("vhangup", libc::SYS_vhangup, [0; 5]);
    call("io_uring_setup", libc::SYS_io_uring_setup, [0; 5]);
    call("io_uring_enter", libc::SYS_io_uring_enter, [0; 5]);
    call("io_uring_register", libc::SYS_io_uring_register, [0; 5]);
    call("personality", libc::SYS_personality, [0x0040_0000, 0, 0, 0, 0]);
    call(
        "ask personality",
        libc::SYS_personality,
        [0xffff_ffff, 0, 0, 0, 0],
    );
    call(
        "tiocsti",
        libc::SYS_ioctl,
        [0, libc::TIOCSTI as usize, c"x".as_ptr() as usize, 0, 0],
    );
    call("tioclinux", libc::SYS_ioctl, [0, 0x541C, 0, 0, 0]);
    call("x32 getpid", 0x4000_0000 + libc::SYS_getpid, [0; 5]);
    #[cfg(target_arch = "x86_64")]
    for (name, number) in [
        ("iopl", libc::SYS_iopl),
        ("ioperm", libc::SYS_ioperm),
        ("modify_ldt", libc::SYS_modify_ldt),
    ] {
        call(name, number, [0, 1, 1, 0, 0]);
    }
}

/// Makes shared memory, a semaphore and queues, which without namespaces are the host's.
fn ipc() {
    let create = libc::IPC_CREAT as usize | 0o600;
    let private = libc::IPC_PRIVATE as usize;
    call("shmget", libc::SYS_shmget, [private, 4096, create, 0, 0]);
    call("semget", libc::SYS_semget, [private, 1, create, 0, 0]);
    call("msgget", libc::SYS_msgget, [private, create, 0, 0, 0]);
    let queue = c"oubliette-inside".as_ptr() as usize;
    let flags = (libc::O_CREAT | libc::O_RDWR) as usize;
    call("mq_open", libc::SYS_mq_open, [queue, flags, 0o600, 0, 0]);
}

/// Sets limits and priorities of another process to what they may well be already.
fn other_process(pid: &str) {
    let Ok(pid) = pid.parse::<usize>() else { return };
    let limit = [1_u64, 1];
    let processors = [1_u64; 16];
    let limit = limit.as_ptr() as usize;
    call(
        "prlimit",
        libc::SYS_prlimit64,
        [pid, libc::RLIMIT_NOFILE as usize, limit, 0, 0],
    );
    call(
        "setpriority of a process",
        libc::SYS_setpriority,
        [0, pid, 0, 0, 0],
    );
    call("setpriority of a user", libc::SYS_setpriority, [2, 0, 0, 0, 0]);
    call(
        "sched_setaffinity",
        libc::SYS_sched_setaffinity,
        [pid, size_of_val(&processors), processors.as_ptr() as usize, 0, 0],
    );
    call(
        "ioprio_set of a process",
        libc::SYS_ioprio_set,
        [1, pid, 2 << 13, 0, 0],
    );
    call(
        "ioprio_set of a user",
        libc::SYS_ioprio_set,
        [3, 0, 2 << 13, 0, 0],
    );
}

/// Sends on no descriptor, so that a call that is not refused fails all the same.
fn out_of_band() {
    let nowhere = usize::MAX;
    for (kind, flags) in [
        ("plain", libc::MSG_DONTWAIT),
        ("oob", libc::MSG_OOB),
        ("oob too", libc::MSG_OOB | libc::MSG_DONTWAIT),
    ] {
        let flags = flags as usize;
        call(
            &format!("{kind} sendto"),
            libc::SYS_sendto,
            [nowhere, 0, 0, flags, 0],
        );
        call(
            &format!("{kind} sendmsg"),
            libc::SYS_sendmsg,
            [nowhere, 0, flags, 0, 0],
        );
        call(
            &format!("{kind} sendmmsg"),
            libc::SYS_sendmmsg,
            [nowhere, 0, 0, flags, 0],
        );
    }
}

/// Forks waiting children until a fork fails; with an argument, keeps them until stdin ends.
#[allow(unsafe_code)]
fn fork(args: &[String]) {
    for count in 0..4000 {
        // SAFETY: one thread; the child only waits.
        match unsafe { libc::fork() } {
            0 => loop {
                std::thread::park();
            },
            -1 => {
                println!(
                    "{count} then {}",
                    errno(io::Error::last_os_error().raw_os_error().unwrap_or(0))
                );
                if !args.is_empty() {
                    let _ = io::stdin().read_line(&mut String::new());
                }
                return;
            }
            _ => {}
        }
    }
    println!("4000 and no end");
}

/// Allocates and writes this many MiB of memory.
fn allocate(args: &[String]) {
    let megabytes: usize = args.first().and_then(|text| text.parse().ok()).unwrap_or(0);
    let mut held: Vec<Vec<u8>> = Vec::new();
    for _ in 0..megabytes {
        let mut block = Vec::new();
        if block.try_reserve_exact(1 << 20).is_err() {
            return println!("allocate: ENOMEM");
        }
        block.resize(1 << 20, 1);
        held.push(block);
    }
    println!("allocate: ok ({})", held.len());
}
