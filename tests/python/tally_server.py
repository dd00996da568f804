"""An MCP server over stdio that leaves a trace of each call: `add` appends its mark to `tally.txt` in the workspace.

The line is in the file before the call is answered, so a call that was answered can be found, and one that ran twice
is there twice.
"""

import json
import os
import sys

SCHEMA = {"type": "object", "properties": {"mark": {"type": "string"}}, "required": ["mark"]}


def add(mark: str) -> dict:
    file = os.open("tally.txt", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    os.write(file, f"{mark}\n".encode())
    os.close(file)
    return {"content": [{"type": "text", "text": f"added {mark}"}]}


for line in sys.stdin:
    message = json.loads(line)
    id, method = message.get("id"), message.get("method")
    if id is None:
        continue
    answer = {"jsonrpc": "2.0", "id": id}
    if method == "initialize":
        answer["result"] = {
            "protocolVersion": message["params"]["protocolVersion"],
            "capabilities": {"tools": {}},
            "serverInfo": {"name": "tally", "version": "1"},
        }
    elif method == "tools/list":
        answer["result"] = {"tools": [{"name": "add", "inputSchema": SCHEMA}]}
    elif method == "tools/call":
        answer["result"] = add(message["params"]["arguments"]["mark"])
    elif method == "ping":
        answer["result"] = {}
    else:
        answer["error"] = {"code": -32601, "message": "no such method"}
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
