"""What sandboxes reach outside, and how: lists of hosts for agents and tool servers, and every connection in the debugger."""

from __future__ import annotations

import json

import pytest

import harness
from attack_support import ATTACKS, TRUST, Attacker, program, refusal
from egress_support import ASK_PROXY, SAY, WebServer, egress_events, tool_server
from wire import Relay


@pytest.fixture(scope="module")
def web():
    with WebServer() as web:
        yield web


@pytest.fixture(scope="module")
def server(web):
    config = f'{TRUST}[egress]\nallow = ["127.0.0.1:{web.port}", "localhost:{web.port}"]\n'
    with harness.running(config) as server:
        yield server


def proxied(**more) -> dict:
    return {"network": "proxy", **more}


def test_an_agent_reaches_only_the_hosts_in_its_list(server, admin, project, web):
    """The same server is reached under the listed name and not under another; the answer says which setting is missing, and
    the debugger has both."""
    listed, other = f"localhost:{web.port}", f"127.0.0.1:{web.port}"
    with Attacker(server, admin, project, "listed", sandbox=proxied(egress=["*.example.org", listed])) as agent:
        (good, bad) = json.loads(agent.run(ASK_PROXY + SAY, hosts=[listed, other]))
        assert good == [200, "hello from outside"], good
        assert bad[0] == 403 and "sandbox.egress in agents/listed/agent.json" in bad[1] and other in bad[1], bad
        events = egress_events(server, admin, agent.session, 2)
        reached = next(event for event in events if event["allowed"])
        refused = next(event for event in events if not event["allowed"])
        assert (reached["host"], reached["port"], reached["rule"]) == ("localhost", web.port, listed), reached
        assert reached["bytes_in"] >= len("hello from outside") and reached["bytes_out"] > 0, reached
        assert reached["duration_ms"] >= 0 and reached["agent"] == "listed" and "server" not in reached, reached
        assert (refused["host"], refused["port"]) == ("127.0.0.1", web.port) and "rule" not in refused, refused
        assert refused["bytes_in"] == refused["bytes_out"] == 0 and "agent.json" in refused["error"], refused

        # An edit holds for the process that runs, as soon as the session has heard of it.
        definition = server.api("agent_get", admin, slug="listed")["definition"]
        definition["sandbox"]["egress"] = []
        server.api("agent_put", admin, slug="listed", definition=definition)

        def closed() -> bool:
            (answer,) = json.loads(agent.run(ASK_PROXY + SAY, hosts=[listed]))
            return answer[0] == 403 and "sandbox.egress" in answer[1]

        harness.wait_until(closed, "the emptied list to hold")


def test_without_a_list_an_agent_reaches_what_the_server_allows(server, admin, project, web):
    with Attacker(server, admin, project, "free", sandbox=proxied()) as agent:
        answers = json.loads(agent.run(ASK_PROXY + SAY, hosts=[f"127.0.0.1:{web.port}", "127.0.0.1:1"]))
        assert answers[0] == [200, "hello from outside"], answers
        assert answers[1][0] == 403 and "[egress] allow" in answers[1][1], answers
        (event, _) = egress_events(server, admin, agent.session, 2)
        assert event["allowed"] and "rule" not in event, event


def test_a_list_opens_nothing_that_the_server_keeps_closed(server, admin, project, web):
    with WebServer("not for you") as closed:
        target = f"127.0.0.1:{closed.port}"
        with Attacker(server, admin, project, "opener", sandbox=proxied(egress=[target])) as agent:
            (answer,) = json.loads(agent.run(ASK_PROXY + SAY, hosts=[target]))
        assert answer[0] == 403 and "[egress] allow" in answer[1], answer
        assert closed.requests == []


def test_a_tool_server_has_a_list_of_its_own(server, admin, project, web):
    """A tool server reaches what its own entry lists, whatever its agent and the other servers may."""
    by_name, by_address = f"localhost:{web.port}", f"127.0.0.1:{web.port}"
    for id, host in (("byname", by_name), ("byaddress", by_address)):
        server.put_tool(id, admin, **tool_server(network="proxy", egress=[host]))
    server.put_agent("user", admin, [[{"say": "ready"}]], tools={"use": ["byname", "byaddress"]})
    started = server.api("session_message", admin, message="go", project_id=project, agent="user", wait=True)
    session = started["session_id"]

    def asked(id: str) -> list[int]:
        arguments = {"program": program(ASK_PROXY, hosts=[by_name, by_address])}
        result = server.api("tool_call", admin, session_id=session, tool=f"@{id}/run", arguments=arguments)
        return [status for status, _ in json.loads(result["content"][0]["text"])]

    assert asked("byname") == [200, 403]
    assert asked("byaddress") == [403, 200]
    events = egress_events(server, admin, session, 4)
    allowed = {(event["server"], event["host"]) for event in events if event["allowed"]}
    assert allowed == {("byname", "localhost"), ("byaddress", "127.0.0.1")}, events
    refused = [event for event in events if not event["allowed"]]
    assert {event["server"] for event in refused} == {"byname", "byaddress"}, refused
    assert all(f"tools/{event['server']}/tool.json" in event["error"] for event in refused), refused
    server.api("session_end", admin, session_id=session)


