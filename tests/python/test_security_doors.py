"""The server's doors hold against clients that mean harm: those that nobody knows yet, those behind a proxy, those whose
login is over, and agents that have found a key or the control socket."""

from __future__ import annotations

import concurrent.futures
import contextlib
import http.client
import json
import socket
import stat
from typing import Any, Iterator

import pytest

from attack_support import MIB, TRUST, Attacker, Memory, refusal, unharmed
from harness import DEADLINE, Server, ToolFailed, get, post, put, running, wait_until
from wire import Relay

HEADERS = {"Accept": "application/json, text/event-stream", "Content-Type": "application/json"}


@pytest.fixture(scope="module")
def server():
    with running(TRUST) as server:
        yield server


class Inside(Attacker):
    """An agent that has found its session's key."""

    def __init__(self, server: Server, admin: str, project: str):
        super().__init__(server, admin, project)
        self.run("open('/workspace/key', 'w').write(agent.environment('OUBLIETTE_API_KEY'))")
        self.key = (self.workspace / "key").read_text()

    def call(self, tool: str, key: str, /, **arguments: Any) -> dict:
        with Relay(self.details["relay_socket"]) as relay:
            return relay.call("oubliette_call_tool", tool=tool, arguments=arguments, api_key=key)


@pytest.fixture
def inside(server, admin):
    project = server.api("project_create", admin, name="keyed", api_key={"scope": "admin"})["project_id"]
    with Inside(server, admin, project) as inside:
        yield inside


def denied(answer: dict) -> str:
    assert "error" in answer, f"it was done: {answer}"
    assert answer["error"]["data"]["code"] == "permission_denied", answer
    return answer["error"]["message"]


# -- inside ----------------------------------------------------------------------------------------


def test_a_file_written_with_a_sessions_key_is_audited_as_its_own(server, admin, inside):
    """An agent writes a file over REST to have the change look like somebody else's."""
    workspace = inside.details["workspace_id"]
    url = f"{server.url}/api/workspaces/{workspace}/files/forged"
    assert put(url, content=b"x", headers={"Authorization": f"Bearer {inside.key}"}).status_code == 200
    entries = server.api("audit_list", admin, action="workspace_file_put", session_id=inside.session)["entries"]
    assert len(entries) == 1, entries


def test_a_mask_does_not_give_a_stored_secret_to_another_program(server, admin, inside):
    """An agent replaces a tool server's program and keeps its masked secrets, for the new program to show."""
    stdio = {"kind": "mcp", "transport": "stdio", "env": {"KEY": "a-stored-secret"}}
    server.api("catalog_put", admin, id="vault", definition={**stdio, "command": "true"})
    for env in ({"KEY": "***"}, {"KEY": "${env:HOME}"}):
        definition = {**stdio, "env": env, "command": "/usr/bin/env"}
        denied(inside.call("catalog_put", admin, id="vault", definition=definition))
    kept = server.api("catalog_get", admin, id="vault")["definition"]
    assert kept["command"] == "true"
    agent = {"name": "n", "prompt": "p", "runtime": {"kind": "acp", "command": ["env"], "env": {"KEY": "${env:HOME}"}}}
    denied(inside.call("agent_put", admin, slug="reader", definition=agent))


def test_an_agent_put_from_inside_uses_nothing_that_opens_the_network(server, admin, inside):
    """An agent defines another that uses a tool server with network, or may start an agent with network."""
    server.api("catalog_put", admin, id="web", definition={"kind": "mcp", "transport": "http", "endpoint": "http://127.0.0.1:9/"})
    server.put_agent("online", admin, [[{"say": "x"}]], sandbox={"network": "proxy"})
    for more in ({"tools": {"use": ["web"]}}, {"children": ["online"]}, {"sandbox": {"network": "proxy"}}, {"sandbox": {"upstreams": ["x"]}}):
        denied(inside.call("agent_put", admin, slug="opened", definition={"name": "n", "prompt": "p", **more}))
    assert refusal(lambda: server.api("agent_get", admin, slug="opened")) == "not_found"


def test_the_key_of_another_session_is_refused(server, admin, inside):
    """An agent uses another session's key, to act under the rules of neither."""
    with Inside(server, admin, inside.project) as other:
        denied(inside.call("project_list", other.key))
        assert "error" not in inside.call("project_list", inside.key)


