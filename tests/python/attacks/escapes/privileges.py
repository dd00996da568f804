"""Attempts to gain privileges, and to leave by namespaces and mounts."""

import contextlib
import ctypes
import glob
import os
import resource
import signal
import struct

from escapes import CLONE_NEW, LIBC, NOT_SEEN, Escaped, attempt, call, refused, scratch


def capabilities():
    with open("/proc/self/status") as status:
        fields = dict(line.split(":\t", 1) for line in status.read().splitlines() if ":\t" in line)
    return {name: int(fields[name], 16) for name in ("CapInh", "CapPrm", "CapEff", "CapAmb")}, fields


@attempt()
def have_capabilities(host):
    held, fields = capabilities()
    if any(held.values()):
        raise Escaped(f"capabilities: {held}")
    if fields["NoNewPrivs"].strip() != "1" or fields["Seccomp"].strip() != "2":
        raise Escaped(f"no_new_privs {fields['NoNewPrivs']}, seccomp {fields['Seccomp']}")


@attempt()
def raise_capabilities(host):
    header = ctypes.create_string_buffer(struct.pack("Ii", 0x20080522, 0))
    data = ctypes.create_string_buffer(struct.pack("IIIIII", *[0xFFFFFFFF] * 6))
    call("capset", header, data)

    def ambient():
        if LIBC.prctl(47, 2, 21, 0, 0) != 0:  # PR_CAP_AMBIENT, PR_CAP_AMBIENT_RAISE, CAP_SYS_ADMIN
            raise OSError(ctypes.get_errno(), "prctl")

    refused("an ambient capability", ambient)


@attempt()
def become_root(host):
    for change in (lambda: os.setuid(0), lambda: os.setresuid(0, 0, 0), lambda: os.setgroups([0]), lambda: os.setgid(0)):
        with contextlib.suppress(OSError):
            change()
    held, _ = capabilities()
    if any(held.values()):
        raise Escaped(f"capabilities after setuid: {held}")


@attempt()
def run_a_setuid_program(host):
    own = scratch("setuid")
    with open("/bin/cat", "rb") as source, open(own, "wb") as copy:
        copy.write(source.read())
    os.chmod(own, 0o6755)
    programs = [[own, "/proc/self/status"]]
    for path in ("/usr/bin/su", "/bin/mount", "/usr/bin/passwd", "/usr/bin/newgrp"):
        if os.path.exists(path) and os.stat(path).st_mode & 0o4000:
            programs.append([path, "--version"])
    for argv in programs:
        reading, writing = os.pipe()
        if not (child := os.fork()):
            os.dup2(writing, 1)
            with contextlib.suppress(OSError):
                os.execv(argv[0], argv)
            os._exit(1)
        os.close(writing)
        with open(reading) as said:
            text = said.read()
        os.waitpid(child, 0)
        effective = [line for line in text.splitlines() if line.startswith("CapEff")]
        if argv[0] == own and effective != ["CapEff:\t0000000000000000"]:
            raise Escaped(f"a setuid copy runs with {effective}")
    os.unlink(own)


@attempt()
def drop_the_filters(host):
    LIBC.prctl(22, 0, 0, 0, 0)  # PR_SET_SECCOMP, off
    LIBC.prctl(38, 0, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS, off
    call("mount", b"none", b"/tmp", b"tmpfs", 0, 0)
    have_capabilities(host)


@attempt()
def make_device_nodes(host):
    for name, kind, device in (("disk", 0o060600, os.makedev(254, 0)), ("memory", 0o020600, os.makedev(1, 1))):
        refused(name, lambda: os.mknod(scratch(name), kind, device))


@attempt()
def open_devices_of_the_machine(host):
    disks = [path for pattern in ("sd?", "vd?", "nvme*", "loop*", "dm-*", "mapper/*") for path in glob.glob(f"/dev/{pattern}")]
    for path in disks + [
        "/dev/mem", "/dev/kmem", "/dev/port", "/dev/kmsg", "/dev/kvm", "/dev/vda", "/dev/sda", "/dev/fuse", "/dev/net/tun",
        "/dev/loop-control", "/dev/mapper/control", "/dev/vsock", "/dev/vhost-net", "/dev/input/event0", "/dev/uinput",
        "/dev/dri/card0", "/dev/snd/control", "/dev/hpet", "/dev/cpu/0/msr", "/dev/watchdog", "/dev/rtc0",
    ]:
        refused(path, lambda: os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK)), NOT_SEEN)


