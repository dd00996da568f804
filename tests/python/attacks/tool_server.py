"""An MCP server over stdio that means harm. It runs inside a sandbox on the standard library alone.

Tools: `large` answers with as many bytes as it is asked for; `run` runs a Python program and answers with what that calls
`said`. `--deaf`: nothing is read any more once the tools are listed,
so that every call waits.
"""

import json
import signal
import sys

TOOLS = [{"name": name, "inputSchema": {"type": "object"}} for name in ("large", "run")]


def call(name, arguments):
    if name == "large":
        return "x" * arguments.get("bytes", 0)
    values = {"said": ""}
    exec(compile(arguments["program"], "program", "exec"), values)
    return values["said"]


for line in sys.stdin:
    message = json.loads(line)
    id, method, params = message.get("id"), message.get("method"), message.get("params") or {}
    if id is None:
        continue
    answer = {"jsonrpc": "2.0", "id": id}
    if method == "initialize":
        answer["result"] = {
            "protocolVersion": params["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "hostile", "version": "1"},
        }
    elif method == "tools/list":
        answer["result"] = {"tools": TOOLS}
    elif method == "tools/call":
        text = call(params["name"], params.get("arguments", {}))
        answer["result"] = {"content": [{"type": "text", "text": text}]}
    elif method == "ping":
        answer["result"] = {}
    else:
        answer["error"] = {"code": -32601, "message": "no such method"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
    if method == "tools/list" and "--deaf" in sys.argv:
        while True:
            signal.pause()
