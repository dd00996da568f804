"""The types that the server publishes: schemas of the files people write, and of every action's result."""

from __future__ import annotations

import contextlib
import io
import json
import tarfile
import tomllib

import jsonschema
import pytest

import result_types
from harness import ROOT, ToolFailed, get, request, running, wait_until

SCHEMAS = ["agent", "tool", "config"]


def schema_of(server, name: str) -> dict:
    answer = get(f"{server.url}/api/schemas/{name}.json")
    assert answer.status_code == 200 and answer.headers["content-type"] == "application/schema+json"
    return answer.json()


def test_schemas_are_served_without_a_token_and_are_those_of_the_tree(server):
    for name in SCHEMAS:
        schema = schema_of(server, name)
        jsonschema.Draft202012Validator.check_schema(schema)
        assert schema == json.loads((ROOT / "docs/src/schemas" / f"{name}.json").read_text())
        fields = json.dumps(schema)
        assert '"description"' in fields and '"default"' in fields or name == "config"
    assert get(f"{server.url}/api/schemas/other.json").status_code == 404


def test_the_files_of_a_first_run_fit_their_schemas():
    with running(command="up") as server:
        agents = sorted(server.home.glob("agents/*/agent.json"))
        tools = sorted(server.home.glob("tools/*/tool.json"))
        assert agents and tools
        for file in agents:
            jsonschema.validate(json.loads(file.read_text()), schema_of(server, "agent"))
        for file in tools:
            jsonschema.validate(json.loads(file.read_text()), schema_of(server, "tool"))
        config = tomllib.loads((server.home / "oubliette.toml").read_text())
        jsonschema.validate(config, schema_of(server, "config"))


def test_a_file_may_name_its_schema_and_either_spelling_is_read(server, admin):
    address = f"{server.url}/api/schemas"
    server.put_agent("named", admin, [[{"say": "x"}]], **{"$schema": f"{address}/agent.json"})
    assert server.api("agent_get", admin, slug="named")["definition"]["$schema"] == f"{address}/agent.json"
    assert "$schema" in json.loads((server.home / "agents/named/agent.json").read_text())
    entry = {"kind": "mcp", "transport": "stdio", "command": "cat", "$schema": f"{address}/tool.json"}
    server.put_tool("camel", admin, **entry, timeouts={"startupMs": 77}, healthCheck={"intervalMs": 78}, readOnly=[], cacheMb=9)
    server.put_tool("snake", admin, **entry, timeouts={"startup_ms": 77}, health_check={"interval_ms": 78}, read_only=[], cache_mb=9)
    camel, snake = (server.api("catalog_get", admin, id=id)["definition"] for id in ("camel", "snake"))
    assert camel | {"id": ""} == snake | {"id": ""}
    assert camel["timeouts"]["startupMs"] == 77 and camel["cache_mb"] == 9
    with pytest.raises(ToolFailed, match="duplicate"):
        server.put_tool("both", admin, **entry, timeouts={"startup_ms": 1, "startupMs": 2})
    with pytest.raises(ToolFailed, match="schema"):
        server.put_agent("wrong", admin, [], **{"$schema": 5})


@pytest.fixture(scope="module")
def configured():
    config = '[providers.far]\nbase_url = "http://127.0.0.1:9"\n[prices."far/*"]\ninput = 1\noutput = 2\n'
    with running(config) as server:
        yield server


