"""OpenCode from npm in the local sandbox, network off, model through the forwarder, tools through oubliette-client."""

from __future__ import annotations

import json

import opencode
from caller import calling, lend
from harness import MODERN, running
from model_server import ModelServer

KEY = "sk-scripted-0123456789"


def agent(server, admin, **more):
    server.api("agent_put", admin, slug="opencode", definition=opencode.definition(**more))


async def test_opencode_calls_a_tool_of_the_caller_and_finishes_its_turn():
    model = ModelServer([("myapp_send_notification", {"message": "hello"})])
    with running(opencode.config(model), {"SCRIPTED_MODEL_KEY": KEY}) as server:
        admin = server.token("admin")
        project = server.api("project_create", admin, name="p")["project_id"]
        agent(server, admin)
        schema = {"type": "object", "properties": {"message": {"type": "string"}}}
        async with calling(server, admin, MODERN) as caller:
            await caller.start("Say hello.", project_id=project, agent="opencode", context=lend({"name": "send_notification", "inputSchema": schema}))
            request = await caller.until("caller_tool_request")
            assert request["arguments"] == {"message": "hello"}
            await caller.respond(request, result={"status": "sent"})
            turn = await caller.until("turn_completed")
            assert "sent" in turn["text"] and turn["stop_reason"] == "end_turn"
            session = caller.session_id
        # The forwarder added the provider's key; nothing inside the sandbox ever had it.
        assert all(h["authorization"] == f"Bearer {KEY}" for h in model.headers)
        asked = server.api("debugger_events", admin, session_id=session, kinds=["model_request"])["events"]
        assert asked and asked[0]["provider"] == "scripted" and asked[0]["status"] == 200
        everything = json.dumps([server.api("session_events", admin, session_id=session, max_events=1000), asked])
        assert KEY not in everything and KEY not in server.log()
    model.close()


async def test_opencode_with_a_write_key_creates_a_project_and_a_raw_client_is_refused_a_token():
    model = ModelServer([("oubliette_project_create", {"name": "made-by-opencode"})])
    with running(opencode.config(model), {"SCRIPTED_MODEL_KEY": KEY}) as server:
        admin, write = server.token("admin"), server.token("write")
        project = server.api("project_create", admin, name="p", env={"OUBLIETTE_API_KEY": write})["project_id"]
        agent(server, admin)
        done = server.api("session_message", admin, message="Make a project.", project_id=project, agent="opencode", wait=True)
        assert "made-by-opencode" in done["text"]
        assert len(server.api("project_list", admin, name_contains="made-by-opencode")["projects"]) == 1
        names = {t["function"]["name"] for r in model.requests for t in r.get("tools", [])}
        assert not [n for n in names if n.endswith("oubliette_token_create")]
        # The scripted built-in agent acts as a raw client in the same kind of sandbox: it calls a tool that is not listed.
        server.put_agent("raw", admin, [[{"call": {"tool": "oubliette_token_create", "arguments": {"name": "x", "scope": "admin"}}}]])
        raw = server.api("session_message", admin, message="go", project_id=project, agent="raw", wait=True)
        log = server.api("session_events", admin, session_id=raw["session_id"], max_events=1000)["events"]
        result = next(e for e in log if e["type"] == "tool_result")
        assert not result["ok"] and "permission_denied" in json.dumps(result)
    model.close()