@pytest.mark.parametrize(
    "sandbox, field",
    [
        (proxied(egress=["https://api.github.com"]), "sandbox.egress[0]"),
        (proxied(egress=["a.org", "*"]), "sandbox.egress[1]"),
        (proxied(egress=["a.org"] * 257), "sandbox.egress"),
        (proxied(egress=None), "sandbox.egress"),
        ({"network": "none", "egress": ["a.org"]}, "sandbox.egress"),
        ({"upstreams": ["../x"]}, "sandbox.upstreams[0]"),
    ],
)
def test_a_wrong_list_is_refused_with_its_field(server, admin, sandbox, field):
    with pytest.raises(harness.ToolFailed) as refused:
        server.put_agent("wrong", admin, [[{"say": "x"}]], sandbox=sandbox)
    assert refused.value.code == "invalid_argument" and field in refused.value.message, refused.value
    assert refusal(lambda: server.api("agent_get", admin, slug="wrong")) == "not_found"


def test_a_child_reaches_no_host_that_its_parent_does_not(server, admin, project, web):
    """A child runs an agent without a list: its parent's list holds for it too."""
    listed, other = f"localhost:{web.port}", f"127.0.0.1:{web.port}"
    sandbox = proxied(egress=[listed])
    with Attacker(server, admin, project, "child", sandbox=proxied()) as child:
        child.end()
    with Attacker(server, admin, project, "parent", sandbox=sandbox, children=["child"]) as parent:
        message = {"message": program(ASK_PROXY + SAY, hosts=[listed, other]), "agent": "child", "wait": True}
        with Relay(parent.details["relay_socket"]) as relay:
            answer = relay.call("session_message", **message)
        said = answer["result"]["text"]
        assert [status for status, _ in json.loads(said)] == [200, 403], said
        assert "agents/parent/agent.json" in said, said


NODE = harness.ROOT / "tests" / "node" / "node_modules" / "node" / "bin" / "node"
ASK_WITH_NODE = """
    import subprocess

    script = "fetch(process.argv[1]).then(async (a) => console.log(a.status, await a.text()), (e) => console.log('failed', String(e.cause)))"
    # It warns of a proxy as long as that is experimental.
    done = subprocess.run([node, '--no-warnings', '-e', script, url], capture_output=True, text=True, timeout=100)
    said = done.stdout + done.stderr
"""


def test_node_in_a_sandbox_finds_the_proxy_by_its_environment():
    """`fetch` of Node.js heeds the variables of a proxy only with NODE_USE_ENV_PROXY. The host is one that NO_PROXY does not
    name."""
    if not NODE.exists():
        pytest.skip("Node.js 22 is not there: cargo xtask setup")
    folder = NODE.resolve().parent
    with WebServer(address="127.0.0.2") as web:
        host = f"127.0.0.2:{web.port}"
        shown = [str(ATTACKS), str(folder)]
        with harness.running(f'[trust]\nread_only = {json.dumps(shown)}\n[egress]\nallow = ["{host}"]\n') as server:
            admin = server.token("admin")
            project = server.api("project_create", admin, name="test")["project_id"]
            more = {"read_only": shown, "network": "proxy", "egress": [host]}
            server.put_tool("fetching", admin, **tool_server(**more))
            server.put_tool("unaware", admin, **tool_server(**more, env={"NODE_USE_ENV_PROXY": ""}))
            command = ["/usr/bin/python3", "-I", "-S", str(ATTACKS / "acp_agent.py")]
            runtime = {"kind": "acp", "command": command, "read_only": shown}
            sandbox, tools = proxied(egress=[host]), {"use": ["fetching", "unaware"]}
            server.put_agent("node", admin, runtime=runtime, sandbox=sandbox, tools=tools)
            values = {"node": str(folder / NODE.name), "url": f"http://{host}/"}
            message = program(ASK_WITH_NODE + SAY, **values)
            done = server.api("session_message", admin, message=message, project_id=project, agent="node", wait=True)
            assert done["text"].strip() == "200 hello from outside", done

            def asked(id: str) -> str:
                arguments = {"program": program(ASK_WITH_NODE, **values)}
                result = server.api("tool_call", admin, session_id=done["session_id"], tool=f"@{id}/run", arguments=arguments)
                return result["content"][0]["text"].strip()

            assert asked("fetching") == "200 hello from outside"
            assert asked("unaware").startswith("failed")
            assert len(web.requests) == 2
