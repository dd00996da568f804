"""The caller libraries, Python, Rust and TypeScript, against the real server: an agent in a sandbox calls lent functions while
connections are cut."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import pathlib
import subprocess
import sys

import pytest

from caller import call
from harness import BIN, DEADLINE, ROOT, running
from typescript import node_programs, typescript_client  # noqa: F401: a fixture
from wire import Link

sys.path.insert(0, str(ROOT / "clients" / "python" / "src"))

from oubliette_caller import Ended, Oubliette, Refused  # noqa: E402


@pytest.fixture(scope="module")
def server():
    # A grace period long enough to reconnect on a busy machine.
    with running("[relay]\nreconnect_grace = '20s'\n") as server:
        yield server


@pytest.fixture(scope="module")
def token(server):
    return server.token("write")


# -- Python ------------------------------------------------------------------------------------------


async def test_python_lends_functions(server, admin, token, project):
    turn = [call("myapp_add", a=2, b=3), call("myapp_fail"), {"say": "done"}]
    server.put_agent("py", admin, [turn, [{"say": "second"}]])
    lend = Oubliette(server.url, token).lend("myapp")
    events = []
    lend.on_event(events.append)

    @lend.tool
    async def add(a: int, b: int) -> dict[str, int]:
        """Adds."""
        return {"sum": a + b}

    @lend.tool
    def fail() -> None:
        """Fails."""
        raise ValueError("not today")

    async with lend.start("go", agent="py", project_id=project) as session:
        done = await asyncio.wait_for(session.turn(), DEADLINE)
        assert done.turn == 1 and done.text == "done"
        row = next(r for r in server.api("tool_list", admin, session_id=session.id)["tools"] if r["name"] == "myapp_add")
        assert row["description"] == "Adds." and row["inputSchema"]["required"] == ["a", "b"]
        assert (await asyncio.wait_for(session.ask("more"), DEADLINE)).text == "second"
        await session.end()
        assert isinstance(await asyncio.wait_for(session.ended(), DEADLINE), Ended)
    results = [e for e in events if e["type"] == "tool_result"]
    assert [r["ok"] for r in results] == [True, False]
    assert '"sum"' in json.dumps(results[0]) and "not today" in json.dumps(results[1])
    assert [e["index"] for e in events] == list(range(len(events)))


async def test_python_survives_a_cut_connection(server, admin, token, project):
    server.put_agent("py-cut", admin, [[call("myapp_slow", n=1), call("myapp_slow", n=2), {"say": "done"}]])
    with Link(server.port) as link:
        lend = Oubliette(link.url, token).lend("myapp")
        events, ran = [], []
        lend.on_event(events.append)

        @lend.tool
        async def slow(n: int) -> str:
            ran.append(n)
            # Cut while the function runs: the stream and the answer need new connections.
            link.cut()
            return f"slow {n}"

        async with lend.start("go", agent="py-cut", project_id=project) as session:
            assert (await asyncio.wait_for(session.turn(), DEADLINE)).text == "done"
            await session.end()
    # Each function ran once, each answer arrived, and the listener got every event once.
    assert ran == [1, 2]
    assert all(e["ok"] for e in events if e["type"] == "tool_result")
    assert [e["index"] for e in events] == list(range(len(events)))


async def test_python_survives_a_cut_before_the_request(server, admin, token, project):
    server.put_agent("py-late", admin, [[{"say": "first"}], [call("myapp_ping"), {"say": "done"}]])
    with Link(server.port) as link:
        lend = Oubliette(link.url, token).lend("myapp")

        @lend.tool
        async def ping() -> str:
            return "pong"

        async with lend.start("go", agent="py-late", project_id=project) as session:
            await asyncio.wait_for(session.turn(), DEADLINE)
            link.cut()
            # Only a new stream can deliver the next request.
            server.api("session_message", admin, session_id=session.id, message="again")
            assert (await asyncio.wait_for(session.turn(2), DEADLINE)).text == "done"
            await session.end()
        log = server.api("session_events", admin, session_id=session.id, max_events=1000)["events"]
        assert [e["outcome"] for e in log if e["type"] == "caller_tool_done"] == ["answered"]


async def test_python_survives_a_server_restart():
    with running("[relay]\nreconnect_grace = '20s'\n") as server:
        admin, token = server.token("admin"), server.token("write")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("py", admin, [[{"say": "first"}], [call("myapp_ping"), {"say": "done"}]])
        lend = Oubliette(server.url, token).lend("myapp")

        @lend.tool
        async def ping() -> str:
            return "pong"

        async with lend.start("go", agent="py", project_id=project) as session:
            await asyncio.wait_for(session.turn(), DEADLINE)
            await asyncio.to_thread(server.kill)
            await asyncio.to_thread(server.start)
            # The declaration was lost with the server; the message declares the tools again.
            assert (await asyncio.wait_for(session.ask("again"), DEADLINE)).text == "done"
            await session.end()


async def test_python_says_why_it_was_refused(server, project):
    lend = Oubliette(server.url, "oub_wrong").lend("myapp")
    with pytest.raises(Refused) as refused:
        async with lend.start("go", project_id=project):
            pass
    assert refused.value.code == "unauthenticated"


async def test_the_python_example_runs(server, admin):
    bound, project = example_agent(server, admin)
    example = ROOT / "clients" / "python" / "examples" / "lend.py"
    environ = {**os.environ, "PYTHONPATH": str(ROOT / "clients" / "python" / "src"), "PYTHONUNBUFFERED": "1"}
    with Link(server.port) as link:
        environ |= {"OUBLIETTE_URL": link.url, "OUBLIETTE_TOKEN": bound}
        await run_example(server, admin, link, project, [sys.executable, str(example), "go"], environ)


# -- Rust --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def rust_example() -> pathlib.Path:
    """`crates/caller/examples/lend.rs`, built: beside the programs under test, or by cargo."""
    built = BIN / "examples" / "lend"
    if not built.exists():
        build = ["cargo", "build", "--quiet", "-p", "oubliette-caller", "--example", "lend", "--message-format=json"]
        out = subprocess.run(build, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        made = (json.loads(line) for line in out.splitlines())
        built = pathlib.Path(next(m["executable"] for m in made if m.get("executable")))
    return built


async def test_the_rust_example_runs(server, admin, rust_example):
    bound, project = example_agent(server, admin)
    with Link(server.port) as link:
        environ = {**os.environ, "OUBLIETTE_TOKEN": bound}
        await run_example(server, admin, link, project, [str(rust_example), link.url, "go"], environ)


# -- TypeScript --------------------------------------------------------------------------------------


@pytest.mark.parametrize("node", node_programs())
async def test_the_typescript_example_runs(server, admin, typescript_client, node):
    bound, project = example_agent(server, admin)
    with Link(server.port) as link:
        environ = {**os.environ, "OUBLIETTE_URL": link.url, "OUBLIETTE_TOKEN": bound}
        command = [node, str(typescript_client / "examples" / "lend.mjs"), "go"]
        await run_example(server, admin, link, project, command, environ)


# -- all examples ------------------------------------------------------------------------------------


def example_agent(server, admin) -> tuple[str, str]:
    """A project whose agent calls what the examples lend, and a token for only this project."""
    turn = [call("myapp_notify", message="hello"), call("myapp_notify", message="again"), {"say": "told"}]
    server.put_agent("teller", admin, [turn])
    project = server.api("project_create", admin, name="example", agent="teller")["project_id"]
    return server.token("write", project), project


async def run_example(server, admin, link: Link, project: str, command: list[str], environ: dict[str, str]) -> None:
    """Runs an example and cuts its connections after the first call; it must print both notes and the turn's text."""
    process = await asyncio.create_subprocess_exec(*command, env=environ, stdout=asyncio.subprocess.PIPE)
    try:
        lines = []

        async def read() -> None:
            async for line in process.stdout:
                lines.append(line.decode().rstrip())
                if lines == ["note: hello"]:
                    link.cut()

        await asyncio.wait_for(read(), DEADLINE)
        assert await process.wait() == 0
        assert lines == ["note: hello", "note: again", "told"]
    finally:
        with contextlib.suppress(ProcessLookupError):
            process.kill()
    session = server.api("session_list", admin, project_id=project)["sessions"][0]
    assert session["status"] == "ended"
