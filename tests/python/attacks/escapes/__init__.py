"""Attempts to leave a sandbox, each a function named after what it tries.

They run inside a sandbox on the standard library alone: an agent, a tool server or a command imports this package from its
workspace and calls `run_all`. An attempt gets what an attacker could know of the host (paths, process ids, ports). It returns
when everything it tried was refused, and raises `Escaped` when something was not. Every attempt runs in a child process, so that
one that ends its process does not end the others.
"""

import contextlib
import ctypes
import errno
import importlib
import os
import select
import signal
import traceback

LIBC = ctypes.CDLL(None, use_errno=True)
CHILD_SECONDS = 30

ATTEMPTS = {}
"""Every attempt by its name, with the isolation levels it must be refused at."""

BOTH = ("namespaces", "landlock")
NAMESPACES = ("namespaces",)

NUMBERS = {
    "ptrace": 101, "syslog": 103, "personality": 135, "modify_ldt": 154, "pivot_root": 155, "adjtimex": 159,
    "chroot": 161, "acct": 163, "settimeofday": 164, "mount": 165, "umount2": 166, "swapon": 167, "reboot": 169,
    "sethostname": 170, "setdomainname": 171, "iopl": 172, "ioperm": 173, "init_module": 175, "delete_module": 176,
    "quotactl": 179, "clock_settime": 227, "kexec_load": 246, "add_key": 248, "request_key": 249, "keyctl": 250,
    "capset": 126, "unshare": 272, "clone": 56, "perf_event_open": 298, "fanotify_init": 300, "name_to_handle_at": 303,
    "open_by_handle_at": 304, "setns": 308, "process_vm_readv": 310, "process_vm_writev": 311, "kcmp": 312,
    "finit_module": 313, "renameat2": 316, "kexec_file_load": 320, "bpf": 321, "userfaultfd": 323, "prlimit64": 302,
    "sched_setaffinity": 203, "setpriority": 141, "ioprio_set": 251, "shmget": 29, "msgget": 68, "semget": 64, "mq_open": 240,
    "open_tree": 428, "move_mount": 429, "fsopen": 430, "fsconfig": 431, "fsmount": 432, "fspick": 433, "pidfd_open": 434,
    "clone3": 435, "pidfd_getfd": 438, "process_madvise": 440, "mount_setattr": 442, "io_uring_setup": 425,
    "io_uring_enter": 426, "io_uring_register": 427,
}
"""System call numbers of x86-64."""

CLONE_NEW = {
    "mount": 0x00020000, "cgroup": 0x02000000, "uts": 0x04000000, "ipc": 0x08000000, "user": 0x10000000, "pid": 0x20000000,
    "net": 0x40000000,
}

DENIED = {errno.EPERM, errno.EACCES, errno.ENOSYS}
NOT_SEEN = DENIED | {errno.ENOENT, errno.EROFS, errno.ENOTDIR, errno.EXDEV, errno.ENXIO, errno.ENODEV, errno.ELOOP}
NOT_REACHED = NOT_SEEN | {errno.ECONNREFUSED, errno.ENETUNREACH, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}
NO_PROCESS = DENIED | {errno.ESRCH, errno.ENOENT}


class Escaped(Exception):
    """Something that must be refused was not."""


def attempt(levels=BOTH):
    def register(function):
        ATTEMPTS[function.__name__] = (function, levels)
        return function

    return register


def refused(what, action, codes=DENIED):
    """Expects an action to fail with one of these errors. Any other error means that the attempt itself is wrong."""
    try:
        result = action()
    except OSError as error:
        if error.errno not in codes:
            raise RuntimeError(f"{what}: {error!r} is no refusal")
        return
    raise Escaped(f"{what} was done: {result!r}"[:500])


def call(name, *arguments, codes=DENIED):
    """Expects a system call to be refused."""

    def make():
        ctypes.set_errno(0)
        words = [ctypes.c_char_p(word) if isinstance(word, bytes) else ctypes.c_long(word) if isinstance(word, int) else word
                 for word in arguments]
        result = LIBC.syscall(ctypes.c_long(NUMBERS[name]), *words)
        if result < 0:
            raise OSError(ctypes.get_errno(), name)
        if name == "clone" and result == 0:
            os._exit(0)
        return result

    refused(name, make, codes)


def read(path):
    with open(path, "rb") as file:
        return file.read(4096)


def write(path, text=b"escaped"):
    """Writes over the beginning of a file that exists."""
    fd = os.open(path, os.O_WRONLY)
    try:
        return os.write(fd, text)
    finally:
        os.close(fd)


def create(path):
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o644))


def scratch(name):
    """A path in the own workspace that nothing is at."""
    path = os.path.join(os.getcwd(), f"escape-{os.getpid()}-{name}")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
    return path


def other_processes():
    """Processes that are seen and not the own."""
    own = {os.getpid(), os.getppid()}
    return [int(name) for name in os.listdir("/proc") if name.isdigit() and int(name) not in own]


def run_one(function, host):
    """The outcome of one attempt, made by a child process."""
    reading, writing = os.pipe()
    if not (child := os.fork()):
        os.close(reading)
        try:
            function(host)
            outcome = "held"
        except Escaped as escaped:
            outcome = f"escaped: {escaped}"
        except BaseException:
            outcome = f"error: {traceback.format_exc()}"
        os.write(writing, outcome.encode()[:8000])
        os._exit(0)
    os.close(writing)
    text = b""
    while select.select([reading], [], [], CHILD_SECONDS)[0] and (piece := os.read(reading, 65536)):
        text += piece
    os.close(reading)
    with contextlib.suppress(OSError):
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return text.decode() or f"error: the attempt did not end by itself (status {status:#x})"


def load():
    """Imports the modules that define the attempts."""
    for module in ("files", "privileges", "processes", "kernel", "network"):
        importlib.import_module(f"escapes.{module}")


def run_all(host):
    """Makes every attempt of a level; their outcomes by name."""
    load()
    return {name: run_one(function, host) for name, (function, levels) in ATTEMPTS.items() if host["level"] in levels}