@attempt()
def raise_limits(host):
    for name in ("RLIMIT_CORE", "RLIMIT_NOFILE", "RLIMIT_NPROC", "RLIMIT_FSIZE", "RLIMIT_MEMLOCK"):
        kind = getattr(resource, name)
        _, hard = resource.getrlimit(kind)
        if hard == resource.RLIM_INFINITY:
            continue
        try:
            resource.setrlimit(kind, (hard + 1, hard + 1))
        except (ValueError, OSError):
            continue
        raise Escaped(f"{name} was raised above {hard}")


@attempt()
def dump_core(host):
    if resource.getrlimit(resource.RLIMIT_CORE) != (0, 0):
        raise Escaped("a core could be dumped, by whatever the host's core_pattern names")


@attempt()
def unshare_namespaces(host):
    for flag in CLONE_NEW.values():
        call("unshare", flag)
    call("unshare", CLONE_NEW["user"] | CLONE_NEW["mount"])


@attempt()
def clone_into_namespaces(host):
    for flag in CLONE_NEW.values():
        call("clone", flag | signal.SIGCHLD, 0, 0, 0, 0)
    arguments = ctypes.create_string_buffer(struct.pack("QQQQQQQQ", CLONE_NEW["user"], 0, 0, 0, signal.SIGCHLD, 0, 0, 0))
    call("clone3", arguments, 64)


@attempt()
def enter_the_namespaces_of_another_process(host):
    for pid in (1, os.getppid(), host["server_pid"]):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/ns"):
                with contextlib.suppress(OSError):
                    fd = os.open(f"/proc/{pid}/ns/{name}", os.O_RDONLY)
                    call("setns", fd, 0)
    call("setns", os.open("/proc/self/ns/mnt", os.O_RDONLY), 0)


@attempt()
def mount_a_file_system(host):
    call("mount", b"none", b"/tmp", b"tmpfs", 0, 0)
    call("mount", b"none", b"/tmp", b"proc", 0, 0)
    call("mount", b"/dev/vda", b"/tmp", b"ext4", 0, 0)
    call("mount", b"/", b"/tmp", b"", 0x1000, 0)  # MS_BIND
    call("fsopen", b"tmpfs", 0)
    call("fspick", -100, b"/", 0)
    call("fsmount", 0, 0, 0)
    call("fsconfig", 0, 6, 0, 0, 0)
    call("open_tree", -100, b"/", 1)  # OPEN_TREE_CLONE
    call("move_mount", -100, b"/", -100, b"/tmp", 0)


@attempt()
def make_a_read_only_mount_writable(host):
    for path in (b"/", b"/proc", b"/usr", b"/etc"):
        call("mount", b"none", path, b"", 0x1020, 0)  # MS_REMOUNT | MS_BIND
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", 0, 1, 0, 0))
    call("mount_setattr", -100, b"/", 0, attributes, 32)


@attempt()
def share_mounts_with_the_host(host):
    call("mount", b"none", b"/", b"", 0x100000 | 0x4000, 0)  # MS_SHARED | MS_REC
    attributes = ctypes.create_string_buffer(struct.pack("QQQQ", 0, 0, 0x100000, 0))
    call("mount_setattr", -100, b"/", 0, attributes, 32)


@attempt()
def unmount_what_hides_the_host(host):
    for path in (b"/", b"/proc", b"/tmp", b"/home/agent", os.getcwd().encode(), b"/etc"):
        call("umount2", path, 2)  # MNT_DETACH
    call("pivot_root", b"/", b"/tmp")


@attempt()
def leave_by_chroot(host):
    call("chroot", b"/tmp")
    call("chroot", b".")
