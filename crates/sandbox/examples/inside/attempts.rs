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
        "fork" => fork(),
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
    call("setns", libc::SYS_setns, [0; 5]);
    for (name, flag) in [
        ("clone user", libc::CLONE_NEWUSER),
        ("clone mount", libc::CLONE_NEWNS),
        ("clone net", libc::CLONE_NEWNET),
        ("clone pid", libc::CLONE_NEWPID),
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
    call("io_uring_setup", libc::SYS_io_uring_setup, [0; 5]);
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
}

/// Forks waiting children until a fork fails.
#[allow(unsafe_code)]
fn fork() {
    for count in 0..4000 {
        // SAFETY: one thread; the child only waits.
        match unsafe { libc::fork() } {
            0 => loop {
                std::thread::park();
            },
            -1 => {
                return println!(
                    "{count} then {}",
                    errno(io::Error::last_os_error().raw_os_error().unwrap_or(0))
                );
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
