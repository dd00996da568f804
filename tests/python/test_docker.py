"""Sessions in containers, on a real engine: tools of every source, switching, the end, faults, limits, what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import time

import pytest

import container_engine
import harness
from caller import call
from container_engine import IMAGE
from harness import MODERN, ToolFailed, running, wait_until
from test_caller_tool_relay import NOTIFY, calling, lend

WHY_NOT = container_engine.why_not()
pytestmark = [
    pytest.mark.skipif(WHY_NOT is not None, reason=f"docker driver: {WHY_NOT}"),
    pytest.mark.xdist_group("docker"),
]

GRACE = 5

# A tool server in the shell that every image of the tests has: echo of the environment, and of what it can see.
TOOL_SERVER = r"""
while IFS= read -r line; do
  id=$(printf '%s' "$line" | sed -n 's/.*"id":\([0-9]*\).*/\1/p')
  case "$line" in
    *'"initialize"'*) printf '{"jsonrpc":"2.0","id":%s,"result":{"protocolVersion":"2025-06-18","capabilities":{"tools":{}},"serverInfo":{"name":"sh","version":"1"}}}\n' "$id" ;;
    *'"tools/list"'*) printf '{"jsonrpc":"2.0","id":%s,"result":{"tools":[{"name":"look","inputSchema":{"type":"object"}}]}}\n' "$id" ;;
    *'"tools/call"'*)
      seen="env=$(env | cut -d= -f1 | sort | tr '\n' ',') mcp=$(ls /mcp 2>/dev/null) ws=$(ls /workspace | tr '\n' ',')"
      printf '{"jsonrpc":"2.0","id":%s,"result":{"content":[{"type":"text","text":"%s"}]}}\n' "$id" "$seen" ;;
    *'"ping"'*) printf '{"jsonrpc":"2.0","id":%s,"result":{}}\n' "$id" ;;
  esac
done
"""


def config(engine, **more: str) -> str:
    lines = "\n".join(f"{name} = {value}" for name, value in more.items())
    return f"""
[sandbox]
driver = "docker"
grace = "{GRACE}s"
{lines}
[sandbox.docker]
host = "{engine.host}"
image = "{IMAGE}"
"""


@pytest.fixture(scope="module")
def engine():
    with container_engine.running_engine() as engine:
        yield engine


@pytest.fixture(scope="module")
def server(engine):
    with running(config(engine)) as server:
        yield server


def talk(server, token, project, agent, message="go", **more):
    return server.api("session_message", token, message=message, project_id=project, agent=agent, wait=True, **more)


def results(server, token, session_id) -> list[dict]:
    events = server.api("session_events", token, session_id=session_id, max_events=1000)["events"]
    return [e for e in events if e["type"] == "tool_result"]


def end(server, token, session_id):
    server.api("session_end", token, session_id=session_id)


def test_the_driver_on_this_engine(engine):
    """The driver's own tests: streams, sockets, signals, exit codes, escapes, limits, wrong images."""
    env = {
        **os.environ,
        "OUBLIETTE_TEST_ENGINE": str(engine.socket),
        "OUBLIETTE_TEST_IMAGE": IMAGE,
    }
    command = ["cargo", "test", "-p", "oubliette-sandbox", "--test", "docker", "--", "--test-threads", "2", "--nocapture"]
    done = subprocess.run(command, cwd=harness.ROOT, env=env, capture_output=True, text=True)
    assert done.returncode == 0 and "without an engine" not in done.stderr, done.stdout[-5000:] + done.stderr[-3000:]


def test_doctor_names_the_engine_and_what_it_promises(engine, server):
    checks = {check["name"]: check for check in server.cli_json("doctor")["checks"]}
    assert checks["sandbox"]["ok"] and "docker" in checks["sandbox"]["detail"]
    assert engine.host in checks["container engine"]["detail"] and "API" in checks["container engine"]["detail"]
    for name in ("container user", "first process", "default image", "memory limit", "local sandbox"):
        assert checks[name]["ok"], checks[name]


