"""Where Landlock is the only isolation, agents run as the server's user and see its sockets: none but their own serves
them."""

from __future__ import annotations

import json
import os
import pathlib

import pytest

from attack_support import TRUST, Attacker, program, unharmed
from egress_support import tool_server
from harness import running

CONNECT = """
    import json, socket

    def ask(path, text):
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(30)
            try:
                client.connect(path)
                client.sendall(text.encode())
                return client.recv(65536).decode(errors="replace")
            except TimeoutError:
                raise
            except OSError:
                return ""

    agent.say(json.dumps({path: ask(path, text) for path, text in asked.items()}))
"""

HTTP = "GET / HTTP/1.1\r\nHost: localhost\r\n\r\n"
SPOKEN = {
    "relay.sock": '{"jsonrpc":"2.0","id":1,"method":"agent_tools","params":{}}\n',
    "stdio.sock": "x" * 4096,
    "model.sock": HTTP,
    "proxy.sock": HTTP,
    "proxy0": HTTP,
}
"""What is said on each of a session's sockets, to which a server that serves the peer has an answer."""


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A server on a host where bubblewrap is installed and does not work."""
    folder = tmp_path_factory.mktemp("path")
    bwrap = folder / "bwrap"
    bwrap.write_text("#!/bin/sh\nexit 1\n")
    bwrap.chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    with running(TRUST + '[sandbox]\nminimum = "landlock"\n', {"PATH": path}) as server:
        yield server


def asked(sockets: list[pathlib.Path]) -> dict[str, str]:
    return {str(path): SPOKEN[path.name] for path in sockets}


def test_an_agent_is_served_by_its_own_sockets_only(server, admin, project):
    """An agent without network connects to the sockets of a session that has a proxy, and to the control socket."""
    assert server.api("server_info", admin)["isolation"] == "landlock"
    proxied = {"sandbox": {"network": "proxy"}}
    with (
        Attacker(server, admin, project) as attacker,
        Attacker(server, admin, project, "victim", **proxied) as victim,
    ):
        names = [path.name for path in victim.sockets]
        assert {"relay.sock", "model.sock", "proxy.sock"} <= set(names), names
        control = str(server.home / "run" / "control.sock")
        others = {**asked(victim.sockets), control: HTTP}
        answers = json.loads(attacker.run(CONNECT, asked=others))
        assert answers == {path: "" for path in others}, "another's socket serves this agent"
        # The attack is carried out: what it says is answered where it may be said.
        own = asked([path for path in attacker.sockets if path.name in ("relay.sock", "model.sock")])
        answers = json.loads(attacker.run(CONNECT, asked=own))
        assert all(answers.values()) and len(answers) == 2, answers
        own = asked([path for path in victim.sockets if path.name != "stdio.sock"])
        answers = json.loads(victim.run(CONNECT, asked=own))
        assert all(answers.values()) and len(answers) == 3, answers
        assert "was given this socket" in server.log()
    unharmed(server, admin)


def test_an_agent_is_not_served_by_the_proxy_of_its_tool_server(server, admin, project):
    """A tool server may reach hosts that its agent may not: its proxy's socket serves it alone."""
    server.put_tool("online", admin, **tool_server(network="proxy"))
    with Attacker(server, admin, project, "offline", tools={"use": ["online"]}) as agent:
        (proxy,) = [path for path in agent.sockets if path.name == "proxy0"]
        answers = json.loads(agent.run(CONNECT, asked={str(proxy): HTTP}))
        assert answers == {str(proxy): ""}, answers
        # The attack is carried out: the tool server itself is answered.
        ask = f"""
            import socket
            proxy = socket.socket(socket.AF_UNIX)
            proxy.settimeout(30)
            proxy.connect({str(proxy)!r})
            proxy.sendall({HTTP!r}.encode())
            said = proxy.recv(99).decode()
        """
        call = {"session_id": agent.session, "tool": "@online/run", "arguments": {"program": program(ask)}}
        said = server.api("tool_call", admin, **call)["content"][0]["text"]
        assert said.startswith("HTTP/1.1 400"), said
    unharmed(server, admin)
