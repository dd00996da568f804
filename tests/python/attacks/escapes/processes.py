"""Attempts to reach other processes."""

import contextlib
import ctypes
import os
import resource
import signal
import struct

from escapes import (
    LIBC, NAMESPACES, NO_PROCESS, NOT_SEEN, NUMBERS, Escaped, attempt, call,
    other_processes, read, refused, write,
)


@attempt(NAMESPACES)
def see_processes_of_the_host(host):
    if os.path.exists(f"/proc/{host['server_pid']}/cmdline"):
        comm = read(f"/proc/{host['server_pid']}/comm")
        if comm.strip() == b"oubliette":
            raise Escaped("the server's process is seen")
    if len(other_processes()) > 20:
        raise Escaped(f"{len(other_processes())} processes are seen")


@attempt()
def trace_other_processes(host):
    attach, seize, traceme = 16, 0x4206, 0
    call("ptrace", traceme, 0, 0, 0)
    for pid in (1, os.getppid(), host["server_pid"]):
        call("ptrace", attach, pid, 0, 0)
        call("ptrace", seize, pid, 0, 0)


@attempt()
def read_and_write_the_memory_of_other_processes(host):
    buffer = ctypes.create_string_buffer(8)
    vector = ctypes.create_string_buffer(struct.pack("QQ", ctypes.addressof(buffer), 8))
    for pid in (1, os.getppid(), host["server_pid"]):
        call("process_vm_readv", pid, vector, 1, vector, 1, 0)
        call("process_vm_writev", pid, vector, 1, vector, 1, 0)
        for flags in (os.O_RDONLY, os.O_RDWR):
            if pid != os.getppid():
                refused(f"memory of {pid}", lambda: os.open(f"/proc/{pid}/mem", flags), NOT_SEEN)


@attempt()
def take_descriptors_of_other_processes(host):
    for pid in (1, host["server_pid"]):
        opened = LIBC.syscall(NUMBERS["pidfd_open"], pid, 0)
        call("pidfd_getfd", opened, 0, 0)
    call("kcmp", os.getpid(), 1, 0, 0, 0)
    call("process_madvise", 0, 0, 0, 0, 0)


@attempt()
def read_secrets_from_environments(host):
    def look(where, text):
        for secret in host["secrets"]:
            if secret.encode() in text:
                raise Escaped(f"a secret of the server is in {where}")

    for pid in [*other_processes(), os.getppid(), os.getpid()]:
        for name in ("environ", "cmdline"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/{name}", "rb") as file:
                look(f"/proc/{pid}/{name}", file.read())
    look("the own environment", repr(os.environ).encode())


@attempt()
def signal_processes_of_the_host(host):
    for pid in (host["server_pid"], host["victim_pid"]):
        refused(f"kill {pid}", lambda: os.kill(pid, 0), NO_PROCESS)
        refused(f"kill {pid}", lambda: os.kill(pid, signal.SIGTERM), NO_PROCESS)


@attempt()
def end_the_first_process_of_the_sandbox(host):
    # Inside a pid namespace the kernel drops such a signal; elsewhere it is refused.
    with contextlib.suppress(OSError):
        os.kill(1, signal.SIGKILL)
    if not os.path.exists("/proc/1"):
        raise Escaped("process 1 is gone")


@attempt()
def change_the_priority_of_processes_of_the_host(host):
    pid = host["victim_pid"]
    call("setpriority", 0, pid, 19, codes=NO_PROCESS)
    call("sched_setaffinity", pid, 8, ctypes.create_string_buffer(struct.pack("Q", 1)), codes=NO_PROCESS)
    call("ioprio_set", 1, pid, (3 << 13), codes=NO_PROCESS)


@attempt()
def change_the_priority_of_all_processes_of_the_user(host):
    which_user, which_group = 2, 1
    for which in (which_user, which_group):
        with contextlib.suppress(OSError):
            os.setpriority(which, 0, 7)
    # Whether it had an effect is seen on the host: the victim's priority.


@attempt()
def change_the_limits_of_processes_of_the_host(host):
    limit = ctypes.create_string_buffer(struct.pack("QQ", 1, 1))
    call("prlimit64", host["victim_pid"], resource.RLIMIT_NOFILE, limit, 0, codes=NO_PROCESS)
    refused("oom_score_adj", lambda: write(f"/proc/{host['victim_pid']}/oom_score_adj", b"1000"), NOT_SEEN)


@attempt()
def attach_shared_memory_and_queues_of_the_host(host):
    call("shmget", host["ipc_key"], 1, 0, codes=NOT_SEEN)
    call("semget", host["ipc_key"], 1, 0, codes=NOT_SEEN)
    call("msgget", host["ipc_key"], 0, codes=NOT_SEEN)
    call("mq_open", host["queue"].encode(), os.O_RDWR, 0, 0, codes=NOT_SEEN)
