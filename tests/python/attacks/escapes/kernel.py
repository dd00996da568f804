"""Attempts to reach into the kernel and to change its settings."""

import contextlib
import ctypes
import fcntl
import glob
import mmap
import os
import struct

from escapes import CLONE_NEW, LIBC, NOT_SEEN, NUMBERS, Escaped, attempt, call, create, refused, scratch, write


@attempt()
def use_keyrings(host):
    call("keyctl", 0, -3, 0, 0, 0)  # KEYCTL_GET_KEYRING_ID of the session
    call("keyctl", 1, 0, 0, 0, 0)  # KEYCTL_JOIN_SESSION_KEYRING
    call("add_key", b"user", b"escaped", b"x", 1, -4)
    call("request_key", b"user", b"escaped", 0, -4)


@attempt()
def load_bpf_programs(host):
    call("bpf", 0, ctypes.create_string_buffer(struct.pack("IIII", 2, 4, 8, 1) + bytes(56)), 72)  # BPF_MAP_CREATE


@attempt()
def measure_with_perf(host):
    attributes = ctypes.create_string_buffer(struct.pack("IIQ", 1, 128, 0) + bytes(112))
    call("perf_event_open", attributes, 0, -1, -1, 0)


@attempt()
def use_io_uring(host):
    call("io_uring_setup", 1, ctypes.create_string_buffer(120))
    call("io_uring_enter", 0, 0, 0, 0, 0)
    call("io_uring_register", 0, 0, 0, 0)


@attempt()
def handle_page_faults(host):
    call("userfaultfd", 0)
    call("userfaultfd", 1)
    refused("/dev/userfaultfd", lambda: os.open("/dev/userfaultfd", os.O_RDWR), NOT_SEEN)


@attempt()
def load_kernel_modules(host):
    call("init_module", 0, 0, b"")
    call("finit_module", 0, b"", 0)
    call("delete_module", b"none", 0)


@attempt()
def start_another_kernel(host):
    call("kexec_load", 0, 0, 0, 0)
    call("kexec_file_load", 0, 0, 0, 0, 0)
    # With wrong magic numbers, so that nothing happens should it be let through.
    call("reboot", 1, 2, 3, 0)
    refused("sysrq", lambda: write("/proc/sysrq-trigger", b"h"), NOT_SEEN)


@attempt()
def set_the_clock(host):
    now = ctypes.create_string_buffer(16)
    LIBC.clock_gettime(0, now)
    call("clock_settime", 0, now)
    call("settimeofday", now, 0)
    call("adjtimex", ctypes.create_string_buffer(struct.pack("Iixxxx", 1, 0) + bytes(256)))


@attempt()
def set_the_hosts_name(host):
    # A name of its own is harmless; the host's is compared by the test.
    for name in ("sethostname", "setdomainname"):
        with contextlib.suppress(OSError):
            LIBC.syscall(NUMBERS[name], b"escaped", 7)


@attempt()
def set_kernel_parameters(host):
    for path in (
        "/proc/sys/kernel/core_pattern", "/proc/sys/kernel/modprobe", "/proc/sys/kernel/hostname", "/proc/sys/kernel/sysrq",
        "/proc/sys/kernel/ns_last_pid", "/proc/sys/vm/overcommit_memory", "/proc/sys/fs/binfmt_misc/register",
        "/proc/sys/net/ipv4/ip_forward", "/proc/sys/user/max_user_namespaces", "/proc/irq/default_smp_affinity",
    ):
        refused(path, lambda: os.close(os.open(path, os.O_WRONLY)), NOT_SEEN)


@attempt()
def read_kernel_memory_and_messages(host):
    for path in ("/proc/kcore", "/proc/kmsg", "/dev/mem", "/dev/kmsg"):
        refused(path, lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)), NOT_SEEN)
    call("syslog", 3, ctypes.create_string_buffer(100), 100)