async def test_tools_of_every_source_and_no_container_left(engine, server, admin):
    project = server.api("project_create", admin, name="all", api_key={"scope": "read"}, env={"PROJECT_SECRET": "ps-1"})["project_id"]
    server.put_tool("sh", admin, kind="mcp", transport="stdio", command="/bin/sh", args=["-c", TOOL_SERVER], env={"OWN": "1"})
    server.put_tool("reader", admin, kind="builtin", builtinPolicy={"name": "fs_read", "allowedPaths": ["."]})
    server.put_tool("writer", admin, kind="builtin", builtinPolicy={"name": "fs_write", "allowedPaths": ["."]})
    server.put_tool("shell", admin, kind="builtin", builtinPolicy={"name": "shell_exec", "allowedCommands": ["sh"]})
    script = [
        call("writer_fs_write", path="a.txt", content="from fs_write"),
        call("shell_shell_exec", argv=["sh", "-c", "cat a.txt && echo more >> a.txt && id -u && cat /proc/1/comm"]),
        call("reader_fs_read", path="a.txt"),
        call("sh_look"),
        call("oubliette_project_list"),
        call("myapp_send_notification", message="hello"),
        {"say": "done"},
    ]
    server.put_agent("all", admin, [script], tools={"use": ["sh", "reader", "writer", "shell"]})
    async with calling(server, server.token("write"), MODERN) as caller:
        await caller.start(project_id=project, agent="all", context=lend(NOTIFY))
        request = await caller.until("caller_tool_request")
        # The agent and its tool server each have a container of their own.
        assert len(engine.containers()) == 2
        for container in engine.containers():
            told = json.dumps(engine.inspect(container))
            assert "ps-1" not in told and "oub_" not in told, told
            host = engine.inspect(container)["HostConfig"]
            assert host["CapDrop"] == ["ALL"] and host["ReadonlyRootfs"] and host["NetworkMode"] == "none"
            assert not host["Privileged"] and "no-new-privileges" in host["SecurityOpt"]
            assert host["Memory"] > 0 and host["PidsLimit"] > 0
            assert engine.inspect(container)["Config"]["User"].split(":")[0] != "0"
        await caller.respond(request, result={"status": "sent"})
        assert (await caller.until("turn_completed"))["text"] == "done"
        session = caller.session_id
    got = results(server, admin, session)
    assert all(result["ok"] for result in got) and len(got) == 6, got
    texts = [json.dumps(result) for result in got]
    assert "from fs_write" in texts[1] and "oubliette-clien" in texts[1]
    assert "more" in texts[2]
    looked = texts[3]
    assert "OWN" in looked and "a.txt" in looked
    assert "PROJECT_SECRET" not in looked and "OUBLIETTE" not in looked and "relay.sock" not in looked
    pinned = server.api("session_get", admin, session_id=session)["images"]
    assert pinned[IMAGE].startswith("sha256:")
    end(server, admin, session)
    wait_until(lambda: not engine.containers(), "every container to be removed")


def test_cancel_and_switch(engine, server, admin, project):
    server.put_agent("first", admin, [[{"say": "one"}, {"sleep_ms": 600_000}], [{"say": "again"}]])
    server.put_agent("second", admin, [[{"say": "two"}]])
    session = server.api("session_message", admin, message="a", project_id=project, agent="first")["session_id"]
    with server.events(session, admin) as events:
        events.until("delta")
        assert server.api("session_cancel", admin, session_id=session)["cancelled"]
        assert events.until("turn_completed")["stop_reason"] == "cancelled"
    assert server.api("session_message", admin, message="b", session_id=session, wait=True)["text"] == "again"
    before = engine.containers()
    server.api("session_switch_agent", admin, session_id=session, agent="second")
    assert server.api("session_message", admin, message="c", session_id=session, wait=True)["text"] == "two"
    assert not set(before) & set(engine.containers()), "the old agent's container is gone"
    end(server, admin, session)
    wait_until(lambda: not engine.containers(), "every container to be removed")


def test_a_container_killed_from_outside_is_told_and_the_next_message_works(engine, server, admin, project):
    server.put_agent("killed", admin, [[{"say": "one"}, {"sleep_ms": 600_000}], [{"say": "back"}]])
    session = server.api("session_message", admin, message="a", project_id=project, agent="killed")["session_id"]
    with server.events(session, admin) as events:
        events.until("delta")
        engine.docker("kill", engine.containers()[0])
        assert "killed from outside" in json.dumps(events.until("error"))
    assert server.api("session_message", admin, message="b", session_id=session, wait=True)["text"] == "back"
    end(server, admin, session)
    wait_until(lambda: not engine.containers(), "every container to be removed")


