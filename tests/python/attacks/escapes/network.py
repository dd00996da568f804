"""Attempts to reach the network and sockets of the host."""

import contextlib
import errno
import fcntl
import socket
import struct

from escapes import DENIED, NAMESPACES, NOT_REACHED, NOT_SEEN, Escaped, attempt, refused


def connect(family, address):
    with socket.socket(family, socket.SOCK_STREAM) as connection:
        connection.settimeout(5)
        connection.connect(address)
        return f"connected to {address}"


@attempt()
def connect_to_the_hosts_loopback(host):
    for port in (host["port"], host["listener_port"]):
        refused(f"127.0.0.1:{port}", lambda: connect(socket.AF_INET, ("127.0.0.1", port)), NOT_REACHED)
        refused(f"[::1]:{port}", lambda: connect(socket.AF_INET6, ("::1", port)), NOT_REACHED)
        for address in host["addresses"]:
            refused(f"{address}:{port}", lambda: connect(socket.AF_INET, (address, port)), NOT_REACHED)


@attempt()
def send_datagrams_to_the_host(host):
    for address in ["127.0.0.1", *host["addresses"]]:
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
            sender.sendto(b"escaped", (address, host["datagram_port"]))
    # Whether any arrived is seen on the host.


@attempt()
def connect_to_the_internet_and_to_metadata(host):
    for address in ("192.0.2.1", "169.254.169.254", "10.0.0.1", "100.100.100.200"):
        refused(address, lambda: connect(socket.AF_INET, (address, 80)), NOT_REACHED)


@attempt()
def connect_to_abstract_sockets_of_the_host(host):
    refused("an abstract socket", lambda: connect(socket.AF_UNIX, "\0" + host["abstract"]), NOT_REACHED)


def ask(path, text):
    """What a Unix socket answers; nothing where it cannot be connected to or hangs up."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(5)
        connection.connect(path)
        connection.sendall(text)
        return connection.recv(65536)
    return b""


@attempt()
def act_as_the_owner_over_the_control_socket(host):
    head = b"POST /api/tools/token_list HTTP/1.1\r\nHost: localhost\r\nContent-Length: 2\r\n\r\n{}"
    if b" 200 " in ask(host["control"], head).split(b"\r\n")[0]:
        raise Escaped("the control socket serves a sandbox as the owner")


@attempt()
def act_as_another_session_over_its_socket(host):
    answer = ask(host["other_relay"], b'{"jsonrpc":"2.0","id":1,"method":"agent_tools","params":{}}\n')
    if b"result" in answer or b"tools" in answer:
        raise Escaped(f"another session's socket answers: {answer[:200]}")


@attempt(NAMESPACES)
def connect_to_sockets_of_other_programs(host):
    refused("a socket of the host", lambda: connect(socket.AF_UNIX, host["listener_path"]), NOT_REACHED)


@attempt()
def connect_to_daemons_of_the_host(host):
    for path in (
        "/var/run/docker.sock", "/run/docker.sock", "/run/containerd/containerd.sock", "/run/podman/podman.sock",
        "/run/dbus/system_bus_socket", "/run/systemd/private", "/run/snapd.socket", "/tmp/.X11-unix/X0",
    ):
        refused(path, lambda: connect(socket.AF_UNIX, path), NOT_REACHED)


@attempt()
def open_raw_and_unusual_sockets(host):
    unusual = NOT_SEEN | {errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}
    for name, family, kind, protocol in (
        ("raw ICMP", socket.AF_INET, socket.SOCK_RAW, 1), ("raw IP", socket.AF_INET, socket.SOCK_RAW, 255),
        ("raw ICMPv6", socket.AF_INET6, socket.SOCK_RAW, 58), ("packet", 17, socket.SOCK_RAW, 0x300),
        ("packet by the old name", socket.AF_INET, 10, 0x300), ("vsock", 40, socket.SOCK_STREAM, 0),
        ("crypto", 38, socket.SOCK_SEQPACKET, 0), ("IPsec keys", 15, socket.SOCK_RAW, 2), ("XDP", 44, socket.SOCK_RAW, 0),
        ("CAN", 29, socket.SOCK_RAW, 1), ("Bluetooth", 31, socket.SOCK_RAW, 1), ("TIPC", 30, socket.SOCK_RDM, 0),
        ("RDS", 21, socket.SOCK_SEQPACKET, 0), ("X.25", 9, socket.SOCK_SEQPACKET, 0), ("AX.25", 3, socket.SOCK_DGRAM, 0),
        ("QIPCRTR", 42, socket.SOCK_DGRAM, 0), ("SMC", 43, socket.SOCK_STREAM, 0), ("MPTCP", 45, socket.SOCK_STREAM, 0),
    ):
        refused(name, lambda: socket.socket(family, kind, protocol).close(), unusual)


@attempt()
def open_netlink_sockets(host):
    unusual = DENIED | {errno.EAFNOSUPPORT, errno.EPROTONOSUPPORT}
    for name, protocol in (
        ("sock_diag", 4), ("xfrm", 6), ("SELinux", 7), ("audit", 9), ("netfilter", 12), ("connector", 11), ("uevents", 15),
        ("generic", 16), ("crypto", 21),
    ):
        refused(name, lambda: socket.socket(16, socket.SOCK_RAW, protocol).close(), unusual)


@attempt(NAMESPACES)
def change_the_network(host):
    with contextlib.suppress(OSError), socket.socket(16, socket.SOCK_RAW, 0) as netlink:
        # RTM_NEWLINK: a new dummy interface
        body = struct.pack("BxHiII", 0, 0, 0, 0, 0) + struct.pack("HH8s", 12, 3, b"escaped\0")
        netlink.send(struct.pack("IHHII", 16 + len(body), 16, 0x605, 1, 0) + body)
        answer = netlink.recv(4096)
        if struct.unpack_from("i", answer, 16)[0] == 0:
            raise Escaped("an interface was made")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        down = struct.pack("16sH14x", b"lo", 0)
        refused("taking an interface down", lambda: fcntl.ioctl(any_socket, 0x8914, down))