# -- the control socket ----------------------------------------------------------------------------


def control(server: Server, first: bytes) -> bytes:
    """What the control socket answers to these bytes of a process of the same user."""
    with socket.socket(socket.AF_UNIX) as peer:
        peer.settimeout(DEADLINE)
        peer.connect(str(server.home / "run" / "control.sock"))
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            peer.sendall(first)
            return peer.recv(65536)
        return b""


def test_the_control_socket_takes_the_owner_only_with_the_homes_secret():
    """An agent of the same user, which Landlock keeps out of the home but not from its sockets, connects to the control
    socket: without the secret in the home it is refused, which is logged and audited."""
    with running() as server:
        admin = server.token("admin")
        file = server.home / "run" / "control.secret"
        secret = file.read_bytes()
        assert stat.S_IMODE(file.stat().st_mode) == 0o600
        body = json.dumps({"name": "stolen", "scope": "admin"}).encode()
        ask = b"POST /api/tools/token_create HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)
        assert control(server, ask) == b""
        assert control(server, b"A" * 43 + b"\n" + ask) == b""
        assert control(server, secret[:-1] + b"x" + ask) == b""
        assert b"200 OK" in control(server, secret + ask.replace(b"stolen", b"owners"))
        names = [row["name"] for row in server.api("token_list", admin)["tokens"]]
        assert "stolen" not in names and "owners" in names
        entries = server.api("audit_list", admin, action="control_connect")["entries"]
        assert [entry["outcome"] for entry in entries] == ["permission_denied"] * 3, entries
        assert "control socket refused" in server.log()
        server.stop()
        assert not file.exists()
        server.start()
        assert file.read_bytes() != secret, "the secret of an earlier start is known to whoever saw it"
        assert control(server, secret + ask) == b""
        server.cli("project", "list")


# -- before anybody is known -----------------------------------------------------------------------


def raw(server: Server, source: str = "127.0.0.1") -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=DEADLINE, source_address=(source, 0))


def test_login_reads_little_before_it_knows_anybody(server, admin):
    """A client announces a login of 4 MiB; it is refused before it sends any of it."""
    for head in (b"Content-Length: 4194304\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\n2000\r\n" + b" " * 0x2000 + b"\r\n"):
        with raw(server) as client:
            client.sendall(b"POST /api/login HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n" + head)
            assert client.recv(65536).startswith(b"HTTP/1.1 413 ")
    assert post(f"{server.url}/api/login", json={"token": admin}).status_code == 200