def test_every_action_answers_what_its_type_says(configured):
    """`harness.Server.api` checks each answer against the OpenAPI document; this asks every action for one."""
    server, admin = configured, configured.token("admin")
    api = lambda action, /, **arguments: server.api(action, admin, **arguments)
    result_types.checked.clear()
    project = api(
        "project_create", name="p", env={"A": "secret"}, api_key={"scope": "read"}, sandbox={"memory_mb": 512}, limits={"tokens_per_day": 5_000_000}
    )["project_id"]
    api("project_update", project_id=project, description="d", limits={"cost_usd_per_day": 5})
    api("project_get", project_id=project)
    api("project_list", limit=1)
    workspace = api("workspace_create", project_id=project, env={"B": "x"})["workspace_id"]
    api("workspace_list", project_id=project)
    api("workspace_diff", workspace_id=workspace)

    server.put_tool("shell", admin, kind="builtin", builtinPolicy={"name": "shell_exec", "allowedCommands": ["echo"]})
    server.put_tool("down", admin, kind="mcp", transport="tcp", endpoint="127.0.0.1:9", timeouts={"startupMs": 500}, restart={"maxAttempts": 0})
    (server.home / "agents/torn").mkdir(parents=True)
    (server.home / "agents/torn/agent.json").write_text("{")
    (server.home / "tools/torn").mkdir(parents=True)
    (server.home / "tools/torn/tool.json").write_text("{")
    turns = [[{"say": "hello"}, {"call": {"tool": "shell_shell_exec", "arguments": {"argv": ["echo", "x"]}}}], [{"sleep_ms": 600_000}]]
    tools = {"use": ["shell", "down"], "ask": [{"tool": "@shell/*", "when": {"properties": {"argv": {"contains": {"const": "ask"}}}}}]}
    server.put_agent("worker", admin, turns, tools=tools, env={"K": "v"})
    server.put_agent("other", admin, [[{"say": "other"}]])
    wait_until(lambda: any(agent["slug"] == "torn" for agent in api("agent_list")["agents"]), "the broken agent")
    wait_until(lambda: any(entry["id"] == "torn" for entry in api("catalog_list")["entries"]), "the broken tool")
    api("agent_get", slug="worker")
    api("catalog_get", id="shell")
    api("catalog_test", id="shell")
    api("catalog_test", id="down")
    api("preset_list")
    api("tool_explain", agent="worker", tool="shell_shell_exec", arguments={"argv": ["echo"]})

    session = api("session_message", message="hi", project_id=project, agent="worker", wait=True)["session_id"]
    api("session_get", session_id=session)
    api("session_list", project_id=project)
    api("session_events", session_id=session, include_children=True)
    api("tool_list", session_id=session)
    api("tool_list", agent="worker")
    api("tool_call", session_id=session, tool="shell_shell_exec", arguments={"argv": ["echo", "y"]})
    api("catalog_status")
    with contextlib.suppress(ToolFailed):  # nothing listens there
        api("tool_server_restart", session_id=session, server="down")
    api("debugger_events", max_events=1000)
    api("figures_report", minutes=5)
    api("usage_report", group_by="agent")
    # A turn that goes on, with a message behind it.
    api("session_message", session_id=session, message="sleep")
    waiting = api("session_message", session_id=session, message="next")["turn"]
    api("session_queue_list", session_id=session)
    api("session_queue_remove", session_id=session, turn=waiting)
    api("session_cancel", session_id=session)
    api("session_switch_agent", session_id=session, agent="other")

    asking = api("session_message", message="hi", project_id=project, agent="other", wait=True)["session_id"]
    server.put_agent("asker", admin, [[{"call": {"tool": "shell_shell_exec", "arguments": {"argv": ["echo", "ask"]}}}]], tools=tools)
    asked = api("session_message", message="hi", project_id=project, agent="asker")["session_id"]
    with server.events(asked, admin) as events:
        approval = events.until("approval_requested")["approval_id"]
        api("approval_list", status="pending")
        api("approval_decide", approval_id=approval, decision="allow", reason="fine")
        events.until("turn_completed")
    api("approval_list", session_id=asked)

    lent = {"caller_id": "app", "caller_tools": [{"name": "ask_me", "description": "d", "inputSchema": {"type": "object"}}]}
    server.put_agent("borrower", admin, [[{"call": {"tool": "app_ask_me", "arguments": {}}}]])
    borrowed = api("session_message", message="hi", project_id=project, agent="borrower", context=lent)["session_id"]
    with server.events(borrowed, admin) as events:
        request = events.until("caller_tool_request")["request_id"]
        api("caller_tool_response", session_id=borrowed, request_id=request, result={"a": 1})
        events.until("turn_completed")

    for one in (session, asking, asked, borrowed):
        api("session_end", session_id=one)
    api("session_delete", session_id=asking)
    token = api("token_create", name="t", scope="read", project_id=project, expires_in="1h")
    api("token_list")
    api("token_revoke", token_id=token["token_id"])
    api("audit_list", limit=1000)
    api("server_info")
    api("server_list")
    api("doctor")
    api("program_list")
    block = {"mcpServers": {"far": {"url": "http://127.0.0.1:9/mcp", "headers": {"X-Key": "secret"}}}}
    [planned] = api("tool_add", servers=block, dry_run=True)["planned"]
    assert planned["id"] == "far" and not planned["replaces"] and planned["definition"]["headers"] == {"X-Key": "secret"}
    assert "far" not in [entry["id"] for entry in api("catalog_list")["entries"]]
    api("tool_add", servers={"mcpServers": {"far": {"url": "http://127.0.0.1:9/mcp"}}}, test=False)
    api("catalog_delete", id="far")
    api("library_list")
    files = api("library_read", kind="agent", id="borrower")["files"]
    api("library_push", puts=[{"kind": "agent", "id": "pushed", "files": files}])
    api("library_push", deletes=[{"kind": "agent", "id": "pushed"}])
    api("agent_delete", slug="borrower")
    api("workspace_delete", workspace_id=workspace)
    api("project_delete", project_id=project)

    document = json.loads(server._openapi())
    actions = {path.removeprefix("/api/tools/") for path in document["paths"] if path.startswith("/api/tools/")}
    # These need a package registry or a server that restarts; their answers are checked where they are tested.
    elsewhere = {"program_install", "program_remove", "tool_server_restart"}
    assert actions - result_types.checked <= elsewhere


def test_a_wrong_answer_is_seen(configured):
    answer = configured.api("server_info", configured.token("read"))
    document = configured._openapi()
    for wrong in ({**answer, "surprise": 1}, {**answer, "uptime_s": "long"}, {k: v for k, v in answer.items() if k != "scope"}):
        with pytest.raises(AssertionError, match="server_info answered"):
            result_types.check(document, "server_info", wrong)


def test_routes_of_files_answer_what_their_types_say(server, admin, project):
    workspace = server.api("workspace_create", admin, project_id=project)["workspace_id"]
    paths = json.loads(server._openapi())["paths"]
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz", format=tarfile.GNU_FORMAT) as archive:
        archive.addfile(tarfile.TarInfo("empty"))
    file, archive = "/api/workspaces/{id}/files/{path}", "/api/workspaces/{id}/archive"
    for method, route, content in (("PUT", file, b"text"), ("DELETE", file, None), ("PUT", archive, packed.getvalue())):
        url = server.url + route.format(id=workspace, path="a.txt")
        answer = request(method, url, content=content, headers={"Authorization": f"Bearer {admin}"})
        assert answer.status_code == 200, answer.text
        schema = paths[route][method.lower()]["responses"]["200"]["content"]["application/json"]["schema"]
        # Every field is named in it.
        jsonschema.validate(answer.json(), {**schema, "additionalProperties": False})
