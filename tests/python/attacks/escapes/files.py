"""Attempts to read and write files of the host."""

import contextlib
import ctypes
import errno
import os
import struct

from escapes import (
    LIBC, NAMESPACES, NO_PROCESS, NOT_SEEN, Escaped, attempt, call, create,
    other_processes, read, refused, scratch, write,
)


@attempt()
def read_the_owners_token(host):
    refused("reading admin.token", lambda: read(host["secret"]), NOT_SEEN)


@attempt()
def read_the_database_and_the_configuration(host):
    for name in ("oubliette.db", "oubliette.db-wal", "oubliette.toml"):
        refused(name, lambda: read(os.path.join(host["home"], name)), NOT_SEEN)


@attempt()
def list_the_servers_home_and_other_sessions(host):
    for path in (host["home"], os.path.join(host["home"], "sessions"), os.path.join(host["home"], "projects"), "/root", "/srv"):
        refused(f"listing {path}", lambda: os.listdir(path), NOT_SEEN)


@attempt()
def read_another_projects_workspace(host):
    refused("another workspace", lambda: read(host["other_file"]), NOT_SEEN)


@attempt()
def write_another_projects_workspace(host):
    refused("overwriting", lambda: write(host["other_file"]), NOT_SEEN)
    refused("a new file", lambda: create(os.path.join(os.path.dirname(host["other_file"]), "escaped")), NOT_SEEN)
    refused("removing", lambda: os.unlink(host["other_file"]), NOT_SEEN)


@attempt()
def read_password_hashes_and_keys_of_the_host(host):
    for path in ("/etc/shadow", "/etc/gshadow", "/etc/ssh/ssh_host_ed25519_key", "/root/.ssh/id_ed25519"):
        refused(path, lambda: read(path), NOT_SEEN)


@attempt()
def follow_a_symlink_out_of_the_workspace(host):
    for name, target in (("absolute", host["secret"]), ("relative", os.path.relpath(host["secret"], os.getcwd()))):
        link = scratch(name)
        os.symlink(target, link)
        refused(f"{name} link", lambda: read(link), NOT_SEEN)
        refused(f"writing through a {name} link", lambda: write(link), NOT_SEEN)
        os.unlink(link)


@attempt()
def climb_out_with_dots(host):
    for root in (os.getcwd(), "/usr/lib", "/proc/self/root", "/proc/self/cwd", os.environ["HOME"]):
        refused(f"dots from {root}", lambda: read(root + "/.." * 40 + host["secret"]), NOT_SEEN)


@attempt()
def climb_out_by_descriptors_of_directories(host):
    for path in ("/", "/proc/self/root", "/usr"):
        with contextlib.suppress(PermissionError):
            folder = os.open(path, os.O_PATH | os.O_DIRECTORY)
            inside = "../" * 40 + host["secret"].lstrip("/")
            refused(f"openat from {path}", lambda: os.open(inside, os.O_RDONLY, dir_fd=folder), NOT_SEEN)


@attempt()
def read_through_the_root_of_another_process(host):
    for pid in ["self", "1", str(os.getppid()), str(host["server_pid"])]:
        for link in ("root", "cwd"):
            refused(f"/proc/{pid}/{link}", lambda: read(f"/proc/{pid}/{link}{host['secret']}"), NOT_SEEN | NO_PROCESS)


@attempt()
def read_through_descriptors_of_other_processes(host):
    for pid in other_processes():
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    target = os.readlink(f"/proc/{pid}/fd/{name}")
                    if target.startswith(host["home"]) and not target.startswith(os.getcwd()):
                        raise Escaped(f"descriptor {name} of process {pid} is {target}")


@attempt()
def find_descriptors_the_server_left_open(host):
    known = ("pipe:", "socket:", "anon_inode:", "/dev/null", "/memfd:", f"/proc/{os.getpid()}/fd")
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            target = os.readlink(f"/proc/self/fd/{name}")
            own = target.startswith((host["attacks"], os.getcwd(), "/usr/")) or f"fd/{name}" == target
            if not own and not target.startswith(known) and "/fd" not in target:
                raise Escaped(f"descriptor {name} is {target}")


@attempt()
def hard_link_a_file_from_outside(host):
    for target in (host["secret"], host["other_file"], "/etc/shadow"):
        refused(f"link to {target}", lambda: os.link(target, scratch("link")), NOT_SEEN)
        refused(f"move of {target}", lambda: os.rename(target, scratch("moved")), NOT_SEEN)


@attempt()
def hard_link_into_the_workspace_through_proc(host):
    refused("link", lambda: os.link(f"/proc/1/root{host['secret']}", scratch("link"), follow_symlinks=True), NOT_SEEN)


@attempt()
def exchange_a_file_with_one_outside(host):
    own, exchange, at_cwd = scratch("own"), 2, -100
    create(own)
    call("renameat2", at_cwd, own.encode(), at_cwd, host["secret"].encode(), exchange, codes=NOT_SEEN)
    os.unlink(own)


@attempt()
def open_a_file_by_its_handle(host):
    buffer = ctypes.create_string_buffer(struct.pack("Ii", 128, 0) + bytes(128))
    mount = ctypes.c_int()
    call("name_to_handle_at", -100, b"/", buffer, ctypes.byref(mount), 0)
    call("open_by_handle_at", -100, buffer, os.O_RDONLY)


@attempt()
def write_to_the_system(host):
    places = ["/usr/escaped", "/usr/bin/escaped", "/etc/escaped", "/lib/escaped", "/escaped", "/opt/escaped", "/var/escaped"]
    for path in places + [os.path.join(host["outside"], "escaped"), os.path.join(host["home"], "escaped")]:
        refused(path, lambda: create(path), NOT_SEEN)
    for path in ("/usr/bin/id", "/etc/passwd", "/etc/ld.so.cache"):
        refused(f"overwriting {path}", lambda: write(path), NOT_SEEN)


@attempt()
def replace_the_client_or_the_sockets(host):
    for path in ("/opt/oubliette/oubliette-client", host["client"], "/mcp/relay.sock"):
        refused(f"removing {path}", lambda: os.unlink(path), NOT_SEEN | {errno.EBUSY})
        refused(f"replacing {path}", lambda: os.rename(scratch_file(), path), NOT_SEEN | {errno.EBUSY})


def scratch_file():
    path = scratch("file")
    create(path)
    return path


@attempt(NAMESPACES)
def change_the_mode_owner_and_times_of_a_file_outside(host):
    for path in (host["secret"], host["other_file"]):
        refused("chmod", lambda: os.chmod(path, 0o777), NOT_SEEN)
        refused("chown", lambda: os.chown(path, 1000, 1000), NOT_SEEN)
        refused("utime", lambda: os.utime(path, (0, 0)), NOT_SEEN)
        refused("setxattr", lambda: os.setxattr(path, "user.escaped", b"x"), NOT_SEEN | {errno.ENOTSUP})


@attempt(NAMESPACES)
def watch_the_servers_files(host):
    watch = LIBC.inotify_init1(0)

    def add():
        if LIBC.inotify_add_watch(watch, host["home"].encode(), 0xFFF) < 0:
            raise OSError(ctypes.get_errno(), "inotify_add_watch")

    refused("inotify", add, NOT_SEEN)
    call("fanotify_init", 0, 0)


@attempt()
def share_files_in_temporary_directories_with_the_host(host):
    for path in host["temporary"]:
        refused(f"reading {path}", lambda: read(path), NOT_SEEN)
        refused(f"writing {path}", lambda: write(path), NOT_SEEN)