def test_a_request_without_a_token_is_refused_before_its_body_comes(server):
    for path in ("/api/tools/project_list", "/mcp", "/api/workspaces/x/files/y"):
        method = "PUT" if "files" in path else "POST"
        with raw(server) as client:
            client.sendall(f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 4194304\r\n\r\n".encode())
            answer = client.recv(65536)
            assert answer.startswith(b"HTTP/1.1 401 "), path
            assert b"connection: close\r\n" in answer.lower(), "no next request can be told from the rest of the body"


def test_connections_are_counted():
    """One address opens connections without end; past a quarter of all it gets 503, and others are served."""
    with running("[server]\nmax_connections = 16\n") as server, contextlib.ExitStack() as held:
        ask = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"

        def open_one(source: str = "127.0.0.1") -> tuple[socket.socket, bytes]:
            client = held.enter_context(raw(server, source))
            client.sendall(ask)
            return client, client.recv(65536)

        # What the harness itself had open is closed in its own time.
        wait_until(lambda: open_one()[1].startswith(b"HTTP/1.1 503 "), "the address to have its share")
        client, answer = open_one()
        assert answer.startswith(b"HTTP/1.1 503 ") and b"retry-after" in answer.lower(), answer
        for n in range(2, 5):
            assert open_one(f"127.0.0.{n}")[1].startswith(b"HTTP/1.1 200 "), "another address is served"
        held.close()
        wait_until(lambda: open_one()[1].startswith(b"HTTP/1.1 200 "), "closed connections to count no more")


def test_a_slow_head_ends_its_connection(server):
    """A client begins a request and never completes it."""
    with raw(server) as client:
        client.sendall(b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert client.recv(65536).startswith(b"HTTP/1.1 200 ")
        client.sendall(b"GET /health HTTP/1.1\r\nX-Slow: ")
        # Well above the time a head may take, well below the time a connection may be idle.
        client.settimeout(45)
        with contextlib.suppress(ConnectionResetError):
            while client.recv(65536):
                pass


def test_initialize_is_not_kept_whole(server, admin):
    """A client opens MCP sessions with megabytes of name, version and capabilities, which the server would keep."""
    authorized = {**HEADERS, "Authorization": f"Bearer {admin}"}
    big = "x" * (MIB // 2)
    params = {
        "protocolVersion": "2025-11-25",
        "clientInfo": {"name": big, "version": big, "title": big, "websiteUrl": big},
        "capabilities": {"experimental": {"x": {"y": big}}, "sampling": {"tools": {"z": big}}},
    }
    body = json.dumps({"jsonrpc": "2.0", "id": 1, "method": "initialize", "params": params})
    post(f"{server.url}/mcp", content=body, headers=authorized)
    memory = Memory(server)
    for _ in range(40):
        answer = post(f"{server.url}/mcp", content=body, headers=authorized)
        assert answer.status_code == 200 and answer.headers["mcp-session-id"], answer.text
    memory.check(60 * MIB)


# -- browsers --------------------------------------------------------------------------------------


@contextlib.contextmanager
def stream(server: Server, path: str, **headers: str) -> Iterator[http.client.HTTPResponse]:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=DEADLINE)
    try:
        connection.request("GET", path, headers=headers)
        yield connection.getresponse()
    finally:
        connection.close()


def ends(response: http.client.HTTPResponse) -> bool:
    """Whether a stream ends. One that goes on sends a comment every ten seconds."""
    for _ in range(4):
        if not response.readline():
            return True
        response.readline()
    return False


@pytest.mark.parametrize("how", ["logout", "revoke", "expiry"])
def test_a_stream_opened_by_cookie_ends_with_the_login(server, admin, how):
    """A browser left an event stream open; after logout, nobody who has it hears more."""
    more = {"expires_in": "5s"} if how == "expiry" else {}
    made = server.api("token_create", admin, name="browser", scope="read", **more)
    login = post(f"{server.url}/api/login", json={"token": made["token"]})
    cookie = login.headers["set-cookie"].split(";")[0]
    with stream(server, "/api/debugger?since_index=1000000000", Cookie=cookie) as response:
        assert response.status == 200
        if how == "logout":
            assert post(f"{server.url}/api/logout", headers={"Cookie": cookie}).status_code == 200
        elif how == "revoke":
            server.api("token_revoke", admin, token_id=made["token_id"])
        assert ends(response), "the stream goes on"
    assert get(f"{server.url}/api/debugger", headers={"Cookie": cookie}).status_code == 401


@pytest.mark.parametrize("how", ["logout", "revoke"])
def test_a_waiting_answer_ends_with_the_login(server, admin, project, how):
    """Somebody waits for a turn and hears its events; after logout, not one more."""
    server.put_agent("slow", admin, [[{"sleep_ms": 600_000}, {"say": "a-late-word"}]])
    made = server.api("token_create", admin, name="browser", scope="write")
    cookie = post(f"{server.url}/api/login", json={"token": made["token"]}).headers["set-cookie"].split(";")[0]
    by_cookie = {"Cookie": cookie, "X-Oubliette": "1"}
    ask = {"message": "go", "project_id": project, "agent": "slow", "wait": True}
    with concurrent.futures.ThreadPoolExecutor() as pool:
        waiting = pool.submit(post, f"{server.url}/api/tools/session_message", json=ask, headers=by_cookie)
        running_now = lambda: server.api("session_list", admin, project_id=project, status="running")["sessions"]
        session = wait_until(running_now, "the turn to run")[0]["session_id"]
        if how == "logout":
            assert post(f"{server.url}/api/logout", headers={"Cookie": cookie}).status_code == 200
        else:
            server.api("token_revoke", admin, token_id=made["token_id"])
        assert waiting.result(timeout=DEADLINE).status_code == 401
    assert server.api("session_get", admin, session_id=session)["status"] == "running", "the turn goes on"
    server.api("session_end", admin, session_id=session)


@pytest.mark.parametrize("host", ["[::1].evil.test", "[::1]evil.test", "127.0.0.1.evil.test", "localhost:80:evil.test", "a@localhost"])
def test_a_page_of_another_host_is_not_this_servers(server, admin, host):
    """A page rebinds its name to loopback; a name that only begins like loopback is not this server's."""
    with stream(server, "/api/openapi.json", Host=host) as response:
        assert response.status == 403, host
    with stream(server, "/api/openapi.json", Origin=f"http://{host}") as response:
        assert response.status == 403, host


def failed_login(server: Server, **headers: str) -> int:
    return post(f"{server.url}/api/login", json={"token": "oub_" + "x" * 43}, headers=headers).status_code


def test_failed_logins_count_for_the_client_behind_a_trusted_proxy():
    """A client guesses tokens through a reverse proxy: it is slowed down, whatever it writes into X-Forwarded-For, and
    nobody else is."""
    with running('[server]\ntrusted_proxies = ["127.0.0.1", "10.0.0.0/8"]\n') as server:
        guessing = lambda n: failed_login(server, **{"X-Forwarded-For": f"198.51.100.{n}, 203.0.113.1, 10.0.0.7"})
        assert 429 in [guessing(n) for n in range(12)]
        assert failed_login(server, **{"X-Forwarded-For": "203.0.113.2"}) == 401


def test_nobody_else_names_another_address(server):
    """A client that is no proxy names another address with every guess."""
    assert 429 in [failed_login(server, **{"X-Forwarded-For": f"198.51.100.{n}"}) for n in range(12)]


def test_the_login_cookie_is_secure_where_the_browser_uses_https():
    def is_secure(server: Server, **headers: str) -> bool:
        answer = post(f"{server.url}/api/login", json={"token": server.token("read")}, headers=headers)
        return "; Secure" in answer.headers["set-cookie"]

    https = {"X-Forwarded-Proto": "https"}
    with running() as server:
        assert not is_secure(server, **https), "nobody is believed who is not listed"
    with running('[server]\ntrusted_proxies = ["127.0.0.1"]\n') as server:
        assert is_secure(server, **https) and not is_secure(server)
    with running("[server]\nsecure_cookies = true\n") as server:
        assert is_secure(server)


# -- the log and the first run ---------------------------------------------------------------------


@pytest.mark.parametrize("format", ["text", "json"])
def test_what_an_agent_writes_forges_no_line_of_the_log(format):
    """An agent writes lines and terminal escapes to stderr and ends; the log shows them as one escaped value."""
    forged = "2026-01-01T00:00:00Z  INFO forged line"
    with running(TRUST + f'[log]\nlevel = "debug"\nformat = "{format}"\n') as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        with contextlib.suppress(ToolFailed):
            with Attacker(server, admin, project) as attacker:
                attacker.begin(
                    "import os\nos.write(2, ('x\\n' + forged + '\\n\\x1b[2J\\x9b31m\\r').encode())\nos._exit(3)", forged=forged
                )
                wait_until(lambda: attacker.details["status"] == "failed", "the agent to be seen to have ended")
        log = server.log()
        assert "forged line" in log, "the attack was not carried out"
        assert not [line for line in log.splitlines() if line.startswith(forged)], log
        assert "\x1b" not in log and "\x9b" not in log


def test_the_sample_shell_runs_no_other_program():
    """An agent of a new home has the sample shell run a program of its choice."""
    with running(command="up") as server:
        admin = server.token("admin")
        project = server.api("project_list", admin)["projects"][0]["project_id"]
        started = server.api("session_message", admin, message="go", project_id=project, agent="demo", wait=True)
        for argv in (
            ["find", ".", "-exec", "id", ";"],
            ["git", "-c", "core.fsmonitor=id", "status"],
            ["git", "status"],
            ["git", "diff"],
            ["git", "log"],
            ["tar", "-cf", "/dev/null", "--checkpoint-action=exec=id", "."],
            ["awk", "BEGIN{system(\"id\")}"],
            ["env", "id"],
            ["sh", "-c", "id"],
        ):
            call = {"session_id": started["session_id"], "tool": "@shell/shell_exec", "arguments": {"argv": argv}}
            code = refusal(lambda: server.api("tool_call", admin, **call))
            if code is None:
                result = server.api("tool_call", admin, **call)
                assert result["isError"] and "uid=" not in json.dumps(result), (argv, result)
        unharmed(server, admin)
