"""OpenCode from npm as an agent: inside the sandbox, with its model requests sent through the forwarder."""

from __future__ import annotations

import json
from typing import Any

import harness
from model_server import ModelServer

NODE_MODULES = harness.ROOT / "tests" / "node" / "node_modules"
PROGRAM = NODE_MODULES / "opencode-linux-x64" / "bin" / "opencode"


def config(model: ModelServer, more: str = "") -> str:
    """An `oubliette.toml` that knows the scripted model and lets the sandbox see OpenCode."""
    return f"""
[providers.scripted]
base_url = "http://127.0.0.1:{model.port}"
api_key_env = "SCRIPTED_MODEL_KEY"

[trust]
read_only = ["{NODE_MODULES}"]
{more}"""


def definition(**more: Any) -> dict[str, Any]:
    provider = {
        "npm": "@ai-sdk/openai-compatible",
        "name": "Scripted",
        "options": {"baseURL": "http://127.0.0.1:19999/scripted/v1", "apiKey": "never-used"},
        "models": {"m": {"name": "m", "tool_call": True}},
    }
    settings = {"provider": {"scripted": provider}, "model": "scripted/m", "small_model": "scripted/m", "autoupdate": False, "share": "disabled"}
    env = {
        "OPENCODE_CONFIG_CONTENT": json.dumps(settings),
        "OPENCODE_DISABLE_MODELS_FETCH": "1",
        "OPENCODE_DISABLE_AUTOUPDATE": "1",
        "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
        "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
    }
    runtime = {"kind": "acp", "command": [str(PROGRAM), "acp"], "env": env, "read_only": [str(NODE_MODULES)]}
    return {"name": "OpenCode", "prompt": "Do as you are told.", "runtime": runtime, **more}