def test_wrong_images_are_refused_with_the_reason(engine, server, admin, project):
    server.put_agent("nowhere", admin, [[{"say": "x"}]], sandbox={"image": "oubliette-missing:1"})
    with pytest.raises(ToolFailed) as missing:
        talk(server, admin, project, "nowhere")
    assert "oubliette-missing:1" in missing.value.message and "docker load" in missing.value.message
    with pytest.raises(ToolFailed) as odd:
        server.put_agent("odd", admin, [[{"say": "x"}]], sandbox={"image": "--privileged x"})
    assert "sandbox.image" in odd.value.message
    # The agent's image beats its project's.
    server.api("project_update", admin, project_id=project, sandbox={"image": "oubliette-missing:2"})
    server.put_agent("own", admin, [[{"say": "fine"}]], sandbox={"image": IMAGE})
    done = talk(server, admin, project, "own")
    assert done["text"] == "fine"
    end(server, admin, done["session_id"])
    with pytest.raises(ToolFailed) as projects:
        server.put_agent("plain", admin, [[{"say": "x"}]])
        talk(server, admin, project, "plain")
    assert "oubliette-missing:2" in projects.value.message
    with pytest.raises(ToolFailed) as write:
        server.api("project_update", server.token("write"), project_id=project, sandbox={"image": IMAGE})
    assert write.value.code == "permission_denied"
    wait_until(lambda: not engine.containers(), "every container to be removed")


def test_limits_hold_in_containers(engine, server, admin):
    project = server.api("project_create", admin, name="small", sandbox={"memory_mb": 96, "pids": 24})["project_id"]
    server.put_tool("sh2", admin, kind="builtin", builtinPolicy={"name": "shell_exec", "allowedCommands": ["sh"], "timeoutMs": 60000})
    eat = "exec perl -e '$x = q(x) x (1 << 20); push @a, $x . $_ for 1 .. 100000'"
    fork = "for i in $(seq 1 100); do sleep 20 & done; echo all"
    script = [call("sh2_shell_exec", argv=["sh", "-c", eat]), call("sh2_shell_exec", argv=["sh", "-c", fork]), {"say": "done"}]
    server.put_agent("small", admin, [script], tools={"use": ["sh2"]})
    done = talk(server, admin, project, "small")
    memory, processes = results(server, admin, done["session_id"])
    assert not memory["ok"] and "memory" in json.dumps(memory), memory
    assert not processes["ok"], processes
    end(server, admin, done["session_id"])
    wait_until(lambda: not engine.containers(), "every container to be removed")


def test_after_kill_9_containers_end_within_the_grace_and_leftovers_are_removed(engine):
    with running(config(engine)) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="kill")["project_id"]
        server.put_agent("long", admin, [[{"say": "one"}, {"sleep_ms": 600_000}], [{"say": "goes on"}]])
        session = server.api("session_message", admin, message="a", project_id=project, agent="long")["session_id"]
        with server.events(session, admin) as events:
            events.until("delta")
        assert len(engine.containers(running_only=True)) == 1
        server.kill()
        killed = time.monotonic()
        wait_until(lambda: not engine.containers(running_only=True), "the container to end", deadline=GRACE * 4)
        assert time.monotonic() - killed >= GRACE / 2, "it waits for the server to come back"
        server.start()
        wait_until(lambda: not engine.containers(), "the leftover to be removed")
        done = server.api("session_message", admin, message="b", session_id=session, wait=True)
        assert done["text"] == "goes on"
        # Killed while a container runs, and started again at once: the next server removes it.
        server.kill()
        left = engine.containers()
        server.start()
        wait_until(lambda: not set(left) & set(engine.containers()), "the leftover to be removed")
        end(server, admin, session)
        wait_until(lambda: not engine.containers(), "every container to be removed")


def test_doctor_says_what_to_do_without_an_engine(tmp_path):
    text = '[sandbox]\ndriver = "docker"\n[sandbox.docker]\nhost = "unix:///nonexistent/docker.sock"\n'
    server = harness.Server(tmp_path / "h", text)
    checks = {check["name"]: check for check in json.loads(server.cli("--json", "doctor", check=False).stdout)["checks"]}
    assert not checks["sandbox"]["ok"] and not checks["container engine"]["ok"]
    assert "no container engine" in checks["container engine"]["detail"]
    assert "[sandbox.docker] host" in checks["container engine"]["remedy"]