@attempt()
def use_sysfs_and_debugfs(host):
    for path in ("/sys/kernel/debug", "/sys/kernel/tracing", "/sys/fs/bpf", "/sys/firmware/efi/efivars", "/sys/kernel/security"):
        refused(path, lambda: os.listdir(path), NOT_SEEN)
    for path in ("/sys/kernel/uevent_helper", "/sys/power/state", "/sys/kernel/mm/transparent_hugepage/enabled"):
        refused(path, lambda: os.close(os.open(path, os.O_WRONLY)), NOT_SEEN)


@attempt()
def name_a_release_agent(host):
    call("mount", b"none", b"/tmp", b"cgroup", 0, b"memory")
    call("mount", b"none", b"/tmp", b"cgroup2", 0, 0)
    places = ["/sys/fs/cgroup/release_agent", "/sys/fs/cgroup/memory/release_agent"]
    for path in places + glob.glob("/sys/fs/cgroup/*/release_agent"):
        refused(path, lambda: write(path), NOT_SEEN)


@attempt()
def leave_the_control_group(host):
    places = ["/sys/fs/cgroup/cgroup.procs", "/sys/fs/cgroup/memory/cgroup.procs", "/sys/fs/cgroup/pids/cgroup.procs"]
    for path in places + glob.glob("/sys/fs/cgroup/*/cgroup.procs"):
        refused(path, lambda: write(path, b"0"), NOT_SEEN)


@attempt()
def change_swap_quota_and_accounting(host):
    call("swapon", b"/tmp/swap", 0)
    call("quotactl", 0x80000000, b"/", 0, 0)
    call("acct", b"/tmp/acct")


@attempt()
def reach_hardware_ports(host):
    call("iopl", 3)
    call("ioperm", 0x80, 1, 1)
    call("modify_ldt", 0, 0, 0)


@attempt()
def change_the_personality(host):
    for flag in (0x0040000, 0x0400000, 0x0100000):  # no randomisation, executable data, a page at address 0
        call("personality", flag)


@attempt()
def call_the_kernel_by_other_numbers(host):
    x32 = 0x40000000

    def by_x32(name, *arguments):
        ctypes.set_errno(0)
        if LIBC.syscall(x32 + NUMBERS[name], *arguments) < 0:
            raise OSError(ctypes.get_errno(), name)

    refused("mount by x32", lambda: by_x32("mount", b"none", b"/tmp", b"tmpfs", 0, 0))
    refused("unshare by x32", lambda: by_x32("unshare", CLONE_NEW["user"]))
    if not (child := os.fork()):
        # mov eax, 310 (unshare of 32-bit programs); mov ebx, CLONE_NEWUSER; int 0x80; ret
        code = b"\x53\xb8\x36\x01\x00\x00\xbb\x00\x00\x00\x10\xcd\x80\x5b\xc3"
        page = mmap.mmap(-1, 4096, prot=mmap.PROT_READ | mmap.PROT_WRITE | mmap.PROT_EXEC)
        page.write(code)
        made = ctypes.CFUNCTYPE(ctypes.c_int)(ctypes.addressof(ctypes.c_char.from_buffer(page)))()
        os._exit(1 if made == 0 else 0)
    _, status = os.waitpid(child, 0)
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) == 1:
        raise Escaped("a user namespace by a 32-bit system call")


@attempt()
def change_the_project_whose_quota_a_file_counts_against(host):
    path = scratch("project")
    create(path)
    for target, flags in ((path, os.O_RDWR), (os.getcwd(), os.O_RDONLY)):
        file = os.open(target, flags)
        try:
            for project in (0, 4242):
                attributes = struct.pack("IIIII8x", 0, 0, 0, project, 0)
                refused("FS_IOC_FSSETXATTR", lambda: fcntl.ioctl(file, 0x401C5820, attributes))
        finally:
            os.close(file)
    os.unlink(path)


@attempt()
def type_into_a_terminal(host):
    for fd in (0, 1, 2):
        for request, argument in ((0x5412, b"x"), (0x541C, b"\x03")):  # TIOCSTI, TIOCLINUX
            refused(f"ioctl {request:#x}", lambda: fcntl.ioctl(fd, request, argument))
    refused("/dev/tty", lambda: os.open("/dev/tty", os.O_RDWR), NOT_SEEN)
    refused("/dev/console", lambda: os.open("/dev/console", os.O_RDWR), NOT_SEEN)
